"""The variables of a loss scale, and the record of the gradients scaled by it.

The owner creates the variables, so that its checkpoints name them.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.kinds import Model, Optimizer, Tensor, Variable
from tfamp.core.loss_scale import LossScale, LossScaleState, next_state
from tfamp.core.messages import described
from tfamp.interop.keras_hooks import as_tensor, built_for
from tfamp.training.gradients import Gradients, dtype_name, on_every_replica, widened
from tfamp.training.next_values import KeptValues, targets_of


def check_scales_no_loss(optimizer: Optimizer, user: str) -> None:
    """Raises if `optimizer` is not an optimizer, or scales losses itself as `user` does."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            f"{optimizer.name} is a LossScaleOptimizer already; with a {user} the loss would "
            "be scaled twice. Pass its inner_optimizer instead."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"The optimizer for a {user} must be a keras.optimizers.Optimizer, e.g. "
            f"keras.optimizers.Adam(); got {described(optimizer)}"
        )
    factor = optimizer.loss_scale_factor
    if factor is not None:
        raise ValueError(
            f"{optimizer.name} has loss_scale_factor={factor}, so it scales losses itself. "
            f"Create it without; tfamp.LossScaleOptimizer(..., loss_scale={factor}) has a fixed "
            "scale."
        )


def scaled_loss(loss: Tensor, scale: Tensor) -> Tensor:
    """Multiplies a loss by the loss scale, in float32 or wider.

    A float16 loss is cast first: scales from 2**16 on are inf in float16.
    """
    try:
        wide = widened(loss)
    except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        raise TypeError(
            f"The loss must be a float tensor; got {type(loss).__name__}. To scale several "
            "losses, scale each of them."
        ) from error
    if dtype_name(wide) not in FLOAT_DTYPES:
        raise TypeError(f"The loss must be a float tensor; got dtype {dtype_name(wide)}.")
    return wide * ops.cast(scale, wide.dtype)


def advance(variables: LossScaleState, rule: LossScale, finite: Tensor) -> None:
    """Updates a loss scale and its counters after a step whose gradients were `finite` or not.

    Counters that the rule does not use are None.
    """
    # A Python 0 would become an int32, which is compared on the host.
    zero = ops.zeros_like(as_tensor(variables.good_steps))
    before = LossScaleState(*(zero if v is None else as_tensor(v) for v in variables))
    after = next_state(rule, before, finite, ops)
    for variable, old, new in zip(variables, before, after, strict=True):
        if variable is not None and new is not old:
            variable.assign(ops.cast(new, variable.dtype))


class Mark(NamedTuple):
    """A flag in a variable, shared by functions that are traced separately.

    It is set while the variable equals `value`. Where that is a counter, counting
    clears all marks.
    """

    variable: Variable
    value: Tensor

    @property
    def is_set(self) -> Tensor:
        """Whether it is set, a scalar bool tensor."""
        return ops.equal(as_tensor(self.variable), as_tensor(self.value))

    def set(self, where: Tensor = True) -> None:
        """Sets it if a scalar bool holds."""
        value = as_tensor(self.value)
        if where is not True:
            value = ops.where(where, value, as_tensor(self.variable))
        self.variable.assign(value)

    def clear(self) -> None:
        """Clears it, if it is a bool variable."""
        self.variable.assign(not self.value)


class _Known(enum.Enum):
    """Knowledge of a step's gradients when it is called or traced."""

    SCALED = "they are to be divided by the loss scale"
    UNSCALED = "they have been divided by it already"
    WHEN_IT_RUNS = "the marks of the record tell when the step runs"


