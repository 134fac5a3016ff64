"""Stores of weights - plain, low precision with float32 masters, rounded - and their update.

A store maps each variable to the object that the optimizer updates, and moves
values between them.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.device_names import device_kind_of
from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Handle, Optimizer, Tensor, Variable
from tfamp.interop import keras_hooks, tf_private
from tfamp.interop.keras_hooks import as_tensor, native, runs_tensorflow
from tfamp.interop.patching import level_of_user, wrap_method
from tfamp.training import underflow
from tfamp.training.fused_update import FUSED_OPTIMIZERS, fused_update, why_not_fused
from tfamp.training.gradients import (
    Gradients,
    assign_if,
    call_if,
    dtype_name,
    is_next_value,
    update_everywhere,
    variable_name,
)
from tfamp.training.optimizer_state import warn_of_low_state
from tfamp.training.rounding import Chance, Form, form_of, nearest

# What to do where the slots of low-precision variables cannot hold an optimizer's state.
_GIVE_MASTERS = "Leave master_weights out or give True, or use SGD."
_LET_IT_BUILD = (
    "The inner optimizer was built before: create a new one, and let LossScaleOptimizer build it."
)


class PlainWeights:
    """Weights that an optimizer updates directly; subclasses store low ones in other ways.

    Args:
        optimizer: The optimizer that updates them.
        remedy: The sentence of a warning about low-precision slots that says what to do.

    Attributes:
        optimizer: The optimizer that updates them.
        warned: Whether such a warning was given, or is left to another one.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, remedy: str = _GIVE_MASTERS) -> None:
        self.optimizer, self._remedy = optimizer, remedy
        self.warned = False
        # Targets of the optimizer's update, by its key of the variable.
        self._by_key: dict[Any, keras.Variable | StoredWeight] = {}

    def create(self, variables: Sequence[Variable]) -> list[keras.Variable]:
        """Creates extra variables for low-precision ones, on the first call; returns them.

        Warns once if the optimizer keeps a state of these that their dtype cannot hold.
        """
        self._warn_of_state(variables, self._remedy)
        return []

    def _warn_of_state(self, variables: Sequence[Variable], remedy: str) -> None:
        low = _low_ones(variables)
        if low and not self.warned:
            self.warned = True
            where = (
                f"{dtype_name(low[0])} slots may not hold: for {len(low)} variables such as "
                f"{variable_name(low[0])}, without master weights,"
            )
            warn_of_low_state(self.optimizer, where, remedy)

    def targets(self, variables: Sequence[Variable]) -> list[Variable]:
        """Returns the optimizer's targets for variables."""
        key = keras_hooks.key_of(self.optimizer)
        return [self._by_key.get(key(v), v) for v in variables]

    def weight_of(self, target: Variable) -> Variable | None:
        """Returns the variable that has a target as its master; None without one."""
        return None

    def build(self, variables: Sequence[Variable]) -> None:
        """Builds the optimizer for the targets of variables; it sums gradients in float32."""
        targets = self.targets(variables)
        low = any(dtype_name(target) in LOW_PRECISION for target in targets)
        with keras_hooks.float32_gradient_sums() if low else contextlib.nullcontext():
            self.optimizer.build(targets)

    def load(self) -> None:
        """Copies values assigned to the variables since `store` to the targets.

        Under a strategy that updates variables by `merge_call`, call `load` and `store` in
        cross-replica context.
        """

    def store(self) -> None:
        """Assigns the updated targets to the variables."""

    def finalize(self, variables: Sequence[Variable]) -> None:
        """Overwrites the weights with the optimizer's moving averages, if any."""
        self.load()
        self.optimizer.finalize_variable_values(self.targets(variables))
        self.store()

    def exact_values(self, variables: Sequence[Variable]) -> list[Tensor]:
        """Returns the values of variables in the highest stored precision.

        A value assigned to a variable since the last update counts. A variable that is its own
        target is returned itself.
        """
        self.load()
        return [
            variable if target is variable else tf.convert_to_tensor(target.value)
            for variable, target in zip(variables, self.targets(variables), strict=True)
        ]

    def set_exact(self, variables: Sequence[Variable], values: Sequence[Tensor]) -> None:
        """Assigns float32 values to the targets of variables."""
        targets = self.targets(variables)
        for variable, target, value in zip(variables, targets, values, strict=True):
            if target is not variable:
                target.assign(tf.cast(tf.convert_to_tensor(value), tf.float32))
        self.store()

    def chance(self) -> Chance:
        """Returns the seed and the step of the next update's rounding."""
        steps = as_tensor(keras_hooks.step_counter(self.optimizer))
        return Chance(ops.zeros_like(steps), steps)


