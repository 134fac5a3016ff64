"""Compares the layers of a Keras model in mixed precision with float32.

The model runs as it is, with its policies replaced while a run lasts: the same variables, nothing
cloned. Every run starts from the same values of all variables, seeds included.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.diagnostics import model_runs
from tfamp.diagnostics.comparing.comparison import ComparisonRow
from tfamp.diagnostics.comparing.error_measures import RangeShares, largest_error, range_shares
from tfamp.interop import keras_hooks
from tfamp.layers.float_policies import policy_with
from tfamp.policy import Policy

# What a layer raises that cannot run in the low dtype on float32 inputs.
_REFUSALS = (tf.errors.InvalidArgumentError, TypeError, ValueError)
# A layer's own error counts for itself if it is that many times the largest of a layer in it.
_OWN_FACTOR = 2.0

_Tensors = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class _Seen:
    """A call of a layer in the float32 run."""

    tensors: _Tensors
    shares: RangeShares


class LayerComparison:
    """A model with its float32 run, to compare others with.

    Args:
        model: A Keras model or layer.
        x: Its input.
        dtype: The low dtype.
    """

    def __init__(self, model: Any, x: Any, dtype: str) -> None:
        self._model, self._x, self._dtype = model, x, dtype
        if not model.built:
            model(x, training=False)
        self._layers = [layer for layer in model_runs.all_layers(model) if self._has_row(layer)]
        self._low = {
            id(layer): (layer, name)
            for layer, name in self._low_policies()
            if _runs_in(layer, name) and _runs_in(layer, "float32")
        }
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._order: list[Any] = []
        self.outputs: _Tensors = []
        self._run_float32()
        self.noise = self.output_error(None)
        self._own = self._own_errors()

    def rows(self) -> tuple[tuple[ComparisonRow, ...], float]:
        """Runs in mixed precision.

        Returns:
            The rows, in the order in which the layers ended, and the output error.
        """
        errors: dict[int, float] = {}
        dtypes: dict[int, str] = {}

        def compare(layer: Any, number: int, value: Any) -> None:
            seen = self._seen.get((id(layer), number))
            tensors = _arrays(value)
            if seen is not None and len(tensors) == len(seen.tensors):
                error = largest_error(tensors, seen.tensors)
                errors[id(layer)] = max(errors.get(id(layer), 0.0), error)
                dtypes[id(layer)] = layer.compute_dtype

        with self._mixed(()):
            outputs = self._run(compare)
        rows = (
            self._row(layer, dtypes[id(layer)], errors[id(layer)])
            for layer in self._order
            if id(layer) in errors
        )
        return tuple(rows), largest_error(outputs, self.outputs)

    def output_error(self, kept: Collection[str] | None) -> float:
        """Runs in mixed precision with some layers in float32, all with None.

        Args:
            kept: Paths of layers; what is in them stays float32 too.

        Returns:
            The relative error of the outputs.
        """
        with self._mixed(kept):
            return largest_error(self._run(None), self.outputs)

    def suspects(self) -> list[str]:
        """Returns the paths of the layers that are low, those with the largest own error first.

        A layer that holds others comes after these, unless its error is much larger than theirs.
        """
        scores: dict[int, float] = {}
        for layer in reversed(self._layers):  # Inner layers before those that hold them.
            own = self._own.get(id(layer), 0.0)
            inner = [scores[id(each)] for each in self._below(layer) if id(each) in scores]
            worst = max(inner, default=0.0)
            explained = bool(inner) and own <= _OWN_FACTOR * worst
            scores[id(layer)] = -1.0 / (1 + own) if explained else own
        order = {id(layer): number for number, layer in enumerate(self._order)}
        units = [layer for layer in self._layers if self._members(layer) and id(layer) in order]
        units.sort(key=lambda layer: (-scores[id(layer)], order[id(layer)]))
        return list(dict.fromkeys(map(model_runs.layer_path, units)))

    # Which layers

    def _has_row(self, layer: Any) -> bool:
        only_holds = isinstance(layer, keras.Sequential | keras_hooks.functional_class())
        return not only_holds and not isinstance(layer, keras.layers.InputLayer)

    def _low_policies(self) -> Iterator[tuple[Any, str]]:
        """The layers that compute in the low dtype in a mixed run, with their policies."""
        name = f"mixed_{self._dtype}"
        yield from model_runs.policies_in(self._model, self._dtype)
        for layer in model_runs.all_layers(self._model):
            if layer.compute_dtype == self._dtype:
                yield layer, name
        if not isinstance(self._model, keras.Model) and not model_runs.low_dtype_of(self._model):
            # A layer by itself: what a model would keep float32 as its output is what is asked for.
            for layer in model_runs.all_layers(self._model):
                if not Policy(name).keeps_float32(type(layer)):
                    yield layer, name

    def _below(self, layer: Any) -> list[Any]:
        return model_runs.all_layers(layer)[1:]

    def _members(self, layer: Any) -> list[tuple[Any, str]]:
        """The layer and the layers in it that are low in a mixed run."""
        own = (self._low.get(id(each)) for each in model_runs.all_layers(layer))
        return [each for each in own if each is not None]

    @contextlib.contextmanager
    def _mixed(self, kept: Collection[str] | None) -> Iterator[None]:
        """Mixed precision with some layers, and what is in them, in float32; all with None."""
        if kept is None:
            low: Mapping[int, tuple[Any, str]] = {}
        else:
            named = [each for each in self._layers if model_runs.layer_path(each) in kept]
            float32 = {id(each) for layer in named for each in model_runs.all_layers(layer)}
            low = {key: each for key, each in self._low.items() if key not in float32}
        with model_runs.computing_in(self._model, "float32"), _with_policies(low.values()):
            yield

    # Runs

    def _run(self, look: Callable[[Any, int, Any], None] | None) -> _Tensors:
        """Runs the model with the policies it has now; shows every layer call, with its number."""
        calls: Counter[int] = Counter()

        def around(layer: Any, call: Callable[[], Any]) -> Any:
            value = call()
            if look is not None and self._has_row(layer):
                look(layer, calls[id(layer)], value)
                calls[id(layer)] += 1
            return value

        with model_runs.unchanged(self._model.variables), model_runs.observing_layers(around):
            return _arrays(self._model(self._x, training=False))

    def _run_float32(self) -> None:
        def remember(layer: Any, number: int, value: Any) -> None:
            tensors = _arrays(value)
            if tensors:
                self._seen[id(layer), number] = _Seen(tensors, range_shares(tensors, self._dtype))
                if not number:
                    self._order.append(layer)

        with model_runs.computing_in(self._model, "float32"):
            self.outputs = self._run(remember)

    def _own_errors(self) -> dict[int, float]:
        """Runs in float32, and every low layer once more in the low dtype on the same inputs."""
        errors: dict[int, float] = {}
        calls: Counter[int] = Counter()
        alone = False

        def around(layer: Any, call: Callable[[], Any]) -> Any:
            nonlocal alone
            value = call()
            members = [] if alone else self._members(layer)
            seen = None if alone else self._seen.get((id(layer), calls[id(layer)]))
            if not alone:
                calls[id(layer)] += 1
            if members and seen is not None:
                alone = True
                try:
                    error = _error_in(members, call, seen.tensors)
                finally:
                    alone = False
                if error is not None:
                    errors[id(layer)] = max(errors.get(id(layer), 0.0), error)
            return value

        with (
            model_runs.computing_in(self._model, "float32"),
            model_runs.unchanged(self._model.variables),
            model_runs.observing_layers(around),
        ):
            self._model(self._x, training=False)
        return errors

    def _row(self, layer: Any, dtype: str, error: float) -> ComparisonRow:
        seen = [each for (key, _), each in self._seen.items() if key == id(layer)]
        return ComparisonRow(
            layer=model_runs.layer_path(layer),
            kind=type(layer).__name__,
            dtype=dtype,
            relative_error=error,
            own_error=self._own.get(id(layer)),
            max=max(each.shares.max_abs for each in seen),
            overflow=max(each.shares.overflow for each in seen),
            underflow=max(each.shares.underflow for each in seen),
            calls=len(seen),
        )


def _runs_in(layer: Any, name: str) -> bool:
    """Whether a layer can have a policy: what Keras has quantized need not."""
    return policy_with(layer, name) is not None


def _error_in(
    members: list[tuple[Any, str]], call: Callable[[], Any], expected: _Tensors
) -> float | None:
    with _with_policies(members):
        try:
            tensors = _arrays(call())
        except _REFUSALS:
            return None
    return largest_error(tensors, expected) if len(tensors) == len(expected) else math.inf


@contextlib.contextmanager
def _with_policies(policies: Any) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for layer, name in policies:
            undo.callback(keras_hooks.replace_policy(layer, policy_with(layer, name)))
        yield


def _arrays(value: Any) -> _Tensors:
    """The float tensors in a structure that have values: none while a function is traced."""
    return [
        np.asarray(keras.ops.convert_to_numpy(each))
        for each in model_runs.float_tensors(value)
        if hasattr(each, "numpy")
    ]
