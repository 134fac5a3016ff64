"""Weights and slots stored in 16 bits that an optimizer sees, and updates, as float32.

What is stored is a `Form`. An optimizer is built for `LowVariable`s and computes with them in
float32; each value is rounded once, when it is stored. There is no float32 copy of more than one
variable at a time.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop.keras_hooks import native
from tfamp.interop.patching import wrap_method
from tfamp.training.forms import Chance, Form, form_of, wide_form
from tfamp.training.fused_update import NUMBERS_OF_ONE, form_of_slot, load, store
from tfamp.training.gradients import Gradients, dtype_name, is_next_value, variable_name
from tfamp.training.optimizer_view import applied, view_of
from tfamp.training.replicas import several_replicas, update_everywhere

# ---- As an optimizer sees it ---------------------------------------------------------------------

_OPERATORS = ("add", "sub", "mul", "truediv", "pow")


@dataclass
class _Update:
    """What an optimizer has assigned in the update of one variable, to be stored at its end."""

    chance: Chance
    pending: dict[int, tuple[LowVariable, Any]] | None = None
    written: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def of_one_variable(self) -> Iterator[None]:
        """Collects what is assigned and stores it at the end; begins when the last one is done."""
        last = [op for op in self.written if op is not None]
        with tf.control_dependencies(last):
            self.pending = {}
            yield
            pending, self.pending = self.pending, None
            self.written = [
                op for one, value in pending.values() for op in one.store(value, self.chance)
            ]


class LowVariable:
    """A variable that is stored in another form, as the float32 variable that it stands for.

    Args:
        variable: The variable, which is the first of what is stored.
        key: By which Keras's optimizers know it.
        form: How the float32 number is stored.
        beside: The variables that are stored beside it.
        number: Its number among all that are rounded in a step.
        update: The update during which values are read and assigned.
    """

    trainable = True
    overwrite_with_gradient = False

    def __init__(
        self,
        variable: Any,
        key: Any,
        form: Form,
        beside: Sequence[Any] = (),
        number: int = 0,
        update: _Update | None = None,
    ) -> None:
        self.variable, self.form, self.beside, self.number = variable, form, beside, number
        self._unique_id, self.update = key, update
        self.dtype = "float64" if form.dtypes == ("float64",) else "float32"
        self.path = variable_name(variable)
        self.name = str(variable.name).partition(":")[0]
        self.shape = variable.shape
        self.bound = getattr(variable, "constraint", None)

    @property
    def constraint(self) -> Any:
        """The variable's `bound`, but not during an update, which applies it itself."""
        return self.bound if self.update is None else None

    @property
    def device(self) -> str:
        """Where it is."""
        return str(native(self.variable).device)

    @property
    def handles(self) -> list[Any]:
        """The resources of what is stored, on a replica its own."""
        return [native(each).handle for each in (self.variable, *self.beside)]

    def during(self, update: _Update) -> LowVariable:
        """The same during an update."""
        own = self.variable, self._unique_id, self.form, self.beside, self.number
        return LowVariable(*own, update)

    @property
    def value(self) -> LowVariable:
        """Itself: as that of Keras's variables it is read where it is used, not before."""
        return self

    def read(self) -> Any:
        """The float32 value."""
        if self.update is None:  # Perhaps outside of a replica, where there are no resources.
            parts = (native(each) for each in (self.variable, *self.beside))
            return self.form.decode(*map(tf.convert_to_tensor, parts))
        pending = self.update.pending or {}
        return pending[id(self)][1] if id(self) in pending else load(self.form, self.handles)

    def store(self, value: Any, chance: Chance, offset: int = 0) -> list[Any]:
        """Stores a float32 value and returns the ops that do.

        Values that are stored in the same step one after the other have offsets of their own.
        """
        number = tf.constant(self.number + offset)
        return store(self.form, self.handles, value, chance, number)

    def assign(self, value: Any) -> None:
        """Assigns a value, at the end of the update of this variable where there is one."""
        value = tf.cast(tf.convert_to_tensor(value), self.dtype)
        if self.update is None:
            self.assign_everywhere(value, Chance(0, 0))
        elif self.update.pending is None:
            self.store(value, self.update.chance)
        else:
            self.update.pending[id(self)] = (self, value)

    def assign_everywhere(self, source: Any, chance: Chance) -> None:
        """Assigns a tensor, or the value of another variable, on all replicas."""

        def on_device(target: Any, *others: Any) -> None:
            value = tf.cast(tf.convert_to_tensor(others[0]), self.dtype)
            words = functools.partial(chance.words, tf.constant(self.number), value)
            parts = self.form.encode(value, words)
            for each, part in zip((target, *others[1:]), parts, strict=True):
                each.assign(part)

        update_everywhere(self.variable, on_device, (source, *self.beside))

    def assign_add(self, value: Any) -> None:
        """Adds a value."""
        self.assign(self.read() + value)

    def assign_sub(self, value: Any) -> None:
        """Subtracts a value."""
        self.assign(self.read() - value)

    def scatter_add(self, rows: tf.IndexedSlices) -> None:
        """Adds to some rows."""
        self.assign(tf.tensor_scatter_nd_add(self.read(), *_indexed(rows)))

    def scatter_sub(self, rows: tf.IndexedSlices) -> None:
        """Subtracts from some rows."""
        self.assign(tf.tensor_scatter_nd_sub(self.read(), *_indexed(rows)))

    def scatter_update(self, rows: tf.IndexedSlices) -> None:
        """Replaces some rows."""
        self.assign(tf.tensor_scatter_nd_update(self.read(), *_indexed(rows)))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return tf.convert_to_tensor(self.read(), dtype=dtype, name=name)

    def __getitem__(self, index: Any) -> Any:
        return self.read()[index]

    def __neg__(self) -> Any:
        return -self.read()


