"""Graphs that are not valid: an error that says where, in bounded time and memory."""

import pytest
import tensorflow as tf

import tfamp
from tfamp.graph import inlining
from tfamp.graph.rewrite import rewrite_graph_def
from tfamp.interop import tf_private

FLOAT = tf.float32.as_datatype_enum


def add_function(graph, name, calls=None, times=1):
    """A function of one tensor: exp, or another function called `times` times."""
    function = graph.library.function.add()
    function.signature.name = name
    function.signature.input_arg.add(name="x", type=FLOAT)
    function.signature.output_arg.add(name="y", type=FLOAT)
    last = "x"
    for number in range(times):
        node = function.node_def.add(name=f"n{number}", input=[last])
        if calls is None:
            node.op, last = "Exp", f"n{number}:y:0"
            node.attr["T"].type = FLOAT
        else:
            last = f"n{number}:output:0"
            make_call(node, calls)
    function.ret["y"] = last
    return function


def make_call(node, name):
    node.op = "PartitionedCall"
    node.attr["f"].func.name = name
    node.attr["Tin"].list.type.append(FLOAT)
    node.attr["Tout"].list.type.append(FLOAT)


def chain(levels, times=1):
    """A call of a function that calls a function ..., `times` times at each level."""
    graph = tf.compat.v1.GraphDef()
    graph.node.add(name="x", op="Placeholder").attr["dtype"].type = FLOAT
    make_call(graph.node.add(name="c", input=["x"]), f"f{levels - 1}")
    for level in reversed(range(levels)):
        add_function(graph, f"f{level}", f"f{level - 1}" if level else None, times)
    return graph


def rewrite(graph):
    return rewrite_graph_def(graph, ["c:0"], dtype="bfloat16", device="cpu").graph_def


def refused(graph, message):
    before = graph.SerializeToString(deterministic=True)
    with pytest.raises(tfamp.RewriteError, match=message):
        rewrite(graph)
    assert graph.SerializeToString(deterministic=True) == before


def test_a_function_without_a_name():
    graph = chain(1)
    add_function(graph, "")
    refused(graph, "a function without a name")


def test_a_call_with_too_many_arguments():
    graph = chain(1)
    graph.node[1].input.append("x")
    refused(graph, "Node 'c' .*it has 2 inputs, and the function 'f0' takes 1")


def test_a_call_of_itself_without_arguments():
    graph = chain(1)
    function = graph.library.function[0]
    itself = function.node_def.add(name="itself", op="PartitionedCall")
    itself.attr["f"].func.name = function.signature.name
    for types in ("Tin", "Tout"):
        itself.attr[types].list.SetInParent()
    refused(graph, "Node 'itself' .*it has 0 inputs, and the function 'f0' takes 1")


@pytest.mark.parametrize("tensor", ["nowhere:y:0", "n0:other:0", "n0:y:first", ""])
def test_a_function_that_uses_what_no_node_gives(tensor):
    graph = chain(1)
    graph.library.function[0].ret["y"] = tensor
    refused(graph, r"its input 'c/.*' is not (the|an) output")


def test_a_call_that_is_its_own_argument():
    graph = chain(1)
    graph.library.function[0].ret["y"] = "x"
    graph.node[1].input[0] = "c"
    refused(graph, "'c.*' is computed from nothing but itself")


def test_functions_that_call_each_other_too_deep():
    refused(chain(2000), "call each other hundreds deep")


@pytest.mark.parametrize("attr", ["equation", "_class", "_gradient_op_type"])
def test_an_attribute_that_is_not_text_names_its_node(attr):
    graph = chain(1)
    inside = graph.library.function[0].node_def[0]
    if attr == "equation":
        inside.op, inside.attr["N"].i = "Einsum", 1
        graph.library.function[0].ret["y"] = "n0:output:0"
    if attr == "_class":
        inside.attr[attr].list.s.append(b"loc:@\xff")
    else:
        inside.attr[attr].s = b"ij\xff->i"
    if attr == "_gradient_op_type":
        # Read where a function with a custom gradient is inlined into another one's copy.
        inside.attr["_tfamp_inlined_into"].s = b"\xff"
        attr = "_tfamp_inlined_into"
    message = rf"Node '(c/)?n0' \(\w+\): the attribute {attr} holds b'.*\\xff.*not UTF-8 text"
    refused(graph, message)