class MasterWeights(PlainWeights):
    """Low-precision weights with float32 masters, which the optimizer updates.

    An update smaller than half the distance between two float16 numbers is lost when it is
    added to a float16 weight, however often. Added to its master it is kept; the weight is the
    master, rounded.

    Args:
        optimizer: The optimizer that updates the masters.
        required: Whether it is an error that the optimizer was built without them; otherwise
            it goes on without, and a warning names what is lost.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, *, required: bool = True) -> None:
        super().__init__(optimizer)
        self._required = required
        self._pairs: list[tuple[Variable, keras.Variable]] = []

    @property
    def masters(self) -> list[keras.Variable]:
        """The masters, in the order of their variables."""
        return [master for _, master in self._pairs]

    def create(self, variables: Sequence[Variable]) -> list[keras.Variable]:
        """Creates the masters on the first call; returns them."""
        if self._pairs or not (low := _low_ones(variables)):
            return []
        if self.optimizer.built and not self._required:
            self._warn_of_state(variables, _LET_IT_BUILD)
            return []
        _check_not_built(self.optimizer, low)
        key = keras_hooks.key_of(self.optimizer)
        excluded, _ = keras_hooks.excluded_from_decay(self.optimizer)
        for variable in low:
            master = _beside(variable, "float32", "", tf.identity)
            master.constraint = getattr(variable, "constraint", None)
            excluded |= {key(master)} if key(variable) in excluded else set()
            self._by_key[key(variable)] = master
            self._pairs.append((variable, master))
        return self.masters

    def weight_of(self, target: Variable) -> Variable | None:
        """Returns the variable of a master."""
        return next((variable for variable, master in self._pairs if master is target), None)

    def load(self) -> None:
        """Copies values assigned to the variables since `store` to the masters.

        An element that equals its rounded master keeps the master; any other was assigned, as
        by loading weights, and replaces it.
        """

        def take_over_all() -> None:
            for variable, master in self._pairs:
                update_everywhere(master, _take_over, (variable,))

        if tf.executing_eagerly() or tf_private.is_compiled_by_xla() or self._are_on_accelerators():
            take_over_all()
        elif self._pairs:
            # Usually none was: a check is cheaper than writing all masters.
            checks = [
                update_everywhere(master, _differs, (variable,)) for variable, master in self._pairs
            ]
            call_if(tf.reduce_any(tf.stack(tf.nest.flatten(checks))), take_over_all)

    def _are_on_accelerators(self) -> bool:
        """Whether a master is not on a CPU: there the host would wait for a device's check."""
        devices = (native(master).device for master in self.masters)
        return any(device_kind_of(device) != "cpu" for device in devices)

    def store(self) -> None:
        """Assigns the masters, rounded, to the variables."""
        for variable, master in self._pairs:
            update_everywhere(variable, _round, (master,))


