"""Rounding of float32 to 16 bits: nearest, stochastic, or split into two halves.

Pure functions of tensors that work on bit patterns: eager, in a `tf.function` and compiled by
XLA they have the same result, also where the processor flushes subnormal numbers to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.core.kinds import DType, Tensor

# Of the bits of a float32 number: half of the last bit that bfloat16 keeps, the one that makes a
# NaN quiet, and masks.
_HALF = 1 << 15
_QUIET = 1 << 22
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
# LLVM splits shorter rows into a vector and a remainder. As many float32 numbers as 512 bits hold.
_SHORT = 1 << 4


def nearest(value: Tensor, dtype: DType) -> Tensor:
    """Rounds float32 to float16, ties to even, or bfloat16, ties away from zero.

    With ties away from zero the difference fits into 16 bits, as `split` needs; with ties to
    even an even number is the nearest one to 2**16 + 1 float32 numbers. A NaN stays one.
    """
    if tf.as_dtype(dtype) != tf.bfloat16:
        return tf.cast(value, dtype)
    return _rounded(_bits(value), _unsigned(_HALF))


def stochastic(value: Tensor, dtype: DType, words: Tensor) -> Tensor:
    """Rounds float32 to one of the two float16 or bfloat16 neighbours, at random, unbiased.

    The probability of a neighbour is proportional to the distance from the other one.
    Representable numbers, inf included, are exact; beyond the largest finite number it rounds
    to nearest, and a NaN stays one. `words` are uniform uint32 numbers, one per element.

    Source: Zamirai et al., "Revisiting BFloat16 Training", 2020, which rounds
    bfloat16 weights so.
    """
    if tf.as_dtype(dtype) == tf.bfloat16:
        return _stochastic_bfloat16(value, words)
    return _stochastic_float16(value, words)


def _stochastic_bfloat16(value: Tensor, words: Tensor) -> Tensor:
    # Adding 16 random bits to the truncated ones carries with the right probability.
    bits = _bits(value)
    last = _unsigned(0x7F7F0000)  # the largest finite bfloat16
    inside = _and(bits, _MAGNITUDE) < last
    return _rounded(bits, tf.where(inside, _shifted(words, 16), _unsigned(_HALF)))


def _stochastic_float16(value: Tensor, words: Tensor) -> Tensor:
    bits = _bits(value)
    magnitude = tf.bitcast(_and(bits, _MAGNITUDE), tf.float32)
    # The spacing is a power of two, constant for subnormal numbers.
    exponent = tf.maximum(_and(bits, _EXPONENT), _unsigned((-14 + 127) << 23))
    step = tf.bitcast(exponent - _unsigned(10 << 23), tf.float32)
    steps = magnitude / step
    whole = tf.floor(steps)
    # float32 holds 24 bits, so the comparison is exact.
    threshold = tf.cast(tf.cast(_shifted(words, 8), tf.int32), tf.float32) * 2.0**-24
    rounded = (whole + tf.cast(threshold < steps - whole, tf.float32)) * step
    signed = tf.where(_and(bits, 1 << 31) > _unsigned(0), -rounded, rounded)
    inside = magnitude < float_format("float16").max
    return tf.cast(tf.where(inside, signed, value), tf.float16)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 into the nearest bfloat16 number and the int16 difference of the bits.

    A NaN is split into a NaN and a difference that leave one, but not the same bits.
    """
    # The lower half is negative where the weight was rounded up.
    lower = _narrowed(_and(_bits(master), 0xFFFF))
    return nearest(master, "bfloat16"), tf.bitcast(lower, tf.int16)


def joined(weight: Tensor, difference: Tensor) -> Tensor:
    """Inverts `split`, bit for bit but for NaN."""
    offset = tf.bitcast(tf.cast(difference, tf.int32), tf.uint32)
    return tf.bitcast(_raised(weight) + offset, tf.float32)


# ---- Random numbers --------------------------------------------------------------------


def random_words(key: tuple[Tensor, Tensor], shape: Tensor) -> Tensor:
    """Uniform uint32 numbers, one per element of a shape, as a function of a key.

    The number of an element does not depend on the size of the shape.

    Source: a multiply-and-shift hash of the element's number, as in Wellons, "Prospecting for
    hash functions", 2018: a few instructions, where Philox would take longer than the update.
    """
    return _hashed(tf.bitwise.bitwise_xor(_numbers(shape), key[0]), key[1])


