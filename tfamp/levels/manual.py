"""Manual mixed precision: the dtype of one layer, or of every layer of a pattern, set by hand."""

from __future__ import annotations

import re
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_hooks
from tfamp.interop.keras_backend import described
from tfamp.interop.patching import unwrap_methods
from tfamp.layers.float_policies import float_policy, give_policy, policy_with, quantization_of
from tfamp.layers.model_calls import protect_values
from tfamp.layers.output_dtypes import retype_followers
from tfamp.layers.roles import managed_layers
from tfamp.levels.compiled_model import drop_traced_functions
from tfamp.levels.config_values import read_dtype
from tfamp.levels.layer_policies import layers_before, set_by_hand
from tfamp.levels.model_state import ModelState
from tfamp.levels.model_structure import (
    correct_symbolic_dtypes,
    functionals_of,
    layers_of,
    path_of,
    select,
)


def set_layer_dtype(
    model_or_layer: Any, dtype: Any, *, pattern: str | None = None
) -> tuple[str, ...]:
    """Makes a layer, or every layer of a pattern, compute in a dtype.

    What MindSpore's `to_float` does. Layers inside are set with it. The casts around follow by
    themselves: a Keras layer casts what it is given, and variables keep the dtype they have, so a
    built and trained model will do. What is set by hand stays when `prepare` puts another level on
    the model, outputs and BatchNormalization included; only level O0 leads back. A layer that Keras
    has quantized stays so.

    Give the model, with a pattern, rather than a layer of it: then all of its symbolic outputs
    say the new dtype, and its compiled functions are traced anew.

    Args:
        model_or_layer: A model or layer.
        dtype: "float16", "bfloat16" or "float32".
        pattern: Name or path of layers inside, or a regular expression searched for in the paths
            of layers where none has that very name. None for the given layer itself.

    Returns:
        The paths of the layers that were set.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `dtype` is another one, no layer matches, or a layer stores its weights in
            another low dtype, does not run in this one, or is quantized so that it cannot. Nothing
            has changed then.

    Example:
        >>> import keras, tfamp
        >>> model = keras.Sequential(
        ...     [keras.Input((8,)), keras.layers.Dense(4, name="wide"), keras.layers.Dense(2)]
        ... )
        >>> tfamp.set_layer_dtype(model, "bfloat16", pattern="wide")
        ('sequential/wide',)
        >>> [layer.compute_dtype for layer in model.layers]
        ['bfloat16', 'float32']
    """
    if not isinstance(model_or_layer, keras.Layer):
        raise TypeError(
            f"set_layer_dtype takes a keras.Model or keras.Layer; got {described(model_or_layer)}"
        )
    name = read_dtype(dtype)
    if name is None:
        raise ValueError("dtype must be 'float16', 'bfloat16' or 'float32'; got None or 'auto'.")
    chosen = _chosen(model_or_layer, pattern)
    targets = [layer for layer in layers_of(*chosen) if _can_be_set(layer)]
    for layer in targets:
        _check_storage(layer, name)
    _check_quantized(targets, name)
    state = ModelState(model_or_layer)
    try:
        for layer in targets:
            _set(layer, name)
            protect_values(layer)
        for functional, _ in functionals_of(model_or_layer):
            correct_symbolic_dtypes(functional)
        for layer in targets:
            retype_followers(layer)
    except BaseException:
        state.restore()
        raise
    drop_traced_functions(model_or_layer)
    return tuple(path_of(layer) for layer in chosen)


def _chosen(owner: Any, pattern: str | None) -> list[Any]:
    if pattern is None:
        return [owner]
    if not isinstance(pattern, str):
        raise TypeError(
            f"pattern must be a string; got {pattern!r} of type {type(pattern).__name__}."
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}.") from error
    return select(layers_of(owner)[1:], [pattern], "pattern")


def _can_be_set(layer: Any) -> bool:
    return not isinstance(layer, keras.layers.InputLayer) and float_policy(layer) is not None


def _check_storage(layer: Any, dtype: str) -> None:
    for weight in layer.weights:
        stored = keras.backend.standardize_dtype(weight.dtype)
        if stored in LOW_PRECISION and stored != dtype:
            raise ValueError(
                f"{path_of(layer)} stores its weights in {stored}, so it cannot compute in "
                f"{dtype}. Set the dtype first, then prepare the model for O3 or master weights."
            )


def _check_quantized(layers: list[Any], dtype: str) -> None:
    without = [layer for layer in layers if policy_with(layer, _policy_name(layer, dtype)) is None]
    if without:
        names = ", ".join(f"{path_of(layer)} ({quantization_of(layer)})" for layer in without)
        raise ValueError(
            f"Keras has quantized {names}, and a layer quantized so cannot be set to {dtype}: its "
            "predictions would change by more than rounding. Leave it out with pattern=, or set "
            "the dtype first and quantize then."
        )


def _policy_name(layer: Any, dtype: str) -> str:
    low = [
        keras.backend.standardize_dtype(weight.dtype) in LOW_PRECISION for weight in layer.weights
    ]
    return dtype if dtype == "float32" or any(low) else f"mixed_{dtype}"


def _set(layer: Any, dtype: str) -> None:
    before, record = layers_before.get(layer), managed_layers.get(layer)
    if record is not None and isinstance(layer, keras.layers.BatchNormalization):
        # Its own arithmetic again, in the dtype that was asked for.
        unwrap_methods(layer)
        layer.autocast = True if before is None else before.autocast
    managed_layers.discard(layer)
    give_policy(layer, _policy_name(layer, dtype))
    set_by_hand.set(layer, True)
    for node in keras_hooks.inbound_nodes(layer):
        for tensor in node.outputs:
            if tensor.dtype in (*LOW_PRECISION, "float32"):
                keras_hooks.set_symbolic_dtype(tensor, layer.compute_dtype)
