"""Each private symbol of traced functions, so that a release that changes one says which."""

import gc
import types

import pytest
import tensorflow as tf

import tfamp
from tfamp.interop import tf_private


def test_capture_gives_the_tensor_of_the_function_being_traced():
    outside = tf.constant([1.0, 2.0])
    captured = []

    @tf.function
    def fn():
        captured.append(tf_private.capture_into_graph(outside))
        return captured[0] * 2.0

    assert fn().numpy().tolist() == [2.0, 4.0]
    assert captured[0].graph is fn.get_concrete_function().graph
    assert fn.get_concrete_function().captured_inputs[0] is outside


def test_noted_variables_are_watched_by_tapes_outside():
    variable = tf.Variable(2.0)

    @tf.function
    def fn():
        tf_private.note_variables([variable])
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
    tf_private.register_functions([definition], owner)
    context = tf_private.private("eager.context:context")()
    assert context.has_function(definition.signature.name)
    del owner
    gc.collect()
    assert not context.has_function(definition.signature.name)


def test_registered_gradient_finds_a_function_and_says_when_there_is_none():
    @tf.RegisterGradient("TfampTestGradient")
    def gradient(op, upstream):
        return upstream

    assert tf_private.registered_gradient("TfampTestGradient") is gradient
    with pytest.raises(LookupError):
        tf_private.registered_gradient("TfampNoSuchGradient")


def test_an_imported_call_is_differentiated():
    inner = tf.function(lambda x: x * x, experimental_attributes={"_noinline": True})
    outer = tf.function(lambda x: inner(x)).get_concrete_function(tf.TensorSpec(()))
    graph_def = outer.graph.as_graph_def()
    nodes = [node for node in graph_def.node if "PartitionedCall" in node.op]

    @tf.function
    def fn(x):
        (result,) = tf.graph_util.import_graph_def(
            graph_def, {"x:0": x}, [f"{nodes[0].name}:0"], name="imported"
        )
        return tf_private.differentiate_call(result.op, [tf.constant(1.0)])

    assert [float(each) for each in fn(tf.constant(3.0))] == [6.0]


@pytest.mark.parametrize("jit", [True, None])
def test_options_of_a_function(jit):
    signature = [tf.TensorSpec((None,))]
    function = tf.function(
        lambda x: x, signature, autograph=False, jit_compile=jit, reduce_retracing=True
    )
    options = tf_private.function_options(function)
    assert list(options.input_signature) == signature
    assert options.jit_compile is jit
    assert options.reduce_retracing
    assert not options.autograph
    assert options.experimental_autograph_options is None
    changed = types.SimpleNamespace(input_signature=None)
    with pytest.raises(tfamp.UnsupportedVersionError, match="_jit_compile is not in TensorFlow"):
        tf_private.function_options(changed)


def test_noted_constants_have_the_value_that_was_given():
    found = []
    with tf_private.constants_noted(lambda value, tensor: found.append((value, tensor.dtype))):
        tf.function(lambda x: x + 1e-8).get_concrete_function(tf.TensorSpec((), tf.float16))
    assert (1e-8, tf.float16) in found
    count = len(found)
    tf.function(lambda x: x + 1e-8).get_concrete_function(tf.TensorSpec((), tf.float16))
    assert len(found) == count


def test_marked_ops_and_set_attributes_are_in_the_graph():
    def function(x):
        with tf_private.ops_marked("_tfamp_test", "here"):
            y = tf.exp(x)
        z = tf.sqrt(y)
        tf_private.set_attribute(z.op, "_tfamp_value", tf.make_tensor_proto(3.0))
        return z

    graph = tf.function(function).get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
    nodes = {node.op: node for node in graph.node}
    assert nodes["Exp"].attr["_tfamp_test"].s == b"here"
    assert "_tfamp_test" not in nodes["Sqrt"].attr
    assert tf.make_ndarray(nodes["Sqrt"].attr["_tfamp_value"].tensor) == 3.0


def test_gradients_are_noted_with_their_sources():
    found = []
    original = tf.GradientTape.gradient
    x = tf.Variable(2.0)
    with tf_private.gradients_noted(lambda *each: found.append(each)):
        with tf.GradientTape() as tape:
            y = x * x
        gradients = tape.gradient(y, [x])
    assert tf.GradientTape.gradient is original
    ((sources, noted),) = found
    assert sources[0] is x
    assert noted is gradients


def test_saved_functions_have_their_signatures_with_defaults_and_saveable_ones_run(tmp_path):
    module = tf.Module()
    module.fn = tf.function(lambda x, flag=False, *, bias=None: x)
    own = type("Function", (tf_private.SaveableFunction,), {})
    module.saveable = own(lambda x: x + 1.0, name="saveable")  # It is one of TensorFlow's.
    x = tf.ones(2)
    module.fn(x), module.saveable(x)
    tf.saved_model.save(module, tmp_path)
    loaded = tf.saved_model.load(tmp_path)
    for each in (module, loaded):
        signature = tf_private.function_signature(each.fn)
        assert str(signature) == "(x, flag=False, *, bias=None)"
    assert loaded.saveable(x).numpy().tolist() == [2.0, 2.0]
