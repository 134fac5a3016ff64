"""float32 copies of float16 and bfloat16 variables, which the inner optimizer updates instead.

An update smaller than half the distance between two float16 numbers is lost when it is added to a
float16 weight, however often. Added to a float32 copy it is kept; the weight is the copy, rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.training import gradients as gradient_lib


class Mastered(NamedTuple):
    """A variable of a model and its copy.

    Attributes:
        variable: The float16 or bfloat16 variable, a `keras.Variable` or `tf.Variable`.
        master: The float32 `keras.Variable`.
    """

    variable: Any
    master: keras.Variable


@dataclass(frozen=True, slots=True)
class Masters:
    """The copies of one optimizer, by the key it knows their variables by."""

    by_key: dict[Any, Mastered] = field(default_factory=dict)

    def pairs(self) -> list[Mastered]:
        """The variables that have a copy, with it."""
        return list(self.by_key.values())


def needs_master(variable: Any) -> bool:
    """Whether a variable is float16 or bfloat16 and is updated by a gradient."""
    overwritten = getattr(variable, "overwrite_with_gradient", False)
    return gradient_lib.dtype_name(variable) in LOW_PRECISION and not overwritten


def create_master(variable: Any) -> keras.Variable:
    """Creates the float32 copy of a variable, of the same name, path, place and constraint.

    Optimizers decide by names and paths what decays and which variables they treat how.

    Args:
        variable: A `keras.Variable` or `tf.Variable`.

    Returns:
        The copy, with the variable's present value.
    """
    *scopes, name = gradient_lib.variable_name(variable).partition(":")[0].split("/")
    native = _native(variable)
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        stack.enter_context(tf.distribute.get_strategy().extended.colocate_vars_with(native))
        master = keras.Variable(
            lambda shape, dtype: tf.cast(tf.convert_to_tensor(native), dtype),
            shape=tuple(variable.shape),
            dtype="float32",
            trainable=False,
            name=name,
        )
    master.constraint = getattr(variable, "constraint", None)
    return master


def follow_model(pairs: Sequence[Mastered]) -> None:
    """Takes over what has been assigned to the variables since `write_to_model`.

    Where a variable is its copy rounded, the copy keeps its value; elsewhere, in each element by
    itself, somebody has assigned another one (has loaded weights, say), and that holds.

    Args:
        pairs: The variables and their copies. Under a strategy that updates variables by
            `merge_call` this is to be called in cross-replica context.
    """

    def follow(master: Any, variable: Any) -> None:
        value = tf.convert_to_tensor(variable)
        assigned = tf.not_equal(tf.cast(tf.convert_to_tensor(master), value.dtype), value)

        def take_over() -> None:
            master.assign(tf.where(assigned, tf.cast(value, master.dtype), master))

        if tf.executing_eagerly():
            take_over()  # Without waiting for the device to know whether it is needed.
        else:
            # Nearly always nothing was: a look is cheaper than writing all copies.
            tf.cond(tf.reduce_any(assigned), take_over, lambda: None)

    for variable, master in pairs:
        _update(master, follow, variable)


def write_to_model(pairs: Sequence[Mastered]) -> None:
    """Assigns the copies, rounded, to the variables.

    Args:
        pairs: As in `follow_model`.
    """

    def write(variable: Any, master: Any) -> None:
        variable.assign(tf.cast(tf.convert_to_tensor(master), variable.dtype))

    for variable, master in pairs:
        _update(variable, write, master)


def _update(target: Any, function: Any, source: Any) -> None:
    # On every device its own copies, with nothing sent between them: an assignment in a replica
    # would average the replicas' values, which are the same. `model.fit` finalizes the variables
    # outside the scope of their strategy, which then is not the current one.
    native = _native(target)
    strategy = tf.distribute.get_strategy()
    scope: Any = contextlib.nullcontext()
    if not tf.distribute.has_strategy() and hasattr(native, "distribute_strategy"):
        strategy = native.distribute_strategy
        scope = strategy.scope()
    with scope:
        strategy.extended.update(native, function, args=(_native(source),), group=False)


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
