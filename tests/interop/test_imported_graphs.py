"""Imported loops, functions and variables get all that TensorFlow attaches to traced ones."""

import gc
import inspect
import types

import pytest
import tensorflow as tf

import tfamp
from tfamp.interop import imported_graphs, tf_private


def test_noted_variables_are_watched_by_tapes_outside():
    variable = tf.Variable(2.0)

    @tf.function
    def fn():
        imported_graphs.note_variables([variable])
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=tf.float32)

    with tf.GradientTape() as tape:
        value = fn()
    assert tape.watched_variables()[0] is variable
    assert float(tape.gradient(value, variable)) == 1.0


def test_registered_functions_can_be_called_until_their_owner_is_gone():
    class Owner:
        pass

    traced = tf.function(lambda x: x + x).get_concrete_function(tf.TensorSpec(()))
    definition = type(traced.function_def)()
    definition.CopyFrom(traced.function_def)
    definition.signature.name = "registered_by_a_test"
    owner = Owner()
    imported_graphs.register_functions([definition], owner)
    context = tf_private.private("eager.context:context")()
    assert context.has_function(definition.signature.name)
    del owner
    gc.collect()
    assert not context.has_function(definition.signature.name)


def _traced_counter():
    """A variable, and a function that doubles it, returns that, and adds one that nothing reads."""
    counter = tf.Variable(3.0)

    @tf.function(autograph=False)
    def counted():
        counter.assign(counter * 2.0)
        value = tf.identity(counter)
        counter.assign_add(1.0)
        return value

    return counter, counted.get_concrete_function()


@pytest.mark.parametrize("is_first", [True, False])
def test_imported_ops_keep_their_order_and_run(is_first, monkeypatch):
    counter, traced = _traced_counter()
    (handle,) = (tensor.name for tensor in traced.inputs)
    resources_of = tf_private.private("framework.auto_control_deps:_get_resource_inputs")
    looked_at = []
    monkeypatch.setattr(
        inspect.getmodule(resources_of),
        "_get_resource_inputs",
        lambda op: looked_at.append(op.type) or resources_of(op),
    )

    @tf.function(autograph=False)
    def fn():
        if not is_first:
            counter.assign(5.0)
        graph = tf.compat.v1.get_default_graph()
        captured = graph.capture(counter.handle)
        before = len(graph.get_operations())
        (value,) = tf.graph_util.import_graph_def(
            traced.graph.as_graph_def(), {handle: captured}, [traced.outputs[0].name], name=""
        )
        imported_graphs.keep_order(graph.get_operations()[before:])
        return value

    for held in (3.0, 10.0):
        counter.assign(held)
        doubled = 2.0 * (held if is_first else 5.0)
        assert float(fn()) == doubled
        assert float(counter) == doubled + 1.0
    # TensorFlow orders them again only where others came first, which they may depend on.
    assert ("AssignAddVariableOp" in looked_at) is not is_first


def _differentiated():
    """The gradient of a function with an imported call."""
    inner = tf.function(lambda x: x * x, experimental_attributes={"_noinline": True})
    outer = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec(()))
    graph_def = outer.graph.as_graph_def()
    nodes = [node for node in graph_def.node if "PartitionedCall" in node.op]

    @tf.function(autograph=False)
    def fn(x):
        (result,) = tf.graph_util.import_graph_def(
            graph_def, {"x:0": x}, [f"{nodes[0].name}:0"], name="imported"
        )
        return imported_graphs.differentiate_call(result.op, [tf.constant(1.0)])

    return fn(tf.constant(3.0))


def test_an_imported_call_is_differentiated():
    assert [float(gradient) for gradient in _differentiated()] == [6.0]


@pytest.mark.parametrize(
    "symbol", ["from_structured_signature", "from_func_graph", "_get_gradient_function"]
)
def test_a_symbol_that_a_call_is_differentiated_by_is_named_if_it_is_missing(monkeypatch, symbol):
    original = tf_private.foreign_symbol

    def without(owner, name, library):
        hidden = types.SimpleNamespace() if name == symbol else owner
        return original(hidden, name, library)

    monkeypatch.setattr(tf_private, "foreign_symbol", without)
    with pytest.raises(tfamp.UnsupportedVersionError, match=f"{symbol} is not in TensorFlow"):
        _differentiated()


def _branches(x):
    return tf.cond(x > 0.0, lambda: tf.exp(x), lambda: tf.sin(x))


def _cases(x):
    return tf.switch_case(tf.cast(x, tf.int32), [lambda: tf.exp(x), lambda: tf.sin(x)])


def _loop(x):
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, tf.exp(y)), (0, x))[1]


@pytest.mark.parametrize(("function", "count"), [(_branches, 2), (_cases, 2), (_loop, 1)])
def test_bodies_of_an_imported_op_are_kept_for_its_gradient(function, count):
    traced = tf.function(function).get_concrete_function(tf.TensorSpec(()))
    output = traced.outputs[0].name
    changed = []

    @tf.function(autograph=False)
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            graph_def = traced.graph.as_graph_def()
            (y,) = tf.graph_util.import_graph_def(graph_def, {"x:0": x}, [output], name="")
        for op in tf.compat.v1.get_default_graph().get_operations():
            for graph in imported_graphs.kept_body_graphs(op):
                changed.append(graph)
                for inner in graph.get_operations():
                    if inner.type in ("Exp", "Sin"):
                        inner._gradient_function = lambda op, upstream: upstream * 100.0
        return tf.gradients(y, x)[0]

    found = gradient(tf.constant(0.5))
    assert len(changed) == count
    assert float(found) == 100.0 ** (2 if function is _loop else 1)
