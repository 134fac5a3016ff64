"""How float32 numbers are stored in 16 bits: what a weight or a slot of an optimizer is made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.training import rounding


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
def wide_form(dtype: str) -> Form:
    """The form of numbers that are stored as they are computed with."""
    return Form((dtype,), lambda value: value, lambda value, words: (value,))


FLOAT32 = wide_form("float32")


@functools.cache
def form_of(how: str, dtype: str) -> Form:
    """The form of numbers of a low dtype that are rounded "stochastic" or "split"."""
    if how == "split":
        return Form((dtype, "int16"), rounding.joined, lambda value, words: rounding.split(value))
    return Form(
        (dtype,),
        rounding.widened,
        lambda value, words: (rounding.stochastic(value, dtype, words()),),
    )


class Chance(NamedTuple):
    """What random numbers are made of: a seed and the number of steps, scalar integers."""

    seed: Any
    step: Any

    def words(self, number: Any, value: Any) -> Any:
        """Random words for a tensor, which has its number among all that a step rounds."""
        known = value.shape.is_fully_defined()
        shape = tf.constant(value.shape.as_list(), tf.int32) if known else tf.shape(value)
        return rounding.random_words(rounding.keys(*self, number), shape)
