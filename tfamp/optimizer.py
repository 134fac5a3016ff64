"""`LossScaleOptimizer`: a Keras optimizer wrapper whose loss scaling cannot corrupt a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf
from keras import ops

from tfamp.core import options
from tfamp.core.kinds import Optimizer, Tensor, Variable
from tfamp.core.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
    LossScale,
    LossScaleState,
    loss_scale_of_keras_2,
    resolve_loss_scale,
)
from tfamp.core.names import ComputeDtype, LowDtype, WeightRounding
from tfamp.core.options import GradClip
from tfamp.interop.keras_hooks import as_tensor, native, require_tensorflow, runs_tensorflow
from tfamp.interop.keras_saving import (
    INNER_SETTINGS,
    RestoresInner,
    read_by_saving,
    read_optimizer,
    wrapper_settings,
)
from tfamp.interop.tf_private import as_written
from tfamp.training import gradients as gradient_lib
from tfamp.training import next_values, scaling, skipped_steps
from tfamp.training.gradients import Gradients, check_in_replica, outside_the_graph
from tfamp.training.scaling_warnings import ScalingWarnings
from tfamp.training.weights import MasterWeights, PlainWeights, RoundedWeights, apply_if_finite

_Loss = TypeVar("_Loss")
_Observer: TypeAlias = Callable[[list[Tensor], list[Variable], Tensor | None, Tensor], None]


@keras.saving.register_keras_serializable(package="tfamp")
class LossScaleOptimizer(RestoresInner, keras.optimizers.LossScaleOptimizer):
    """Wraps a Keras optimizer with loss scaling, so that float16 gradients do not underflow.

    The loss is multiplied by a scale before the gradients are taken and the gradients are
    divided by it before they are applied. A step in which any gradient on any replica is inf or
    NaN is skipped: no weight, no slot variable, no moving average and no iteration count
    changes, and the scale backs off. After `dynamic_growth_steps` finite steps in a row it
    grows. It never leaves [`min_scale`, `max_scale`].

    `model.fit` needs nothing else. In a custom loop scale the loss with `get_scaled_loss`, take
    the gradients, and either pass them to `apply_gradients` as they are or unscale them first
    with `get_unscaled_gradients`, for example to clip them.

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, with the methods of
    `tf.keras.mixed_precision.LossScaleOptimizer`. It is a subclass of
    `keras.optimizers.LossScaleOptimizer`, so `compile` does not wrap it again.

    Args:
        inner_optimizer: The `keras.optimizers.Optimizer` to wrap. It is not modified.
        loss_scale: A `FixedLossScale` or `DynamicLossScale`; a number means a fixed scale. None
            builds a `DynamicLossScale` from the arguments below.
        dynamic: False keeps the scale at `initial_scale`; overflowing steps are still skipped.
        initial_scale: Scale of the first step; None, as in Keras 2, means the default.
        dynamic_growth_steps: Finite steps in a row before the scale grows; None: the default.
        growth_factor: Growth factor of the scale, greater than 1.
        backoff_factor: Factor of the scale after an overflow, between 0 and 1.
        hysteresis: Number of overflows in a row from which on the scale backs off.
        min_scale: Smallest scale.
        max_scale: Largest scale.
        aggregate_in_float16: True is `aggregate_in="float16"`.
        master_weights: Whether to update float16 and bfloat16 variables through float32 copies,
            kept and saved with the optimizer. None does without `weight_rounding`, if Keras
            runs on TensorFlow and `inner_optimizer` is not built yet.
        weight_rounding: Alternative to master weights for float16 and bfloat16 variables, whose
            small updates rounding to nearest would lose. "stochastic" rounds to one of the two
            neighbours at random, unbiased. "split", for bfloat16, stores the lower 16 bits of a
            float32 master next to the weight, its upper 16 bits: training equals
            `master_weights` bit for bit, in 4 bytes a weight instead of 6. float32 variables
            are updated as usual. Supported by Keras's SGD, Adam, AdamW, Lion, Nadam and
            Adafactor.
        slots: With `weight_rounding`, the dtype of the inner optimizer's slots for
            low-precision variables: "bfloat16", "float16" or "float32"; the first two are
            rounded stochastically. None is "float32" for "split", else "bfloat16".
        grad_clip: A `GradClip`, a dict of its fields or a number for the Euclidean norm: clips
            the unscaled gradients, summed over the replicas, all together.
        aggregate_in: Dtype in which the gradients of several replicas are sent to be summed:
            16 bits are half of float32's bytes. "float16" sums as float16, at the current scale;
            unscales the sum in float32, then checks it. "bfloat16", which needs no scale, sums in
            float32 and rounds the sum to bfloat16. None sends them in float32.
        name: Name of the optimizer.

    Raises:
        TypeError: `inner_optimizer` is not a Keras optimizer, or an argument has a wrong type.
        ValueError: `inner_optimizer` scales losses itself, or a number is out of range, or
            `loss_scale` is given together with the arguments it replaces, or `grad_clip` or
            `aggregate_in` with an inner optimizer that accumulates gradients, or
            `aggregate_in` is another dtype or contradicts `aggregate_in_float16`, or
            `weight_rounding` with `master_weights` or another optimizer, or `slots` without
            `weight_rounding`, or `dynamic=False` with an argument for a changing scale.

    Warns:
        TfampWarning: 16-bit variables have no float32 copies, and their slots cannot hold the
            state of `inner_optimizer`; when it is built, with what to do.

    Example:
        >>> import keras, numpy, tfamp
        >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)
        >>> weight = keras.Variable(1.0)
        >>> gradient = numpy.float32(optimizer.get_scaled_loss(1.0))
        >>> _ = optimizer.apply_gradients([(gradient, weight)])
        >>> float(weight)
        0.5
    """

    # Called by `apply` with gradients, variables, the remaining divisor of the gradients (None:
    # unscaled) and whether all are finite. A NumericsMonitor adds one while it records;
    # functions traced before do not call it.
    gradient_observers: tuple[_Observer, ...] = ()

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        *,
        loss_scale: LossScale | float | None = None,
        dynamic: bool = True,
        initial_scale: float | None = DynamicLossScale.initial_scale,
        dynamic_growth_steps: int | None = DynamicLossScale.growth_steps,
        growth_factor: float = DynamicLossScale.growth_factor,
        backoff_factor: float = DynamicLossScale.backoff_factor,
        hysteresis: int = DynamicLossScale.hysteresis,
        min_scale: float = DynamicLossScale.min_scale,
        max_scale: float = DynamicLossScale.max_scale,
        aggregate_in_float16: bool = False,
        master_weights: bool | None = None,
        weight_rounding: WeightRounding | None = None,
        slots: ComputeDtype | None = None,
        grad_clip: GradClip | Mapping[str, Any] | float | None = None,
        aggregate_in: LowDtype | None = None,
        name: str | None = None,
    ) -> None:
        scaling.check_scales_no_loss(inner_optimizer, "LossScaleOptimizer")
        clip = options.resolve_grad_clip(grad_clip)
        aggregate_in = options.resolve_aggregation(aggregate_in, aggregate_in_float16)
        how = options.resolve_weight_rounding(weight_rounding, slots, master_weights)
        _check_features(inner_optimizer, clip, aggregate_in is not None, master_weights, how)
        built = DynamicLossScale(
            # Keras 2's class has None for both, and programs pass it on.
            initial_scale=_or_default(initial_scale, DynamicLossScale.initial_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_steps=_or_default(dynamic_growth_steps, DynamicLossScale.growth_steps),
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        rule = resolve_loss_scale(loss_scale, dynamic, built)
        # Not Keras's LossScaleOptimizer.__init__, which clears the inner loss_scale_factor.
        keras.optimizers.Optimizer.__init__(self, learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.rule = rule
        self.grad_clip = clip
        self.aggregate_in = aggregate_in
        self.master_weights = master_weights
        self.weight_rounding, self.slots = weight_rounding, slots
        self._create_variables()
        # Used by `prepare` too, and `gradient_record` by GradientAccumulator.
        self.stored_weights = self._stored_weights(how)
        if runs_tensorflow():
            skipped_steps.watch(self)
            next_values.watch_tapes(self)

    def _create_variables(self) -> None:
        """Creates the state variables; checkpoints find them by the names of the attributes."""
        # Not in build: a function traced before the first apply would hold a constant scale.
        self.dynamic_scale = self._scalar("dynamic_scale", "float32", self.initial_scale)
        self.step_counter = self._scalar("step_counter", "int", 0)
        self._skipped = self._scalar("skipped_steps", "int", 0)
        self._consecutive = self._scalar("consecutive_skipped_steps", "int", 0)
        self._last_finite = self._scalar("last_step_finite", "bool", True)
        # State of get_unscaled_gradients for an apply in another function.
        self._unscaled_pending = self._scalar("unscaled_pending", "bool", False)
        self._unscaled_finite = self._scalar("unscaled_finite", "bool", True)
        clips = self.grad_clip is not None
        self._norm = self._scalar("last_gradient_norm", "float32", 0.0) if clips else None
        self.gradient_record = scaling.GradientRecord(
            self.dynamic_scale,
            unscaled=scaling.Mark(self._unscaled_pending, True),
            nonfinite=scaling.Mark(self._unscaled_finite, False),
            in_use=scaling.Mark(self._make_in_use(), True),
        )
        self.scaling_warnings = ScalingWarnings(self.name, self.gradient_record)

    @staticmethod
    def _make_in_use() -> keras.Variable:
        """A flag whether losses are scaled, a fact of the program and not of its state.

        It is in no file: a loop that scales nothing may go on from a `fit` that does.
        """
        return keras.Variable(False, dtype="bool", trainable=False, aggregation="none")

    def _stored_weights(self, how: tuple[str, str] | None) -> PlainWeights:
        if how is None:
            return self._masters_or_plain()
        # Python's generator, which `keras.utils.set_random_seed` seeds, as Keras draws its
        # seeds. In checkpoints, so that a resumed run rounds alike.
        self._rounding_seed = self._scalar("rounding_seed", "int", random.randrange(2**31))
        return RoundedWeights(self.inner_optimizer, *how, self._rounding_seed)

    def _masters_or_plain(self) -> PlainWeights:
        inner, wanted = self.inner_optimizer, self.master_weights
        if wanted is None and not runs_tensorflow():
            backend = keras.config.backend()
            return PlainWeights(
                inner,
                f"Master weights need Keras's TensorFlow backend; this is {backend!r}: keep the "
                "variables in float32, as under 'mixed_bfloat16', or use SGD.",
            )
        if wanted is False:
            return PlainWeights(inner)
        return MasterWeights(inner, required=wanted is not None)

    def _scalar(self, name: str, dtype: str, value: float | bool) -> keras.Variable:
        start = keras.initializers.Constant(value)
        # Every replica assigns the same value to its copy: nothing is all-reduced.
        return self.add_variable((), initializer=start, dtype=dtype, aggregation="none", name=name)

    # ---- Building ----------------------------------------------------------------------------

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the inner optimizer's variables.

        Args:
            var_list: The trainable variables. An empty list does nothing: the first apply
                builds the optimizer then.
        """
        # Keras builds with an empty list when it loads a compiled model from an .h5 file. Built
        # for no variables, the optimizer would refuse the model's.
        if not var_list:
            return
        created = self.stored_weights.create(var_list)
        for variable in created:
            self._track_variable(variable)
        if created:
            self._master_list = created  # For tf.train.Checkpoint, which goes by attributes.
        if not self.inner_optimizer.built:
            self.stored_weights.build(var_list)
        self._load_waiting()
        # Not Keras's build, which would create state by the settings of the inner optimizer.
        for index, variable in enumerate(var_list):
            self._trainable_variables_indices[self._var_key(variable)] = index
        # Not Keras's __setattr__, which would track the list as state.
        object.__setattr__(self, "_trainable_variables", list(var_list))
        self.built = True

    def _take_over_masters(self, other: LossScaleOptimizer) -> None:
        """Uses the masters of another wrapper, for which the inner optimizer was built."""
        if self.master_weights is False or self.weight_rounding is not None:
            raise ValueError(
                f"{self.inner_optimizer.name} was built for {len(other.master_variables)} master "
                "weights, which master_weights=False or weight_rounding leave out. Give a new "
                "optimizer, or keep the masters: leave both settings out."
            )
        self.stored_weights = other.stored_weights
        self._master_list = other.master_variables
        for variable in self._master_list:
            self._track_variable(variable)

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from the inner optimizer's weight decay; call it before it is built.

        Args:
            var_list: The variables to exclude.
            var_names: Parts of names; variables whose name contains one are excluded.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Assigns the inner optimizer's moving averages to the weights, as `fit` does at its end.

        Args:
            var_list: The trainable variables.
        """
        self.stored_weights.finalize(var_list)

    # ---- Scaling -----------------------------------------------------------------------------

    @as_written
    def get_scaled_loss(self, loss: _Loss) -> _Loss:
        """Multiplies the loss by the current scale.

        Args:
            loss: Float tensor of any shape, or a function without arguments that returns it.

        Returns:
            The scaled loss, float32 (float64 for a float64 loss), or a function returning it.

        Raises:
            TypeError: `loss` is neither.

        Example:
            >>> import keras, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
            >>> float(optimizer.get_scaled_loss(2.0))
            16.0
        """
        if callable(loss) and not keras.ops.is_tensor(loss):
            compute: Callable[[], Tensor] = loss
            return lambda: self.scale_loss(compute())  # type: ignore[return-value]
        return self.scale_loss(loss)

    @as_written
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies the loss by the current scale; `model.fit` calls it.

        Args:
            loss: Float tensor of any shape.

        Returns:
            The scaled loss, float32 (float64 for a float64 loss).

        Raises:
            TypeError: `loss` is not a float tensor.
        """
        scaled = scaling.scaled_loss(loss, as_tensor(self.dynamic_scale))
        self.gradient_record.note_scaled_loss()
        return scaled

    @as_written
    def get_unscaled_gradients(
        self, grads: Iterable[Any], *, variables: Iterable[Any] | None = None
    ) -> list[Any]:
        """Divides gradients of a scaled loss by the current scale.

        "Gradients" of variables with `overwrite_with_gradient`, as in Keras's float8 layers,
        are their next values and stay as they are.

        The gradients are checked here and the result is stored until the next apply, so that
        changing them in between, by clipping for example, cannot hide an overflow. May be
        called several times before one apply, for the gradients of several backward passes.

        Args:
            grads: Float tensors, `tf.IndexedSlices` or None, as `tape.gradient` returns them.
            variables: Their variables, in the same order. Needed for float8 layers only, and
                only for other gradients than results of `tape.gradient` in this function.

        Returns:
            The unscaled gradients, in the same order.

        Raises:
            TypeError: `grads` is not a list or tuple of gradients.
            ValueError: One of them has been unscaled already, or does not fit its variable.

        Example:
            >>> import keras, tensorflow as tf, tfamp
            >>> optimizer = tfamp.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
            >>> [float(g) for g in optimizer.get_unscaled_gradients([tf.constant(24.0)])]
            [3.0]
        """
        grads = gradient_lib.listed(grads, "get_unscaled_gradients")
        if self._divides:
            self.scaling_warnings.before_unscaling()
        return self.gradient_record.unscale(self, grads, variables)

    # ---- Applying ----------------------------------------------------------------------------

    @as_written
    def minimize(
        self, loss: Any, var_list: Sequence[Any], tape: tf.GradientTape | None = None
    ) -> None:
        """Scales the loss, takes its gradients and applies them.

        Args:
            loss: A function without arguments that returns the loss, or the loss itself,
                computed under `tape`.
            var_list: The variables to update.
            tape: The tape that recorded `loss`, if `loss` is a tensor.

        Raises:
            ValueError: `loss` is a tensor and `tape` is missing, or `var_list` is empty.
        """
        variables = list(var_list)
        is_function = callable(loss) and not ops.is_tensor(loss)
        if not is_function and tape is None:
            raise ValueError(
                "minimize needs the tape that recorded the loss, or the loss as a function "
                "without arguments; got a loss tensor and tape=None."
            )
        # The tape is entered again to record the multiplication.
        with tape or tf.GradientTape() as recording:
            scaled = self.scale_loss(loss() if is_function else loss)
        gradients = recording.gradient(scaled, variables)
        self.apply(gradients, variables, unscaled=False)

    @as_written
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], *, unscaled: bool | None = None
    ) -> Any:
        """Applies gradients, unless one of them is not finite.

        Args:
            grads_and_vars: Pairs of gradient and variable.
            unscaled: Whether the gradients have been unscaled. None: they have if
                `get_unscaled_gradients` was called since the last apply.

        Returns:
            `iterations`, as Keras's optimizers do.

        Raises:
            ValueError: All gradients are missing, or a shape does not match its variable, or
                the optimizer was built for other variables.
            TypeError: An element is not a pair of a float gradient and a variable.
        """
        grads, variables = gradient_lib.split_pairs(grads_and_vars, "apply_gradients")
        self.apply(grads, variables, unscaled=unscaled)
        return self.iterations

    @as_written
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        *,
        unscaled: bool | None = None,
    ) -> None:
        """Applies gradients, unless one of them is not finite.

        Args:
            grads: Float tensors, `tf.IndexedSlices` or None.
            trainable_variables: The variables, in the same order. None: those the optimizer was
                built with.
            unscaled: As in `apply_gradients`.

        Raises:
            ValueError: As in `apply_gradients`, or called outside a replica.
            TypeError: As in `apply_gradients`.
        """
        if trainable_variables is None:
            trainable_variables = self._trainable_variables
        grads, variables = list(grads), list(trainable_variables)
        gradient_lib.check_gradients(grads, variables)
        if unscaled is not None:
            options.checked_flag("unscaled", unscaled)
        check_in_replica()
        if not self.built:
            outside_the_graph(lambda: self.build(variables))
        self._check_known(variables)
        if unscaled is None and self._divides:
            self.scaling_warnings.before_step(grads, variables)
        if not unscaled and self._divides:
            scale, known = as_tensor(self.dynamic_scale), unscaled is False
            self.scaling_warnings.before_dividing(self, grads, scale, known)
        record, weights = self.gradient_record, self.stored_weights
        # Without a scale nothing shows whether these are the gradients that were unscaled.
        has_scale = self.rule != FixedLossScale(1.0)
        scaled = record.take(grads, weights.targets(variables), unscaled if has_scale else True)
        were_unscaled = bool(unscaled) or (has_scale and scaled.divisor is None)
        gradients, finite, norm = gradient_lib.summed_checked_clipped(
            scaled, record.finite_before(were_unscaled), self.grad_clip, self._aggregation()
        )
        for observe in self.gradient_observers:
            observe(grads, variables, scaled.divisor, finite)
        if self._norm is not None:
            self._norm.assign(norm)
        skips = self.rule.skip_nonfinite
        apply_if_finite(weights, gradients, finite, skips=skips, record=self._record_step)
        skipped_steps.note_step(self)

    def _aggregation(self) -> gradient_lib.Aggregation | None:
        if self.aggregate_in is None:
            return None
        if self.aggregate_in == "bfloat16":
            return Gradients.summed_in_bfloat16
        scale = as_tensor(self.dynamic_scale)
        return lambda gradients: gradients.summed_in_float16(scale)

    def _check_known(self, variables: list[Variable]) -> None:
        # Some releases of Keras fail while they format this message.
        for variable in variables:
            if self._var_key(variable) not in self._trainable_variables_indices:
                raise ValueError(
                    f"Unknown variable {gradient_lib.variable_name(variable)}: {self.name} was "
                    f"built for {len(self._trainable_variables)} other variables. Create a new "
                    "optimizer for a new set of variables, or build it with all of them first."
                )

    @property
    def _divides(self) -> bool:
        """Whether the scale is ever another than 1."""
        return self.dynamic or self.initial_scale != 1.0

    def _record_step(self, finite: Tensor) -> None:
        """Updates the loss scale and its counters after a step with finite gradients or not."""
        counters = self.step_counter, self._skipped, self._consecutive
        scaling.advance(LossScaleState(self.dynamic_scale, *counters), self.rule, finite)
        self._last_finite.assign(finite)
        self.gradient_record.unscaled.clear()
        self.gradient_record.nonfinite.clear()

    def stateless_apply(
        self,
        optimizer_variables: Sequence[Any],
        grads: Sequence[Any],
        trainable_variables: Sequence[Any],
    ) -> tuple[list[Any], list[Any]]:
        """Returns the values that `apply` would assign; for Keras's JAX backend.

        Args:
            optimizer_variables: Values of `variables`, in that order.
            grads: Gradients of the scaled loss, or of the loss itself if none has been scaled.
            trainable_variables: Values of the variables the optimizer was built with.

        Returns:
            The new values of the trainable variables and of `variables`.

        Raises:
            ValueError: The optimizer is not built, or the backend is TensorFlow, where Keras's
                optimizers do not support it.
        """
        if not self.built:
            raise ValueError(f"{self.name} must be built before stateless_apply: call build.")
        mapping = list(zip(self.variables, optimizer_variables, strict=True))
        inner_values = list(optimizer_variables[len(self._variables) :])
        with keras.StatelessScope(state_mapping=mapping) as scope:
            # Functions without state have no flag to read: what was traced before decides.
            scale = self.dynamic_scale.value if self.gradient_record.was_used else None
            gradients = Gradients(list(grads), self._trainable_variables, scale).unscaled()
            finite = gradients.all_finite()
            self._record_step(finite)
        new_state = [scope.get_current_value(variable) for variable in self._variables]

        def update() -> tuple[list[Tensor], list[Tensor]]:
            return self.inner_optimizer.stateless_apply(
                inner_values, gradients.values, trainable_variables
            )

        new_trainable, new_inner = ops.cond(
            ops.logical_or(finite, not self.rule.skip_nonfinite),
            update,
            lambda: (list(trainable_variables), inner_values),
        )
        return new_trainable, new_state + list(new_inner)

    # ---- State -------------------------------------------------------------------------------

    def get_scale(self) -> Any:
        """Returns the current loss scale to scale a loss with, a scalar float32 tensor.

        From the first call on, `apply` divides gradients by the scale, as after a scaled loss.
        """
        self.gradient_record.note_read_scale()
        return as_tensor(self.dynamic_scale)

    @property
    def loss_scale(self) -> Any:
        """The current loss scale, a scalar float32 tensor; reading it counts as `get_scale`."""
        # Keras and TensorFlow read every attribute of what they save.
        return as_tensor(self.dynamic_scale) if read_by_saving() else self.get_scale()

    @property
    def dynamic(self) -> bool:
        """Whether the scale adapts."""
        return isinstance(self.rule, DynamicLossScale)

    @property
    def aggregate_in_float16(self) -> bool:
        """Whether the gradients of several replicas are sent, and summed, as float16."""
        return self.aggregate_in == "float16"

    @property
    def initial_scale(self) -> float:
        """The scale of the first step."""
        return self.rule.initial_scale

    @property
    def dynamic_growth_steps(self) -> int | None:
        """Finite steps in a row before the scale grows; None for a fixed scale."""
        return self.rule.growth_steps if isinstance(self.rule, DynamicLossScale) else None

    @property
    def dynamic_counter(self) -> Any:
        """Finite steps since the scale last changed, a scalar integer tensor."""
        return as_tensor(self.step_counter)

    @property
    def optimizers(self) -> list[keras.optimizers.Optimizer]:
        """The optimizers of an inner `MultiOptimizer`, whose learning rates Keras's callbacks set.

        Raises:
            AttributeError: The inner optimizer is a single one; these callbacks test for it.
        """
        parts: list[keras.optimizers.Optimizer] = self.inner_optimizer.optimizers
        return parts

    @property
    def iterations(self) -> Any:
        """Steps applied so far, the inner optimizer's variable; on several replicas a tensor."""
        count = self.inner_optimizer.iterations
        # A variable with a value per replica does not convert to a number.
        distributed = isinstance(native(count), tf.distribute.DistributedValues)
        return as_tensor(count) if distributed else count

    @property
    def skipped_steps(self) -> Any:
        """Steps skipped so far because a gradient was not finite, a scalar integer tensor."""
        return as_tensor(self._skipped)

    @property
    def consecutive_skipped_steps(self) -> Any:
        """Steps skipped since the last finite one, a scalar integer tensor."""
        return as_tensor(self._consecutive)

    @property
    def last_step_finite(self) -> Any:
        """Whether every gradient of the last step was finite, a scalar bool tensor."""
        return as_tensor(self._last_finite)

    @property
    def last_gradient_norm(self) -> Any:
        """Norm of the last step's unscaled gradients before clipping, of `grad_clip`'s type.

        A scalar float32 tensor: the norm of the sum over the replicas, not finite if the step
        was skipped. None without `grad_clip`.
        """
        return None if self._norm is None else as_tensor(self._norm)

    @property
    def master_variables(self) -> list[keras.Variable]:
        """The float32 master weights, in the order of their variables; empty without any."""
        stored = self.stored_weights
        return stored.masters if isinstance(stored, MasterWeights) else []

    # ---- Saving ------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, serializable."""
        clip = self.grad_clip
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "loss_scale": asdict(self.rule),
            "aggregate_in": self.aggregate_in,
            "master_weights": self.master_weights,
            "weight_rounding": self.weight_rounding,
            "slots": self.slots,
            "grad_clip": None if clip is None else clip.to_dict(),
        }

    def _only_in_saved_models(self) -> dict[str, Any]:
        mark = self.gradient_record.in_use
        return {} if mark is None else {"scale_is_in_use": mark.variable}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Makes an optimizer from `get_config`'s result, which is not modified.

        Args:
            config: The configuration, or one of a `keras.optimizers.LossScaleOptimizer` of any
                release of Keras 3, or of Keras 2 and tf_keras. The inner optimizer may be a
                name that `keras.optimizers.get` takes, such as "adam".
            custom_objects: Names of user-defined classes of the inner optimizer.

        Returns:
            The optimizer, without its state.

        Raises:
            TypeError: It has no inner optimizer.

        Warns:
            TfampWarning: It has a setting of an optimizer, such as `clipnorm`, that Keras's
                wrapper does not apply either.

        Example:
            >>> import keras, tfamp
            >>> theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
            >>> old = {**theirs.get_config(), "clipnorm": None, "use_ema": False}
            >>> tfamp.LossScaleOptimizer.from_config(old).initial_scale
            32768.0
        """
        arguments = wrapper_settings(config)
        if "optimizer" in arguments:
            arguments["inner_optimizer"] = arguments.pop("optimizer")
            arguments["loss_scale"] = loss_scale_of_keras_2(arguments["loss_scale"])
        inner = read_optimizer(arguments.pop("inner_optimizer", None), custom_objects)
        if isinstance(saved := arguments.pop("loss_scale", None), Mapping):
            kind = FixedLossScale if "scale" in saved else DynamicLossScale
            saved = kind(**saved)
        return cls(inner, loss_scale=saved, **arguments)


def _inner_setting(name: str) -> property:
    """Returns a property that reads a setting of the inner optimizer and cannot be set."""

    def read(self: LossScaleOptimizer) -> Any:
        return getattr(self.inner_optimizer, name)

    def refuse(self: LossScaleOptimizer, value: Any) -> None:
        if "inner_optimizer" in vars(self):  # Keras's constructor sets its defaults before.
            raise AttributeError(
                f"{name} is a setting of the optimizer inside {self.name}; got {value!r}. Set "
                f"it there: optimizer.inner_optimizer.{name} = {value!r}"
            )

    return property(read, refuse, doc=f"The inner optimizer's `{name}`; set it there.")


for _name in INNER_SETTINGS.keys() - {"learning_rate"}:
    setattr(LossScaleOptimizer, _name, _inner_setting(_name))


def continue_from(optimizer: LossScaleOptimizer, other: LossScaleOptimizer) -> None:
    """Copies the counters of another optimizer and, if the rule is the same, its scale.

    Takes over its masters if both wrap the same optimizer, which was built for them.

    Raises:
        ValueError: The optimizer was chosen to have no masters.
    """
    if other.inner_optimizer is optimizer.inner_optimizer and other.master_variables:
        optimizer._take_over_masters(other)
    optimizer._skipped.assign(other._skipped)
    optimizer._consecutive.assign(other._consecutive)
    if other.rule == optimizer.rule:
        optimizer.dynamic_scale.assign(other.dynamic_scale)
        optimizer.step_counter.assign(other.step_counter)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _check_features(
    inner: Optimizer, clip: GradClip | None, in_float16: Any, masters: Any, rounding: Any
) -> None:
    """Raises if the inner optimizer or Keras's backend does not support a feature."""
    of_sums = options.checked_flag("aggregate_in_float16", in_float16) or clip is not None
    if masters is not None:
        options.checked_flag("master_weights", masters)
    of_weights = bool(masters) or rounding is not None
    if of_sums or of_weights:
        require_tensorflow(
            "tfamp.LossScaleOptimizer with grad_clip, aggregate_in, master_weights or "
            "weight_rounding",
            "tfamp.LossScaleOptimizer without them",
        )
    if of_sums and inner.gradient_accumulation_steps:
        raise ValueError(
            f"{inner.name} has "
            f"gradient_accumulation_steps={inner.gradient_accumulation_steps}: grad_clip and "
            "aggregate_in would act on the gradients of every micro-batch instead of their mean. "
            "Create it without, and accumulate with tfamp.GradientAccumulator."
        )
