"""Runs a Keras model as if it were in another dtype, and observes the calls of its layers.

The model keeps its variables and, once the run is over, its policies: nothing is cloned, so that
any model will do, subclassed ones too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here
from tfamp.layers import layer_dtypes
from tfamp.layers.layer_dtypes import can_be_raised, policy_with
from tfamp.layers.model_calls import casts_unprepared
from tfamp.policy import Policy

# Gets a layer and a function that makes its call; returns the call's result.
Around: TypeAlias = Callable[[Any, Callable[[], Any]], Any]
COMPUTE_DTYPES = ("float32", *LOW_PRECISION)


def layer_path(layer: Any) -> str:
    """Returns a layer's path, such as "encoder/dense_1"; its name where it has none yet."""
    return str(layer.path or layer.name)


def low_dtype_of(model: Any) -> str | None:
    """Returns the low dtype that layers of a model compute in; None if all are float32."""
    used = {layer.compute_dtype for layer in layers_of(model)}
    return next((dtype for dtype in LOW_PRECISION if dtype in used), None)


@contextlib.contextmanager
def computing_in(model: Any, dtype: str | None) -> Iterator[None]:
    """Makes a model compute in a dtype, with the variables it has, until the block ends.

    In float32 every layer that is low computes in float32. In a low dtype, a model that has low
    layers computes these in that dtype; of one that has none, those layers become low that a mixed
    `tfamp.Policy` would make low: all but BatchNormalization and the layers that make the outputs.

    Layers that Keras has quantized stay so, and those whose quantization does not go with the dtype
    stay as they are. Policies are given back, also after an exception. It is the model that
    changes: other threads must not call it meanwhile.
    """
    with with_policies(policies_in(model, dtype)), contextlib.ExitStack() as undo:
        for layer in filter(casts_unprepared, layers_of(model)):
            undo.callback(setattr, layer, "autocast", True)
            layer.autocast = False
        yield


@contextlib.contextmanager
def with_policies(policies: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Gives layers the float policies of these names until the block ends."""
    with contextlib.ExitStack() as undo:
        for layer, name in policies:
            undo.callback(keras_hooks.replace_policy(layer, policy_with(layer, name)))
        yield


def check_compute_dtype(dtype: Any) -> None:
    """Raises a ValueError where a model cannot compute in a dtype; None is the model's own."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"dtype must be one of {', '.join(COMPUTE_DTYPES)} or None; got {dtype!r}."
        )


def policies_in(model: Any, dtype: str | None) -> list[tuple[Any, str]]:
    """Returns the layers that `computing_in` makes compute in a dtype, with float policies."""
    check_compute_dtype(dtype)
    if dtype is None:
        return []
    layers = layers_of(model)
    wanted = [layer for layer in layers if layer.compute_dtype in LOW_PRECISION]
    name = dtype if dtype == "float32" else f"mixed_{dtype}"
    if dtype != "float32" and not wanted:
        kept = _kept_float32(model, Policy(name))
        float32 = (layer for layer in layers if layer.compute_dtype == "float32")
        wanted = [layer for layer in float32 if id(layer) not in kept]
    return [(layer, name) for layer in wanted if policy_with(layer, name) is not None]


def _kept_float32(model: Any, policy: Policy) -> set[int]:
    """The `id`s of the layers that a mixed policy would keep float32, with the layers in them."""
    makers = _output_layers(model) if isinstance(model, keras.Model) else []
    kept = list(filter(can_be_raised, makers))
    for layer in layers_of(model):
        if policy.keeps_float32(type(layer)) or isinstance(layer, keras.layers.InputLayer):
            kept.append(layer)
    return {id(below) for layer in kept for below in layers_of(layer)}


def _output_layers(layer: Any) -> list[Any]:
    """The layers that make a model's outputs, in models inside too; of a layer itself."""
    is_sequential = isinstance(layer, keras.Sequential)
    functional: Any = keras_hooks.functional_of(layer) if is_sequential else layer
    if isinstance(functional, keras_hooks.functional_class()):
        makers = layer_dtypes.output_makers(list(functional.outputs))
        return [found for maker in makers for found in _output_layers(maker)]
    return [] if isinstance(layer, keras.Model) else [layer]


def observing_layers(around: Around) -> contextlib.AbstractContextManager[None]:
    """Puts a function around the layer calls that this thread makes in the block."""

    def call_layer(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        return around(layer, functools.partial(original, layer, *args, **kwargs))

    return patched_here(layer_call=call_layer)


@contextlib.contextmanager
def unchanged(variables: list[Any]) -> Iterator[None]:
    """Gives Keras or TensorFlow variables the values they had, however the block ends."""
    before = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