def _indexed(rows: tf.IndexedSlices) -> tuple[Any, Any]:
    return rows.indices[:, None], rows.values


def _operator(name: str, reflected: bool) -> Callable[[LowVariable, Any], Any]:
    function = getattr(operator, name)
    if reflected:
        return lambda self, other: function(other, self.read())
    return lambda self, other: function(self.read(), other)


for _name in _OPERATORS:
    setattr(LowVariable, f"__{_name}__", _operator(_name, False))
    setattr(LowVariable, f"__r{_name}__", _operator(_name, True))


# ---- The weights of an optimizer -----------------------------------------------------------------


class LowWeights:
    """The low-precision variables of an optimizer, as float32 variables that it updates.

    Args:
        how: What is done about the rounding of weights: "stochastic" or "split".
        slots: The dtype of the optimizer's slots.
        seed: A scalar integer variable with the seed of all random rounding.
    """

    def __init__(self, how: str, slots: str, seed: Any) -> None:
        self.how, self.slots, self.seed = how, slots, seed
        self._by_key: dict[Any, LowVariable] = {}

    def create(self, optimizer: Any, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates what is stored beside variables, once, and returns it."""
        if self._by_key:
            return []
        if optimizer.built:
            raise ValueError(
                f"{optimizer.name} was built before weight_rounding={self.how!r} could give it "
                f"{self.slots} slots. Create a new inner optimizer, and let LossScaleOptimizer "
                "build it."
            )
        created = []
        for number, variable in enumerate(variables):
            if dtype_name(variable) not in LOW_PRECISION or is_next_value(variable):
                continue
            if self.how == "split" and dtype_name(variable) != "bfloat16":
                raise ValueError(
                    f"weight_rounding='split' keeps the lower half of a float32 number beside a "
                    f"bfloat16 weight, which is its upper half; {variable_name(variable)} is "
                    f"{dtype_name(variable)}. Give weight_rounding='stochastic', or bfloat16 "
                    "weights."
                )
            form = form_of(self.how, dtype_name(variable))
            beside = [_zeros_beside(variable, self.how, dtype) for dtype in form.dtypes[1:]]
            key = optimizer._var_key(variable)
            own = variable, key, form, beside, number * NUMBERS_OF_ONE
            self._by_key[key] = LowVariable(*own)
            created += beside
        return created

    def targets(self, optimizer: Any, variables: Sequence[Any]) -> list[Any]:
        """What stands for each variable that is low, else the variable."""
        return [self._by_key.get(optimizer._var_key(v), v) for v in variables]

    def build(self, optimizer: Any, targets: Sequence[Any]) -> None:
        """Builds an optimizer, whose slots of low variables get the dtype of `slots`."""
        reached: set[int] = set()
        with contextlib.ExitStack() as undo:

            def reach(each: Any) -> Any:
                if id(each) not in reached:
                    reached.add(id(each))
                    check_slots(each, self.slots)
                    add = functools.partial(_add_slot, self.slots, each)
                    undo.callback(wrap_method(each, "add_variable_from_reference", add))
                return each

            for each in applied(optimizer):
                reach(each)
            if hasattr(optimizer, "_optimizer_map"):  # A function makes optimizers while it builds.
                undo.callback(
                    wrap_method(optimizer, "_optimizer_map", lambda choose, v: reach(choose(v)))
                )
            optimizer.build(targets)

    def updates_any(self, variables: Sequence[Any]) -> bool:
        """Whether one of variables is stored low."""
        return any(isinstance(variable, LowVariable) for variable in variables)

    def apply(self, optimizer: Any, gradients: Gradients, chance: Chance) -> None:
        """Applies gradients as the optimizer does, one variable after the other."""
        for each in applied(optimizer):
            gradients = _clipped(each, gradients)
        if several_replicas() and not gradients.summed:
            gradients = gradients.summed_over_replicas()
        update = _Update(chance)
        view = view_of(optimizer, _stepping, functools.partial(_adapt, update))
        own = [_during(update, optimizer, variable) for variable in gradients.variables]
        view.apply(gradients.values, own)

    def finalize(self, optimizer: Any, chance: Chance) -> None:
        """Puts the optimizer's moving averages, if it has any, into the weights."""
        for each in applied(optimizer):
            if each.built and each.use_ema:  # Of several one may have no variables.
                averages = each._model_variables_moving_average
                for variable, average in zip(each._trainable_variables, averages, strict=True):
                    own = _during(_Update(chance), each, variable)
                    if isinstance(own, LowVariable):
                        own.assign_everywhere(average, chance)


def check_slots(optimizer: Any, slots: str) -> None:
    """Raises if slots of a dtype cannot hold what an optimizer keeps."""
    wrong = [x.name for x in applied(optimizer) if not isinstance(x, _HELD_BY_FLOAT16)]
    if slots == "float16" and wrong:
        raise ValueError(
            f"slots='float16' cannot hold what {wrong[0]} keeps: squares of gradients under 2.4e-4 "
            "are zero in float16, and divide the step. Give slots='bfloat16', which takes as much "
            "memory and has float32's range."
        )


def _clipped(optimizer: Any, gradients: Gradients) -> Gradients:
    """Clips what an optimizer, of several perhaps, updates; with accumulation it does so itself.

    Keras clips what each replica has, and sums then.
    """
    if optimizer.gradient_accumulation_steps or not any(getattr(optimizer, n) for n in _CLIPS):
        return gradients
    known, values = optimizer._trainable_variables_indices, list(gradients.values)
    own = [
        i
        for i, (gradient, variable) in enumerate(gradients.pairs())
        if gradient is not None and optimizer._var_key(variable) in known
    ]
    for i, value in zip(own, optimizer._clip_gradients([values[i] for i in own]), strict=True):
        values[i] = value
    return replace(gradients, values=values, checked=None)


# They keep averages of gradients, and no squares.
_HELD_BY_FLOAT16 = (keras.optimizers.SGD, keras.optimizers.Lion)


def _zeros_beside(variable: Any, how: str, dtype: str) -> keras.Variable:
    *scopes, name = variable_name(variable).partition(":")[0].split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        strategy = tf.distribute.get_strategy()
        stack.enter_context(strategy.extended.colocate_vars_with(native(variable)))
        return keras.Variable(
            lambda shape, dtype: tf.zeros(shape, dtype),
            shape=tuple(variable.shape),
            dtype=dtype,
            trainable=False,
            name=f"{name}_{how}",
        )


def _add_slot(
    slots: str,
    optimizer: Any,
    original: Any,
    reference_variable: Any,
    name: str | None = None,
    initializer: Any = "zeros",
) -> Any:
    if not isinstance(reference_variable, LowVariable):
        return original(reference_variable, name=name, initializer=initializer)
    strategy = tf.distribute.get_strategy()
    with strategy.extended.colocate_vars_with(native(reference_variable.variable)):
        return optimizer.add_variable(
            shape=reference_variable.shape,
            initializer=initializer,
            dtype=slots,
            name=f"{reference_variable.path.replace('/', '_')}_{name or 'var'}",
        )


def _during(update: _Update, optimizer: Any, variable: Any) -> Any:
    """What a view's optimizer takes for a variable: in float32, read and assigned in an update."""
    if isinstance(variable, LowVariable):
        return variable.during(update)
    if is_next_value(variable):
        return variable
    form = wide_form(dtype_name(variable))
    return LowVariable(variable, optimizer._var_key(variable), form, update=update)


# ---- An optimizer that updates them --------------------------------------------------------------


class _InReplica(keras.optimizers.Optimizer):
    """What Keras's optimizers do, on each replica by itself and for variables of any kind.

    Keras's own methods for TensorFlow hand variables to the strategy, which has to know them.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> list[Any]:
        return list(grads_and_vars)

    def _apply_weight_decay(self, variables: Sequence[Any]) -> None:
        for variable in variables if self.weight_decay is not None else ():
            if self._use_weight_decay(variable):
                rate = tf.cast(self.learning_rate, variable.dtype)
                decay = tf.cast(self.weight_decay, variable.dtype)
                variable.assign_sub(variable * decay * rate)

    def _backend_update_step(self, grads: Any, trainable_variables: Any, rate: Any) -> None:
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            self.update_step(gradient, variable, rate)

    def _backend_increment_gradient_accumulators(self, grads: Any, acc_grads: Any) -> None:
        for gradient, total in zip(grads, acc_grads, strict=True):
            total.assign(total + gradient)

    def _overwrite_model_variables_with_average_value(self, trainable_variables: Any) -> None:
        averages = self._model_variables_moving_average
        for variable, average in zip(trainable_variables, averages, strict=True):
            variable.assign(average)


@functools.cache
def _stepping(kind: type) -> type:
    """A class of optimizers whose updates of one variable are stored together, rounded once."""

    class Stepping(kind, _InReplica):
        """The optimizer's own update, with what Keras does before and after it for all at once."""

        def _apply_weight_decay(self, variables: Any) -> None:
            """Leaves it to `update_step`."""

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            with self._update.of_one_variable():
                super()._apply_weight_decay([variable])
                super().update_step(gradient, variable, learning_rate)
                if variable.bound is not None and not self._bounds_later():
                    variable.assign(variable.bound(variable.read()))

        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
            super()._backend_apply_gradients(grads, trainable_variables)
            for variable in trainable_variables if self._bounds_later() else ():
                if variable.bound is not None:
                    bounded = variable.bound(variable.read())
                    variable.store(bounded, self._update.chance, NUMBERS_OF_ONE - 1)

        def _bounds_later(self) -> bool:
            """Whether averages are of unconstrained values, or some steps update nothing."""
            return bool(self.use_ema or self.gradient_accumulation_steps)

    return Stepping


def _adapt(update: _Update, optimizer: Any, state: dict[str, Any]) -> None:
    """Puts what stands for them in the place of the variables that an optimizer keeps."""
    state["_update"] = update
    if not optimizer.gradient_accumulation_steps:
        state |= dict.fromkeys(_CLIPS)  # They are clipped.
    variables = state["_trainable_variables"]
    numbers = [getattr(variable, "number", 0) for variable in variables]
    slots = 0
    for name, value in list(state.items()):
        if name in _NO_SLOTS or name.startswith("_self_"):  # These are TensorFlow's.
            continue
        if isinstance(value, keras.Variable):
            state[name] = _slot_during(update, value, 0)
        elif _are_slots(members := list(value.values()) if isinstance(value, dict) else value):
            slots += 1
            pairs = zip(members, numbers, strict=False)
            own = [_slot_during(update, slot, number + slots) for slot, number in pairs]
            state[name] = dict(zip(value, own, strict=True)) if isinstance(value, dict) else own
    state["_trainable_variables"] = [_during(update, optimizer, v) for v in variables]


def _are_slots(members: Any) -> bool:
    """Whether these are the slots of an optimizer's variables, None for those that have none."""
    return (
        isinstance(members, (list, tuple))
        and any(isinstance(each, keras.Variable) for each in members)
        and all(each is None or isinstance(each, keras.Variable) for each in members)
    )


def _slot_during(update: _Update, slot: Any, number: int) -> Any:
    if slot is None or "float" not in dtype_name(slot):
        return slot
    return LowVariable(slot, id(slot), form_of_slot(slot), (), number, update)


_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
# Of an optimizer's attributes, those that hold variables and no slots.
_NO_SLOTS = ("_variables", "_trainable_variables", "_iterations", "_learning_rate")
