"""Counting values by exponent, against plain NumPy, and the scale that follows from it."""

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from helpers.acceptance import deterministic_ops
from helpers.cases import tiers
from tfamp.diagnostics.step_statistics import (
    EXPONENTS,
    ExponentHistogram,
    count_values,
    histogram,
    suggested_scale,
    total,
)

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65505.0, 65536.0, 2.0**-24, 2.0**-14]
SPECIAL += [1e-45, -1e-40, 2.0**-126, 3.4e38, np.nextafter(np.float32(2.0**-14), np.float32(0))]
floats = st.floats(width=32, allow_subnormal=True) | st.sampled_from(SPECIAL)
numbers = st.floats(min_value=2.0**-60, max_value=2.0**40)


def counted(values, scale=1.0, second_scale=1.0, jit_compile=False):
    bounds = [tf.constant(65504.0 * each) for each in (scale, second_scale)]
    count = tf.function(count_values, jit_compile=True) if jit_compile else count_values
    return histogram(count([values], *bounds).numpy().tolist(), scale)


def reference(values):
    """The same histogram, from NumPy's frexp in float64."""
    values = np.abs(np.asarray(values, "float64").ravel())
    values = np.where(values < 2.0**-126, 0.0, values)
    finite = values[np.isfinite(values) & (values > 0)]
    exponents = np.frexp(finite)[1] - 1
    found = np.unique(exponents, return_counts=True)
    counts = {int(e): int(n) for e, n in zip(*found, strict=True)}
    return ExponentHistogram(
        counts,
        zeros=int((values == 0).sum()),
        infs=int(np.isinf(values).sum()),
        nans=int(np.isnan(values).sum()),
        over=int((values > 65504).sum()),
        largest=float(finite.max(initial=0)),
    )


@hypothesis.given(st.lists(floats, max_size=40))
@hypothesis.settings(max_examples=60)
def test_counts_are_numpys(values):
    values = np.array(values, "float32")
    found, _ = counted(tf.constant(values))
    assert found == reference(values)
    assert found.values == len(values)


@pytest.mark.parametrize(
    ("dtype", "jit_compile"),
    tiers(
        [("float16", False), ("bfloat16", False), ("bfloat16", True), ("float32", False)],
        [("float16", True), ("float32", True)],
    ),
)
def test_every_dtype_is_counted_exactly_compiled_too(dtype, jit_compile):
    random = np.random.default_rng(0)
    values = random.standard_normal((20, 30)) * 2.0 ** random.integers(-30, 17, (20, 30))
    values = tf.cast(tf.constant(values), dtype)
    found, _ = counted(values, jit_compile=jit_compile)
    assert found == reference(tf.cast(values, tf.float64).numpy())


def test_float64_beyond_float32_is_at_its_ends_and_no_inf_or_zero():
    found, _ = counted(tf.constant([1e300, -1e-300, 0.0, np.inf], tf.float64))
    assert found.counts == {127: 1, -126: 1}
    assert (found.zeros, found.infs, found.over) == (1, 1, 2)


def test_sparse_gradients_count_with_their_values_and_missing_ones_not_at_all():
    sparse = tf.IndexedSlices(tf.constant([[2.0], [0.0]]), tf.constant([0, 5]))
    assert counted(sparse)[0] == ExponentHistogram({1: 1}, zeros=1, largest=2.0)
    assert counted(None)[0] == ExponentHistogram()
    assert counted(tf.zeros((0, 3)))[0] == ExponentHistogram()


def test_no_op_is_one_that_gpus_reject_under_determinism():
    specs = [tf.TensorSpec((8,)), tf.TensorSpec(()), tf.TensorSpec(())]
    count = tf.function(lambda values, *bounds: count_values([values], *bounds))
    with deterministic_ops():
        graph = count.get_concrete_function(*specs).graph.as_graph_def()
    nodes = [*graph.node, *(node for each in graph.library.function for node in each.node_def)]
    assert not {node.op for node in nodes} & {"Bincount", "DenseBincount"}
    sums = {node.attr["T"].type for node in nodes if node.op == "UnsortedSegmentSum"}
    # Floats would depend on the order of the additions.
    assert sums == {tf.int32.as_datatype_enum}


def test_determinism_changes_no_count():
    magnitudes = 10.0 ** np.arange(-50.0, 50.0).repeat(100)
    some = np.random.default_rng(0).standard_normal(len(magnitudes)) * magnitudes
    values = [tf.constant([*some, *SPECIAL], tf.float32)]
    bounds = tf.constant(65504.0), tf.constant(1.0)
    found = count_values(values, *bounds).numpy()
    with deterministic_ops():
        np.testing.assert_array_equal(count_values(values, *bounds), found)
    assert found[0, :EXPONENTS].sum() == len(some) + len(SPECIAL)


def test_counts_beyond_what_float32_counts_are_exact():
    number = 2**24 + 1
    assert counted(tf.ones((number,)))[0].counts == {0: number}
    bound = tf.constant(65504.0)  # Replicas add up.
    rows = count_values([tf.constant([x, 0.0]) for x in (1.0, 8.0)], bound, bound).numpy()
    assert histogram(rows, 1.0)[0] == ExponentHistogram({0: 1, 3: 1}, zeros=2, largest=8.0)


@hypothesis.given(st.lists(numbers, min_size=1, max_size=30), st.integers(-8, 32))
@hypothesis.settings(max_examples=60)
def test_a_divisor_shifts_the_histogram_and_both_bounds_are_exact(values, exponent):
    values = np.array(values, "float32")
    unscaled, over = counted(tf.constant(values * 2.0**exponent), 2.0**exponent, 1.0)
    assert unscaled == reference(values)
    assert unscaled.shifted(exponent, over) == reference(values * np.float32(2.0**exponent))


def test_shares_are_of_what_is_neither_zero_nor_nan():
    values = [0.0, 0.0, np.nan, 2.0**-25, 2.0**-24, 2.0**-15, 1.0, 65504.0, 65505.0, np.inf]
    found, _ = counted(tf.constant(values))
    assert found.shares() == {"under_2**-24": 1 / 7, "under_2**-14": 3 / 7, "over_65504": 2 / 7}
    assert found.nonfinite == 2
    assert set(ExponentHistogram(zeros=3).shares().values()) == {0.0}


@hypothesis.given(st.lists(numbers, min_size=1, max_size=30))
@hypothesis.settings(max_examples=100)
def test_the_suggested_scale_puts_the_most_values_in_the_normal_range(values):
    values = np.array(values)
    suggested = suggested_scale(reference(values))

    def in_range(scale):
        scaled = values * scale
        return -1 if scaled.max() > 65504 else int((scaled >= 2.0**-14).sum())

    assert np.frexp(suggested)[0] == 0.5
    assert in_range(suggested) == max(in_range(2.0**k) for k in range(-60, 80))
    assert in_range(suggested) > 0
    # Any of 2**6 to 2**35 would do for values of 2**-20.
    assert suggested_scale(ExponentHistogram({-20: 5}, largest=2.0**-20)) == 2.0**21
    assert suggested_scale(ExponentHistogram(zeros=5, infs=1)) is None


def test_a_total_is_of_all_values_together():
    both = total([ExponentHistogram({0: 1}, 2, 3, 4, 3, 1.0), ExponentHistogram({0: 1, 5: 2})])
    assert both == ExponentHistogram({0: 2, 5: 2}, 2, 3, 4, 3, 1.0)
