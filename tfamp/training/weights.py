"""How the weights are stored that an optimizer updates: as they are, or with float32 masters.

An update smaller than half the distance between two float16 numbers is lost when it is added to a
float16 weight, however often. Added to a float32 copy, its master, it is kept; the weight is the
master, rounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop.keras_backend import native
from tfamp.training.gradients import dtype_name, is_next_value, variable_name
from tfamp.training.replicas import call_if


class Mastered(NamedTuple):
    """A variable of a model and its copy.

    Attributes:
        variable: The float16 or bfloat16 variable, a `keras.Variable` or `tf.Variable`.
        master: The float32 `keras.Variable`.
    """

    variable: Any
    master: keras.Variable


class Weights:
    """Weights that are updated as they are; what every other way to store them has methods for."""

    def pairs(self) -> list[Mastered]:
        """The variables that have a master, with it."""
        return []

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates the variables that are needed beside the given ones, once, and returns them."""
        return []

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """What the inner optimizer updates for each variable."""
        return list(variables)

    def load(self) -> None:
        """Makes the targets follow what has been assigned to the variables since `store`.

        Under a strategy that updates variables by `merge_call`, `load` and `store` are to be called
        in cross-replica context.
        """

    def store(self) -> None:
        """Assigns the targets to the variables."""


class MasterWeights(Weights):
    """Weights of which the float16 and bfloat16 ones are updated through float32 masters.

    Args:
        optimizer: The inner optimizer, not built.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer
        self._by_key: dict[Any, Mastered] = {}

    def pairs(self) -> list[Mastered]:
        """The variables that have a master, with it."""
        return list(self._by_key.values())

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates the masters, once."""
        low = [v for v in variables if dtype_name(v) in LOW_PRECISION and not is_next_value(v)]
        if not low or self._by_key:
            return []
        if self._optimizer.built:
            raise ValueError(
                f"{self._optimizer.name} was built for {len(low)} low-precision variables, "
                f"such as {variable_name(low[0])}, before master_weights could give "
                "it float32 copies to update. Create a new inner optimizer, and let "
                "LossScaleOptimizer build it."
            )
        pairs = [Mastered(variable, _create_master(variable)) for variable in low]
        self._by_key.update({self._optimizer._var_key(pair.variable): pair for pair in pairs})
        self._carry_over_exclusions()
        return [pair.master for pair in pairs]

    def _carry_over_exclusions(self) -> None:
        key = self._optimizer._var_key
        excluded: set[Any] = getattr(self._optimizer, "_exclude_from_weight_decay", set())
        excluded |= {key(pair.master) for pair in self.pairs() if key(pair.variable) in excluded}

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """The master of a variable that has one, else the variable."""
        pairs = [(self._by_key.get(self._optimizer._var_key(v)), v) for v in variables]
        return [variable if pair is None else pair.master for pair, variable in pairs]

    def load(self) -> None:
        """Takes over what has been assigned to the variables since `store`.

        Where a variable is its master rounded, the master keeps its value; elsewhere, in each
        element by itself, somebody has assigned another one (has loaded weights, say), and that
        holds.
        """

        def take_over_all() -> None:
            for variable, master in self.pairs():
                _update(master, _take_over, variable)

        if not self._by_key:
            return
        if tf.executing_eagerly():
            take_over_all()  # Without waiting for the device to know whether it is needed.
            return
        # Nearly always nothing was: one look is cheaper than writing all masters.
        looks = [_update(master, _differs, variable) for variable, master in self.pairs()]
        call_if(tf.reduce_any(tf.stack(tf.nest.flatten(looks))), take_over_all)

    def store(self) -> None:
        """Assigns the masters, rounded, to the variables."""
        for variable, master in self.pairs():
            _update(variable, _round, master)


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


def _assigned(master: Any, variable: Any) -> Any:
    value = tf.convert_to_tensor(variable)
    return tf.not_equal(tf.cast(tf.convert_to_tensor(master), value.dtype), value)


def _differs(master: Any, variable: Any) -> Any:
    return tf.reduce_any(_assigned(master, variable))


def _take_over(master: Any, variable: Any) -> None:
    value = tf.cast(tf.convert_to_tensor(variable), master.dtype)
    master.assign(tf.where(_assigned(master, variable), value, master))


def _round(variable: Any, master: Any) -> None:
    variable.assign(tf.cast(tf.convert_to_tensor(master), variable.dtype))


def _update(target: Any, function: Callable[[Any, Any], Any], source: Any) -> Any:
    # On every device its own copies, with nothing sent between them: an assignment in a replica
    # would average the replicas' values, which are the same. `model.fit` finalizes the variables
    # outside the scope of their strategy, which then is not the current one.
    target = native(target)
    strategy = tf.distribute.get_strategy()
    scope: Any = contextlib.nullcontext()
    if not tf.distribute.has_strategy() and hasattr(target, "distribute_strategy"):
        strategy = target.distribute_strategy
        scope = strategy.scope()
    with scope:
        return strategy.extended.update(target, function, args=(native(source),), group=False)
