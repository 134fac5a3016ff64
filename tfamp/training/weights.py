"""Weights as they are stored, each kind a class: plain ones, and low ones with float32 masters.

`training.low_weights` has those that are rounded without masters.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop import keras_optimizers
from tfamp.interop.keras_hooks import native
from tfamp.interop.tf_private import xla_works
from tfamp.training.gradients import (
    call_if,
    dtype_name,
    is_next_value,
    update_everywhere,
    variable_name,
)
from tfamp.training.rounding import Chance, nearest_of_numbers


class PlainWeights:
    """Weights that an optimizer updates as they are; what the other kinds do differently overrides.

    Attributes:
        optimizer: The optimizer that updates them.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self.optimizer = optimizer

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates what is kept beside variables, once, and returns it."""
        return []

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """Returns what the optimizer updates for each variable."""
        return list(variables)

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the optimizer for what it updates of variables."""
        self.optimizer.build(self.targets(variables))

    def load(self) -> None:
        """Takes over what has been assigned to the variables since `store`.

        Under a strategy that updates variables by `merge_call`, `load` and `store` are to be called
        in cross-replica context.
        """

    def store(self) -> None:
        """Assigns what the optimizer has updated to the variables."""

    def finalize(self, variables: Sequence[Any]) -> None:
        """Puts the optimizer's moving averages, if it has any, into the weights."""
        self.load()
        self.optimizer.finalize_variable_values(self.targets(variables))
        self.store()

    def exact_values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as exactly as they are known.

        A value that was assigned to a variable since the last update holds. Variables that are as
        they are are returned.
        """
        return list(variables)

    def set_exact(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives what stands for variables, if anything, their float32 values."""

    def chance(self) -> Chance | None:
        """Returns what decides the rounding of the next update, where chance has a part in it."""
        return None

    def check_all_updated(self, variables: Sequence[Any]) -> None:
        """Raises where the optimizer's own update cannot update one of these."""


class MasterWeights(PlainWeights):
    """Low-precision weights with float32 copies, their masters, which the optimizer updates.

    An update smaller than half the distance between two float16 numbers is lost when it is added
    to a float16 weight, however often. Added to its master it is kept; the weight is the master,
    rounded.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        super().__init__(optimizer)
        self._by_key: dict[Any, tuple[Any, keras.Variable]] = {}

    @property
    def masters(self) -> list[keras.Variable]:
        """The masters, in the order of the variables they belong to."""
        return [master for _, master in self._by_key.values()]

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates the masters, once, and returns them."""
        low = [v for v in variables if dtype_name(v) in LOW_PRECISION and not is_next_value(v)]
        if not low or self._by_key:
            return []
        if self.optimizer.built:
            raise ValueError(
                f"{self.optimizer.name} was built for {len(low)} low-precision variables, "
                f"such as {variable_name(low[0])}, before master_weights could give "
                "it float32 copies to update. Create a new inner optimizer, and let "
                "LossScaleOptimizer build it."
            )
        key = keras_optimizers.key_of(self.optimizer)
        self._by_key |= {key(v): (v, _create_master(v)) for v in low}
        excluded, _ = keras_optimizers.excluded_from_decay(self.optimizer)
        pairs = self._by_key.values()
        excluded |= {key(master) for variable, master in pairs if key(variable) in excluded}
        return self.masters

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the master of each variable that has one, else the variable."""
        key = keras_optimizers.key_of(self.optimizer)
        return [self._by_key.get(key(v), (v, v))[1] for v in variables]

    def load(self) -> None:
        """Takes over what has been assigned to the variables since `store`.

        Where a variable is its master rounded, the master keeps its value; elsewhere, in each
        element by itself, somebody has assigned another one (has loaded weights, say), and that
        holds.
        """
        pairs = list(self._by_key.values())

        def take_over_all() -> None:
            for variable, master in pairs:
                update_everywhere(master, _take_over, (variable,))

        if not pairs:
            return
        if tf.executing_eagerly():
            take_over_all()  # Without waiting for the device to know whether it is needed.
            return
        # Nearly always nothing was: one look is cheaper than writing all masters.
        looks = [update_everywhere(master, _differs, (variable,)) for variable, master in pairs]
        call_if(tf.reduce_any(tf.stack(tf.nest.flatten(looks))), take_over_all)

    def store(self) -> None:
        """Assigns the masters, rounded, to the variables."""
        for variable, master in self._by_key.values():
            update_everywhere(variable, _round, (master,))

    def exact_values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the masters' values, and what was assigned since the last update."""
        return [_exact(*pair) for pair in zip(variables, self.targets(variables), strict=True)]

    def set_exact(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives the masters of variables their values."""
        for variable, master, value in zip(variables, self.targets(variables), values, strict=True):
            if master is not variable:
                master.assign(tf.cast(tf.convert_to_tensor(value), tf.float32))
                # Else a tie that was rounded otherwise is an assigned value.
                update_everywhere(variable, _round, (master,))


def _create_master(variable: Any) -> keras.Variable:
    """Creates the float32 copy of a variable, of the same name, path, place and constraint.

    Optimizers decide by names and paths what decays and which variables they treat how.
    """
    *scopes, name = variable_name(variable).partition(":")[0].split("/")
    value = native(variable)
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        stack.enter_context(tf.distribute.get_strategy().extended.colocate_vars_with(value))
        master = keras.Variable(
            lambda shape, dtype: tf.cast(tf.convert_to_tensor(value), dtype),
            shape=tuple(variable.shape),
            dtype="float32",
            trainable=False,
            name=name,
        )
    master.constraint = getattr(variable, "constraint", None)
    return master


def _exact(variable: Any, target: Any) -> Any:
    if target is variable:
        return variable
    value = tf.cast(tf.convert_to_tensor(variable), tf.float32)
    return tf.where(_assigned(target, variable), value, tf.convert_to_tensor(target))


def _assigned(master: Any, variable: Any) -> Any:
    value = tf.convert_to_tensor(variable)
    return tf.not_equal(nearest_of_numbers(tf.convert_to_tensor(master), value.dtype), value)


def _any_assigned(master: Any, value: Any) -> Any:
    return tf.reduce_any(_assigned(master, value))


def _differs(master: Any, variable: Any) -> Any:
    return _in_one_pass(_any_assigned, master, variable)


def _take_over(master: Any, variable: Any) -> None:
    value = tf.cast(tf.convert_to_tensor(variable), master.dtype)
    master.assign(tf.where(_assigned(master, variable), value, master))


def _round(variable: Any, master: Any) -> None:
    if variable.dtype == tf.bfloat16:
        variable.assign(_in_one_pass(_nearest_bfloat16, master))
    else:
        variable.assign(nearest_of_numbers(tf.convert_to_tensor(master), variable.dtype))


def _nearest_bfloat16(master: Any) -> Any:
    return nearest_of_numbers(master, "bfloat16")


def _in_one_pass(function: Callable[..., Any], *variables: Any) -> Any:
    """Calls a function with the values of variables, compiled where it is part of a graph.

    Op by op every step of a rounding reads and writes whole tensors.
    """
    values = [tf.convert_to_tensor(variable) for variable in variables]
    if tf.executing_eagerly() or not xla_works(native(variables[0]).device):
        return function(*values)
    return _compiled(function)(*values)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)
