"""Gradients that are next values, as Keras's float8 layers return them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.replicas import per_replica

STEPS = 12


def marked(value=1.0):
    variable = keras.Variable(value, aggregation="none")
    variable.overwrite_with_gradient = True
    return variable


def float8_layer(units=3, width=4):
    keras.utils.set_random_seed(1)
    layer = keras.layers.Dense(units)
    layer.build((None, width))
    layer.quantize("float8")
    return layer


def batches():
    random = np.random.default_rng(0)
    return [tf.constant(random.normal(size=(8, 4)) * 3, tf.float32) for _ in range(STEPS)]


def loss_of(layers, x):
    y = x
    for layer in layers:
        y = layer(y, training=True)
    return tf.reduce_mean(tf.square(y - 1.0))


def trained(make_step):
    """The values of two float8 layers after steps; Keras runs these in functions only."""
    layers = [float8_layer(4), float8_layer(2)]
    parts = [layer.trainable_variables for layer in layers]
    step = make_step(layers, parts)
    for x in batches():
        step(x)
    return [variable.numpy() for part in parts for variable in part]


def bare_step(layers, parts):
    optimizer = keras.optimizers.SGD(0.05)
    variables = [*parts[0], *parts[1]]
    optimizer.build(variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(layers, x)
        optimizer.apply(tape.gradient(loss, variables), variables)

    return step


def wrapped_step(built, layers, parts):
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**8)
    variables = [*parts[0], *parts[1]]
    if built:
        optimizer.build(variables)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_of(layers, x))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, variables))
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


def head_step(layers, parts):
    """Unscales the gradients of the body and those of the head by themselves."""
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**8)
    variables = [*parts[0], *parts[1]]
    optimizer.build(variables)

    @tf.function
    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            loss = optimizer.get_scaled_loss(loss_of(layers, x))
        body, head = (tape.gradient(loss, part) for part in parts)
        head = optimizer.get_unscaled_gradients(head)
        body = optimizer.get_unscaled_gradients(body)
        optimizer.apply_gradients(zip([*body, *head], variables, strict=True))

    return step


def two_optimizers_step(layers, parts):
    """One wrapper unscales for an optimizer of Keras too."""
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**8)
    other = keras.optimizers.SGD(0.05)
    optimizer.build(parts[0])
    other.build(parts[1])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(loss_of(layers, x))
        gradients = optimizer.get_unscaled_gradients(tape.gradient(loss, [*parts[0], *parts[1]]))
        count = len(parts[0])
        other.apply(gradients[count:], parts[1])
        optimizer.apply_gradients(zip(gradients[:count], parts[0], strict=True))

    return step


def scaler_step(layers, parts):
    scaler, optimizer = tfamp.GradScaler(2.0**8), keras.optimizers.SGD(0.05)
    variables = [*parts[0], *parts[1]]

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = scaler.scale(loss_of(layers, x))
        gradients = scaler.unscale(optimizer, tape.gradient(loss, variables))
        scaler.step(optimizer, zip(gradients, variables, strict=True))
        scaler.update()

    return step


STEPPERS = {
    "built": lambda *args: wrapped_step(True, *args),
    "not built": lambda *args: wrapped_step(False, *args),
    "head": head_step,
    "two optimizers": two_optimizers_step,
    "scaler": scaler_step,
}


def is_scaled(index):
    """The place of the history of the outputs' gradient, which is that of the scaled loss."""
    return index % 8 in (6, 7)


@pytest.mark.parametrize("name", STEPPERS)
def test_float8_layers_train_as_without_a_loss_scale(name):
    expected, actual = trained(bare_step), trained(STEPPERS[name])
    for index, (value, target) in enumerate(zip(actual, expected, strict=True)):
        if not is_scaled(index):  # Their own scale makes up for the loss scale.
            np.testing.assert_allclose(value, target, rtol=0.1, atol=0.05)
    amax = [value for value in actual if value.shape == (1024,)]
    assert [np.abs(values).max() > 0.05 for values in amax] == [True] * 6


def run(step, *args, graph=True):
    (tf.function(step) if graph else step)(*args)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("built", [False, True])
