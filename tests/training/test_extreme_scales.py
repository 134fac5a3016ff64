"""Updates at loss scales from 2**-126 to 2**126: they equal those without a scale."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-3, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(1e-3, momentum=0.9, nesterov=True, weight_decay=0.01),
    "fast_sgd": lambda: keras.optimizers.SGD(8.0),
    "slow_sgd": lambda: keras.optimizers.SGD(1e-12),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw": lambda: keras.optimizers.AdamW(1e-3),
    "lion": lambda: keras.optimizers.Lion(1e-3),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-3),
    "rmsprop": lambda: keras.optimizers.RMSprop(1e-3),  # Updated by Keras.
    "clipnorm": lambda: keras.optimizers.SGD(1e-3, clipnorm=0.5),
}
EXPONENTS = (-126, -64, -32, 15, 64, 117, 126)
STEPS = 3
INDICES = tf.constant([0, 1, 1, 3])


def gradients(exponent, shape):
    """Gradients whose products with the scale are normal float32 numbers."""
    sizes = np.random.default_rng(1).uniform(1.0, 1.9, (STEPS, *shape))
    signs = np.where(np.random.default_rng(2).random((STEPS, *shape)) < 0.5, -1.0, 1.0)
    return tf.constant(sizes * signs * 2.0**exponent, tf.float32)


def scaler_step(inner, exponent, variables):
    scaler = tfamp.GradScaler(init_scale=2.0**exponent)

    def step(*grads):
        scaler.step(inner, zip(grads, variables, strict=True))
        scaler.update(2.0**exponent)

    return step


def wrapper_step(inner, exponent, variables, **arguments):
    scale = tfamp.FixedLossScale(2.0**exponent)
    optimizer = tfamp.LossScaleOptimizer(inner, loss_scale=scale, **arguments)
    optimizer.build(variables)

    def step(*grads):
        optimizer.apply_gradients(zip(grads, variables, strict=True), unscaled=False)

    return step


MODES = {
    "eager": lambda step: step,
    "graph": lambda step: tf.function(step, autograph=False),
    "xla": lambda step: tf.function(step, autograph=False, jit_compile=True),
}


def trained(make, exponent, make_step, mode, **arguments):
    """The change of the variables, and the optimizer's slots, after a few steps."""
    # From 0: the sum of the updates is not rounded to the weight's digits.
    variables = [tf.Variable(tf.zeros((4, 3))), tf.Variable(tf.zeros((5,)))]
    inner = make()
    inner.build(variables)
    step = MODES[mode](make_step(inner, exponent, variables, **arguments))
    each = [gradients(exponent, variable.shape) for variable in variables]
    for number in range(STEPS):
        step(*(grads[number] for grads in each))
    assert int(inner.iterations) == STEPS
    slots = [each for each in inner.variables if each.shape.rank if "learning" not in each.name]
    return [variable.numpy() for variable in [*variables, *slots]]


@pytest.mark.parametrize(
    ("make_step", "mode"),
    [(scaler_step, "eager"), (scaler_step, "xla"), (wrapper_step, "graph")],
)
@pytest.mark.parametrize("name", first_of(OPTIMIZERS))
def test_the_update_is_that_of_scale_1_at_every_scale(name, make_step, mode):
    expected = trained(OPTIMIZERS[name], 0, make_step, mode)
    assert all(np.abs(value).max() > 0 for value in expected)
    for exponent in EXPONENTS:
        actual = trained(OPTIMIZERS[name], exponent, make_step, mode)
        for value, target in zip(actual, expected, strict=True):
            np.testing.assert_allclose(value, target, rtol=1e-6, atol=0, err_msg=str(exponent))


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("name", ["sgd", "adam", "adafactor"])
def test_rounded_weights_and_repeated_rows_at_every_scale(name, kind):
    def train(exponent):
        table = keras.Variable(np.full((4, 3), 0.5), dtype="bfloat16")
        inner = OPTIMIZERS[name]()
        step = wrapper_step(inner, exponent, [table], weight_rounding="split")
        step = MODES["graph"](step)
        for rows in gradients(exponent, (4, 3)):
            step(tf.IndexedSlices(rows, INDICES, tf.constant([4, 3])) if kind == "sparse" else rows)
        return [np.array(tf.cast(v, tf.float32)) for v in [table, *inner.variables[2:]]]

    expected = train(0)
    for exponent in EXPONENTS:
        for value, target in zip(train(exponent), expected, strict=True):
            np.testing.assert_allclose(value, target, rtol=1e-6, err_msg=str(exponent))


def test_usual_scales_multiply_no_gradient_on_a_cpu():
    variable = tf.Variable(tf.zeros((4,)))
    inner = keras.optimizers.SGD(0.1)
    inner.build([variable])
    step = tf.function(scaler_step(inner, 15, [variable]), autograph=False)
    traced = step.get_concrete_function(tf.TensorSpec((4,)))
    nodes = [n for f in traced.graph.as_graph_def().library.function for n in f.node_def]
    producers = {node.name: node.op for node in nodes}
    updates = [node for node in nodes if node.op == "ResourceApplyGradientDescent"]
    sources = [producers[node.input[2].partition(":")[0]] for node in updates]
    # The product is in a branch for extreme scales only.
    assert len(sources) == 1
    assert sources[0] in ("If", "StatelessIf", "Identity")
