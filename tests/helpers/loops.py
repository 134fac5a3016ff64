"""Graphs with control flow of both kinds, TensorLists, functions and batch normalization."""

from __future__ import annotations

import tensorflow as tf

SPEC = tf.TensorSpec((4, 4))


def _concrete(function):
    return tf.function(function, autograph=False).get_concrete_function(SPEC)


def loop_v1():
    """A loop of Enter, Merge, Switch, NextIteration and Exit with a matmul in it."""
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (4, 4), name="x")
        context = tf.compat.v1.enable_control_flow_v2
        tf.compat.v1.disable_control_flow_v2()
        try:
            _, y = tf.compat.v1.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, tf.nn.relu(y @ x) * 0.5), (0, x)
            )
        finally:
            context()
        tf.identity(y, name="out")
    return graph.as_graph_def()


def loop_v2():
    return _concrete(
        lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y @ x), (0, x))[1]
    )


def conditional():
    return _concrete(
        lambda x: tf.cond(tf.reduce_sum(x) > 0.0, lambda: x @ x, lambda: tf.tanh(x @ x @ x))
    )


def nested_functions():
    inner = tf.function(lambda x: tf.nn.relu(x @ x), autograph=False)
    middle = tf.function(lambda x: inner(x) @ x + 1.0, autograph=False)
    return _concrete(lambda x: middle(x) @ inner(x))


def tensor_list():
    def function(x):
        rows = tf.TensorArray(tf.float32, size=2).write(0, x @ x).write(1, tf.nn.relu(x @ x))
        return rows.read(0) @ rows.read(1)

    return _concrete(function)


def tensor_list_with_denied_element():
    def function(x):
        rows = tf.TensorArray(tf.float32, size=2).write(0, x @ x).write(1, tf.exp(x))
        return tf.tanh(rows.read(0)) @ rows.read(1)

    return _concrete(function)


def mapped():
    return _concrete(lambda x: tf.map_fn(lambda row: row[None] @ x, x)[:, 0])


def identity_n():
    def function(x):
        a, b, index = tf.identity_n([x @ x, tf.exp(x), tf.constant(3)])
        return tf.nn.relu(a) @ b + tf.cast(index, tf.float32)

    return _concrete(function)


def average_pool_3d():
    def function(x):
        volume = tf.reshape(x @ x, (1, 2, 2, 2, 2))
        pooled = tf.nn.avg_pool3d(tf.nn.bias_add(volume, [0.0, 1.0]), 2, 1, "SAME")
        return tf.reshape(pooled, (4, 4)) @ x

    return _concrete(function)


def casts():
    """Casts of the user's: integers to float32, and up and down again."""

    def function(x):
        mask = tf.cast(tf.cast(x > 0.0, tf.int32), tf.float32)
        half = tf.cast(x @ mask, tf.bfloat16)
        return tf.cast(half, tf.float32) @ x

    return _concrete(function)


def gather_and_friends():
    """Ops with several type attributes, one of them of integers."""

    def function(x):
        y = tf.gather(x @ x, [3, 2, 1, 0], axis=0)
        y = tf.concat([y[:2], tf.transpose(y)[2:]], 0)
        values, _ = tf.math.top_k(tf.pad(y, [[0, 0], [1, 1]]), k=4)
        return tf.where(values > 0.5, values, 0.1) @ x

    return _concrete(function)


FUNCTIONS = {
    each.__name__: each
    for each in (
        average_pool_3d,
        casts,
        conditional,
        gather_and_friends,
        identity_n,
        loop_v2,
        mapped,
        nested_functions,
        tensor_list,
        tensor_list_with_denied_element,
    )
}