@pytest.mark.filterwarnings("ignore::tfamp.NothingConvertedWarning")
def test_functions_that_double_at_every_level_stay_small(monkeypatch):
    monkeypatch.setattr(inlining, "MOST_NEW_NODES", 100)
    graph = rewrite(chain(60, times=2))
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert len(nodes) < 500
    assert {"PartitionedCall", "Exp"} <= {node.op for node in nodes}


@pytest.mark.parametrize("count", [-1, 2**62])
def test_a_count_that_would_fill_the_memory(count):
    graph = chain(1)
    node = graph.node.add(name="many", op="AddN", input=["x"])
    node.attr["T"].type, node.attr["N"].i = FLOAT, count
    refused(graph, rf"Node 'many' \(AddN\): the attribute N is {count}, a wrong count")


@pytest.mark.parametrize("kind", ["number", "list", "empty"])
def test_a_type_attribute_that_holds_none(kind):
    graph = chain(1)
    node = graph.node.add(name="e", op="Exp", input=["x"])
    if kind == "number":
        node.attr["T"].i = 7
    else:
        node.attr["T"].list.type.extend([FLOAT] if kind == "list" else [])
    refused(
        graph, r"Node 'e' \(Exp\): the attribute T does not hold a dtype|the attribute T is missing"
    )


def test_an_output_with_a_number_that_is_none():
    graph = chain(1)
    node = graph.node.add(name="e", op="Exp", input=["x:first"])
    node.attr["T"].type = FLOAT
    refused(graph, "its input 'x:first' is not an output")


@pytest.mark.parametrize("written", [False, True])
def test_a_node_of_a_loop_that_feeds_itself(written):
    weight = tf.Variable(tf.eye(2))

    @tf.function
    def loop(x):
        for _ in tf.range(3):
            x = tf.identity(x @ weight)
        if written:
            weight.assign(x)
        return x

    concrete = loop.get_concrete_function(tf.TensorSpec((2, 2)))
    graph = concrete.graph.as_graph_def(add_shapes=True)
    bodies = [f for f in graph.library.function if any(n.op == "MatMul" for n in f.node_def)]
    for body in bodies:
        for node in body.node_def:
            if node.op == "Identity":
                node.input[0] = f"{node.name}:output:0"
    before = graph.SerializeToString(deterministic=True)
    names = [tensor.name for tensor in concrete.outputs]
    result = rewrite_graph_def(graph, names, dtype="bfloat16", device="cpu")
    assert "bfloat16" in {node.dtype for node in result.plan.nodes}
    assert graph.SerializeToString(deterministic=True) == before


def test_an_op_whose_library_is_loaded_after_an_error_is_known(monkeypatch):
    graph_def = tf.compat.v1.GraphDef()
    graph_def.node.add(name="x", op="Placeholder").attr["dtype"].type = 1
    node = graph_def.node.add(name="late", op="TfampLoadedLate", input=["x"])
    node.attr["T"].type = 1
    load = "'late' .*does not know this op; load its library"
    with pytest.raises(tfamp.RewriteError, match=load):
        rewrite_graph_def(graph_def, ["late:0"], dtype="bfloat16")

    definition = type(tf_private.op_definition("Relu"))()
    definition.CopyFrom(tf_private.op_definition("Relu"))
    definition.name = "TfampLoadedLate"
    before = tf_private.op_definition

    def loaded(name):
        return definition if name == definition.name else before(name)

    monkeypatch.setattr(tf_private, "op_definition", loaded)
    with pytest.warns(tfamp.NothingConvertedWarning):
        plan = rewrite_graph_def(graph_def, ["late:0"], dtype="bfloat16").plan

    assert [node.name for node in plan.nodes] == ["x", "late"]
