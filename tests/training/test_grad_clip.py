"""Clipping by `grad_clip`: what is accepted, and that all gradients are clipped together."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfamp
from helpers.cases import first_of
from helpers.tolerances import assert_close
from helpers.training import assert_identical, data, small_model, snapshot, train_step

NORMS = [1, 2, math.inf]


@pytest.mark.parametrize("norm_type", [1, 2, 2.0, math.inf, "inf"])
def test_fields_defaults_and_dict_round_trip(norm_type):
    clip = tfamp.GradClip.from_dict({"max_norm": 0.5, "norm_type": norm_type})
    assert clip.norm_type == float(norm_type)
    assert tfamp.GradClip.from_dict(clip.to_dict()) == clip
    assert dataclasses.asdict(tfamp.GradClip(35)) == {"max_norm": 35.0, "norm_type": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        clip.max_norm = 1.0


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"max_norm": 1.0, "normtype": 2}, ValueError, "no key 'normtype'.*mean 'norm_type'"),
        ({"norm_type": 2}, ValueError, "needs the key 'max_norm'"),
        ({"max_norm": "1"}, TypeError, "max_norm must be a number; got '1'"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be a number in"),
        ({"max_norm": math.nan}, ValueError, "max_norm"),
        ({"max_norm": 1.0, "norm_type": 3}, ValueError, "norm_type must be 1, 2 or inf; got 3"),
        ({"max_norm": 1.0, "norm_type": True}, ValueError, "norm_type must be 1, 2 or inf"),
        ([1.0], TypeError, "must be a dict such as"),
    ],
)
def test_wrong_values_say_what_is_wrong(values, error, message):
    with pytest.raises(error, match=message):
        tfamp.GradClip.from_dict(values)


def make(grad_clip):
    inner = keras.optimizers.SGD(1.0)
    return tfamp.LossScaleOptimizer(inner, grad_clip=grad_clip, initial_scale=2.0**10)


def test_optimizer_takes_every_form_and_refuses_something_else_and_a_second_accumulation():
    for given in (tfamp.GradClip(2.0), {"max_norm": 2.0}, 2.0, 2):
        assert make(given).grad_clip == tfamp.GradClip(2.0)
    assert make(None).last_gradient_norm is None
    with pytest.raises(TypeError, match="grad_clip must be a GradClip"):
        make("2")
    accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    for argument in ({"grad_clip": 1.0}, {"aggregate_in_float16": True}):
        with pytest.raises(ValueError, match=r"every micro-batch.*GradientAccumulator"):
            tfamp.LossScaleOptimizer(accumulating, **argument)


def apply(optimizer, gradients, traced, unscale=False):
    weights = [keras.Variable(np.zeros(np.shape(g), "float32")) for g in gradients]
    optimizer.build(weights)

    def step():
        grads = [optimizer.get_scaled_loss(tf.constant(g)) for g in gradients]
        if unscale:
            grads = optimizer.get_unscaled_gradients(grads)
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    (tf.function(step) if traced else step)()
    return [weight.numpy() for weight in weights]


GRADIENTS = [np.float32([[3.0, -1.0], [0.0, 2.0]]), np.float32([-4.0])]


@pytest.mark.parametrize(
    ("traced", "unscale"), [(True, False), (False, True)], ids=["function", "eager"]
)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", first_of([1.5, 100.0]))
def test_all_gradients_are_clipped_by_one_factor(norm_type, max_norm, unscale, traced):
    optimizer = make({"max_norm": max_norm, "norm_type": norm_type})
    weights = apply(optimizer, GRADIENTS, traced, unscale)
    flat = np.concatenate([g.ravel() for g in GRADIENTS])
    norm = np.linalg.norm(flat, norm_type)
    assert_close(optimizer.last_gradient_norm, norm, "float32", depth=2)
    for weight, gradient in zip(weights, GRADIENTS, strict=True):
        assert_close(weight, -gradient * min(1.0, max_norm / norm), "float32", depth=2)
        assert norm > max_norm or np.array_equal(weight, -gradient)


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", first_of([np.inf, np.nan]))
def test_a_nonfinite_gradient_is_skipped_not_clipped(norm_type, bad):
    model, optimizer = small_model(), make({"max_norm": 1.0, "norm_type": norm_type})
    step = tf.function(train_step(model, optimizer, unscale=False))
    x, y = data(1)
    step(x, y)
    before = snapshot(model, optimizer.inner_optimizer)
    step(np.where(np.arange(8)[:, None] == 3, np.float32(bad), x), y)
    assert_identical(snapshot(model, optimizer.inner_optimizer), before)
    assert int(optimizer.skipped_steps) == 1
    assert not np.isfinite(optimizer.last_gradient_norm)


@pytest.mark.parametrize("traced", [True, False], ids=["function", "eager"])
def test_gradients_whose_norm_overflows_are_skipped_and_tiny_ones_stay(traced):
    optimizer = make(1.0)
    assert not np.any(apply(optimizer, [np.float32([3e25]), np.float32([-4e25])], traced))
    assert int(optimizer.skipped_steps) == 1
    assert_close(apply(make(1.0), [np.float32([3e-25])], traced), [[-3e-25]], "float32")


def test_rows_of_a_sparse_gradient_with_one_index_count_as_their_sum():
    table = keras.Variable(np.zeros((5, 2), "float32"))
    optimizer = make(1.0)
    optimizer.build([table])

    @tf.function
    def step():
        values = optimizer.get_scaled_loss(tf.constant([[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]]))
        slices = tf.IndexedSlices(values, tf.constant([1, 1, 3]), tf.constant([5, 2]))
        optimizer.apply_gradients([(slices, table)])

    step()
    assert float(optimizer.last_gradient_norm) == 5.0
    expected = [[0, 0], [-0.6, 0], [0, 0], [0, -0.8], [0, 0]]
    assert_close(table.numpy(), expected, "float32", depth=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_many_low_rows_of_a_sparse_gradient_are_added_up_in_float32(dtype):
    # Ones add up to 256 in bfloat16; hundreds overflow float16.
    value = 1.0 if dtype == "bfloat16" else 256.0
    table = keras.Variable(np.zeros((4, 1)), dtype=dtype)
    optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=1.0, grad_clip=1.0)
    rows = tf.zeros([1024], tf.int32)
    slices = tf.IndexedSlices(tf.fill((1024, 1), tf.cast(value, dtype)), rows, tf.constant([4, 1]))
    optimizer.apply_gradients([(slices, table)])
    assert float(optimizer.last_gradient_norm) == 1024 * value
    assert table.numpy().astype("float32").ravel().tolist() == [-1.0, 0.0, 0.0, 0.0]


def test_fit_save_and_load(tmp_path):
    x, y = data()
    model = small_model()
    model.compile(make({"max_norm": 0.1, "norm_type": "inf"}), "mse", jit_compile=True)
    start = snapshot(model)
    model.fit(x, y, batch_size=32, verbose=0)
    moved = [np.abs(a - start[name]).max() for name, a in snapshot(model).items()]
    assert_close(max(moved), 0.1, "float32", depth=9)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").optimizer
    assert again.grad_clip == tfamp.GradClip(0.1, math.inf)
    assert float(again.last_gradient_norm) == float(model.optimizer.last_gradient_norm) > 0.1
