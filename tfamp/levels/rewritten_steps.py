"""The steps of a model at level O1: what `fit`, `predict` and `generate` call, rewritten.

The steps are replaced on the model: while Keras traces one, it is a rewritten function, which
holds the steps of all replicas under a strategy. Other calls of the model run under autocast.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfamp.core.kinds import Function, Layer, Method, Model, Nest
from tfamp.core.names import ComputeDtype, Placement
from tfamp.interop.keras_hooks import layers_of, reading_variables_in
from tfamp.interop.patching import Replacement, is_wrapped_by, wrap_method, wrapped_methods
from tfamp.interop.tf_private import replicas_share_graph
from tfamp.layers import layer_dtypes
from tfamp.levels.model_structure import computing_layers_of, output_layers_of
from tfamp.planning.options import RewriteOptions
from tfamp.rewriting.function import RewrittenFunction
from tfamp.rewriting.traced_function import traces_for_a_rewrite
from tfamp.torch_style.context import autocast
from tfamp.torch_style.modes import is_without_levels

# Rewrites a step.
Rewrite: TypeAlias = Callable[[Function], RewrittenFunction[..., Any]]

# Name scope of kept layers, and of their gradients. Keras's scopes are not stable: the
# second trace of a layer called dense is under dense_1.
_KEPT_SCOPE = "tfamp_keep_float32"
_KEPT_NODES = rf"(^|/){_KEPT_SCOPE}(_\d+)?/"


def rewrite_steps_of(model: Model, options: RewriteOptions, kept: Iterable[Layer]) -> Rewrite:
    """Makes a model without a level run at level O1, kept layers in float32.

    Returns the function that rewrites another step in the same way.
    """
    rewrite = functools.partial(RewrittenFunction, options=options)
    keep_in_float32(kept)
    wrappers: list[tuple[Layer, str, Replacement]] = [
        *((layer, "call", _bias_in_float32) for layer in output_layers_of(model)),
        # Keras calls it instead of `call` once the layer is quantized. Autocast skips it.
        *(
            (layer, "quantized_call", functools.partial(_under_kept_scope))
            for layer in layers_of(model)
        ),
        (model, "call", functools.partial(_under_autocast, options.dtype)),
    ]
    if hasattr(model, "generate_step"):
        generation = _rewritten_generation(model.generate_step, options.dtype, rewrite)
        wrappers.append((model, "generate_step", generation))
    for wrapper in wrappers:
        wrap_method(*wrapper)
    for name in ("train_step", "test_step", "predict_step"):
        _rewrite_step_of(model, name, options.dtype, rewrite)
    return rewrite


def step_options(dtype: ComputeDtype, placement: Placement) -> RewriteOptions:
    """Returns the options for steps, which need not run every layer that is kept in float32."""
    return RewriteOptions(dtype=dtype, placement=placement).keeping((_KEPT_NODES,))


def keep_in_float32(kept: Iterable[Layer]) -> contextlib.ExitStack:
    """Makes layers compute in float32 at level O1, until the returned stack is closed."""
    undo = contextlib.ExitStack()
    for layer in computing_layers_of(*kept):
        if not is_wrapped_by(layer, "call", _in_float32):
            undo.callback(wrap_method(layer, "call", functools.partial(_in_float32)))
    return undo


def has_rewritten_steps(model_or_layer: Layer) -> bool:
    """Whether a model is at level O1, or a layer is part of one that is."""
    return is_wrapped_by(model_or_layer, "quantized_call", _under_kept_scope)


def _rewrite_step_of(model: Model, name: str, dtype: ComputeDtype, rewrite: Rewrite) -> None:
    step = getattr(model, name)

    def on_all_replicas(data: Nest) -> Nest:
        return tf.distribute.get_strategy().run(step, args=(data,))

    def run_rewritten(step: Function, data: Nest) -> Nest:
        # Made for the trace around it only: Keras traces again after `compile`, which may have
        # brought another optimizer or loss. Keras traces its steps without AutoGraph.
        return rewrite(tf.function(step, autograph=False))(data)

    def around(original: Function, data: Nest) -> Nest:
        if traces_for_a_rewrite():
            return original(data)
        if tf.executing_eagerly():
            with autocast(dtype):
                return original(data)
        if not replicas_share_graph():
            return run_rewritten(step, data)

        def on_one_thread(_: tf.distribute.Strategy, data: Nest) -> Nest:
            return run_rewritten(on_all_replicas, data)

        # A function that one replica traces alone cannot all-reduce.
        return tf.distribute.get_replica_context().merge_call(on_one_thread, args=(data,))

    wrap_method(model, name, around)
    # find_nonfinite searches the graph that is trained.
    wrapped_methods(model)[name].rewrite = rewrite  # type: ignore[attr-defined]


def _rewritten_generation(step: Function, dtype: ComputeDtype, rewrite: Rewrite) -> Replacement:
    """Returns what replaces the step of KerasHub's `generate`, which never calls the model.

    It runs on one device, so that there are no replicas to join.
    """

    def around(original: Function, *args: Any, **kwargs: Any) -> Nest:
        if traces_for_a_rewrite():
            return original(*args, **kwargs)
        if tf.executing_eagerly():
            with autocast(dtype):
                return original(*args, **kwargs)

        # Tasks differ in their arguments, and Python values among them, such as tokens to stop
        # at, have to stay such: all are captured.
        def captured() -> Nest:
            return step(*args, **kwargs)

        return rewrite(tf.function(captured))()

    return around


def _under_autocast(dtype: ComputeDtype, original: Method, *args: Any, **kwargs: Any) -> Nest:
    if traces_for_a_rewrite() or is_without_levels():
        return original(*args, **kwargs)
    with autocast(dtype):
        outputs = original(*args, **kwargs)
    return keras.tree.map_structure(layer_dtypes.in_float32, outputs)


def _under_kept_scope(original: Method, *args: Any, **kwargs: Any) -> Nest:
    if not traces_for_a_rewrite():
        return original(*args, **kwargs)
    with tf.name_scope(_KEPT_SCOPE):
        return original(*args, **kwargs)


def _in_float32(original: Method, *args: Any, **kwargs: Any) -> Nest:
    if traces_for_a_rewrite():
        return _under_kept_scope(original, *args, **kwargs)
    with autocast(enabled=False), reading_variables_in(None):
        args, kwargs = keras.tree.map_structure(layer_dtypes.in_float32, (args, kwargs))
        return original(*args, **kwargs)


def _bias_in_float32(original: Method, *args: Any, **kwargs: Any) -> Nest:
    # As in a rewrite: only the product is low, and what is added to it makes it float32.
    with reading_variables_in(None):
        return original(*args, **kwargs)
