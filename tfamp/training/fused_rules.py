"""The updates of Keras's SGD, Adam and AdamW, each in one pass over a variable.

Keras writes an update as a dozen ops, each of which reads and writes whole tensors. For SGD
TensorFlow has ops that do it in one, with the same roundings. Adam is compiled by XLA instead:
TensorFlow's ResourceApplyAdam computes 1 - beta_2 in float32, which for 0.999 is off by 1e-5.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

_TENSOR = tf.TensorSpec(None, tf.float32)
_SCALAR = tf.TensorSpec([], tf.float32)
_RESOURCE = tf.TensorSpec([], tf.resource)


@dataclass(frozen=True, slots=True)
class FusedRule:
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


def fused_rule(optimizer: keras.optimizers.Optimizer, scale: Any) -> FusedRule:
    """Returns the rule of an optimizer at its present iteration.

    Args:
        optimizer: A built optimizer for which `has_fused_rule` is True.
        scale: Scalar float32 the gradients are to be divided by.

    Returns:
        The rule; its numbers belong to the graph being traced.
    """
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    if needs_xla(optimizer):
        return _adam_rule(optimizer, scale, rate)
    # A scalar is divided instead of the gradient, which SGD uses only times the learning rate.
    rate = rate / scale
    if optimizer.momentum == 0:
        return FusedRule(_descent, (rate,), ())
    update = _nesterov if optimizer.nesterov else _momentum
    return FusedRule(update, (rate, _number(optimizer.momentum)), (optimizer.momentums,))


def has_fused_rule(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether an optimizer is one of those above, as Keras ships it, with numbers for settings.

    Args:
        optimizer: Any Keras optimizer.

    Returns:
        False for a subclass: it may compute something else.
    """
    settings = [getattr(optimizer, name) for name in _SETTINGS.get(type(optimizer), ())]
    numbers = bool(settings) and all(isinstance(setting, (int, float)) for setting in settings)
    return numbers and not getattr(optimizer, "amsgrad", False)


def needs_xla(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether the rule of an optimizer is compiled by XLA."""
    return type(optimizer) is not keras.optimizers.SGD


_SETTINGS = {
    keras.optimizers.SGD: ("momentum",),
    keras.optimizers.Adam: ("beta_1", "beta_2", "epsilon"),
    keras.optimizers.AdamW: ("beta_1", "beta_2", "epsilon"),
}


def _adam_rule(optimizer: keras.optimizers.Optimizer, scale: Any, rate: Any) -> FusedRule:
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
    return FusedRule(_adam, numbers, (optimizer._momentums, optimizer._velocities))


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
    nesterov: bool = False,
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


_nesterov = functools.partial(_momentum, nesterov=True)


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
