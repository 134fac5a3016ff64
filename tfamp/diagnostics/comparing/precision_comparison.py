"""`compare`: float32 against mixed precision, layer by layer or op by op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.diagnostics.comparing.comparison import Comparison
from tfamp.diagnostics.comparing.keep_search import Found, search_list
from tfamp.diagnostics.comparing.layer_comparison import LayerComparison
from tfamp.diagnostics.comparing.op_comparison import OpComparison
from tfamp.diagnostics.model_runs import low_dtype_of
from tfamp.machine import hardware
from tfamp.rewriting.function import RewrittenFunction


def compare(
    model: Any, x: Any, *, dtype: Any = None, bound: float | None = None, most_runs: int = 200
) -> Comparison:
    """Compares float32 with mixed precision, and says what to keep in float32.

    A Keras model runs eagerly, as in inference. It is called as if it had a mixed policy: layers
    that compute in float16 or bfloat16 already do so in `dtype`; of a float32 model, all do but
    those that a `tfamp.Policy` keeps float32. It is as before afterwards: weights, policies, moving
    statistics and seeds.

    A function is compared op by op: what `tfamp.rewrite` returned with its rewrite, any other
    function under `tfamp.autocast`. Variables are as before afterwards.

    With a bound, the layers with the largest errors of their own are kept in float32, as few as
    are found to be enough: first more and more of them, then each that is not needed is taken out
    again. The list that is returned was run.

    Args:
        model: A Keras model or layer, a function, or what `tfamp.rewrite` returned.
        x: What to call it with: arrays or tensors in the structure that the model takes. Of a
            `tf.data.Dataset` the first element, and of an element (x, y) x. For a function the
            argument, or a tuple of several.
        dtype: "float16" or "bfloat16"; None is the model's own low dtype, or what this machine
            multiplies natively.
        bound: Largest relative error of the outputs that is wanted; None asks for no list.
        most_runs: How many lists to try at most; each is a run of the model.

    Returns:
        The comparison. Errors are the largest difference over the largest float32 magnitude.

    Raises:
        TypeError: `model` is neither a model nor a function.
        ValueError: The dtype or the bound is wrong, the dtype is not that of the rewrite, or
            float32 gives nothing to compare with: no example, or no finite output.

    Example:
        >>> dense = keras.layers.Dense
        >>> layers = [dense(4, kernel_initializer="ones", name="big"), dense(1, name="small")]
        >>> model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.ReLU()])
        >>> found = compare(model, tf.constant([[3e5]]), dtype="float16", bound=0.01)
        >>> found.worst.layer.rpartition("/")[2], found.worst.own_error
        ('big', inf)
        >>> found.output_error
        inf
        >>> found.proved_error < 0.01
        True
    """
    low = _low_dtype(model, dtype)
    if bound is not None and not (isinstance(bound, int | float) and bound >= 0):
        raise ValueError(f"bound must be a relative error, such as 0.01; got {bound!r}.")
    if isinstance(model, keras.Layer):
        subject: Any = LayerComparison(model, _first(x), low)
    elif callable(model):
        subject = OpComparison(model, _arguments(x), low)
    else:
        raise TypeError(
            "compare takes a Keras model, a function or what tfamp.rewrite returned; got "
            f"{type(model).__name__}."
        )
    _check_outputs(subject.outputs)
    rows, error = subject.rows()
    found = Found((), None, 0)
    if bound is not None:
        found = search_list(subject.suspects(), subject.output_error, bound, most_runs=most_runs)
    return Comparison(
        model=str(getattr(model, "name", getattr(model, "__name__", type(model).__name__))),
        dtype=low,
        rows=rows,
        output_error=error,
        bound=bound,
        keep_float32=found.names,
        proved_error=found.error,
        runs=found.runs,
        noise=0.0 if math.isnan(subject.noise) else subject.noise,
    )


def _low_dtype(model: Any, dtype: Any) -> str:
    own = None
    if isinstance(model, RewrittenFunction):
        own = model.dtype
    elif isinstance(model, keras.Layer):
        own = low_dtype_of(model)
    name = getattr(dtype, "name", dtype)
    if name in (None, "auto"):
        automatic = hardware.automatic_policy(hardware.detect())[0].removeprefix("mixed_")
        name = own or (automatic if automatic in LOW_PRECISION else "bfloat16")
    name = str(name).removeprefix("mixed_")
    if name not in LOW_PRECISION:
        raise ValueError(f"dtype must be one of {', '.join(LOW_PRECISION)}, auto; got {dtype!r}.")
    if isinstance(model, RewrittenFunction) and own is None:
        raise ValueError(
            "The function is not rewritten: float32 is the fastest this machine has. Give "
            "tfamp.rewrite a dtype."
        )
    if isinstance(model, RewrittenFunction) and name != own:
        raise ValueError(f"The function is rewritten to {own}, not {name}; leave dtype out.")
    return name


def _check_outputs(outputs: Sequence[Any]) -> None:
    """Raises a ValueError where float32's outputs have no number to compare with."""
    if not outputs:
        return
    if not any(output.size for output in outputs):
        raise ValueError(
            "There is nothing to compare: the outputs have no elements. Give x with at least one "
            "example."
        )
    if not any(np.isfinite(output.astype(np.float64)).any() for output in outputs):
        raise ValueError(
            "There is nothing to compare: no output is finite in float32 either. "
            "tfamp.diagnostics.find_nonfinite tells where it begins."
        )


def _first(x: Any) -> Any:
    """The first batch of a data set, without its labels."""
    if not isinstance(x, tf.data.Dataset):
        return x
    element = next(iter(x), None)
    if element is None:
        raise ValueError("The data set given as x is empty: it has no batch to compare on.")
    return element[0] if isinstance(element, tuple) else element


def _arguments(x: Any) -> tuple[Any, ...]:
    if isinstance(x, tf.data.Dataset):
        x = _first(x)
    given = x if isinstance(x, tuple) else (x,)
    return tuple(tf.nest.map_structure(tf.convert_to_tensor, given))
