"""Sentences below a comparison's table, about errors that its columns do not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import float_format

# Errors relative to the variation above which a note says so, and relative to the largest
# magnitude below which this is worth saying. Choices.
_OF_VARIATION, _OF_MAGNITUDE = 0.1, 0.02


def largest_inexact(arrays: Iterable[np.ndarray], dtype: str) -> float:
    """Returns the largest of whole numbers that a low dtype does not hold; 0 without any.

    Arrays of positions and identifiers hold whole numbers only.
    """
    largest = 0.0
    for array in arrays:
        # float32 holds all whole numbers up to here; larger values are whole by chance.
        top = float(np.max(np.abs(array), initial=0.0))
        if not top <= 2 / float_format("float32").eps or (array != np.rint(array)).any():
            continue
        if (tf.cast(tf.cast(array, dtype), "float64") != array.astype("float64")).numpy().any():
            largest = max(largest, top)
    return largest


def whole_numbers_note(layer: str, largest: float, dtype: str) -> str:
    """Returns a sentence about a layer that rounds positions or identifiers."""
    exact = round(2 / float_format(dtype).eps)
    return (
        f"{layer} takes whole numbers up to {largest:,.0f} as floats and casts them to {dtype}, "
        f'which holds them exactly up to {exact:,}: give the layer dtype="float32" (at a level, '
        "keep_float32), or pass integers"
    )


def variation_notes(
    outputs: Sequence[np.ndarray], references: Sequence[np.ndarray], layers: Sequence[str] = ()
) -> Iterator[str]:
    """Yields a sentence for each output whose error is small for its size only.

    Args:
        outputs: The outputs in mixed precision.
        references: The same in float32.
        layers: Paths of layers whose own outputs are such.
    """
    layer = layers[0] if layers else "a layer"
    for number, (output, reference) in enumerate(zip(outputs, references, strict=False)):
        error, size, variation = _sizes(output, reference)
        if _hides_error(error, size, variation):
            yield (
                f"output {number}: the error (root mean square) is {error / variation:.0%} of the "
                f"standard deviation and {error / size:.1%} of the largest value: something "
                f"large is added to what varies; if {layer} undoes a normalization, give it "
                'dtype="float32"'
            )


def hides_error(outputs: Sequence[np.ndarray], references: Sequence[np.ndarray]) -> bool:
    """Whether the error of an output is small for its size, and large for its variation."""
    return any(_hides_error(*_sizes(*pair)) for pair in zip(outputs, references, strict=False))


def _hides_error(error: float, size: float, variation: float) -> bool:
    return _OF_VARIATION * variation < error < _OF_MAGNITUDE * size and variation > 0


def _sizes(output: np.ndarray, reference: np.ndarray) -> tuple[float, float, float]:
    """The error, the largest magnitude and the variation; 0 where these are not known."""
    value: np.ndarray = output.astype("float64")
    exact: np.ndarray = reference.astype("float64")
    is_known = value.shape == exact.shape and exact.size > 0
    if not is_known or not np.isfinite(value).all() or not np.isfinite(exact).all():
        return 0.0, 0.0, 0.0
    error = float(np.sqrt(np.mean(np.square(value - exact))))
    return error, float(np.max(np.abs(exact))), _variation(exact)


def _variation(array: np.ndarray) -> float:
    """The standard deviation within examples; of one number each, over the examples."""
    examples = array.reshape(len(array) if array.ndim else 1, -1)
    axis = 1 if examples.shape[1] > 1 else 0
    return float(np.sqrt(np.mean(np.var(examples, axis=axis))))
