"""Applying gradients to weights with a Keras optimizer, unless they are not finite."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import UnsupportedVersionError
from tfamp.interop import keras_optimizers
from tfamp.interop.keras_hooks import as_tensor, native, runs_tensorflow
from tfamp.interop.tf_private import strategy_needs_merge_call, xla_works
from tfamp.training.forms import Chance
from tfamp.training.fused_update import fused_update, has_fused_update
from tfamp.training.gradients import Gradients, dtype_name, is_next_value, variable_name
from tfamp.training.low_weights import LowWeights, StoredWeight
from tfamp.training.optimizer_view import applied, view_of
from tfamp.training.replicas import call_if, update_everywhere
from tfamp.training.rounding import nearest_of_numbers

_SUMS = "_all_reduce_sum_gradients"


# Calls a function with arguments that differ between the replicas, once on each of them.
OnEach = Callable[..., None]


def once_for_all_replicas(function: Callable[..., None], condition: Any, *arguments: Any) -> None:
    """Calls `function(on_each, condition, *arguments)` where a `tf.cond` may hold updates.

    Most strategies allow no condition around an update in a replica; for those the function is
    called once for all replicas, in cross-replica context. `on_each(update, *arguments)` calls an
    update on every replica with its own arguments. The condition is the same on all replicas.
    """
    if not (runs_tensorflow() and strategy_needs_merge_call()):
        function(lambda update, *own: update(*own), condition, *arguments)
        return

    def merged(strategy: tf.distribute.Strategy, condition: Any, *arguments: Any) -> None:
        def on_each(update: Callable[..., None], *own: Any) -> None:
            strategy.extended.call_for_each_replica(update, args=own)

        # The replicas agree on it, so any one's will do.
        function(on_each, strategy.experimental_local_results(condition)[0], *arguments)

    tf.distribute.get_replica_context().merge_call(merged, args=(condition, *arguments))


def apply_if_finite(
    weights: Weights,
    gradients: Gradients,
    finite: Any,
    *,
    skips: bool = True,
    record: Callable[[Any], None] = lambda finite: None,
) -> None:
    """Applies gradients where they are `finite`, and otherwise changes nothing.

    `finite` is equal on all replicas. `skips=False` applies them in any case. `record` is called
    with `finite` after that, once for all replicas.
    """

    def apply_own(values: list[Any], divisor: Any) -> None:
        _apply(weights, replace(gradients, values=values, divisor=divisor))

    def on_all_replicas(on_each: OnEach, finite: Any, values: Any, divisor: Any) -> None:
        def update() -> None:
            weights.load()
            on_each(apply_own, values, divisor)
            weights.store()

        if skips:
            call_if(finite, update)
        else:
            update()
        record(finite)

    once_for_all_replicas(on_all_replicas, finite, gradients.values, gradients.divisor)


def _apply(weights: Weights, gradients: Gradients) -> None:
    """Divides gradients by their divisor and applies them, with the same result as Keras."""
    optimizer, chance = weights.optimizer, weights.chance()
    if has_fused_update(optimizer):
        others = fused_update(optimizer, gradients, chance)
        if others is None:
            return
        gradients = others
    if weights.low is not None:
        weights.low.check_all_updated(optimizer, gradients.variables)
    gradients = gradients.unscaled()
    if any(each.gradient_accumulation_steps for each in applied(optimizer)):
        gradients = gradients.as_stored()
    asked: list[bool] = []
    counts_itself = tf.distribute.has_strategy() and not strategy_needs_merge_call()
    view = optimizer
    if gradients.summed or counts_itself:
        view = view_of(optimizer, functools.partial(_summing_as_given, asked, gradients.summed))
    view.apply(gradients.values, gradients.variables)
    if (
        gradients.summed
        and not asked
        and any(g is not None and not is_next_value(v) for g, v in gradients.pairs())
    ):
        raise UnsupportedVersionError(
            f"{optimizer.name} ({type(optimizer).__name__}) does not sum gradients over the "
            f"replicas in Optimizer.{_SUMS}, as Keras 3.12 to 3.15 do, so tfamp cannot do it in "
            "its place. Leave out grad_clip and aggregate_in_float16 on several replicas."
        )


def _summing_as_given(asked: list[bool], summed: bool, kind: type) -> type:
    """A class of optimizers that takes gradients for their sums over the replicas, if they are.

    Keras's optimizers sum inside `apply` and have no switch for it. `asked` tells whether they did.
    """

    def as_given(self: Any, grads_and_vars: Any) -> list[Any]:
        asked.append(True)
        return list(grads_and_vars)

    return type(kind.__name__, (kind,), {_SUMS: as_given} if summed else {})


# ---- The weights ---------------------------------------------------------------------------------


class Weights:
    """Weights as they are stored: low ones with float32 masters, in another form, or as they are.

    An update smaller than half the distance between two float16 numbers is lost when it is added
    to a float16 weight, however often. Added to a float32 copy, its master, it is kept; the weight
    is the master, rounded.

    Args:
        optimizer: The optimizer that updates them; not built, where they have masters.
        have_masters: Whether the low-precision ones have.
        low: What else there is of the low-precision ones, if they have none.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        have_masters: bool = False,
        low: LowWeights | None = None,
    ) -> None:
        self.optimizer, self.have_masters, self.low = optimizer, have_masters, low
        self._by_key: dict[Any, tuple[Any, keras.Variable]] = {}

    def chance(self) -> Chance | None:
        """What the rounding of the next update is decided by, if chance has a part in it."""
        if self.low is None:
            return None
        return Chance(as_tensor(self.low.seed), as_tensor(self.optimizer._iterations))

    def pairs(self) -> list[tuple[Any, keras.Variable]]:
        """The variables that have a master, with it."""
        return list(self._by_key.values())

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates what is kept beside variables, once, and returns it."""
        if self.low is not None:
            return self.low.create(self.optimizer, variables)
        low = [v for v in variables if dtype_name(v) in LOW_PRECISION and not is_next_value(v)]
        if not (self.have_masters and low) or self._by_key:
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
        excluded |= {key(master) for variable, master in self.pairs() if key(variable) in excluded}
        return [master for _, master in self.pairs()]

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """What the optimizer updates: the master of a variable that has one, else the variable."""
        if self.low is not None:
            return self.low.targets(self.optimizer, variables)
        key = keras_optimizers.key_of(self.optimizer)
        return [self._by_key.get(key(v), (v, v))[1] for v in variables]

    def exact_values(self, variables: Sequence[Any]) -> list[Any]:
        """The float32 values of the masters of variables, or of what else stands for them.

        A value that was assigned to a variable since the last update holds. Variables that are as
        they are are returned.
        """
        if self.low is not None:  # It holds whatever is assigned.
            targets = self.targets(variables)
            return [each.read() if isinstance(each, StoredWeight) else each for each in targets]
        return [_exact(*pair) for pair in zip(variables, self.targets(variables), strict=True)]

    def set_exact(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives the masters of variables, or what else stands for them, their float32 values."""
        for variable, target, value in zip(variables, self.targets(variables), values, strict=True):
            if target is not variable:
                target.assign(tf.cast(tf.convert_to_tensor(value), tf.float32))
                if self.have_masters:  # Else a tie that was rounded otherwise is an assigned value.
                    update_everywhere(variable, _round, (target,))

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the optimizer for what it updates of variables."""
        if self.low is not None:
            self.low.build(self.optimizer, self.targets(variables))
        else:
            self.optimizer.build(self.targets(variables))

    def finalize(self, variables: Sequence[Any]) -> None:
        """Puts the optimizer's moving averages, if it has any, into the weights."""
        self.load()
        self.optimizer.finalize_variable_values(self.targets(variables))
        self.store()

    def load(self) -> None:
        """Takes over what has been assigned to the variables since `store`.

        Under a strategy that updates variables by `merge_call`, `load` and `store` are to be called
        in cross-replica context.

        Where a variable is its master rounded, the master keeps its value; elsewhere, in each
        element by itself, somebody has assigned another one (has loaded weights, say), and that
        holds.
        """

        def take_over_all() -> None:
            for variable, master in self.pairs():
                update_everywhere(master, _take_over, (variable,))

        if not self._by_key:
            return
        if tf.executing_eagerly():
            take_over_all()  # Without waiting for the device to know whether it is needed.
            return
        # Nearly always nothing was: one look is cheaper than writing all masters.
        looks = [
            update_everywhere(master, _differs, (variable,)) for variable, master in self.pairs()
        ]
        call_if(tf.reduce_any(tf.stack(tf.nest.flatten(looks))), take_over_all)

    def store(self) -> None:
        """Assigns the masters, rounded, to the variables."""
        for variable, master in self.pairs():
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
