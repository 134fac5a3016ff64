"""`compare`: float32 against mixed precision, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.diagnostics.comparison import Comparison
from tfamp.diagnostics.layer_comparison import LayerComparison
from tfamp.diagnostics.model_runs import low_dtype_of
from tfamp.policy import low_dtype


def compare(
    model: Any, x: Any, *, dtype: Any = None, bound: float | None = None, most_runs: int = 200
) -> Comparison:
    """Compares float32 with mixed precision, and says what to keep in float32.

    A Keras model runs eagerly, as in inference. It is called as if it had a mixed policy: layers
    that compute in float16 or bfloat16 already do so in `dtype`; of a float32 model, all do but
    those that a `tfamp.Policy` keeps float32. It is as before afterwards: weights, policies, moving
    statistics and seeds.

    With a bound, the layers with the largest errors of their own are kept in float32, as few as
    are found to be enough: first more and more of them, then each that is not needed is taken out
    again. The list that is returned was run.

    Args:
        model: A Keras model or layer.
        x: What to call it with: arrays or tensors in the structure that the model takes. Of a
            `tf.data.Dataset` the first element, and of an element (x, y) x.
        dtype: "float16" or "bfloat16"; None is the model's own low dtype, or what this machine
            multiplies natively.
        bound: Largest relative error of the outputs that is wanted; None asks for no list.
        most_runs: How many lists to try at most; each is a run of the model.

    Returns:
        The comparison. Errors are the largest difference over the largest float32 magnitude.

    Raises:
        TypeError: `model` is not a model or a layer.
        ValueError: The dtype or the bound is wrong, or float32 gives nothing to compare with: no
            example, or no finite output.

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
    if not isinstance(model, keras.Layer):
        raise TypeError(
            f"compare takes a Keras model or layer; got {type(model).__name__}. Of a function, put "
            "the parts to be compared into keras.layers.Layer subclasses, and these into a model."
        )
    low = _checked_dtype(model, dtype)
    if bound is not None and not (isinstance(bound, int | float) and bound >= 0):
        raise ValueError(f"bound must be a relative error, such as 0.01; got {bound!r}.")
    subject = LayerComparison(model, _first(x), low)
    _check_outputs(subject.outputs)
    rows, error = subject.rows()
    found = Found((), None, 0)
    if bound is not None:
        found = search_list(subject.suspects(), subject.output_error, bound, most_runs=most_runs)
    return Comparison(
        model=model.name,
        dtype=low,
        rows=rows,
        output_error=error,
        bound=bound,
        keep_float32=found.names,
        proved_error=found.error,
        runs=found.runs,
        noise=0.0 if math.isnan(subject.noise) else subject.noise,
    )


def _checked_dtype(model: Any, dtype: Any) -> str:
    own = low_dtype_of(model)
    name = getattr(dtype, "name", dtype)
    if isinstance(name, str):
        name = name.removeprefix("mixed_")
    return str(own if name in (None, "auto") and own else low_dtype(name) or "bfloat16")


def _check_outputs(outputs: Sequence[Any]) -> None:
    """Raises a ValueError where float32's outputs have no number to compare with."""
    why = ""
    if not any(output.size for output in outputs):
        why = "the outputs have no elements. Give x with at least one example."
    elif not any(np.isfinite(output.astype(np.float64)).any() for output in outputs):
        why = "no output is finite in float32 either. "
        why += "tfamp.diagnostics.find_nonfinite tells where it begins."
    if outputs and why:
        raise ValueError(f"There is nothing to compare: {why}")


def _first(x: Any) -> Any:
    """The first batch of a data set, without its labels."""
    if not isinstance(x, tf.data.Dataset):
        return x
    element = next(iter(x), None)
    if element is None:
        raise ValueError("The data set given as x is empty: it has no batch to compare on.")
    return element[0] if isinstance(element, tuple) else element


# ---- The search for what to keep -----------------------------------------------------------------


# Of a run with the layers of some names in float32.
ErrorOf: TypeAlias = Callable[[frozenset[str]], float]


class Found(NamedTuple):
    """What a search came to: the list and its error, None where none was found."""

    names: tuple[str, ...] | None
    error: float | None
    runs: int


def search_list(
    suspects: Sequence[str], error_of: ErrorOf, bound: float, *, most_runs: int = 200
) -> Found:
    """Searches for a short list of names to keep in float32 whose error is at most a bound.

    The suspects are kept one after the other, the first ones first, until the error is low enough;
    then each of them that is not needed is taken out again. What is left is minimal: without any
    one of its names the error is too large, unless the runs were used up before that was tried.
    """
    search = _Search(error_of, bound, most_runs)
    names = search.needed(suspects)
    if names is not None:
        # Once more, so that the error is not one that was remembered.
        error = search.error(frozenset(names))
        if error <= bound:
            return Found(tuple(names), error, search.runs)
    return Found(None, None, search.runs)


@dataclass
class _Search:
    """Runs, each list once, and counts."""

    error_of: ErrorOf
    bound: float
    most_runs: int
    runs: int = 0
    errors: dict[frozenset[str], float] = field(default_factory=dict)

    def needed(self, suspects: Sequence[str]) -> Sequence[str] | None:
        """Returns the shortest prefix that suffices, without those that are not needed in it."""
        names = self.shortest_prefix(suspects)
        for name in reversed(names or ()):
            fewer = [each for each in names or () if each != name]
            if fewer and self.runs + 1 < self.most_runs and self.suffices(fewer):
                names = fewer
        return names

    def shortest_prefix(self, suspects: Sequence[str]) -> Sequence[str] | None:
        """Returns the shortest prefix that suffices, if longer ones suffice too."""
        too_short, enough = -1, 0
        while not self.suffices(suspects[:enough]):
            if enough >= len(suspects):
                return None
            too_short, enough = enough, 2 * enough or 1
        while enough - too_short > 1 and self.runs + 1 < self.most_runs:
            middle = (too_short + enough) // 2
            if self.suffices(suspects[:middle]):
                enough = middle
            else:
                too_short = middle
        return suspects[:enough]

    def suffices(self, names: Iterable[str]) -> bool:
        """Whether the error with these names in float32 is low enough."""
        key = frozenset(names)
        if key not in self.errors:
            self.errors[key] = self.error(key)
        return self.errors[key] <= self.bound

    def error(self, names: frozenset[str]) -> float:
        """Runs with these names in float32."""
        self.runs += 1
        return self.error_of(names)
