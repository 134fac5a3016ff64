"""Level O1: the steps of a model rewritten as whole graphs; autocast wherever there is no graph.

`fit`, `evaluate` and `predict` call a model's `train_step`, `test_step` and `predict_step`. These
are replaced on the one model: while Keras traces them, each is a rewritten function. Whatever else
calls the model - eager code, a custom loop's own `tf.function` - gets autocast, so that no way to
run the model silently computes in float32.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.interop.keras_hooks import reading_variables_in
from tfamp.interop.patching import level_of_user, wrap_method, wrapped_methods
from tfamp.layers.layer_dtypes import in_float32
from tfamp.levels.model_structure import computing_layers_of, layers_of
from tfamp.planning.options import RewriteOptions
from tfamp.rewriting.function import RewrittenFunction
from tfamp.rewriting.pipeline import traces_for_a_rewrite
from tfamp.torch_style.context import autocast

# Nodes of kept layers, and of their gradients, are under this scope. The scopes that Keras gives
# layers would not do: the second trace of a layer called dense is under dense_1.
_KEPT_SCOPE = "tfamp_keep_float32"
_KEPT_NODES = rf"(^|/){_KEPT_SCOPE}(_\d+)?/"

STEPS = ("train_step", "test_step", "predict_step")


def rewrite_steps_of(
    model: Any, dtype: str, kept: Iterable[Any], **options: Any
) -> Callable[..., Any]:
    """Makes a model that has nothing of tfamp's on it run at level O1, kept layers in float32.

    The options are those of `tfamp.rewrite`. Returns what makes the same of another function.
    """
    rewrite = functools.partial(RewrittenFunction, options=step_settings(dtype, **options))
    keep_in_float32(kept)
    for layer in layers_of(model):
        # In place of `call` once Keras has quantized the layer; autocast leaves it alone itself.
        wrap_method(layer, "quantized_call", _under_kept_scope)
    wrap_method(model, "call", functools.partial(_under_autocast, dtype))
    for name in STEPS:
        _rewrite_step_of(model, name, dtype, rewrite)
    return rewrite


def step_settings(dtype: str, **options: Any) -> RewriteOptions:
    """Returns how steps are rewritten; a step need not run every layer that is kept in float32."""
    return RewriteOptions(dtype=dtype, **options).keeping((_KEPT_NODES,))


def keep_in_float32(kept: Iterable[Any]) -> contextlib.ExitStack:
    """Makes layers compute in float32 at level O1; closing what it returns ends this."""
    undo = contextlib.ExitStack()
    for layer in computing_layers_of(*kept):
        undo.callback(wrap_method(layer, "call", _in_float32))
    return undo


def _rewrite_step_of(model: Any, name: str, dtype: str, rewrite: Callable[..., Any]) -> None:
    # Keras traces its steps without AutoGraph.
    rewritten = rewrite(tf.function(getattr(model, name), autograph=False))

    def around(original: Callable[..., Any], data: Any) -> Any:
        if not tf.executing_eagerly():
            if tf.distribute.get_strategy().num_replicas_in_sync == 1:
                return rewritten(data)
            warnings.warn(
                "At level O1 on several replicas each op is cast as it is traced (autocast): "
                "TensorFlow lets no replica trace a step of its own. To have the graph rewritten "
                "as a whole, write the loop and pass the function that calls strategy.run to "
                "settings.rewrite.",
                TfampWarning,
                stacklevel=level_of_user(),
            )
        with autocast(dtype):
            return original(data)

    wrap_method(model, name, around)
    wrapped_methods(model)[name].rewrite = rewrite  # type: ignore[attr-defined]


def _under_autocast(dtype: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if traces_for_a_rewrite():
        return original(*args, **kwargs)
    with autocast(dtype):
        outputs = original(*args, **kwargs)
    return keras.tree.map_structure(in_float32, outputs)


def _under_kept_scope(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not traces_for_a_rewrite():
        return original(*args, **kwargs)
    with tf.name_scope(_KEPT_SCOPE):
        return original(*args, **kwargs)


def _in_float32(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if traces_for_a_rewrite():
        return _under_kept_scope(original, *args, **kwargs)
    with autocast(enabled=False), reading_variables_in(None):
        args, kwargs = keras.tree.map_structure(in_float32, (args, kwargs))
        return original(*args, **kwargs)
