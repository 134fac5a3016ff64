"""Rounding float32 to 16 bits: unbiased, to the neighbours only, and rebuilt exactly."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from helpers.cases import first_of
from tfamp.core.dtypes import float_format
from tfamp.training import rounding

LOW = ["bfloat16", "float16"]
DRAWS = 10**6


def float32(bits):
    return np.asarray(bits, "uint32").view("float32")


def grid(dtype):
    """Every finite number of a low dtype in float64, in order, and inf at both ends."""
    numbers = np.arange(2**16, dtype="uint16").view(tf.as_dtype(dtype).as_numpy_dtype)
    numbers = numbers.astype("float64")
    return np.unique(numbers[~np.isnan(numbers)])


def neighbours(values, dtype):
    """The greatest number of the dtype that is not greater, and the smallest that is not less."""
    values, numbers = values.astype("float64"), grid(dtype)
    above = numbers[np.searchsorted(numbers, values, side="left")]
    below = numbers[np.searchsorted(numbers, values, side="right") - 1]
    return below, above


@tf.function(jit_compile=True)
def words(number, count, step):
    return rounding.random_words(rounding.keys(7, step, number), tf.stack([count]))


@functools.cache
def drawing(dtype):
    @tf.function(jit_compile=True)
    def draw(value, number):
        each = rounding.random_words(rounding.keys(7, tf.constant(3, tf.int64), number), [DRAWS])
        low = rounding.stochastic(tf.fill([DRAWS], value), dtype, each)
        # As patterns: compiled arithmetic takes subnormal numbers for zero.
        bits = tf.cast(tf.bitcast(low, tf.uint16), tf.int32)
        others = tf.reduce_sum(tf.cast(tf.not_equal(bits, bits[0]), tf.int32))
        return tf.stack([bits[0], tf.reduce_max(bits), tf.reduce_min(bits)]), others

    return draw


def sorted_first(numbers):
    first, *both = (float(number) for number in numbers)
    return first, max(both), min(both)


# Every 11th exponent, subnormal ones included, always, and all slow.
EXPONENTS = [
    pytest.param(range(-149, 128, 11), id="some"),
    pytest.param(range(-149, 128), id="all", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("dtype", first_of(reversed(LOW)))
@pytest.mark.parametrize("exponents", EXPONENTS)
def test_the_mean_of_stochastic_rounding_is_the_value(dtype, exponents):
    random = np.random.default_rng(5)
    largest = float_format(dtype).max
    for number, exponent in enumerate(exponents):
        sign = (-1) ** number
        value = np.float32(sign * np.ldexp(1 + random.random(), exponent))
        (below,), (above,) = neighbours(np.atleast_1d(value), dtype)
        drawn = drawing(dtype)(tf.constant(value), tf.constant(number))  # Compiled once.
        patterns, others = (each.numpy() for each in drawn)
        drawn = patterns.astype("uint16").view(tf.as_dtype(dtype).as_numpy_dtype)
        first, highest, lowest = sorted_first(drawn.astype("float64"))
        assert {lowest, highest} <= {below, above}, value
        if abs(float(value)) > largest or below == above:
            nearest = float(rounding.widened(rounding.nearest(tf.constant(value), dtype)))
            assert lowest == highest == nearest
            continue
        ups = others if first == below else DRAWS - others
        ups = 0 if highest == below else DRAWS if lowest == above else ups
        share = (float(value) - below) / (above - below)
        # Chances are multiples of 2**-24.
        error = np.sqrt(max(share * (1 - share), 2.0**-24) / DRAWS)
        assert abs(ups / DRAWS - share) <= 5 * error + 2.0**-24, (value, ups / DRAWS, share)


def test_only_beyond_the_largest_bfloat16_are_random_words_not_looked_at():
    values = float32([0x7F7EFFFF, 0x7F7EFFFF, 0x7F7F0001, 0x7F7F7FFF])
    given = tf.constant(np.array([0, 2**32 - 1, 2**32 - 1, 2**32 - 1], "uint32"))
    found = tf.bitcast(rounding.stochastic(tf.constant(values), "bfloat16", given), tf.uint16)
    assert found.numpy().tolist() == [0x7F7E, 0x7F7F, 0x7F7F, 0x7F7F]


@pytest.mark.parametrize("dtype", first_of(reversed(LOW)))
def test_what_is_representable_stays(dtype):
    bits = np.arange(2**16, dtype="uint16")
    low = tf.bitcast(tf.constant(bits), dtype)
    again = rounding.stochastic(
        rounding.widened(low), dtype, words(0, 2**16, tf.constant(1, tf.int64))
    )
    nan = np.isnan(low.numpy().astype("float32"))
    np.testing.assert_array_equal(tf.bitcast(again, tf.uint16).numpy()[~nan], bits[~nan])
    assert np.isnan(again.numpy().astype("float32")[nan]).all()


@pytest.mark.parametrize("dtype", first_of(LOW))
def test_any_float32_goes_to_a_neighbour_and_the_same_one_compiled_or_not(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    values = float32(bits)
    values = values[~np.isnan(values)]
    each = words(2, len(values), tf.constant(9, tf.int64))
    rounded = {
        compiled: tf.function(rounding.stochastic, jit_compile=compiled)(
            tf.constant(values), dtype, each
        )
        for compiled in (False, True)
    }
    found = rounding.widened(rounded[False]).numpy().astype("float64")
    below, above = neighbours(values, dtype)
    assert ((found == below) | (found == above)).all()
    np.testing.assert_array_equal(
        *(tf.bitcast(each, tf.uint16).numpy() for each in rounded.values())
    )


def test_the_random_words_are_uniform_and_differ_by_step_and_tensor():
    found = np.stack(
        [
            words(tf.constant(number), 2**16, tf.constant(step, tf.int64)).numpy()
            for number in (0, 1, 16)
            for step in (0, 1, 2**33)
        ]
    )
    np.testing.assert_array_equal(
        found[0], words(tf.constant(0), 2**16, tf.constant(0, tf.int64)).numpy()
    )
    for row in found:
        ones = ((row[:, None] >> np.arange(32, dtype="uint32")) & 1).mean(0)
        assert np.abs(ones - 0.5).max() < 5 * 0.5 / 2**8
        counts = np.bincount(row >> 24, minlength=256)
        assert ((counts - 256) ** 2 / 256).sum() < 255 + 5 * np.sqrt(2 * 255)
    scaled = found / 2.0**32 - 0.5
    correlations = np.corrcoef(scaled) - np.eye(len(scaled))
    assert np.abs(correlations).max() < 5 / 2**8
    following = [np.corrcoef(row[:-1], row[1:])[0, 1] for row in scaled]
    assert np.abs(following).max() < 5 / 2**8


@pytest.mark.parametrize("compiled", first_of([True, False]))
@pytest.mark.parametrize("dtype", LOW)
def test_every_nan_stays_one(dtype, compiled):
    # The first is what GPUs make of 0/0; the second has nothing in its upper half.
    bits = [0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FC00000, 0xFFC00000]
    values = tf.bitcast(tf.constant(np.array(bits, "uint32")), tf.float32)
    most = tf.fill([len(bits)], tf.constant(2**32 - 1, tf.uint32))
    ways = [
        lambda values: rounding.nearest(values, dtype),
        lambda values: rounding.stochastic(values, dtype, most),
    ]
    for way in ways:
        rounded = tf.function(way, jit_compile=compiled)(values)
        assert np.isnan(rounded.numpy().astype("float32")).all()


@pytest.mark.slow
def test_split_rebuilds_every_lower_half_of_every_exponent():
    upper = np.concatenate([np.arange(256) << 7, (np.arange(256) << 7) + 127, [0x3F81, 0xBF82]])
    bits = ((upper[:, None].astype("uint32") << 16) + np.arange(2**16, dtype="uint32")).ravel()
    bits = bits[~np.isnan(float32(bits))]
    weight, rest = tf.function(rounding.split, jit_compile=True)(tf.bitcast(bits, tf.float32))
    assert (weight.dtype, rest.dtype) == (tf.bfloat16, tf.int16)
    again = tf.bitcast(rounding.joined(weight, rest), tf.uint32)
    np.testing.assert_array_equal(again.numpy(), bits)


def test_split_keeps_the_nearest_number_and_nan():
    bits = np.random.default_rng(1).integers(0, 2**32, 10**5, dtype=np.uint32)
    values = float32(bits)
    nan = np.isnan(values)
    weight = rounding.widened(rounding.split(tf.constant(values))[0]).numpy()
    assert np.isnan(weight[nan]).all()
    assert np.isnan(rounding.joined(*rounding.split(tf.constant(values[nan])))).all()
    values, weight = values[~nan], weight[~nan]
    below, above = neighbours(values, "bfloat16")
    finite = np.isfinite(below) & np.isfinite(above)
    distance = np.minimum(values - below, above - values)[finite]
    np.testing.assert_array_equal(np.abs(values.astype("float64") - weight)[finite], distance)
