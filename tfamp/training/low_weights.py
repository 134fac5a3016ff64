"""Weights and slots that an optimizer with a compiled rule keeps in 16 bits and updates in float32.

What is stored is a `Form`. `training.fused_update` reads, updates and rounds it in one pass.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.interop.keras_hooks import as_tensor, native
from tfamp.interop.keras_optimizers import key_of
from tfamp.interop.patching import wrap_method
from tfamp.training.fused_update import RULED, unruled
from tfamp.training.gradients import dtype_name, is_next_value, update_everywhere, variable_name
from tfamp.training.rounding import Chance, Form, form_of
from tfamp.training.weights import PlainWeights


@dataclass(eq=False)
class StoredWeight:
    """What an optimizer is built for in the place of a low variable: a float32 number in a form.

    Attributes:
        variable: The variable, which is the first of what is stored.
        _unique_id: By which Keras's optimizers know it.
        form: How the float32 number is stored.
        beside: The variables that are stored beside it.
        number: Its own among the optimizer's.
    """

    variable: Any
    _unique_id: Any
    form: Form
    beside: Sequence[Any]
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
        """Where it is."""
        return str(native(self.variable).device)

    @property
    def handles(self) -> list[Any]:
        """The resources of what is stored, on a replica its own."""
        return [native(each).handle for each in (self.variable, *self.beside)]

    def read(self) -> Any:
        """The float32 value, outside of a replica too, where there are no resources."""
        parts = (native(each) for each in (self.variable, *self.beside))
        return self.form.decode(*map(tf.convert_to_tensor, parts))

    def assign(self, value: Any) -> None:
        """Assigns a float32 value on all replicas."""

        def on_device(target: Any, value: Any, *others: Any) -> None:
            value = tf.convert_to_tensor(value)
            words = functools.partial(Chance(0, 0).words, tf.constant(self.number), value)
            parts = self.form.encode(value, words)
            for each, part in zip((target, *others), parts, strict=True):
                each.assign(part)

        update_everywhere(self.variable, on_device, (value, *self.beside))


class RoundedWeights(PlainWeights):
    """Low-precision weights without masters: what is stored beside them, if anything, is small.

    Args:
        optimizer: The optimizer that updates them; not built.
        how: What is done about the rounding of weights: "stochastic" or "split".
        slots: The dtype of the optimizer's slots.
        seed: A scalar integer variable with the seed of all random rounding.
    """

    def __init__(
        self, optimizer: keras.optimizers.Optimizer, how: str, slots: str, seed: Any
    ) -> None:
        super().__init__(optimizer)
        self.how, self.slots, self.seed = how, slots, seed
        self._by_key: dict[Any, StoredWeight] = {}

    def create(self, variables: Sequence[Any]) -> list[keras.Variable]:
        """Creates what is stored beside variables, once, and returns it."""
        optimizer = self.optimizer
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
            key = key_of(optimizer)(variable)
            self._by_key[key] = StoredWeight(variable, key, form, beside, number)
            created += beside
        return created

    def targets(self, variables: Sequence[Any]) -> list[Any]:
        """Returns what stands for each variable that is low, else the variable."""
        key = key_of(self.optimizer)
        return [self._by_key.get(key(v), v) for v in variables]

    def build(self, variables: Sequence[Any]) -> None:
        """Builds the optimizer, whose slots of low variables get the dtype of `slots`."""
        add = functools.partial(_add_slot, self.slots, self.optimizer)
        undo = wrap_method(self.optimizer, "add_variable_from_reference", add)
        try:
            super().build(variables)
        finally:
            undo()

    def exact_values(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the float32 values of what is stored; it holds whatever is assigned."""
        targets = self.targets(variables)
        return [each.read() if isinstance(each, StoredWeight) else each for each in targets]

    def set_exact(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Stores float32 values for variables."""
        for target, value in zip(self.targets(variables), values, strict=True):
            if isinstance(target, StoredWeight):
                target.assign(tf.cast(tf.convert_to_tensor(value), tf.float32))

    def chance(self) -> Chance:
        """Returns what decides the rounding of the next update."""
        return Chance(as_tensor(self.seed), as_tensor(self.optimizer._iterations))

    def check_all_updated(self, variables: Sequence[Any]) -> None:
        """Raises if variables that are stored low were left to the optimizer's own update."""
        left = [each.path for each in variables if isinstance(each, StoredWeight)]
        if left:
            check_rounded(self.optimizer, self.slots)
            raise ValueError(
                f"weight_rounding={self.how!r} cannot update {left[0]} here: it goes with eager "
                "execution and tf.function on one device, and with MirroredStrategy and "
                "MultiWorkerMirroredStrategy; got "
                f"{type(tf.distribute.get_strategy()).__name__}. Give master_weights=True instead."
            )


def check_rounded(optimizer: Any, slots: str) -> None:
    """Raises if an optimizer has no compiled rule, or slots cannot hold what it keeps."""
    if (other := unruled(optimizer)) is not None:
        raise ValueError(
            f"weight_rounding goes with {', '.join(RULED[:-1])} and {RULED[-1]} as Keras has them, "
            f"whose updates round as they are compiled; got {other}. Use one of these, or give "
            "master_weights=True instead of weight_rounding."
        )
    if slots == "float16" and not isinstance(optimizer, _HELD_BY_FLOAT16):
        raise ValueError(
            f"slots='float16' cannot hold what {optimizer.name} keeps: squares of gradients under "
            "2.4e-4 are zero in float16, and divide the step. Give slots='bfloat16', which takes "
            "as much memory and has float32's range."
        )


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
    if not isinstance(reference_variable, StoredWeight):
        return original(reference_variable, name=name, initializer=initializer)
    strategy = tf.distribute.get_strategy()
    with strategy.extended.colocate_vars_with(native(reference_variable.variable)):
        return optimizer.add_variable(
            shape=reference_variable.shape,
            initializer=initializer,
            dtype=slots,
            name=f"{reference_variable.path.replace('/', '_')}_{name or 'var'}",
        )
