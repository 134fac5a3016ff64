"""Sets the compute dtype of single layers by hand. Variables keep their dtypes."""

from __future__ import annotations

import contextlib
from typing import Any

import keras

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.kinds import Layer
from tfamp.core.messages import described
from tfamp.core.names import ComputeDtypeLike
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import layers_of
from tfamp.layers import layer_dtypes, model_calls, model_roles
from tfamp.layers.layer_plan import Before
from tfamp.layers.layer_record import before_level, managed_by
from tfamp.levels.level_assignments import by_hand, note_state
from tfamp.levels.model_structure import (
    computing_layers_of,
    correct_symbolic_dtypes,
    drop_traced_functions,
    path_of,
    quantized_names,
    select,
)
from tfamp.levels.precision_config import read_dtype
from tfamp.levels.rewritten_steps import has_rewritten_steps, keep_in_float32


def set_layer_dtype(
    model_or_layer: Any, dtype: ComputeDtypeLike, *, pattern: str | None = None
) -> tuple[str, ...]:
    """Sets the compute dtype of a layer, or of every layer that a pattern matches.

    The counterpart of MindSpore's `to_float`. Sublayers are set too. Keras layers cast their
    inputs, and variables keep their dtypes, so the model may be built and trained. Dtypes
    set by hand stay when `prepare` applies another level, also of outputs and
    BatchNormalization; only level O0 resets them. At level O1, where op lists decide, "float32"
    keeps the layer's ops float32, and low dtypes change nothing. Quantized layers stay quantized.

    Pass the model and a pattern rather than a layer of it: then all of its symbolic outputs get
    the new dtype, and its compiled functions are traced again.

    Args:
        model_or_layer: A model or layer.
        dtype: "float16", "bfloat16" or "float32".
        pattern: Name or path of layers inside, or a regular expression searched for in the
            paths of layers where none has that very name. None for the layer itself.

    Returns:
        The paths of the layers that were set.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `dtype` is none of these, no layer matches, or a layer stores its weights in
            another low dtype, does not run in this one, or is quantized so that it cannot.
            Nothing has changed.

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
    chosen = [model_or_layer]
    if pattern is not None:
        chosen = select(layers_of(model_or_layer)[1:], [pattern], "pattern")
    targets = [
        layer
        for layer in computing_layers_of(*chosen)
        if layer_dtypes.float_policy(layer) is not None
    ]
    _check_can_compute(targets, name)
    with contextlib.ExitStack() as undo:
        undo.callback(note_state(model_or_layer))
        is_rewritten = has_rewritten_steps(model_or_layer)
        for layer in targets:
            before = before_level(layer)
            if before is None and is_rewritten:  # Level O1 changes no layer, so it notes none.
                before = Before(layer_dtypes.policy_of(layer), layer.autocast)
            _set(layer, name, before)
            model_calls.protect_values(layer)
            if name == "float32" and is_rewritten:
                keep_in_float32([layer])
        correct_symbolic_dtypes(model_or_layer)
        for layer in targets:
            model_roles.retype_followers(layer)
        undo.pop_all()
    drop_traced_functions(model_or_layer)
    return tuple(path_of(layer) for layer in chosen)


def _check_can_compute(layers: list[Layer], dtype: str) -> None:
    for layer in layers:
        for stored in (weight.dtype for weight in layer.weights):
            if stored in LOW_PRECISION and stored != dtype:
                raise ValueError(
                    f"{path_of(layer)} stores its weights in {stored}, so it cannot compute in "
                    f"{dtype}. Set the dtype first, then prepare the model for O3 or master "
                    "weights."
                )
    names = quantized_names(
        layer
        for layer in layers
        if layer_dtypes.policy_with(layer, _policy_name(layer, dtype)) is None
    )
    if names:
        raise ValueError(
            f"Keras has quantized {names}, and a layer quantized so cannot be set to {dtype}: "
            "its predictions would change by more than rounding. Leave it out with pattern=, "
            "or set the dtype first and quantize then."
        )


def _policy_name(layer: Layer, dtype: str) -> str:
    stores_low = any(weight.dtype in LOW_PRECISION for weight in layer.weights)
    return dtype if dtype == "float32" or stores_low else f"mixed_{dtype}"


def _set(layer: Layer, dtype: str, before: Before | None) -> None:
    if managed_by(layer) is not None and isinstance(layer, keras.layers.BatchNormalization):
        # Back to the arithmetic of Keras, in the requested dtype.
        model_calls.release(layer, None)
        layer.autocast = True if before is None else before.autocast
    layer_dtypes.give_policy(layer, _policy_name(layer, dtype))
    model_calls.guard_kernels(layer)
    model_roles.assign(layer, by_hand(layer, before))
    for node in keras_hooks.inbound_nodes(layer):
        for tensor in node.outputs:
            if tensor.dtype in (*LOW_PRECISION, "float32"):
                keras_hooks.set_symbolic_dtype(tensor, layer.compute_dtype)
