"""`retyped`: a float32 twin has the same nodes, unrounded constants, and keeps what must stay."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from helpers.cases import first_of
from tfamp.diagnostics.nonfinite import Seen
from tfamp.graph import observe
from tfamp.graph.graph import Graph
from tfamp.interop import tf_private
from tfamp.interop.patching import patched_here


def _graph(function, *specs):
    concrete = tf.function(function).get_concrete_function(*specs)
    return concrete, Graph(concrete.graph.as_graph_def())


def _run(concrete, graph, *args):
    outputs = [tensor.name for tensor in concrete.outputs]
    inputs = [tensor.name for tensor in concrete.inputs]
    observer = observe.Observer(graph, observe.observed_scopes(graph), inputs, outputs, Seen.look)
    run = observer.run([[*map(tf.convert_to_tensor, args), *concrete.captured_inputs]])
    return run["", outputs[0].partition(":")[0], 0][-1]


@pytest.mark.parametrize("low", first_of(["bfloat16", "float16"]))
def test_a_twin_computes_in_float32_node_by_node(low):
    def function(x):
        x = tf.cast(x, low)
        for _ in tf.range(3):
            x = x * 128.0
        return tf.cond(x[0] > 0, lambda: x + 2, lambda: x)

    concrete, graph = _graph(function, tf.TensorSpec([2]))
    indexes = observe.observed_scopes(graph)
    twin = observe.retyped(graph, indexes, "float32")
    assert observe.low_dtypes(indexes) == [low]
    assert observe.low_dtypes(observe.observed_scopes(twin)) == []
    assert [node.name for node in twin.nodes] == [node.name for node in graph.nodes]
    stats = _run(concrete, twin, [1.0, 2.0])
    assert (stats.dtype, stats.max) == ("float32", 2 * 128.0**3 + 2)


def test_constants_get_the_values_they_had():
    def constant(original, value, *args, **kwargs):
        tensor = original(value, *args, **kwargs)
        if tensor.dtype == tf.float16:
            proto = tf.make_tensor_proto(np.float32(value))
            tf_private.set_attribute(tensor.op, observe.UNROUNDED, proto)
        return tensor

    with patched_here(constant=constant):
        concrete, graph = _graph(lambda x: x + 1e-8, tf.TensorSpec((), tf.float16))
    twin = observe.retyped(graph, observe.observed_scopes(graph), "float32")
    assert _run(concrete, twin, np.float32(0)).max == np.float32(1e-8)
    assert _run(concrete, graph, np.float16(0)).max == 0.0


def test_low_variables_stay_and_are_cast():
    variable = tf.Variable(tf.ones((2,), tf.float16))

    def function(x):
        variable.assign_add(x)
        return variable + x

    concrete, graph = _graph(function, tf.TensorSpec([2], tf.float16))
    twin = observe.retyped(graph, observe.observed_scopes(graph), "float32")
    assert "AssignAddVariableOp" in {node.op for node in twin.nodes}
    stats = _run(concrete, twin, np.float32([1, 2]))
    assert stats.dtype == "float32"
    np.testing.assert_array_equal(variable.numpy(), [1, 1])  # An Observer undoes what a run did.


def test_random_numbers_are_the_same_in_a_twin_and_in_every_run():
    concrete, graph = _graph(
        lambda x: x * tf.random.uniform([64], dtype=tf.float16), tf.TensorSpec((), tf.float16)
    )
    observe.seed(graph)
    twin = observe.retyped(graph, observe.observed_scopes(graph), "float32")
    low, again = (_run(concrete, graph, np.float16(1)) for _ in range(2))
    assert low == again
    assert _run(concrete, twin, np.float32(1)).max == low.max


def test_the_graph_is_not_modified():
    _, graph = _graph(lambda x: x + 1, tf.TensorSpec([2], tf.float16))
    before = graph.graph_def.SerializeToString(deterministic=True)
    observe.retyped(graph, observe.observed_scopes(graph), "bfloat16")
    assert graph.graph_def.SerializeToString(deterministic=True) == before
