"""How float32 numbers are rounded to numbers of 16 bits, and what is kept beside them.

All are pure functions of tensors and work on bit patterns: they run eagerly, in a `tf.function` and
compiled by XLA with the same result, also where the processor takes subnormal numbers for zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, float_format

_HALF = 1 << 15
_EXPONENT = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
# Of rows that are shorter LLVM makes a vector and a part of one.
_SHORT = 1 << 4


def nearest(value: Any, dtype: Any) -> Any:
    """Rounds float32 to float16 or bfloat16; ties to even in float16, away from zero in bfloat16.

    Ties away from zero leave differences of exactly 16 bits, which `split` keeps. Ties to even do
    not: a number with an even last bit is then the nearest one to 2**16 + 1 float32 numbers. A NaN
    stays one if it is of the kind that arithmetic makes.
    """
    if tf.as_dtype(dtype) != tf.bfloat16:
        return tf.cast(value, dtype)
    return _upper_half(_bits(value) + _unsigned(_HALF))


def stochastic(value: Any, dtype: Any, words: Any) -> Any:
    """Rounds float32 to one of the two float16 or bfloat16 neighbours, at random, unbiased.

    The probability of the farther neighbour is the share of the distance to the nearer one. What
    is representable stays, inf too; beyond the largest finite number it rounds to nearest. A NaN
    stays one if it is of the kind that arithmetic makes.
    `words` are uniform uint32 numbers, one for each element.

    Source: Zamirai et al., "Revisiting BFloat16 Training", 2020, which rounds bfloat16 weights so.
    """
    if tf.as_dtype(dtype) == tf.bfloat16:
        return _stochastic_bfloat16(value, words)
    return _stochastic_float16(value, words)


def _stochastic_bfloat16(value: Any, words: Any) -> Any:
    # 16 random bits are added to the 16 that are cut off: they carry as often as is right.
    bits = _bits(value)
    last = _unsigned(0x7F7F0000)  # the largest finite bfloat16
    inside = _and(bits, _MAGNITUDE) < last
    return _upper_half(bits + tf.where(inside, _shifted(words, 16), _unsigned(_HALF)))


def _stochastic_float16(value: Any, words: Any) -> Any:
    bits = _bits(value)
    magnitude = tf.bitcast(_and(bits, _MAGNITUDE), tf.float32)
    # The distance between neighbours is a power of two, the same for all subnormal numbers.
    exponent = tf.maximum(_and(bits, _EXPONENT), _unsigned((-14 + 127) << 23))
    step = tf.bitcast(exponent - _unsigned(10 << 23), tf.float32)
    steps = magnitude / step
    whole = tf.floor(steps)
    # 24 bits are as many as float32 holds: the comparison is exact.
    threshold = tf.cast(tf.cast(_shifted(words, 8), tf.int32), tf.float32) * 2.0**-24
    rounded = (whole + tf.cast(threshold < steps - whole, tf.float32)) * step
    signed = tf.where(_and(bits, 1 << 31) > _unsigned(0), -rounded, rounded)
    inside = magnitude < float_format("float16").max
    return tf.cast(tf.where(inside, signed, value), tf.float16)


def split(master: Any) -> tuple[Any, Any]:
    """Splits float32 into the nearest bfloat16 number and the int16 difference of the patterns."""
    # The patterns are off by the lower half, which is less than zero where it was rounded up.
    lower = _narrowed(_and(_bits(master), 0xFFFF))
    return nearest(master, "bfloat16"), tf.bitcast(lower, tf.int16)


def joined(weight: Any, difference: Any) -> Any:
    """The float32 number that `split` was given, bit for bit."""
    offset = tf.bitcast(tf.cast(difference, tf.int32), tf.uint32)
    return tf.bitcast(_raised(weight) + offset, tf.float32)


# ---- Random numbers ------------------------------------------------------------------------------


def random_words(key: tuple[Any, Any], shape: Any) -> Any:
    """Uniform uint32 numbers, one for each element of a shape, that a key decides.

    Which element gets which does not depend on how many there are.

    Source: a multiply-and-shift hash of the element's number, as in Wellons, "Prospecting for hash
    functions", 2018: a few instructions, where Philox would take longer than the update.
    """
    return _hashed(tf.bitwise.bitwise_xor(_numbers(shape), key[0]), key[1])


def _numbers(shape: Any) -> Any:
    """The number of each element of a shape, row by row.

    As a sum of a row's number and a column's: compiled, those of a row are counted in 32 bits.
    """
    shape = tf.convert_to_tensor(shape)
    columns = tf.reduce_prod(shape[-1:])
    rows = tf.reduce_prod(shape[:-1])
    first, column = (tf.bitcast(tf.range(n), tf.uint32) for n in (rows, columns))
    first = first * tf.cast(columns, tf.uint32)
    return tf.reshape(first[:, None] + column, shape)


def keys(seed: Any, step: Any, number: Any) -> tuple[Any, Any]:
    """A key of a seed, the number of a step and that of a tensor, all scalar integers."""
    seed, number = (tf.cast(each, tf.uint32) for each in (seed, number))
    step = tf.cast(step, tf.int64)
    low, high = tf.cast(step, tf.uint32), tf.cast(tf.bitwise.right_shift(step, 32), tf.uint32)
    first = _hashed(_hashed(low, seed) + high, number)
    return first, _hashed(first, number + _unsigned(1))


def _hashed(words: Any, salt: Any) -> Any:
    words = words * _unsigned(0x7FEB352D)
    words = tf.bitwise.bitwise_xor(words, _shifted(words, 15)) + salt
    words = words * _unsigned(0x846CA68B)
    return tf.bitwise.bitwise_xor(words, _shifted(words, 16))


# ---- Bit patterns --------------------------------------------------------------------------------


def _bits(value: Any) -> Any:
    return tf.bitcast(value, tf.uint32)


def _unsigned(number: int) -> Any:
    return tf.constant(number, tf.uint32)


def _and(bits: Any, mask: int) -> Any:
    return tf.bitwise.bitwise_and(bits, _unsigned(mask))


def _shifted(bits: Any, places: int) -> Any:
    return tf.bitwise.right_shift(bits, _unsigned(places))


def _upper_half(bits: Any) -> Any:
    """The bfloat16 numbers of patterns in the upper half."""
    return tf.bitcast(_narrowed(_shifted(bits, 16)), tf.bfloat16)


def _narrowed(bits: Any) -> Any:
    """Patterns of 16 bits as such.

    What LLVM makes of a cast of short rows may store 32 bits at the end of each, over the next row
    if XLA updates in place (seen in rows of 9, by LLVM of TensorFlow 2.21 for AVX512).
    """
    if bits.shape.rank and (bits.shape[-1] or _SHORT) < _SHORT:
        return tf.bitcast(bits, tf.uint16)[..., 0]
    return tf.cast(bits, tf.uint16)


def _raised(low: Any) -> Any:
    """The bits of a bfloat16 number in float32."""
    upper = tf.cast(tf.bitcast(low, tf.uint16), tf.uint32)
    return tf.bitwise.left_shift(upper, _unsigned(16))


def widened(low: Any) -> Any:
    """A low number in float32, subnormal ones included."""
    if low.dtype != tf.bfloat16:
        return tf.cast(low, tf.float32)
    return tf.bitcast(_raised(low), tf.float32)


class Form(NamedTuple):
    """How a float32 number is stored.

    Attributes:
        dtypes: The dtypes of the numbers that are stored for it.
        decode: Makes float32 of them.
        encode: Makes them of float32 and of a function that returns random words.
    """

    dtypes: tuple[str, ...]
    decode: Callable[..., Any]
    encode: Callable[[Any, Callable[[], Any]], tuple[Any, ...]]


@functools.cache
def form_of(dtype: str, how: str = "stochastic") -> Form:
    """The form of numbers of a dtype; low ones are rounded "stochastic" or "split"."""
    if dtype not in LOW_PRECISION:
        return Form((dtype,), lambda value: value, lambda value, words: (value,))
    if how == "split":
        return Form((dtype, "int16"), joined, lambda value, words: split(value))
    return Form((dtype,), widened, lambda value, words: (stochastic(value, dtype, words()),))


FLOAT32 = form_of("float32")


class Chance(NamedTuple):
    """What random numbers are made of: a seed and the number of steps, scalar integers."""

    seed: Any
    step: Any

    def words(self, number: Any, value: Any) -> Any:
        """Random words for a tensor, which has its number among all that a step rounds."""
        return random_words(keys(*self, number), tf.shape(value))
