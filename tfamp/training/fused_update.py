"""Updates of Keras's SGD, Adam and AdamW, each in one pass over a variable.

Keras writes an update as a dozen ops, each of which reads and writes whole tensors. For SGD
TensorFlow has ops that do it in one, with the same roundings. Adam is compiled by XLA instead:
TensorFlow's ResourceApplyAdam computes 1 - beta_2 in float32, which for 0.999 is off by 1e-5.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.interop.keras_hooks import native, runs_tensorflow
from tfamp.training.gradients import Gradients, is_next_value

_logger = logging.getLogger(__name__)
# What `Optimizer.apply` consists of: an optimizer with one of its own does something else.
_REPLACED = (
    "apply",
    "update_step",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_backend_update_step",
)


def has_fused_update(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether some variables of an optimizer can be updated in one pass, with Keras's result.

    Not under a distribution strategy, nor with moving averages of the weights or with gradient
    accumulation.
    """
    return (
        runs_tensorflow()
        and _has_rule(optimizer)
        and not optimizer.use_ema
        and not optimizer.gradient_accumulation_steps
        and not any(name in vars(optimizer) for name in _REPLACED)
        and not tf.distribute.has_strategy()
        and tf.compat.v1.executing_eagerly_outside_functions()
    )


def fused_update(optimizer: keras.optimizers.Optimizer, gradients: Gradients) -> None:
    """Applies gradients to dense float32 variables in one pass each, to others as Keras does.

    So are those of Adam and AdamW where XLA does not work.
    """
    # Warns of gradients that are None, as the optimizer does.
    values, variables = optimizer._filter_empty_gradients(gradients.values, gradients.variables)
    divisor = gradients.divisor
    fits = [_fits(optimizer, *pair) for pair in zip(values, variables, strict=True)]
    if optimizer.clipnorm or optimizer.clipvalue or optimizer.global_clipnorm:
        values, divisor = Gradients(values, variables, divisor).unscaled().values, None
        if all(fits):
            values = optimizer._clip_gradients(values)
        else:
            fits = [False] * len(fits)  # The norm may be that of all gradients together.
    triples = list(zip(values, variables, fits, strict=True))
    _update_in_one_pass(optimizer, [(g, v) for g, v, fit in triples if fit], divisor)
    others = [(g, v) for g, v, fit in triples if not fit]
    if others:
        values, variables = (list(each) for each in zip(*others, strict=True))
        optimizer.apply(Gradients(values, variables, divisor).unscaled().values, variables)
    else:
        optimizer._iterations.assign_add(1)


def _fits(optimizer: keras.optimizers.Optimizer, gradient: Any, variable: Any) -> bool:
    target = native(variable)
    if (
        not tf.is_tensor(gradient)
        or isinstance(gradient, tf.IndexedSlices)
        or gradient.dtype == tf.float64
        or not gradient.shape.is_fully_defined()
        or not isinstance(target, tf.Variable)
        or isinstance(target, tf.distribute.DistributedValues)
        or target.dtype != tf.float32
        or getattr(variable, "constraint", None) is not None
        or is_next_value(variable)
    ):
        return False
    return not _needs_xla(optimizer) or xla_works(target.device)


@functools.cache
def xla_works(device: str) -> bool:
    """Whether XLA compiles and runs a function on a device; tried once per process."""
    try:
        with tf.init_scope(), tf.device(device):
            compiled = tf.function(tf.sqrt, jit_compile=True, autograph=False)
            return bool(tf.reduce_all(tf.equal(compiled(tf.ones(4)), 1.0)))
    except tf.errors.OpError as error:
        _logger.info("XLA does not work on %s, updates are not compiled: %s", device, error)
        return False


def _update_in_one_pass(
    optimizer: keras.optimizers.Optimizer, pairs: Sequence[tuple[Any, Any]], divisor: Any
) -> None:
    if not pairs:
        return
    with tf.name_scope(optimizer.name):
        divisor = tf.constant(1.0) if divisor is None else tf.cast(divisor, tf.float32)
        rule = _fused_rule(optimizer, divisor)
        decay = None
        if optimizer.weight_decay is not None:
            rate = tf.cast(optimizer.learning_rate, tf.float32)
            decay = tf.constant(optimizer.weight_decay, tf.float32) * rate
        for gradient, variable in pairs:
            target = native(variable)
            index = optimizer._get_variable_index(variable)
            with tf.device(target.device):
                rule.update(
                    tf.cast(gradient, tf.float32),
                    decay if optimizer._use_weight_decay(target) else None,
                    *rule.numbers,
                    target.handle,
                    *(native(slot[index]).handle for slot in rule.slots),
                )


# ---- The rules -----------------------------------------------------------------------------------

_TENSOR = tf.TensorSpec(None, tf.float32)
_SCALAR = tf.TensorSpec([], tf.float32)
_RESOURCE = tf.TensorSpec([], tf.resource)


