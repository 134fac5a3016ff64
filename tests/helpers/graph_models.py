"""Graphs of small models, forward and as whole train steps, without Keras's own casts.

Each builder returns a Python function of one batch; weights are variables it captures.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfamp.graph.graph import Graph, new_suffix

BATCH = 4


def _weights(*shapes):
    random = np.random.default_rng(11)
    return [
        tf.Variable((random.standard_normal(shape) / np.sqrt(shape[0])).astype("float32"))
        for shape in shapes
    ]


def mlp():
    a, b, c, bias = _weights((8, 16), (16, 16), (16, 4), (16,))

    def forward(x):
        x = tf.nn.relu(tf.nn.bias_add(x @ a, bias))
        x = tf.tanh(x @ b)
        return x @ c

    return forward, (BATCH, 8), [a, b, c, bias]


def cnn():
    kernel, second, dense, scale, offset = _weights((3, 3, 3, 8), (3, 3, 8, 8), (8, 4), (8,), (8,))

    def forward(x):
        x = tf.nn.conv2d(x, kernel, 1, "SAME")
        x, *_ = tf.compat.v1.nn.fused_batch_norm(x, scale, offset, is_training=True)
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "SAME")
        x = tf.nn.relu(tf.nn.conv2d(x, second, 1, "SAME"))
        return tf.reduce_mean(x, [1, 2]) @ dense

    return forward, (BATCH, 8, 8, 3), [kernel, second, dense, scale, offset]


def lstm():
    kernel, recurrent, bias, out = _weights((6, 32), (8, 32), (32,), (8, 4))

    def forward(x):
        steps = tf.TensorArray(tf.float32, size=5).unstack(tf.transpose(x, [1, 0, 2]))
        outputs = tf.TensorArray(tf.float32, size=5)

        def body(i, h, c, outputs):
            z = tf.nn.bias_add(steps.read(i) @ kernel + h @ recurrent, bias)
            gate, forget, candidate, out = tf.split(z, 4, axis=1)
            c = tf.sigmoid(forget) * c + tf.sigmoid(gate) * tf.tanh(candidate)
            h = tf.sigmoid(out) * tf.tanh(c)
            return i + 1, h, c, outputs.write(i, h)

        start = tf.zeros((BATCH, 8))
        _, h, _, outputs = tf.while_loop(
            lambda i, *_: i < 5, body, (0, start, start, outputs), maximum_iterations=5
        )
        return (h + outputs.stack()[2]) @ out

    return forward, (BATCH, 5, 6), [kernel, recurrent, bias, out]


def attention():
    query, key, value, out = _weights((8, 8), (8, 8), (8, 8), (8, 8))
    gain, shift = _weights((8,), (8,))

    def forward(x):
        q, k, v = (
            tf.transpose(tf.reshape(tf.tensordot(x, w, 1), (BATCH, 6, 2, 4)), [0, 2, 1, 3])
            for w in (query, key, value)
        )
        scores = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) * 0.5)
        y = tf.reshape(tf.transpose(tf.matmul(scores, v), [0, 2, 1, 3]), (BATCH, 6, 8))
        y = x + tf.einsum("btd,de->bte", y, out)
        mean, variance = tf.nn.moments(y, -1, keepdims=True)
        y = tf.nn.batch_normalization(y, mean, variance, shift, gain, 1e-3)
        return tf.nn.gelu(y)[:, 0, :4]

    return forward, (BATCH, 6, 8), [query, key, value, out, gain, shift]


MODELS = {"mlp": mlp, "cnn": cnn, "lstm": lstm, "attention": attention}


def train_step(forward, variables):
    """Forward, backward and a gradient step; returns the loss and the gradients' norms."""

    def step(x):
        labels = tf.constant([0, 1, 2, 3])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=forward(x))
            )
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return [loss, *gradients]

    return step


def concrete(name, *, train):
    """The concrete function of a model, forward or a whole train step."""
    forward, shape, variables = MODELS[name]()
    function = train_step(forward, variables) if train else forward
    traced = tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec(shape))
    traced.graph.kept_variables = variables  # TensorFlow itself only refers to them weakly
    return traced


def example(function):
    """A batch for a concrete function, always the same."""
    shape = function.inputs[0].shape
    return tf.constant(np.random.default_rng(5).standard_normal(shape).astype("float32"))


def runnable(function, graph_def):
    """A callable like the concrete function that runs another graph with the same node names."""
    graph_def = Graph(graph_def).copy().rename_functions(new_suffix()).graph_def
    pruned = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph_def, name=""), []
    ).prune([each.name for each in function.inputs], [each.name for each in function.outputs])
    return lambda *args: pruned(*args, *function.captured_inputs)
