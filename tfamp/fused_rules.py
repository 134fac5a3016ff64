"""The updates of Keras's SGD, Adam and AdamW, each compiled to one pass over a variable.

Keras writes an update as a dozen ops, each of which reads and writes whole tensors. Compiled by XLA
they become one or two loops that also divide by the loss scale. The formulas and their order of
operations are Keras's; TensorFlow's own fused op, ResourceApplyAdam, is no substitute: it computes
1 - beta_2 in float32, which for 0.999 is off by 1e-5.
"""

from __future__ import annotations

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
        update: Compiled function of a gradient, the loss scale, the weight decay times the
            learning rate (0 for none), the numbers, the variable's handle and its slots' handles.
        numbers: Scalar float32 tensors, the same for all variables.
        slots: For each slot the optimizer's variables, by the index of the variable they belong to.
    """

    update: Callable[..., None]
    numbers: tuple[Any, ...]
    slots: tuple[Sequence[Any], ...]


def fused_rule(optimizer: keras.optimizers.Optimizer) -> FusedRule:
    """Returns the rule of an optimizer at its present iteration.

    Args:
        optimizer: A built optimizer for which `has_fused_rule` is True.

    Returns:
        The rule; its numbers belong to the graph being traced.
    """
    rate = tf.cast(optimizer.learning_rate, tf.float32)
    if type(optimizer) is not keras.optimizers.SGD:
        return _adam_rule(optimizer, rate)
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
    names = _SETTINGS.get(type(optimizer), ())
    settings = [getattr(optimizer, name) for name in names]
    return (
        bool(names)
        and all(isinstance(setting, (int, float)) for setting in settings)
        and not getattr(optimizer, "amsgrad", False)
    )


_SETTINGS = {
    keras.optimizers.SGD: ("momentum",),
    keras.optimizers.Adam: ("beta_1", "beta_2", "epsilon"),
    keras.optimizers.AdamW: ("beta_1", "beta_2", "epsilon"),
}


def _adam_rule(optimizer: keras.optimizers.Optimizer, rate: Any) -> FusedRule:
    step = tf.cast(optimizer.iterations + 1, tf.float32)
    bias_1 = 1 - tf.pow(_number(optimizer.beta_1), step)
    bias_2 = 1 - tf.pow(_number(optimizer.beta_2), step)
    # 1 - beta in Python's float64, rounded once, as Keras does.
    numbers = (
        rate * tf.sqrt(bias_2) / bias_1,
        _number(1 - optimizer.beta_1),
        _number(1 - optimizer.beta_2),
        _number(optimizer.epsilon),
    )
    return FusedRule(_adam, numbers, (optimizer._momentums, optimizer._velocities))


def _number(value: float) -> Any:
    return tf.constant(value, tf.float32)


def _compiled(numbers: int, slots: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Compiles an update; it is traced once per process and compiled once per variable shape."""
    # Handles, not variables: a function of variables is traced again for each of their shapes.
    return tf.function(
        input_signature=[_TENSOR] + [_SCALAR] * (2 + numbers) + [_RESOURCE] * (1 + slots),
        jit_compile=True,
        autograph=False,
    )


@_compiled(numbers=1, slots=0)
def _descent(gradient: Any, scale: Any, decay: Any, rate: Any, variable: Any) -> None:
    _assign(variable, _decayed(variable, decay) - gradient / scale * rate)


@_compiled(numbers=2, slots=1)
def _momentum(
    gradient: Any, scale: Any, decay: Any, rate: Any, momentum: Any, variable: Any, velocity: Any
) -> None:
    moved = _read(velocity) * momentum - gradient / scale * rate
    _assign(velocity, moved)
    _assign(variable, _decayed(variable, decay) + moved)


@_compiled(numbers=2, slots=1)
def _nesterov(
    gradient: Any, scale: Any, decay: Any, rate: Any, momentum: Any, variable: Any, velocity: Any
) -> None:
    pull = gradient / scale * rate
    moved = _read(velocity) * momentum - pull
    _assign(velocity, moved)
    _assign(variable, _decayed(variable, decay) + (moved * momentum - pull))


@_compiled(numbers=4, slots=2)
def _adam(
    gradient: Any,
    scale: Any,
    decay: Any,
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


def _decayed(variable: Any, decay: Any) -> Any:
    value = _read(variable)
    # Not multiplied by 0: a weight may be infinite, as in a mask.
    return tf.where(tf.equal(decay, 0.0), value, value - value * decay)


def _read(handle: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)


def _assign(handle: Any, value: Any) -> None:
    tf.raw_ops.AssignVariableOp(resource=handle, value=value)
