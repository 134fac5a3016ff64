"""Level O1: the steps of a model rewritten as whole graphs; autocast wherever there is no graph.

`fit`, `evaluate` and `predict` call a model's `train_step`, `test_step` and `predict_step`. These
are replaced on the one model: while Keras traces them, each is a rewritten function. Whatever else
calls the model - eager code, a custom loop's own `tf.function` - gets autocast, so that no way to
run the model silently computes in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.autocasting.context import autocast
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.interop.keras_hooks import variables_as_stored
from tfamp.interop.patching import wrap_method
from tfamp.levels.model_structure import layers_of
from tfamp.rewriting.function import rewrite_step
from tfamp.rewriting.fused_tracing import traces_for_a_rewrite

# Nodes of kept layers, and of their gradients, are under this scope. The scopes that Keras gives
# layers would not do: the second trace of a layer called dense is under dense_1.
_KEPT_SCOPE = "tfamp_keep_float32"
KEPT_NODES = rf"(^|/){_KEPT_SCOPE}(_\d+)?/"

STEPS = ("train_step", "test_step", "predict_step")


@dataclass(frozen=True, slots=True)
class GraphRewrite:
    """How the steps of a model are rewritten.

    Attributes:
        dtype: The low dtype.
        patterns: Regular expressions for the nodes of layers that stay float32.
        placement: "lists" or "min_cut", as for `tfamp.rewrite`.
    """

    dtype: str
    patterns: tuple[str, ...]
    placement: str

    def __call__(self, function: Callable[..., Any]) -> Any:
        """Returns a function that computes the same as a Python or `tf.function`, rewritten."""
        return rewrite_step(
            function, dtype=self.dtype, keep_float32=self.patterns, placement=self.placement
        )


def rewrite_steps_of(model: Any, how: GraphRewrite, kept: Iterable[Any]) -> None:
    """Makes a model run at level O1.

    Args:
        model: The model, with nothing of tfamp's on it.
        how: How its steps are rewritten.
        kept: Layers that stay float32.
    """
    for layer in layers_of(*kept):
        if not isinstance(layer, keras.layers.InputLayer):
            wrap_method(layer, "call", _in_float32)
    for layer in layers_of(model):
        # In place of `call` once Keras has quantized the layer; autocast leaves it alone itself.
        wrap_method(layer, "quantized_call", _under_kept_scope)
    wrap_method(model, "call", _under_autocast(how.dtype))
    for name in STEPS:
        _rewrite_step_of(model, name, how)


def _rewrite_step_of(model: Any, name: str, how: GraphRewrite) -> None:
    # Keras traces its steps without AutoGraph.
    rewritten = how(tf.function(getattr(model, name), autograph=False))

    def around(original: Callable[..., Any], data: Any) -> Any:
        if not tf.executing_eagerly() and not _several_replicas():
            return rewritten(data)
        if not tf.executing_eagerly():
            _warn_of_replicas()
        with autocast(how.dtype):
            return original(data)

    wrap_method(model, name, around)


def _several_replicas() -> bool:
    return tf.distribute.get_strategy().num_replicas_in_sync > 1


def _warn_of_replicas() -> None:
    warnings.warn(
        "At level O1 on several replicas each op is cast as it is traced (autocast): TensorFlow "
        "lets no replica trace a step of its own. To have the graph rewritten as a whole, write "
        "the loop and pass the function that calls strategy.run to settings.rewrite.",
        TfampWarning,
        stacklevel=3,
    )


def _under_autocast(dtype: str) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if traces_for_a_rewrite():
            return original(*args, **kwargs)
        with autocast(dtype):
            outputs = original(*args, **kwargs)
        return keras.tree.map_structure(_as_float32, outputs)

    return call


def _under_kept_scope(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not traces_for_a_rewrite():
        return original(*args, **kwargs)
    with tf.name_scope(_KEPT_SCOPE):
        return original(*args, **kwargs)


def _in_float32(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if traces_for_a_rewrite():
        return _under_kept_scope(original, *args, **kwargs)
    with autocast(enabled=False), variables_as_stored():
        args, kwargs = keras.tree.map_structure(_as_float32, (args, kwargs))
        return original(*args, **kwargs)


def _as_float32(value: Any) -> Any:
    if not keras.ops.is_tensor(value) or isinstance(value, keras.KerasTensor):
        return value
    name = keras.backend.standardize_dtype(value.dtype)
    return keras.ops.cast(value, "float32") if name in LOW_PRECISION else value
