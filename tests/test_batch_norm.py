"""The fused kernel's arithmetic against a float64 reference and TensorFlow's unfused formula."""

import numpy as np
import pytest
import tensorflow as tf

from helpers.cases import one_of_each
from helpers.graph_asserts import op_dtypes
from helpers.tolerances import assert_close
from tfamp.interop import tf_private
from tfamp.layers.fused_norms import fused_norm, has_fused_kernel

EPSILON = 1e-3
SHAPES = {2: (24, 8), 3: (4, 6, 8), 4: (4, 3, 5, 8), 5: (2, 3, 2, 4, 8)}
DTYPES = ["float16", "bfloat16", "float32"]
GAMMA = np.linspace(0.5, 1.5, 8, dtype="float32")
BETA = np.linspace(-1, 1, 8, dtype="float32")


def sample(shape, dtype, *, center=3.0, spread=2.0, seed=0):
    rng = np.random.default_rng(seed)
    return tf.cast(center + spread * rng.standard_normal(shape), dtype)


def reference(x, dy, gamma=GAMMA, beta=BETA):
    """Outputs, statistics and gradients in float64, after the formulas of the paper."""
    x, dy = (np.asarray(each).astype(np.float64) for each in (x, dy))
    axes = tuple(range(x.ndim - 1))
    mean, variance = x.mean(axes), x.var(axes)
    std = np.sqrt(variance + EPSILON)
    normal = (x - mean) / std
    dgamma, dbeta = (dy * normal).sum(axes), dy.sum(axes)
    count = x.size // x.shape[-1]
    dx = gamma / std * (dy - dbeta / count - normal * dgamma / count)
    return normal * gamma + beta, mean, variance, dx, dgamma, dbeta


def gradients(x, dy):
    gamma, beta = tf.constant(GAMMA), tf.constant(BETA)
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        found = fused_norm(x, gamma, beta, EPSILON)
    return (*found, *tape.gradient(found[0], [x, gamma, beta], output_gradients=dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", SHAPES)
def test_one_step_is_that_of_a_float64_reference(rank, dtype):
    x, dy = sample(SHAPES[rank], dtype), sample(SHAPES[rank], dtype, center=0.3, seed=1)
    found = op_dtypes(gradients, x, dy)
    assert found["FusedBatchNormV3"] == found["FusedBatchNormGradV3"] == {dtype}
    actual, expected = gradients(x, dy), reference(x, dy)
    assert [each.dtype for each in actual] == [dtype, *["float32"] * 2, dtype, *["float32"] * 2]
    # Only the tensors are low: statistics and sums over channels are as exact as float32's.
    for each, wanted, computed_in in zip(
        actual, expected, [dtype, "float32", "float32", dtype, "float32", "float32"], strict=True
    ):
        assert_close(each, wanted, computed_in, depth=x.shape.num_elements() // 8)


@pytest.mark.parametrize(("dtype", "jit_compile"), one_of_each(DTYPES, [False, True]))
def test_shapes_known_only_at_run_time(dtype, jit_compile):
    fn = tf.function(gradients, jit_compile=jit_compile)
    spec = tf.TensorSpec((None, None, 8), dtype)
    fn = fn.get_concrete_function(spec, spec)
    for count in (1, 4):
        x, dy = sample((count, 6, 8), dtype), sample((count, 6, 8), dtype, center=0.3, seed=1)
        for each, wanted in zip(fn(x, dy), reference(x, dy), strict=True):
            assert_close(each, wanted, dtype, depth=24)


def test_kernels(monkeypatch):
    assert has_fused_kernel("float32", 1e-3)
    assert has_fused_kernel("bfloat16", 1e-3)
    assert not has_fused_kernel("float64", 1e-3)
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "cpu")
    assert has_fused_kernel("float32", 1e-6)
    monkeypatch.setattr(tf_private, "default_device_kind", lambda: "gpu")
    assert has_fused_kernel("float32", 1.001e-5)
    assert not has_fused_kernel("float32", 1e-6)
    with tf.device("CPU:0"):
        assert has_fused_kernel("float32", 1e-6)
