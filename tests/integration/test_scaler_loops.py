"""The loops of PyTorch's and Paddle's users, as tfamp spells them, reach float32's accuracy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp

sklearn_datasets = pytest.importorskip("sklearn.datasets")

STEPS, BATCH = 120, 128


@pytest.fixture
def digits():
    data = sklearn_datasets.load_digits()
    x, y = (data.data / 16.0).astype("float32"), data.target.astype("int32")
    return x[:1200], y[:1200], x[1200:], y[1200:]


def make_model():
    keras.utils.set_random_seed(1)
    hidden = [keras.layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def mean_loss(y, logits):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.cast(logits, tf.float32))
    return tf.reduce_mean(losses)


def float32_step(model, optimizer, scaler):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = mean_loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return step


def torch_step(model, optimizer, scaler):
    def step(x, y):
        with tf.GradientTape() as tape, tfamp.autocast("float16"):
            scaled_loss = scaler.scale(mean_loss(y, model(x, training=True)))
        variables = model.trainable_variables
        gradients = scaler.unscale(optimizer, tape.gradient(scaled_loss, variables))
        gradients, _ = tf.clip_by_global_norm(gradients, 5.0)
        scaler.step(optimizer, zip(gradients, variables, strict=True))
        scaler.update()

    return step


def paddle_step(model, optimizer, scaler):
    def step(x, y):
        with tf.GradientTape() as tape, tfamp.autocast("float16"):
            scaled = scaler.scale(mean_loss(y, model(x, training=True)))
        scaler.minimize(optimizer, scaled, tape, model.trainable_variables)

    return step


def accuracy(make_step, digits):
    x, y, x_test, y_test = digits
    model, optimizer = make_model(), keras.optimizers.Adam(3e-3)
    optimizer.build(model.trainable_variables)
    scaler = tfamp.GradScaler(growth_interval=20)
    step = make_step(model, optimizer, scaler)
    step = tf.function(step)
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        batch = random.integers(0, len(x), BATCH)
        step(tf.constant(x[batch]), tf.constant(y[batch]))
    if make_step is not float32_step:
        # It grew until it overflowed, at least once: the skipped step is part of what is tested.
        assert 0 < int(optimizer.iterations) < STEPS
        assert all(v.dtype == "float32" for v in model.trainable_variables)
    return float(np.mean(np.argmax(model(x_test), axis=-1) == y_test))


@pytest.mark.slow
def test_the_loops_train_digits_to_float32s_accuracy(digits):
    expected = accuracy(float32_step, digits)
    assert expected > 0.88
    for make_step in (torch_step, paddle_step):
        assert accuracy(make_step, digits) > expected - 0.02
