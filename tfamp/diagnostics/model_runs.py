"""Runs a Keras model in another compute dtype, and observes the calls of its layers.

Nothing is cloned, so that subclassed models work too: the model keeps its variables, and gets
its policies back at the end of a run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION, dtype_hint
from tfamp.core.kinds import Functional, Layer, Nest, Variable
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.interop.patching import patched_here
from tfamp.layers import model_roles
from tfamp.layers.layer_dtypes import policy_with
from tfamp.layers.layer_plan import assigned
from tfamp.layers.model_calls import casts_unprepared
from tfamp.layers.model_roles import why_not_raised
from tfamp.policy import Policy, policy_named
from tfamp.torch_style.modes import without_levels

# Calls a layer, its first argument.
Call: TypeAlias = functools.partial[Nest]
# Takes a layer and a function that calls it; returns the result of the call.
Around: TypeAlias = Callable[[Layer, Call], Nest]
COMPUTE_DTYPES = ("float32", *LOW_PRECISION)


def layer_path(layer: Layer) -> str:
    """Returns the path of a layer, as "encoder/dense_1", or its name before it is built."""
    return str(layer.path or layer.name)


def low_dtype_of(model: Layer) -> str | None:
    """Returns the low compute dtype of a model's layers; None if all are float32."""
    used = {layer.compute_dtype for layer in layers_of(model)}
    return next((dtype for dtype in LOW_PRECISION if dtype in used), None)


@contextlib.contextmanager
def computing_in(model: Layer, dtype: str | None) -> Iterator[None]:
    """Makes a model compute in a dtype, with the variables it has, until the block ends.

    With "float32" all low-precision layers compute in float32. With a low dtype, the layers
    that already are in low precision compute in that dtype; if the model has none, those that a
    mixed `tfamp.Policy` would convert: all but BatchNormalization and the output layers.

    A model at level O1 has float32 layers, and runs without its autocast where a dtype is given.

    Quantized layers stay quantized, and are left out where their quantization does not support
    the dtype. Policies are restored at the end, also after an exception. The model itself
    changes, so other threads must not call it meanwhile.
    """
    with with_policies(policies_in(model, dtype)), contextlib.ExitStack() as undo:
        if dtype is not None:
            undo.enter_context(without_levels())
        for layer in filter(casts_unprepared, layers_of(model)):
            undo.callback(setattr, layer, "autocast", True)
            layer.autocast = False
        yield


@contextlib.contextmanager
def with_policies(policies: Iterable[tuple[Layer, str]]) -> Iterator[None]:
    """Sets the float policies of layers by name until the block ends."""
    with contextlib.ExitStack() as undo:
        for layer, name in policies:
            undo.callback(keras_hooks.replace_policy(layer, policy_with(layer, name)))
        yield


def check_batch(x: Any) -> None:
    """Raises a TypeError for what holds several batches."""
    if isinstance(x, tf.data.Dataset | keras.utils.PyDataset) or hasattr(x, "__next__"):
        raise TypeError(
            f"x must be one batch of arrays or tensors; got {type(x).__name__}. Give the x of "
            "one batch, such as x, y = next(iter(data))."
        )


def check_compute_dtype(dtype: Any) -> None:
    """Raises a ValueError for an unsupported compute dtype; None, the model's, is allowed."""
    if dtype is not None and dtype not in COMPUTE_DTYPES:
        names, hint = ", ".join(COMPUTE_DTYPES), dtype_hint(dtype, COMPUTE_DTYPES)
        raise ValueError(f"dtype must be one of {names} or None; got {dtype!r}.{hint}")


def policies_in(model: Layer, dtype: str | None) -> list[tuple[Layer, str]]:
    """Returns the layers that `computing_in` changes for a dtype, with names of policies."""
    check_compute_dtype(dtype)
    if dtype is None:
        return []
    layers = layers_of(model)
    wanted = [layer for layer in layers if layer.compute_dtype in LOW_PRECISION]
    name = dtype if dtype == "float32" else f"mixed_{dtype}"
    if dtype != "float32" and not wanted:
        kept = _kept_float32(model, policy_named(name))
        float32 = (layer for layer in layers if layer.compute_dtype == "float32")
        wanted = [layer for layer in float32 if id(layer) not in kept]
    return [(layer, name) for layer in wanted if policy_with(layer, name) is not None]


def _kept_float32(model: Layer, policy: Policy) -> set[int]:
    """Ids of the layers that a mixed policy keeps float32, their inner layers included."""
    makers = _output_layers(model) if isinstance(model, keras.Model) else []
    kept = [layer for layer in makers if not why_not_raised(layer)]
    for layer in layers_of(model):
        is_exact = assigned(type(layer), policy, "level").policy_name == "float32"
        if is_exact or isinstance(layer, keras.layers.InputLayer):
            kept.append(layer)
    return {id(below) for layer in kept for below in layers_of(layer)}


def _output_layers(layer: Layer) -> list[Layer]:
    """The output layers of a model, nested models included; of a layer, the layer itself."""
    is_sequential = isinstance(layer, keras.Sequential)
    functional: Functional = keras_hooks.functional_of(layer) if is_sequential else layer
    if isinstance(functional, keras_hooks.functional_class()):
        makers = model_roles.output_makers(list(functional.outputs))
        return [output for maker in makers for output in _output_layers(maker)]
    return [] if isinstance(layer, keras.Model) else [layer]


def observing_layers(around: Around) -> contextlib.AbstractContextManager[None]:
    """Wraps the layer calls that this thread makes in the block in a function."""

    def call_layer(original: Callable[..., Nest], layer: Layer, *args: Any, **kwargs: Any) -> Nest:
        return around(layer, functools.partial(original, layer, *args, **kwargs))

    return patched_here(layer_call=call_layer)


@contextlib.contextmanager
def unchanged(variables: list[Variable]) -> Iterator[None]:
    """Restores the values of Keras or TensorFlow variables, also after an exception."""
    before = [keras.ops.copy(keras.ops.convert_to_tensor(variable)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