@dataclass(eq=False)
class StoredWeight:
    """Float32 stand-in for a low-precision variable, which an optimizer is built for.

    Attributes:
        variable: The variable, the first stored part.
        _unique_id: Its key in Keras's optimizers.
        form: Storage format of the float32 values.
        beside: Variables for the other parts.
        number: Its random stream.
    """

    variable: Variable
    _unique_id: Any
    form: Form
    beside: Sequence[Variable]
    number: int

    dtype = "float32"
    trainable = True
    overwrite_with_gradient = False

    def __post_init__(self) -> None:
        self.path = variable_name(self.variable)
        self.name = str(self.variable.name).partition(":")[0]
        self.shape = self.variable.shape
        self.constraint = getattr(self.variable, "constraint", None)

    @property
    def device(self) -> str:
        """Device of the variable."""
        return str(native(self.variable).device)

    @property
    def handles(self) -> list[Handle]:
        """Resource handles of the parts, of the current replica."""
        return [native(part).handle for part in (self.variable, *self.beside)]

    @property
    def value(self) -> Tensor:
        """The float32 value; also outside a replica, where handles are missing."""
        parts = (native(part) for part in (self.variable, *self.beside))
        return self.form.decode(*map(tf.convert_to_tensor, parts))

    def assign(self, value: Tensor) -> None:
        """Assigns a float32 value on all replicas."""

        def on_device(target: Variable, value: Tensor, *others: Variable) -> None:
            value = tf.convert_to_tensor(value)
            words = functools.partial(Chance(0, 0).words, tf.constant(self.number), value)
            parts = self.form.encode(value, words)
            for stored, part in zip((target, *others), parts, strict=True):
                stored.assign(part)

        update_everywhere(self.variable, on_device, (value, *self.beside))


class RoundedWeights(PlainWeights):
    """Low-precision weights without masters, with at most 16 more bits per number.

    Args:
        optimizer: The optimizer that updates them; not built.
        how: "stochastic" rounding, or "split" into a weight and its lower half.
        slots: The dtype of the optimizer's slots.
        seed: A scalar integer variable with the seed of all random rounding.

    Raises:
        ValueError: The optimizer has no compiled rule, or slots cannot hold what it keeps.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, how: str, slots: str, seed: Variable
    ) -> None:
        super().__init__(optimizer)
        self.how, self.slots, self.seed = how, slots, seed
        if (other := why_not_fused(optimizer)) is not None:
            *first, last = FUSED_OPTIMIZERS
            raise ValueError(
                f"weight_rounding goes with {', '.join(first)} and {last} as Keras "
                "has them, whose updates round as they are compiled; got "
                f"{other}. Use one of these, or give master_weights=True instead of "
                "weight_rounding."
            )
        keeps_no_squares = isinstance(optimizer, keras.optimizers.SGD | keras.optimizers.Lion)
        if slots == "float16" and not keeps_no_squares:
            raise ValueError(
                f"slots='float16' cannot hold what {optimizer.name} keeps: squares of "
                "gradients under 2.4e-4 are zero in float16, and divide the step. Give "
                "slots='bfloat16', which takes as much memory and has float32's range."
            )

    def create(self, variables: Sequence[Variable]) -> list[keras.Variable]:
        """Creates the lower halves of split variables on the first call; returns them."""
        if self._by_key:
            return []
        created = []
        low = _low_ones(variables)
        _check_not_built(self.optimizer, low)
        for number, variable in enumerate(low):
            dtype = dtype_name(variable)
            if self.how == "split" and dtype != "bfloat16":
                raise ValueError(
                    "weight_rounding='split' keeps the lower half of a float32 number beside a "
                    f"bfloat16 weight, which is its upper half; {variable_name(variable)} is "
                    f"{dtype}. Give weight_rounding='stochastic', or bfloat16 weights."
                )
            form = form_of(dtype, self.how)
            rest = form.dtypes[1:]
            beside = [_beside(variable, part, f"_{self.how}", tf.zeros_like) for part in rest]
            key = keras_hooks.key_of(self.optimizer)(variable)
            self._by_key[key] = StoredWeight(variable, key, form, beside, number)
            created += beside
        return created

    def build(self, variables: Sequence[Variable]) -> None:
        """Builds the optimizer; slots of low-precision variables get the dtype of `slots`."""
        undo = wrap_method(self.optimizer, "add_variable_from_reference", self._add_slot)
        try:
            super().build(variables)
        finally:
            undo()

    def _add_slot(
        self, original: Callable[..., Variable], reference_variable: Variable, **arguments: Any
    ) -> Variable:
        if not isinstance(reference_variable, StoredWeight):
            return original(reference_variable, **arguments)
        name = f"{reference_variable.path.replace('/', '_')}_{arguments.pop('name', 'var')}"
        extended = tf.distribute.get_strategy().extended
        with extended.colocate_vars_with(native(reference_variable.variable)):
            return self.optimizer.add_variable(
                reference_variable.shape, dtype=self.slots, name=name, **arguments
            )

    def chance(self) -> Chance:
        """Returns the seed and the step of the next update's rounding."""
        return Chance(as_tensor(self.seed), as_tensor(keras_hooks.step_counter(self.optimizer)))