def _numbers(shape: Tensor) -> Tensor:
    """The numbers of the elements of a shape, row by row.

    Written as a sum of row and column indices, so that compiled loops count in 32 bits.
    """
    shape = tf.convert_to_tensor(shape)
    columns = tf.reduce_prod(shape[-1:])
    rows = tf.reduce_prod(shape[:-1])
    first, column = (tf.bitcast(tf.range(n), tf.uint32) for n in (rows, columns))
    first = first * tf.cast(columns, tf.uint32)
    return tf.reshape(first[:, None] + column, shape)


def keys(seed: Tensor, step: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Hashes a seed, a step and the number of a tensor, all integers, into a key."""
    seed, number = tf.cast(seed, tf.uint32), tf.cast(number, tf.uint32)
    step = tf.cast(step, tf.int64)
    low, high = tf.cast(step, tf.uint32), tf.cast(tf.bitwise.right_shift(step, 32), tf.uint32)
    first = _hashed(_hashed(low, seed) + high, number)
    return first, _hashed(first, number + _unsigned(1))


def _hashed(words: Tensor, salt: Tensor) -> Tensor:
    words = words * _unsigned(0x7FEB352D)
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 15)) + salt
    words = words * _unsigned(0x846CA68B)
    return tf.bitwise.bitwise_xor(words, _shifted(words, 16))


# ---- Bit patterns ----------------------------------------------------------------------


def _bits(value: Tensor) -> Tensor:
    return tf.bitcast(value, tf.uint32)


def _unsigned(number: int) -> Tensor:
    return tf.constant(number, tf.uint32)


def _and(bits: Tensor, mask: int) -> Tensor:
    return tf.bitwise.bitwise_and(bits, _unsigned(mask))


def _shifted(bits: Tensor, places: int) -> Tensor:
    return tf.bitwise.right_shift(bits, _unsigned(places))


def _upper_half(bits: Tensor) -> Tensor:
    """The bfloat16 numbers in the upper halves of patterns."""
    return tf.bitcast(_narrowed(_shifted(bits, 16)), tf.bfloat16)


def _rounded(bits: Tensor, added: Tensor) -> Tensor:
    """The bfloat16 numbers in the upper halves of patterns, after an addition.

    That could carry the pattern of a NaN over into zero's, as of the NaN that GPUs make.
    """
    is_nan = _and(bits, _MAGNITUDE) > _unsigned(_EXPONENT)
    quiet = tf.bitwise.bitwise_or(bits, _unsigned(_QUIET))
    return _upper_half(tf.where(is_nan, quiet, bits + added))


def _narrowed(bits: Tensor) -> Tensor:
    """Narrows 32-bit patterns to their lower 16 bits.

    A cast of short rows may store 32 bits at the end of a row, over the next one if XLA
    updates in place (seen in rows of 9, by LLVM of TensorFlow 2.21 for AVX512).
    """
    if bits.shape.rank and (bits.shape[-1] or _SHORT) < _SHORT:
        return tf.bitcast(bits, tf.uint16)[..., 0]
    return tf.cast(bits, tf.uint16)


def _raised(low: Tensor) -> Tensor:
    """The float32 bits of a bfloat16 number."""
    upper = tf.cast(tf.bitcast(low, tf.uint16), tf.uint32)
    return tf.bitwise.left_shift(upper, _unsigned(16))


def widened(low: Tensor) -> Tensor:
    """Converts a low-precision number to float32, subnormal ones included."""
    if low.dtype != tf.bfloat16:
        return tf.cast(low, tf.float32)
    return tf.bitcast(_raised(low), tf.float32)


class Form(NamedTuple):
    """Storage format of a float32 number.

    Attributes:
        dtypes: Dtypes of the stored parts.
        decode: Converts the parts to float32.
        encode: Converts float32 to the parts, with a function that returns random words.
    """

    dtypes: tuple[str, ...]
    decode: Callable[..., Tensor]
    encode: Callable[[Tensor, Callable[[], Tensor]], tuple[Tensor, ...]]


@functools.cache
def form_of(dtype: str, how: str = "stochastic") -> Form:
    """The form for a dtype; low-precision ones are "stochastic" or "split"."""
    if dtype not in LOW_PRECISION:
        return Form((dtype,), lambda value: value, lambda value, words: (value,))
    if how == "split":
        return Form((dtype, "int16"), joined, lambda value, words: split(value))
    return Form((dtype,), widened, lambda value, words: (stochastic(value, dtype, words()),))


FLOAT32 = form_of("float32")


class Chance(NamedTuple):
    """Source of random numbers: a seed and the number of steps, scalar integers."""

    seed: Tensor
    step: Tensor

    def words(self, number: Tensor, value: Tensor) -> Tensor:
        """Random words for a tensor; `number` selects its random stream."""
        return random_words(keys(*self, number), tf.shape(value))
