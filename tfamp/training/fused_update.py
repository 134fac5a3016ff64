"""Applying scaled gradients, in one pass over each variable where that gives Keras's result."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.interop.keras_backend import runs_tensorflow
from tfamp.training import gradients as gradient_lib
from tfamp.training.fused_rules import fused_rule, has_fused_rule, needs_xla

_logger = logging.getLogger(__name__)
# What `Optimizer.apply` consists of: an optimizer with one of its own does something else.
_REPLACED = (
    "apply",
    "update_step",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
)


def update_variables(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    scale: Any = None,
) -> None:
    """Divides gradients by the loss scale and applies them, with the same result as Keras.

    Dense float32 variables of a plain `keras.optimizers.SGD`, `Adam` or `AdamW` are updated in one
    pass each. All others, and all of them under a distribution strategy, with moving averages of
    the weights, with gradient accumulation or (Adam, AdamW) where XLA does not work, are updated
    by the optimizer's own `apply`.

    Args:
        optimizer: A built Keras optimizer that does not scale losses itself.
        gradients: Finite float tensors, `tf.IndexedSlices` or None.
        variables: The variables they belong to, in the same order.
        scale: Scalar float32 the gradients are still to be divided by; None: they have been.
    """
    if not _optimizer_fits(optimizer):
        gradients = _unscaled(gradients, variables, scale)
        if optimizer.gradient_accumulation_steps:
            gradients = gradient_lib.as_stored_all(gradients, variables)
        optimizer.apply(gradients, variables)
        return
    # Warns of gradients that are None, as the optimizer does.
    gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
    fits = [_pair_fits(optimizer, *pair) for pair in zip(gradients, variables, strict=True)]
    if _clips(optimizer):
        gradients, scale = _unscaled(gradients, variables, scale), None
        if all(fits):
            gradients = optimizer._clip_gradients(gradients)
        else:
            fits = [False] * len(fits)  # The norm may be that of all gradients together.
    pairs = list(zip(gradients, variables, fits, strict=True))
    _update_fused(optimizer, [(g, v) for g, v, fit in pairs if fit], scale)
    others = [(g, v) for g, v, fit in pairs if not fit]
    if others:
        grads, rest = zip(*others, strict=True)
        optimizer.apply(_unscaled(grads, rest, scale), rest)
    else:
        optimizer._iterations.assign_add(1)


def _optimizer_fits(optimizer: keras.optimizers.Optimizer) -> bool:
    return (
        runs_tensorflow()
        and has_fused_rule(optimizer)
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
        and not any(name in vars(optimizer) for name in _REPLACED)
        and not tf.distribute.has_strategy()
        and tf.compat.v1.executing_eagerly_outside_functions()
    )


def _pair_fits(optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> bool:
    target = _native(variable)
    if (
        not tf.is_tensor(gradient)
        or isinstance(gradient, tf.IndexedSlices)
        or gradient.dtype == tf.float64
        or not gradient.shape.is_fully_defined()
        or not isinstance(target, tf.Variable)
        or isinstance(target, tf.distribute.DistributedValues)
        or target.dtype != tf.float32
        or getattr(variable, "constraint", None) is not None
        or getattr(variable, "overwrite_with_gradient", False)
    ):
        return False
    return not needs_xla(optimizer) or xla_works(target.device)


@functools.cache
def xla_works(device: str) -> bool:
    """Whether XLA compiles and runs a function on a device; tried once per process.

    Args:
        device: Name of the device, as `tf.Variable.device` gives it.

    Returns:
        False where XLA is not built in, or lacks a library it needs there.
    """
    try:
        with tf.init_scope(), tf.device(device):
            compiled = tf.function(tf.sqrt, jit_compile=True, autograph=False)
            return bool(tf.reduce_all(tf.equal(compiled(tf.ones(4)), 1.0)))
    except tf.errors.OpError as error:
        _logger.info("XLA does not work on %s, updates are not compiled: %s", device, error)
        return False


def _clips(optimizer: keras.optimizers.Optimizer) -> bool:
    return any((optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm))


def _update_fused(
    optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]], scale: Any
) -> None:
    if not pairs:
        return
    with tf.name_scope(optimizer.name):
        divisor = tf.constant(1.0) if scale is None else tf.cast(scale, tf.float32)
        rule = fused_rule(optimizer, divisor)
        decay = None
        if optimizer.weight_decay is not None:
            rate = tf.cast(optimizer.learning_rate, tf.float32)
            decay = tf.constant(optimizer.weight_decay, tf.float32) * rate
        for gradient, variable in pairs:
            target = _native(variable)
            index = optimizer._get_variable_index(variable)
            with tf.device(target.device):
                rule.update(
                    tf.cast(gradient, tf.float32),
                    decay if optimizer._use_weight_decay(target) else None,
                    *rule.numbers,
                    target.handle,
                    *(_native(slot[index]).handle for slot in rule.slots),
                )


def _unscaled(gradients: Sequence[Any], variables: Sequence[Any], scale: Any) -> Sequence[Any]:
    if scale is None:
        return gradients
    return gradient_lib.unscale_all(gradients, variables, scale)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