class GradientRecord:
    """Record of one optimizer's gradients since its last step: unscaled? all finite?

    Calls within one graph are recorded at trace time. The two marks hold them at run time, for
    a step in another graph.

    Args:
        scale: Variable with the loss scale.
        unscaled: Mark of gradients that were unscaled and not applied.
        nonfinite: Mark of unscaled gradients that were not finite.
        in_use: Mark of a scale that a loss was multiplied by, or that was read. Until it is
            set, gradients are taken as they are. None: the scale is always in use.

    Attributes:
        was_used: Whether any call, in a trace that has perhaps not run yet, used the scale.
    """

    def __init__(
        self, scale: Variable, unscaled: Mark, nonfinite: Mark, in_use: Mark | None = None
    ) -> None:
        self._scale, self.unscaled, self.nonfinite = scale, unscaled, nonfinite
        self.in_use = in_use
        self.was_used = in_use is None
        self._calls = _CallsPerGraph()

    @property
    def all_finite(self) -> Tensor:
        """Whether all gradients unscaled since the last step were finite, a bool tensor."""
        return ops.logical_not(self.nonfinite.is_set)

    def finite_before(self, were_unscaled: bool) -> Tensor:
        """Whether gradients that `take` returned were finite when they were unscaled.

        `were_unscaled` says that they surely were; otherwise the mark shows it.
        """
        if were_unscaled:
            return self.all_finite
        return ops.logical_or(self.all_finite, ops.logical_not(self.unscaled.is_set))

    @property
    def last_call(self) -> str | None:
        """The last call in this graph, "scale", "unscale" or "step"; None without one."""
        return self._calls.current().last

    @property
    def was_read_after_scaling(self) -> bool:
        """Whether the scale was read after a loss was scaled, without a step since."""
        return self._calls.current().read_after_scaling

    def unscale(
        self,
        optimizer: Optimizer,
        gradients: list[Tensor],
        variables: Iterable[Variable] | None = None,
        everywhere: bool = False,
    ) -> list[Tensor]:
        """Unscales gradients for an optimizer, once; checks them and records both.

        `variables` are those of the gradients, None if they are not known. `everywhere` makes
        the replicas agree on the check now instead of in their step.
        """
        calls, tensors = self._calls.current(), _tensors(gradients)
        if any(key in calls.tensors for key in tensors):
            raise ValueError(
                "These gradients have been unscaled already since the last apply; unscaling "
                "them again would divide by the loss scale twice. Call get_unscaled_gradients "
                "once on the gradients of each backward pass, then apply_gradients."
            )
        given = None if variables is None else list(variables)
        targets = targets_of(gradients, built_for(optimizer), given)
        unscaled = Gradients(gradients, targets, as_tensor(self._scale)).unscaled().values
        finite = Gradients.of_any(unscaled).all_finite()
        self.nonfinite.set(ops.logical_not(on_every_replica(finite) if everywhere else finite))
        self.unscaled.set()
        calls.last = "unscale"
        calls.kept.add(gradients, targets)
        calls.results.update(_tensors(unscaled))
        calls.tensors.update(tensors | _tensors(unscaled))
        return unscaled

    def take(
        self, gradients: list[Tensor], targets: list[Variable], unscaled: bool | None = None
    ) -> Gradients:
        """Returns gradients for a step, with their remaining divisor.

        `unscaled` is the caller's statement about them, None for none.
        """
        calls = self._calls.end()
        self._calls.current().last = "step"
        if unscaled is None:
            known = self._known_of(gradients, calls)
        else:
            known = _Known.UNSCALED if unscaled else _Known.SCALED
        divided = calls.results
        gradients = calls.kept.put_back(gradients, targets, lambda each: id(each) in divided)
        # The range of the variable's dtype was unknown when they were unscaled.
        low = [dtype_name(target) in LOW_PRECISION for target in targets]
        checked = [
            calls.last == "unscale" and id(gradient) in calls.tensors and not is_low
            for gradient, is_low in zip(gradients, low, strict=True)
        ]
        return Gradients(gradients, targets, self._divisor_of(known, calls), checked)

    def _known_of(self, gradients: list[Tensor], calls: _Calls) -> _Known:
        """Looks at the calls since the last step, which tell about its gradients."""
        # Eager calls may be followed by a step in a function, which only the mark shows.
        if calls.last == "unscale" and not tf.executing_eagerly():
            return _Known.UNSCALED
        # The results of `unscale` themselves stay unscaled whatever was called since.
        values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
        are_results = [id(value) in calls.results for value in values if value is not None]
        if are_results and all(are_results):
            return _Known.UNSCALED
        return _Known.WHEN_IT_RUNS

    def _divisor_of(self, known: _Known, calls: _Calls) -> Tensor:
        """The remaining divisor of gradients; None for unscaled ones."""
        if known is _Known.UNSCALED:
            return None
        scale = as_tensor(self._scale)
        if known is _Known.SCALED:
            return scale
        divisor = ops.where(self.unscaled.is_set, 1.0, scale)
        # Another function may scale a loss after this trace.
        if self.in_use is not None and not calls.uses_scale:
            divisor = ops.where(self.in_use.is_set, divisor, 1.0)
        return divisor

    def forget_here(self) -> None:
        """Forgets the calls in this graph."""
        self._calls.end()

    def note_scaled_loss(self) -> None:
        """Forgets that gradients were unscaled and not applied: they are not of this loss.

        They were looked at, or part of this loss, or of another backward pass of the same step,
        whose gradients will be unscaled too.
        """
        calls = self._calls.current()
        calls.last, calls.read_after_scaling = "scale", False
        self.unscaled.clear()
        self._note_use(calls)

    def note_read_scale(self) -> None:
        """Records that the scale was read, perhaps to multiply a loss by it."""
        calls = self._calls.current()
        calls.read_after_scaling |= calls.last == "scale"
        self._note_use(calls)

    def _note_use(self, calls: _Calls) -> None:
        calls.uses_scale = self.was_used = True
        if self.in_use is not None:
            self.in_use.set()


_WEAK = weakref.WeakValueDictionary


@dataclass
class _Calls:
    """Calls since the last step, in one graph or in eager mode."""

    last: str | None = None
    # A loss was scaled, or the scale read; the latter after the former.
    uses_scale: bool = False
    read_after_scaling: bool = False
    # Gradients that were unscaled and the results, by identity: one is finite if the other is.
    # Weak references, as a record must not keep a step's gradients alive.
    tensors: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=_WEAK)
    results: weakref.WeakValueDictionary[int, Tensor] = field(default_factory=_WEAK)
    kept: KeptValues = field(default_factory=KeptValues)


def _tensors(gradients: Iterable[Tensor]) -> dict[int, Tensor]:
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return {id(value): value for value in values if tf.is_tensor(value)}


class _CallsPerGraph(threading.local):
    """The calls per graph, and those in eager mode, per thread.

    Per graph they hold under retracing and in several functions; per thread because the
    replicas of a `MirroredStrategy` are traced in threads of their own.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_graph: weakref.WeakKeyDictionary[Any, _Calls] = weakref.WeakKeyDictionary()

    def _here(self) -> Any:
        return self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def current(self) -> _Calls:
        return self._by_graph.setdefault(self._here(), _Calls())

    def end(self) -> _Calls:
        return self._by_graph.pop(self._here(), _Calls())

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallsPerGraph:
        return _CallsPerGraph()  # A copy has not been called.


def build_optimizer(model: Model) -> None:
    """Creates the optimizer's state: a step that creates variables is traced twice.

    Not with a train step of the user's, which may train a part of the weights.
    """
    if type(model).train_step is not keras.Model.train_step:
        return
    is_ready = model.built and model.compiled and model.trainable_variables
    if is_ready and not model.optimizer.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
