"""The two flows of TensorFlow's mixed precision guide, with only the import changed."""

import keras
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
from keras import layers

from helpers.cases import first_of
from helpers.graph_asserts import op_dtypes
from tfamp import mixed_precision


@pytest.fixture(scope="module")
def digits():
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    return (x / 16.0).astype("float32"), y.astype("int32")


def guide_model():
    inputs = keras.Input(shape=(64,), name="digits")
    x = layers.Dense(128, activation="relu", name="dense_1")(inputs)
    dense = layers.Dense(128, activation="relu", name="dense_2")
    x = dense(x)
    x = layers.Dense(10, name="dense_logits")(x)
    outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
    return keras.Model(inputs=inputs, outputs=outputs), dense


def test_policy_object_as_the_guide_prints_it():
    policy = mixed_precision.Policy("mixed_float16")
    mixed_precision.set_global_policy(policy)
    assert (policy.compute_dtype, policy.variable_dtype) == ("float16", "float32")
    assert mixed_precision.global_policy() == policy


@pytest.mark.parametrize("name", ["infer_float32_vars", "float16_with_float32_vars", "int32"])
def test_names_that_keras_2_had_or_has_for_other_dtypes_are_refused(name):
    with pytest.raises(ValueError, match=f"got {name!r}"):
        mixed_precision.Policy(name)
    with pytest.raises(ValueError, match=f"got {name!r}"):
        mixed_precision.set_global_policy(name)
    assert mixed_precision.global_policy().name == "float32"


def test_the_policy_is_the_one_that_was_set_in_every_graph():
    policy = mixed_precision.Policy("mixed_bfloat16")
    mixed_precision.set_global_policy(policy)
    with tf.Graph().as_default():
        assert mixed_precision.global_policy() is policy
    assert tf.function(lambda: mixed_precision.global_policy().compute_dtype)() == b"bfloat16"


def test_arguments_as_keras_2_hands_them_on():
    inner = keras.optimizers.SGD()
    given = mixed_precision.LossScaleOptimizer(
        inner, dynamic=True, initial_scale=None, dynamic_growth_steps=None
    )
    assert (given.initial_scale, given.dynamic_growth_steps) == (2.0**15, 2000)
    fixed = mixed_precision.LossScaleOptimizer(inner, dynamic=False, initial_scale=128)
    assert (fixed.dynamic, float(fixed.loss_scale)) == (False, 128.0)


@pytest.mark.parametrize("unscale", first_of([False, True]))
def test_a_loss_that_is_multiplied_by_hand(unscale):
    """`loss * optimizer.get_scale()`, as some tutorials have it."""
    weight = keras.Variable(1.0)
    optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.25))

    @tf.function
    def step(sign):
        with tf.GradientTape() as tape:
            scaled = tf.square(weight) * sign * optimizer.get_scale()
        grads = tape.gradient(scaled, [weight.value])
        if unscale:
            grads = optimizer.get_unscaled_gradients(grads)
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
        optimizer.apply_gradients(zip(grads, [weight], strict=True))

    step(1.0)
    assert float(weight) == (0.75 if unscale else 0.5)
    step(np.inf)
    assert float(weight) == (0.75 if unscale else 0.5)
    assert float(optimizer.loss_scale) == 2.0**14


@pytest.mark.parametrize("name", first_of(["mixed_float16", "mixed_bfloat16"]))
def test_fit_flow(digits, name):
    x, y = digits
    mixed_precision.set_global_policy(name)
    model, dense = guide_model()
    low = name.removeprefix("mixed_")
    assert (dense.dtype_policy.name, dense.compute_dtype) == (name, low)
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert model.outputs[0].dtype == "float32"
    assert low in op_dtypes(model, tf.TensorSpec((8, 64)))["MatMul"]
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=mixed_precision.LossScaleOptimizer(keras.optimizers.RMSprop()),
        metrics=["accuracy"],
        jit_compile=False,
    )
    assert type(model.optimizer) is mixed_precision.LossScaleOptimizer, "not wrapped again"
    initial = model.get_weights()
    history = model.fit(x, y, batch_size=256, epochs=12, validation_split=0.2, verbose=0)
    assert history.history["accuracy"][-1] > 0.9
    model.set_weights(initial)
    assert model.evaluate(x, y, verbose=0)[1] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(["mixed_float16", "mixed_bfloat16"]))
def test_custom_loop_flow(digits, name):
    x, y = digits
    mixed_precision.set_global_policy(mixed_precision.Policy(name))
    model, _ = guide_model()
    optimizer = mixed_precision.LossScaleOptimizer(keras.optimizers.RMSprop())
    loss_object = keras.losses.SparseCategoricalCrossentropy()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000, seed=0).batch(128)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_object(y, model(x))
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    losses = [np.mean([float(train_step(*batch)) for batch in dataset]) for _ in range(12)]
    assert losses[-1] < 0.3 * losses[0]
    assert np.mean(np.argmax(model.predict(x, verbose=0), axis=-1) == y) > 0.9