@dataclass(frozen=True, slots=True)
class _FusedRule:
    """How one optimizer updates one variable.

    Attributes:
        update: Function of a gradient, the weight decay times the learning rate (None for none),
            the numbers, the variable's handle and its slots' handles. All are tensors.
        numbers: Scalar float32 tensors, the same for all variables.
        slots: For each slot the optimizer's variables, by the index of the variable they belong to.
    """

    update: Callable[..., None]
    numbers: tuple[Any, ...]
    slots: tuple[Sequence[Any], ...]


def _fused_rule(optimizer: keras.optimizers.Optimizer, scale: Any) -> _FusedRule:
    """The rule of an optimizer at its present iteration, for gradients to be divided by `scale`."""
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    if _needs_xla(optimizer):
        return _adam_rule(optimizer, scale, rate)
    # A scalar is divided instead of the gradient, which SGD uses only times the learning rate.
    rate = rate / scale
    if optimizer.momentum == 0:
        return _FusedRule(_descent, (rate,), ())
    update = functools.partial(_momentum, nesterov=optimizer.nesterov)
    return _FusedRule(update, (rate, _number(optimizer.momentum)), (optimizer.momentums,))


def _has_rule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is one of those below, as Keras ships it, with numbers for settings.

    A subclass may compute something else.
    """
    settings = [getattr(optimizer, name) for name in _SETTINGS.get(type(optimizer), ())]
    numbers = bool(settings) and all(isinstance(setting, (int, float)) for setting in settings)
    return numbers and not getattr(optimizer, "amsgrad", False)


def _needs_xla(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the rule of an optimizer is compiled by XLA."""
    return type(optimizer) is not keras.optimizers.SGD


_SETTINGS = {
    keras.optimizers.SGD: ("momentum",),
    keras.optimizers.Adam: ("beta_1", "beta_2", "epsilon"),
    keras.optimizers.AdamW: ("beta_1", "beta_2", "epsilon"),
}


def _adam_rule(optimizer: keras.optimizers.Optimizer, scale: Any, rate: Any) -> _FusedRule:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    bias_1 = 1 - tf.pow(_number(optimizer.beta_1), step)
    bias_2 = 1 - tf.pow(_number(optimizer.beta_2), step)
    # 1 - beta in Python's float64, rounded once, as Keras does.
    numbers = (
        scale,
        rate * tf.sqrt(bias_2) / bias_1,
        _number(1 - optimizer.beta_1),
        _number(1 - optimizer.beta_2),
        _number(optimizer.epsilon),
    )
    return _FusedRule(_adam, numbers, (optimizer._momentums, optimizer._velocities))


def _number(value: float) -> Any:
    return tf.constant(value, tf.float32)


def _descent(gradient: Any, decay: Any, rate: Any, variable: Any) -> None:
    _decay(variable, decay)
    tf.raw_ops.ResourceApplyGradientDescent(var=variable, alpha=rate, delta=gradient)


def _momentum(
    gradient: Any,
    decay: Any,
    rate: Any,
    momentum: Any,
    variable: Any,
    velocity: Any,
    *,
    nesterov: bool,
) -> None:
    _decay(variable, decay)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable,
        accum=velocity,
        lr=rate,
        grad=gradient,
        momentum=momentum,
        use_nesterov=nesterov,
    )


def _decay(variable: Any, decay: Any) -> None:
    if decay is not None:
        tf.raw_ops.AssignSubVariableOp(resource=variable, value=_read(variable) * decay)


# Traced once per process and compiled once per shape. It takes handles: a function of variables is
# traced again for each of their shapes.
@tf.function(
    input_signature=[_TENSOR] + [_SCALAR] * 6 + [_RESOURCE] * 3, jit_compile=True, autograph=False
)
def _compiled_adam(
    gradient: Any,
    decay: Any,
    scale: Any,
    rate: Any,
    rest_1: Any,
    rest_2: Any,
    epsilon: Any,
    variable: Any,
    first: Any,
    second: Any,
) -> None:
    gradient = gradient / scale
    mean = _read(first)
    mean = mean + (gradient - mean) * rest_1
    square = _read(second)
    square = square + (tf.square(gradient) - square) * rest_2
    _assign(first, mean)
    _assign(second, square)
    _assign(variable, _decayed(variable, decay) - mean * rate / (tf.sqrt(square) + epsilon))


def _adam(gradient: Any, decay: Any, *others: Any) -> None:
    _compiled_adam(gradient, tf.constant(0.0) if decay is None else decay, *others)


def _decayed(variable: Any, decay: Any) -> Any:
    value = _read(variable)
    # Not multiplied by 0: a weight may be infinite, as in a mask.
    return tf.where(tf.equal(decay, 0.0), value, value - value * decay)


def _read(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def _assign(handle: Any, value: Any) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