def _low_ones(variables: Sequence[Variable]) -> list[Variable]:
    """Selects low-precision variables, but those whose next value is their gradient."""
    return [v for v in variables if dtype_name(v) in LOW_PRECISION and not is_next_value(v)]


def _check_not_built(optimizer: Optimizer, low: Sequence[Variable]) -> None:
    """Raises if an optimizer was already built for low-precision variables."""
    if low and optimizer.built:
        raise ValueError(
            f"{optimizer.name} was built for {len(low)} low-precision variables, such as "
            f"{variable_name(low[0])}, before master_weights or weight_rounding could give it "
            "what it updates instead. Create a new inner optimizer, and let LossScaleOptimizer "
            "build it."
        )


def _beside(
    variable: Variable, dtype: str, suffix: str, value: Callable[[Any], Any]
) -> keras.Variable:
    """Creates a variable of another one's name, path, shape and device, from its value.

    Optimizers select variables, for weight decay for example, by name and path.
    """
    *scopes, name = variable_name(variable).partition(":")[0].split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        strategy = tf.distribute.get_strategy()
        stack.enter_context(strategy.extended.colocate_vars_with(native(variable)))
        return keras.Variable(
            lambda shape, dtype: tf.cast(value(as_tensor(variable)), dtype),
            shape=tuple(variable.shape),
            dtype=dtype,
            trainable=False,
            name=f"{name}{suffix}",
        )


# ---- Masters and later assignments -----------------------------------------------------


def _assigned(master: Variable, value: Tensor) -> Tensor:
    return tf.not_equal(nearest(master, value.dtype), value)


def _take_over(master: Variable, variable: Variable) -> None:
    master.assign(_next_master(master, variable))


def _round(variable: Variable, master: Variable) -> None:
    if variable.dtype == tf.bfloat16:
        variable.assign(_rounded_to_bfloat16(master))
    else:
        variable.assign(nearest(tf.convert_to_tensor(master), variable.dtype))


