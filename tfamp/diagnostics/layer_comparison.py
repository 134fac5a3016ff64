"""Compares the layers of a Keras model in mixed precision with float32.

The model runs as it is, with its policies replaced while a run lasts: the same variables, nothing
cloned. Every run starts from the same values of all variables, seeds included.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from tfamp.diagnostics.comparison import ComparisonRow, largest_error, range_shares
from tfamp.diagnostics.model_runs import (
    Around,
    all_layers,
    computing_in,
    float_tensors,
    layer_path,
    low_dtype_of,
    observing_layers,
    policies_in,
    unchanged,
    with_policies,
)
from tfamp.interop import keras_hooks
from tfamp.layers.layer_dtypes import policy_with
from tfamp.policy import Policy

# What a layer raises that cannot run in the low dtype on float32 inputs.
_REFUSALS = (tf.errors.InvalidArgumentError, TypeError, ValueError)
# A layer's own error counts for itself if it is that many times the largest of a layer in it.
_OWN_FACTOR = 2.0

_Tensors: TypeAlias = list[np.ndarray[Any, Any]]
# A layer and what each call of it returned, by the layer's `id`, in the order of their first ends.
_Calls: TypeAlias = dict[int, tuple[Any, list[_Tensors]]]


class LayerComparison:
    """A model with its float32 run, to compare others with."""

    def __init__(self, model: Any, x: Any, dtype: str) -> None:
        self._model, self._x, self._dtype = model, x, dtype
        if not model.built:
            model(x, training=False)
        self._layers = list(filter(_has_row, all_layers(model)))
        self._low = {
            id(layer): (layer, name)
            for layer, name in self._low_policies()
            if None not in (policy_with(layer, name), policy_with(layer, "float32"))
        }
        with computing_in(model, "float32"):
            self.outputs, self._calls = self._recorded()
            self._own = self._own_errors()
            self.noise = largest_error(self._run(), self.outputs)

    def rows(self) -> tuple[tuple[ComparisonRow, ...], float]:
        """Runs in mixed precision; returns the rows, in the order of the run, and the error."""
        with self._mixed(()):
            outputs, mixed = self._recorded()
            rows = tuple(
                self._row(layer, calls, errors)
                for key, (layer, calls) in self._calls.items()
                if (errors := _errors(calls, mixed.get(key, (layer, []))[1]))
            )
        return rows, largest_error(outputs, self.outputs)

    def output_error(self, kept: Collection[str]) -> float:
        """Runs in mixed precision with layers of some paths, and what is in them, in float32."""
        with self._mixed(kept):
            return largest_error(self._run(), self.outputs)

    def suspects(self) -> list[str]:
        """Returns the paths of the layers that are low, those with the largest own error first.

        A layer that holds others comes after these, unless its error is much larger than theirs.
        """
        scores: dict[int, float] = {}
        for layer in reversed(self._layers):  # Inner layers before those that hold them.
            own = self._own.get(id(layer), 0.0)
            below = all_layers(layer)[1:]
            inner = [scores[id(each)] for each in below if id(each) in scores]
            explained = bool(inner) and own <= _OWN_FACTOR * max(inner)
            scores[id(layer)] = -1.0 / (1 + own) if explained else own
        seen = (key for key, (_, calls) in self._calls.items() if any(calls))
        order = {key: number for number, key in enumerate(seen)}
        units = [layer for layer in self._layers if self._members(layer) and id(layer) in order]
        units.sort(key=lambda layer: (-scores[id(layer)], order[id(layer)]))
        return list(dict.fromkeys(map(layer_path, units)))

    # Which layers

    def _low_policies(self) -> Iterator[tuple[Any, str]]:
        """The layers that compute in the low dtype in a mixed run, with their policies."""
        name = f"mixed_{self._dtype}"
        yield from policies_in(self._model, self._dtype)
        # A layer by itself: what a model would keep float32 as its output is what is asked for.
        is_layer = not isinstance(self._model, keras.Model)
        is_asked = is_layer and not low_dtype_of(self._model)
        for layer in all_layers(self._model):
            can_be_low = is_asked and not Policy(name).keeps_float32(type(layer))
            if can_be_low or layer.compute_dtype == self._dtype:
                yield layer, name

    def _members(self, layer: Any) -> list[tuple[Any, str]]:
        """The layer and the layers in it that are low in a mixed run."""
        below = all_layers(layer)
        return [self._low[id(each)] for each in below if id(each) in self._low]

    @contextlib.contextmanager
    def _mixed(self, kept: Collection[str]) -> Iterator[None]:
        """Mixed precision with some layers, and what is in them, in float32."""
        named = [each for each in self._layers if layer_path(each) in kept]
        float32 = {id(each) for layer in named for each in all_layers(layer)}
        low = [each for key, each in self._low.items() if key not in float32]
        with computing_in(self._model, "float32"), with_policies(low):
            yield

    # Runs

    def _run(self, around: Around = lambda _, call: call()) -> _Tensors:
        """Runs the model with the policies it has now."""
        with unchanged(self._model.variables), observing_layers(around):
            return _arrays(self._model(self._x, training=False))

    def _recorded(self) -> tuple[_Tensors, _Calls]:
        """Runs the model: its outputs, and those of its layers."""
        calls: _Calls = {}

        def around(layer: Any, call: Callable[[], Any]) -> Any:
            value = call()
            if _has_row(layer):
                calls.setdefault(id(layer), (layer, []))[1].append(_arrays(value))
            return value

        return self._run(around), calls

    def _own_errors(self) -> dict[int, float]:
        """Runs once more, and every low layer in the low dtype too, on the same inputs."""
        errors: dict[int, float] = {}
        left = {key: iter(calls) for key, (_, calls) in self._calls.items()}
        alone = False

        def around(layer: Any, call: Callable[[], Any]) -> Any:
            nonlocal alone
            value = call()
            if alone or id(layer) not in left:
                return value
            expected = next(left[id(layer)], None)
            if expected and (members := self._members(layer)):
                alone, tensors = True, None
                with contextlib.suppress(*_REFUSALS), with_policies(members):
                    tensors = _arrays(call())
                alone = False
                if tensors is not None:
                    is_same = len(tensors) == len(expected)
                    error = largest_error(tensors, expected) if is_same else math.inf
                    errors[id(layer)] = max(errors.get(id(layer), 0.0), error)
            return value

        self._run(around)
        return errors

    def _row(self, layer: Any, calls: list[_Tensors], errors: list[float]) -> ComparisonRow:
        shares = [range_shares(tensors, self._dtype) for tensors in calls if tensors]
        return ComparisonRow(
            layer=layer_path(layer),
            kind=type(layer).__name__,
            dtype=layer.compute_dtype,
            relative_error=max(errors),
            own_error=self._own.get(id(layer)),
            **{name: max(each[name] for each in shares) for name in shares[0]},
            calls=len(shares),
        )


def _has_row(layer: Any) -> bool:
    only_holds = isinstance(layer, keras.Sequential | keras_hooks.functional_class())
    return not only_holds and not isinstance(layer, keras.layers.InputLayer)


def _errors(calls: list[_Tensors], mixed: list[_Tensors]) -> list[float]:
    """The error of each call that returned as many tensors in both runs."""
    pairs = zip(mixed, calls, strict=False)
    return [largest_error(a, b) for a, b in pairs if b and len(a) == len(b)]


def _arrays(value: Any) -> _Tensors:
    """The float tensors in a structure that have values: none while a function is traced."""
    return [
        np.asarray(keras.ops.convert_to_numpy(each))
        for each in float_tensors(value)
        if hasattr(each, "numpy")
    ]
