"""`find_first`: the op that made the first bad value of those that matter, in functions as well."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfamp.graph.function_names import called_functions
from tfamp.graph.measuring.first_nonfinite import Scopes, find_first
from tfamp.graph.measuring.value_probes import Observer, measured_scopes


def _find(function, *args, roots=None):
    args = [tf.convert_to_tensor(each) for each in args]
    concrete = tf.function(function).get_concrete_function(*args)
    graph_def = concrete.graph.as_graph_def()
    indexes = measured_scopes(graph_def)
    outputs = [tensor.name for tensor in concrete.outputs]
    inputs = [tensor.name for tensor in concrete.inputs]
    run = Observer(graph_def, indexes, inputs, outputs).run([*args, *concrete.captured_inputs])
    bodies = [("", graph_def.node)]
    bodies += [(each.signature.name, each.node_def) for each in graph_def.library.function]
    called = {
        (scope, node.name): list(called_functions(node))
        for scope, nodes in bodies
        for node in nodes
    }
    keys = [("", name.partition(":")[0], 0) for name in outputs]
    return find_first(Scopes(indexes, called), run, None, keys if roots is None else roots)


def test_the_first_op_in_the_order_of_the_data():
    def function(x):
        return tf.sqrt(tf.math.log(x) + 1.0) * 2.0

    place = _find(function, [0.0, 1.0])
    assert place.op == "Log"
    assert (place.scope, place.callers) == ("", ())
    assert place.inputs == (("", "x", 0),)


def test_nothing_where_results_are_finite():
    assert _find(lambda x: tf.exp(x), [1.0]) is None
    # A masked infinity, and an infinite constant that a softmax takes.
    assert _find(lambda x: tf.where(x > 0, 1.0 / x, 0.0), [0.0, 1.0]) is None
    assert _find(lambda x: tf.nn.softmax(tf.where(x > 0, x, -np.inf)), [0.0, 1.0]) is None


def test_large_numbers_count_though_results_are_finite():
    place = _find(lambda x: tf.math.rsqrt(tf.reduce_sum(tf.square(x))), [1e30, 1.0])
    assert place.op == "Square"


def test_what_does_not_lead_to_the_result_is_passed_over():
    def function(x):
        masked = tf.where(x > 0, tf.math.log(x), 0.0)
        return masked + tf.sqrt(x - 1.0)

    assert _find(function, [0.0, 2.0]).op == "Sqrt"


def test_inside_a_loop_the_iteration_is_that_of_the_fault():
    def function(x):
        for i in tf.range(5):
            x = tf.math.log(x) if i > 2 else x - 1.0
        return x

    place = _find(function, tf.constant([3.0]))
    assert place.op == "Log"
    assert len(place.callers) == 2  # The loop, and the condition in it.


def test_lists_do_not_hide_where_a_value_came_from():
    def function(x):
        array = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            array = array.write(i, tf.math.log(x - tf.cast(i, tf.float32)))
        return tf.reduce_sum(array.stack())

    assert _find(function, tf.constant(2.0)).op == "Log"


def test_an_infinite_result_of_constants_only():
    assert _find(lambda x: x + np.inf, [1.0]).op == "Const"