def _in_one_pass(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets a function of tensors take variables, and compiles it inside a graph.

    Otherwise every op of a rounding reads and writes whole tensors.
    """
    compiled = tf.function(function, jit_compile=True, autograph=False)

    def call(*variables: Variable) -> Tensor:
        values = [tf.convert_to_tensor(variable) for variable in variables]
        if tf.executing_eagerly() or not tf_private.xla_works(native(variables[0]).device):
            return function(*values)
        return compiled(*values)

    return call


@_in_one_pass
def _rounded_to_bfloat16(master: Variable) -> Tensor:
    return nearest(master, tf.bfloat16)


@_in_one_pass
def _next_master(master: Variable, value: Tensor) -> Tensor:
    return tf.where(_assigned(master, value), tf.cast(value, tf.float32), master)


@_in_one_pass
def _differs(master: Variable, value: Tensor) -> Tensor:
    return tf.reduce_any(_assigned(master, value))


# ---- The update ------------------------------------------------------------------------


# Calls a function on each replica with its own arguments.
OnEach = Callable[..., None]


def once_for_all_replicas(
    function: Callable[..., None], condition: Tensor, *arguments: Any
) -> None:
    """Calls `function(on_each, condition, *arguments)` in a context where `tf.cond` may update.

    Most strategies do not allow a condition around an update on a replica; for those the
    function is called once, in cross-replica context. `on_each(update, *arguments)` calls an
    update on every replica with its own arguments. The condition is equal on all replicas.
    """
    if not (runs_tensorflow() and tf_private.strategy_needs_merge_call()):
        function(lambda update, *arguments: update(*arguments), condition, *arguments)
        return

    def merged(strategy: tf.distribute.Strategy, condition: Tensor, *arguments: Any) -> None:
        def on_each(update: Callable[..., None], *per_replica: Any) -> None:
            strategy.extended.call_for_each_replica(update, args=per_replica)

        # Equal on all replicas.
        function(on_each, strategy.experimental_local_results(condition)[0], *arguments)

    tf.distribute.get_replica_context().merge_call(merged, args=(condition, *arguments))


def apply_if_finite(
    weights: PlainWeights,
    gradients: Gradients,
    finite: Tensor,
    *,
    skips: bool = True,
    record: Callable[[Tensor], None] = lambda finite: None,
) -> None:
    """Applies gradients if they are `finite`; otherwise changes nothing.

    `finite` is equal on all replicas. `skips=False` always applies them. `record` is then
    called with `finite`, once for all replicas.
    """

    def apply_here(values: list[Tensor], divisor: Tensor) -> None:
        _apply(weights, replace(gradients, values=values, divisor=divisor))

    def on_all_replicas(on_each: OnEach, finite: Tensor, values: Tensor, divisor: Tensor) -> None:
        def update() -> None:
            weights.load()
            on_each(apply_here, values, divisor)
            weights.store()

        if skips:
            assign_if(finite, update)
        else:
            update()
        record(finite)

    once_for_all_replicas(on_all_replicas, finite, gradients.values, gradients.divisor)


def _apply(weights: PlainWeights, gradients: Gradients) -> None:
    """Unscales gradients and applies them, with the same result as Keras."""
    optimizer = weights.optimizer
    others = fused_update(optimizer, gradients, weights.chance())
    if others is None:
        return
    if any(isinstance(variable, StoredWeight) for variable in others.variables):
        raise ValueError(
            "weight_rounding goes with one device, MirroredStrategy and "
            "MultiWorkerMirroredStrategy, and with optimizers as they were given; got "
            f"{why_not_fused(optimizer) or type(tf.distribute.get_strategy()).__name__}. Give "
            "master_weights=True instead."
        )
    others = others.unscaled()
    others = others.in_dtypes_of(_gradient_sums(optimizer), keras_hooks.key_of(optimizer))
    counts_itself = tf.distribute.has_strategy() and not tf_private.strategy_needs_merge_call()
    if others.summed or counts_itself:
        counter = _on_this_replica if counts_itself else None
        optimizer = keras_hooks.applying_view(optimizer, summed=others.summed, counter=counter)
    with underflow.paused():
        optimizer.apply(others.values, others.variables)


def _gradient_sums(optimizer: Optimizer) -> dict[Any, Variable]:
    """The sums in which Keras accumulates gradients, by its keys of their variables.

    Warns of those in 16 bits, of an optimizer that was built before it was wrapped.
    """
    key = keras_hooks.key_of(optimizer)
    parts = keras_hooks.inner_optimizers(optimizer)
    pairs = [pair for part in parts for pair in keras_hooks.gradient_sums(part)]
    low = [v for v, total in pairs if dtype_name(total) in LOW_PRECISION and not is_next_value(v)]
    if low:
        _warn_of_low_sums(optimizer, low)
    return {key(variable): total for variable, total in pairs}


def _warn_of_low_sums(optimizer: Optimizer, low: Sequence[Variable]) -> None:
    if _warned_of_low_sums.get(optimizer):
        return
    _warned_of_low_sums[optimizer] = True
    warnings.warn(
        f"{optimizer.name} sums the gradients of {len(low)} variables, such as "
        f"{variable_name(low[0])}, in {dtype_name(low[0])}, because it was built before "
        "LossScaleOptimizer could give it float32 sums: gradients much smaller than their sum are "
        "lost. Create a new inner optimizer, and let LossScaleOptimizer build it.",
        TfampWarning,
        stacklevel=level_of_user(),
    )


_warned_of_low_sums: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()


def _on_this_replica(counter: Variable) -> Any:
    """The replica's own copy of a step counter, to count there.

    Keras counts with a `merge_call`, which a condition on a replica does not allow.
    """
    update = tf.distribute.get_strategy().extended.update
    return update(native(counter), lambda copy: copy, group=False)