def test_clipped_next_values_are_put_back(built, graph):
    weight, amax = keras.Variable(1.0), marked()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    variables = [weight, amax]
    optimizer.build(variables)

    def step():
        with tf.GradientTape() as tape:
            loss = optimizer.get_scaled_loss(3.0 * weight + 100.0 * amax)
        gradients = tape.gradient(loss, variables)
        gradients = optimizer.get_unscaled_gradients(gradients)
        gradients = [tf.clip_by_value(gradient, 0.0, 0.5) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run(step, graph=graph)
    assert [float(weight), float(amax)] == [0.5, 800.0]


@pytest.mark.parametrize("scaler", [False, True])
def test_variables_tell_where_no_tape_does(scaler):
    amax = marked()
    inner = keras.optimizers.SGD(1.0)
    if scaler:
        user = tfamp.GradScaler(8.0)
        unscale = lambda grads, **names: user.unscale(inner, grads, **names)  # noqa: E731
    else:
        user = tfamp.LossScaleOptimizer(inner, initial_scale=8.0)
        user.get_scaled_loss(1.0)
        unscale = user.get_unscaled_gradients
    value = tf.constant(5.0)
    with pytest.raises(ValueError, match="variables has 2 variables for 1 gradients"):
        unscale([value], variables=[amax, amax])
    if scaler:
        user = tfamp.GradScaler(8.0)
    assert float(unscale([value], variables=[amax])[0]) == 5.0


def test_next_values_that_were_divided_raise():
    weight, amax = keras.Variable(1.0), marked()
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    optimizer.get_scaled_loss(1.0)
    gradients = optimizer.get_unscaled_gradients([tf.constant(8.0), tf.constant(5.0)])
    with pytest.raises(ValueError, match="its next value.*variables=variables"):
        optimizer.apply_gradients(zip(gradients, [weight, amax], strict=True))


@pytest.mark.parametrize("graph", [False, True])
def test_an_accumulator_takes_the_largest_of_a_window(graph):
    weight, amax = keras.Variable(1.0), marked(50.0)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    accumulator = tfamp.GradientAccumulator(optimizer, steps=2)
    optimizer.get_scaled_loss(1.0)

    def step(gradient, value):
        pairs = zip([gradient, value], [weight, amax], strict=True)
        accumulator.apply_gradients(pairs)

    step = tf.function(step) if graph else step
    # The values of a window do not outlast it.
    for largest, values in [(390.0, (390.0, 3.0)), (7.0, (2.0, 7.0)), (-1.0, (-2.0, -1.0))]:
        for value in values:
            step(tf.constant(2.0), tf.constant(value))
        assert float(amax) == largest
    assert float(weight) == 1.0 - 3 * 0.25


def test_norms_leave_them_out_and_the_check_does_not():
    weight, amax = keras.Variable(1.0), marked()
    optimizer = tfamp.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, grad_clip=2.0
    )
    optimizer.build([weight, amax])
    monitor = tfamp.diagnostics.NumericsMonitor(every=1)

    def apply(value):
        gradients, variables = [tf.constant(32.0), tf.constant(value)], [weight, amax]
        monitor.record(gradients, variables, optimizer=optimizer)
        optimizer.apply_gradients(zip(gradients, variables, strict=True), unscaled=False)

    apply(900.0)
    assert [float(weight), float(amax), float(optimizer.last_gradient_norm)] == [-1.0, 900.0, 4.0]
    assert monitor.history[-1]["gradients"]["values"] == 1
    # float8 clips the gradient of an output: only its amax shows an overflow.
    apply(np.inf)
    assert [float(weight), float(amax), int(optimizer.skipped_steps)] == [-1.0, 900.0, 1]


@pytest.mark.parametrize("clipping", ["clipnorm", "clipvalue", "global_clipnorm"])
@pytest.mark.parametrize("arguments", [{}, {"master_weights": True}, {"weight_rounding": "split"}])
def test_clipping_of_the_optimizer_leaves_them(arguments, clipping):
    low, amax = keras.Variable(1.0, dtype="bfloat16"), marked()
    inner = keras.optimizers.SGD(1.0, **{clipping: 0.5})
    optimizer = tfamp.LossScaleOptimizer(inner, initial_scale=8.0, **arguments)
    optimizer.build([low, amax])
    optimizer.apply_gradients(
        [(tf.constant(32.0), low), (tf.constant(900.0), amax)], unscaled=False
    )
    assert [float(low.numpy()), float(amax)] == [0.5, 900.0]
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("user", ["wrapper", "float16", "clip", "scaler", "accumulator"])
def test_replicas_take_the_largest(user, two_replicas):
    strategy = two_replicas
    arguments = {"float16": {"aggregate_in_float16": True}, "clip": {"grad_clip": 100.0}}
    with strategy.scope():
        weight, amax = keras.Variable(1.0), keras.Variable([1.0, 1.0])
        amax.overwrite_with_gradient = True
        inner = keras.optimizers.SGD(1.0)
        inner.build([weight, amax])
        scaler = tfamp.GradScaler(8.0)
        optimizer = tfamp.LossScaleOptimizer(inner, initial_scale=8.0, **arguments.get(user, {}))
        optimizer.build([weight, amax])
        accumulator = tfamp.GradientAccumulator(optimizer, steps=1)
    optimizer.get_scaled_loss(1.0)

    def replica(gradient, values):
        pairs = list(zip([gradient, values], [weight, amax], strict=True))
        if user == "scaler":
            scaler.step(inner, pairs)
            scaler.update()
        elif user == "accumulator":
            accumulator.apply_gradients(pairs)
        else:
            optimizer.apply_gradients(pairs)

    values = per_replica(strategy, [232.5, 2.0], [3.1, 4.0])
    tf.function(strategy.run)(replica, (per_replica(strategy, 2.0, 4.0), values))
    copies = strategy.experimental_local_results(amax.value)
    assert [copy.numpy().tolist() for copy in copies] == [[232.5, 4.0]] * 2
    assert float(weight.numpy()) == 0.25


@pytest.mark.parametrize("name", ["Nadam", "Adam"])
def test_momenta_go_on_beside_next_values_as_in_keras(name):
    found = []
    for wrap in (lambda inner: inner, lambda inner: tfamp.LossScaleOptimizer(inner, loss_scale=1)):
        weight, amax = keras.Variable([1.0, -2.0]), marked(0.0)
        optimizer = wrap(getattr(keras.optimizers, name)(0.01))
        for step in range(5):
            gradient = tf.constant([1.0, 0.5]) * (step + 1)
            optimizer.apply_gradients([(gradient, weight), (tf.constant(2.0), amax)])
        assert float(amax) == 2.0
        found.append(np.asarray(weight))
    np.testing.assert_allclose(*found, rtol=1e-6)
