"""The gradients of a step on their way to the weights: summed, checked, clipped, unscaled.

Every stage takes `Gradients` and returns new ones; `summed_checked_clipped` is their order.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras import ops

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION, float_format
from tfamp.core.kinds import Handle, Optimizer, Tensor, Variable
from tfamp.core.options import GradClip
from tfamp.interop import keras_hooks
from tfamp.interop.keras_hooks import native, runs_tensorflow
from tfamp.interop.tf_private import held_dtype, is_compiled_by_xla, written_handles
from tfamp.training.bfloat16_sums import bits_as_bfloat16, bits_of_bfloat16, sum_as_bfloat16

# A gradient and its variable; either may be None.
_Pair: TypeAlias = tuple[Tensor, Variable]


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of one step, with the divisor that unscales them.

    Attributes:
        values: Float tensors, `tf.IndexedSlices` or None.
        variables: Their variables, or None.
        divisor: Scalar float32, the same for all; None if they are unscaled.
        checked: Which of them are known to be finite; None: none is.
        summed: Whether they are sums over all replicas.
    """

    values: list[Tensor]
    variables: list[Variable]
    divisor: Tensor = None
    checked: list[bool] | None = None
    summed: bool = False

    @classmethod
    def of_any(cls, values: list[Tensor], divisor: Tensor = None) -> Gradients:
        """Gradients of unknown variables."""
        return cls(values, [None] * len(values), divisor)

    def pairs(self) -> list[_Pair]:
        """The gradients with their variables."""
        return list(zip(self.values, self.variables, strict=True))

    def unscaled(self) -> Gradients:
        """The gradients divided by their divisor, in float32 or wider, also sparse ones."""
        divided = functools.partial(_quotient, divisor=self.divisor)
        values = [g if is_next_value(v) else _mapped(divided, g) for g, v in self.pairs()]
        return replace(self, values=values, divisor=None)

    def in_dtypes_of(self, sums: Mapping[Any, Variable], key: Callable[..., Any]) -> Gradients:
        """The gradients in the dtypes of the sums that they are added to, by variables' keys.

        Keras adds them without a cast.
        """

        def cast(gradient: Tensor, variable: Variable) -> Tensor:
            total = None if is_next_value(variable) else sums.get(key(variable))
            return gradient if total is None else _in_dtype_of(total, gradient)

        return replace(self, values=[cast(*pair) for pair in self.pairs()])

    def all_finite(self) -> Tensor:
        """Whether all unchecked gradients, unscaled, are finite in their variables' dtypes."""
        checked = self.checked or [False] * len(self.values)
        # By dtypes of gradient and variable, for all gradients of these.
        limit = functools.cache(functools.partial(_low_limit, self.divisor))
        checks = [
            _is_finite(gradient, variable, self.divisor, limit)
            for (gradient, variable), known in zip(self.pairs(), checked, strict=True)
            if gradient is not None and not known
        ]
        return ops.all(ops.stack(checks)) if checks else ops.convert_to_tensor(True)

    def all_finite_everywhere(self, before: Tensor) -> Tensor:
        """Whether all are finite on every replica, and `before` holds there."""
        return on_every_replica(ops.logical_and(self.all_finite(), before))

    def without_missing(self, optimizer: Optimizer) -> Gradients:
        """The gradients that are not None; warns about the others as an optimizer does."""
        values, variables = keras_hooks.without_missing(optimizer, self.values, self.variables)
        return replace(self, values=values, variables=variables, checked=None)

    def clipped_by(self, optimizer: Optimizer) -> Gradients:
        """The unscaled gradients, clipped by the clipping options of a Keras optimizer."""
        unscaled = self.unscaled()
        chosen = [not is_next_value(variable) for variable in self.variables]
        clipped = iter(keras_hooks.clipped(optimizer, unscaled.split(chosen)[0].values))
        pairs = zip(unscaled.values, chosen, strict=True)
        return replace(unscaled, values=[next(clipped) if c else g for g, c in pairs])

    def split(self, chosen: Sequence[bool]) -> tuple[Gradients, Gradients]:
        """The chosen gradients, and the others."""
        first, second = (
            [pair for pair, flag in zip(self.pairs(), chosen, strict=True) if flag is choice]
            for choice in (True, False)
        )
        return self._of_pairs(first), self._of_pairs(second)

    def _of_pairs(self, pairs: Sequence[_Pair]) -> Gradients:
        return replace(self, values=[g for g, _ in pairs], variables=[v for _, v in pairs])

    def summed_over_replicas(self) -> Gradients:
        """The sums of the unscaled gradients over the replicas, in float32 or wider.

        Of one replica, and if they are sums already, the gradients as they are.
        """
        if self.summed or not several_replicas():
            return self
        unscaled = self.unscaled()
        sums = _all_reduced(unscaled.pairs())
        return replace(unscaled, values=sums, checked=None, summed=True)

    def with_largest_next_values(self) -> Gradients:
        """The gradients, with the largest next value of all replicas for every next value.

        Strategies sum only: the replicas' values are summed in rows of their own.
        """
        chosen = [is_next_value(v) and g is not None for g, v in self.pairs()]
        if not any(chosen) or not several_replicas():
            return self
        replica = tf.distribute.get_replica_context()
        own = tf.one_hot(replica.replica_id_in_sync_group, replica.num_replicas_in_sync) > 0.0

        def row(value: Tensor) -> Tensor:
            place = tf.reshape(own, [-1] + [1] * len(value.shape))
            return tf.where(place, value[None], tf.zeros((), value.dtype))

        rows = all_reduce_sum([row(value) for value in self.split(chosen)[0].values])
        largest = iter([tf.reduce_max(each, 0) for each in rows])
        pairs = zip(self.values, chosen, strict=True)
        return replace(self, values=[next(largest) if c else g for g, c in pairs])

    def summed_in_float16(self, loss_scale: Tensor) -> Gradients:
        """The sums over the replicas, all-reduced as float16 at the loss scale: their divisor.

        An overflow in a cast or in the sum is inf in the result, which is to be checked: a loss
        scale that is too large for the sum backs off. 16-bit gradients are sent in their dtype,
        float64 in float64.

        Source: TensorFlow RFC 293, "Keras mixed precision", which was not implemented.
        """
        factor = loss_scale if self.divisor is None else loss_scale / self.divisor

        def packed(values: Tensor) -> Tensor:
            wide = widened(values)
            sent = "float16" if values.dtype == tf.float32 else values.dtype
            return tf.cast(wide * tf.cast(factor, wide.dtype), sent)

        sent = [(g if is_next_value(v) else _mapped(packed, g), v) for g, v in self.pairs()]
        values = [_mapped(widened, gradient) for gradient in _all_reduced(sent)]
        return replace(self, values=values, divisor=loss_scale, checked=None, summed=True)

    def summed_in_bfloat16(self) -> Gradients:
        """The sums over the replicas, sent as bfloat16 and computed in float32: their divisor.

        float64 is sent as float64. bfloat16 has float32's range, so that no loss scale is needed.
        """

        def packed(values: Tensor) -> Tensor:
            return values if values.dtype == tf.float64 else bits_of_bfloat16(values)

        def unpacked(values: Tensor) -> Tensor:
            return values if values.dtype == tf.float64 else bits_as_bfloat16(values)

        dense = [
            not (g is None or isinstance(g, tf.IndexedSlices) or is_next_value(v))
            and dtype_name(g) != "float64"
            for g, v in self.pairs()
        ]
        chosen, others = self.split(dense)
        sums = iter(sum_as_bfloat16(chosen.values))
        # Rows of sparse gradients are gathered, and added up later in float32.
        sent = [(g if is_next_value(v) else _mapped(packed, g), v) for g, v in others.pairs()]
        pairs = zip(_all_reduced(sent), others.variables, strict=True)
        rest = iter([g if is_next_value(v) else _mapped(unpacked, g) for g, v in pairs])
        values = [next(sums) if is_dense else next(rest) for is_dense in dense]
        return replace(self, values=values, checked=None, summed=True)

    def clipped(self, clip: GradClip) -> tuple[Gradients, Tensor]:
        """Clips the global norm through the divisor; returns the norm before, too.

        The divisor stays bit for bit if the norm is within bounds.
        """
        divisor = tf.constant(1.0)
        if self.divisor is not None:
            divisor = tf.cast(self.divisor, tf.float32)
        gradients = [g for g, v in self.pairs() if g is not None and not is_next_value(v)]
        norm_of_one, combined = _NORMS[clip.norm_type]
        norms = [tf.cast(norm_of_one(_distinct_rows(g)), tf.float32) for g in gradients]
        norm = combined(tf.stack([0.0, *norms])) / divisor
        factor = tf.maximum(norm, clip.max_norm) / clip.max_norm
        return replace(self, divisor=divisor * factor), norm


# Sums the gradients of a step over the replicas.
Aggregation: TypeAlias = Callable[[Gradients], Gradients]


def summed_checked_clipped(
    gradients: Gradients, finite: Tensor, clip: GradClip | None, send: Aggregation | None = None
) -> tuple[Gradients, Tensor, Tensor]:
    """Sums, checks and clips the gradients of a step.

    `finite` is the result of earlier checks. `send` sums gradients over replicas in a way of its
    own; sums are checked again, as they can overflow where no replica's gradient does.

    Returns the gradients, whether all are finite on all replicas, and their norm before
    clipping, None without a clip.
    """
    if several_replicas() and send is not None:
        gradients = send(gradients)
    elif clip is not None:
        gradients = gradients.summed_over_replicas()
    finite = gradients.all_finite_everywhere(finite)
    gradients = gradients.with_largest_next_values()
    if clip is None:
        return gradients, finite, None
    gradients, norm = gradients.clipped(clip)
    # The squares may have overflowed. XLA and some kernels do not propagate NaN in a maximum.
    finite &= tf.math.is_finite(norm)
    return gradients, finite, tf.where(finite, norm, math.nan)


def is_next_value(variable: Variable) -> bool:
    """Whether a variable's "gradient" is its next value, as in float8 training."""
    return getattr(variable, "overwrite_with_gradient", False)


def _quotient(values: Tensor, divisor: Tensor) -> Tensor:
    wide = widened(values)
    # A copy, because TensorFlow refuses to sum gradients over replicas if some belong to the
    # graph of this branch, as widened ones do, and others to the graph around it.
    return ops.copy(wide) if divisor is None else wide / ops.cast(divisor, wide.dtype)


def widened(values: Tensor) -> Tensor:
    """A tensor in float32, or in its dtype if that is wider."""
    tensor = ops.convert_to_tensor(values)
    return ops.cast(tensor, "float32") if dtype_name(tensor) in LOW_PRECISION else tensor


def _mapped(function: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)


# ---- Checking --------------------------------------------------------------------------


def _is_finite(
    gradient: Tensor, variable: Variable, divisor: Tensor, limit: Callable[..., Tensor]
) -> Tensor:
    # Without a tf.cond, for which a GPU's host would wait: a step branches once, to
    # update or not.
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    dtype = None if variable is None else dtype_name(variable)
    next_value = is_next_value(variable)
    if dtype_name(values) in LOW_PRECISION and runs_tensorflow():
        # Without a float32 copy.
        return tf.reduce_all(tf.abs(values) <= limit(dtype_name(values), dtype, next_value))
    values = _quotient(values, None if next_value else divisor)
    values = values if dtype is None else ops.cast(values, dtype)
    return ops.all(ops.isfinite(values))


def _low_limit(divisor: Tensor, dtype: str, target: str | None, next_value: bool) -> Tensor:
    """The largest number of a low dtype that is finite once divided, in a variable's dtype."""
    largest = float_format(dtype).max
    room = float_format(target if target in LOW_PRECISION else "float32").max
    divided = divisor is not None and not next_value
    limit = tf.constant(room) * (tf.cast(divisor, tf.float32) if divided else 1.0)
    # Rounded down, by a unit of bfloat16's 8 digits: the product and the cast may round up.
    limit = tf.where(limit < largest, limit * (1 - 2.0**-8), largest)
    return tf.cast(limit, dtype)


def _in_dtype_of(variable: Variable, gradient: Tensor) -> Tensor:
    return _mapped(lambda values: ops.cast(values, dtype_name(variable)), gradient)


# ---- Summing ---------------------------------------------------------------------------


def _all_reduced(pairs: Sequence[_Pair]) -> list[Tensor]:
    sent = [g for g, v in pairs if g is not None and not is_next_value(v)]
    sums = iter(all_reduce_sum(sent) if sent else ())
    return [g if g is None or is_next_value(v) else next(sums) for g, v in pairs]


# ---- The norm --------------------------------------------------------------------------


def _distinct_rows(gradient: Tensor) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        _, rows = tf.unique(gradient.indices)
        # A static number of rows; those beyond the distinct ones are zero.
        return tf.math.unsorted_segment_sum(widened(gradient.values), rows, tf.size(rows))
    return widened(gradient)


_Reduction: TypeAlias = Callable[[Tensor], Tensor]
# The norm of one gradient, or half its square, and its combination over all gradients.
_NORMS: dict[float, tuple[_Reduction, _Reduction]] = {
    1: (lambda values: tf.reduce_sum(tf.abs(values)), tf.reduce_sum),
    2: (tf.nn.l2_loss, lambda halved_squares: tf.sqrt(2 * tf.reduce_sum(halved_squares))),
    math.inf: (lambda values: tf.norm(values, math.inf), tf.reduce_max),
}


# ---- Arguments of users ----------------------------------------------------------------


def variable_name(variable: Variable) -> str:
    """The path of a Keras variable, else its name."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", variable))


def dtype_name(tensor: Tensor) -> str:
    """The dtype of a tensor, variable or `IndexedSlices` as a name."""
    return keras.backend.standardize_dtype(tensor.dtype)


def listed(gradients: Iterable[Tensor], caller: str) -> list[Tensor]:
    """Returns gradients as a list; raises for other arguments of `caller`."""
    is_other = isinstance(gradients, (dict, str)) or hasattr(gradients, "dtype")
    if is_other or not isinstance(gradients, Iterable):
        raise TypeError(
            f"{caller} takes a list of gradients, as tape.gradient returns it for a list of "
            f"variables; got {type(gradients).__name__}."
        )
    return list(gradients)


def split_pairs(
    grads_and_vars: Iterable[_Pair], caller: str
) -> tuple[list[Tensor], list[Variable]]:
    """Splits (gradient, variable) pairs; raises for other arguments of `caller`."""
    try:
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{caller} takes (gradient, variable) pairs, as zip(gradients, variables) makes "
            f"them; got {type(grads_and_vars).__name__} with other elements."
        ) from error
    return [gradient for gradient, _ in pairs], [variable for _, variable in pairs]


def check_gradients(gradients: Sequence[Tensor], variables: Sequence[Variable]) -> None:
    """Raises if the gradients cannot be applied to the variables."""
    if len(gradients) != len(variables):
        raise ValueError(
            f"Expected one gradient for each of the {len(variables)} variables; got "
            f"{len(gradients)}."
        )
    if all(gradient is None for gradient in gradients):
        names = ", ".join(variable_name(v) for v in variables[:3])
        names += ", ..." if len(variables) > 3 else ""
        raise ValueError(
            f"There is nothing to apply: no gradient was given for any of {len(variables)} "
            f"variables ({names}). Were the loss and its scaling, such as get_scaled_loss, "
            "computed inside `with tape:`, from these variables?"
        )
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is not None:
            _check_gradient(gradient, variable)


def _check_gradient(gradient: Tensor, variable: Variable) -> None:
    kind = dtype_name(gradient) if hasattr(gradient, "dtype") else type(gradient).__name__
    if kind not in FLOAT_DTYPES or not hasattr(variable, "assign"):
        raise TypeError(
            "Expected pairs of a float gradient and a variable; got "
            f"{kind} and {type(variable).__name__} for {variable_name(variable)}."
        )
    if not tf.TensorShape(gradient.shape).is_compatible_with(variable.shape):
        raise ValueError(
            f"The gradient of {variable_name(variable)} has shape {gradient.shape}; the "
            f"variable has shape {variable.shape}."
        )


# ---- Replicas --------------------------------------------------------------------------


def check_in_replica() -> None:
    """Raises in cross-replica context: gradients are applied on every replica."""
    if runs_tensorflow() and tf.distribute.in_cross_replica_context():
        raise ValueError(
            "Gradients must be applied inside strategy.run, once on each replica; this call is "
            "in cross-replica context."
        )


def check_created_in_scope(variable: Variable, user: str) -> None:
    """Raises if a variable of a `user` was created outside the strategy that it is used in."""
    extended = tf.distribute.get_strategy().extended
    if tf.distribute.has_strategy() and not extended.variable_created_in_scope(variable):
        raise ValueError(
            f"This {user} was created outside the scope of the strategy it is used in, so its "
            "replicas would share its variables. Create it under strategy.scope()."
        )


def outside_the_graph(create: Callable[[], None]) -> None:
    """Calls a function that creates variables, outside the graph being traced.

    Replicas are traced one after the other: the first one creates the variables. Variables
    created in a replica during tracing cannot be initialized; Keras's optimizers fail there
    unless they were built before.
    """

    def create_in_scope(strategy: tf.distribute.Strategy) -> None:
        with strategy.scope():
            create()

    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        # Under a strategy tf.init_scope leaves the graph, but the tf.function still forbids new
        # variables after its first trace. That rule is per thread.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(create_in_scope, tf.distribute.get_strategy()).result()
    else:
        with tf.init_scope():
            create()


def several_replicas() -> bool:
    """Whether this is a replica, and one of several."""
    replica = tf.distribute.get_replica_context()
    return replica is not None and replica.num_replicas_in_sync > 1


def all_reduce_sum(tensors: Sequence[Tensor]) -> Tensor:
    """Sums tensors or `tf.IndexedSlices` over the replicas."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tensors)


def on_every_replica(finite: Tensor) -> Tensor:
    """Combines a bool of every replica of every worker by a logical and."""
    if not several_replicas():
        return finite
    return tf.equal(all_reduce_sum(tf.cast(tf.logical_not(finite), "float32")), 0.0)


def call_if(condition: Tensor, function: Callable[[], object]) -> None:
    """Calls a function that assigns to variables if a scalar bool tensor holds."""

    def branch() -> None:
        function()

    if runs_tensorflow():
        ops.cond(condition, branch, lambda: None)
    elif condition:  # JAX traces both branches of a cond: what they assign would be tracers.
        branch()


def assign_if(condition: Tensor, function: Callable[[], object]) -> None:
    """As `call_if`, but without a branch in a function that XLA compiles.

    A GPU's host waits for the condition of a branch. There the function is always called, and a
    variable keeps its old value, bit for bit, where the condition does not hold.
    """
    if not (runs_tensorflow() and is_compiled_by_xla()):
        call_if(condition, function)
        return

    def assign() -> None:
        function()

    traced = tf.function(assign, autograph=False).get_concrete_function()
    handles = written_handles(traced)
    before = [_read(handle) for handle in handles]
    traced()
    for handle, old in zip(handles, before, strict=True):
        value = tf.where(condition, _read(handle), old)
        tf.raw_ops.AssignVariableOp(resource=handle, value=value)


def _read(handle: Handle) -> Tensor:
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=held_dtype(handle))


def update_everywhere(
    target: Variable, function: Callable[..., Any], sources: Sequence[Tensor]
) -> Any:
    """Calls `function(target, *sources)` on each device with its copies of the variables.

    Without communication, unlike an assignment in a replica, which averages equal values.
    """
    target = native(target)
    strategy = tf.distribute.get_strategy()
    scope: Any = contextlib.nullcontext()
    # `model.fit` finalizes the variables outside the scope of their strategy.
    if not tf.distribute.has_strategy() and hasattr(target, "distribute_strategy"):
        strategy = target.distribute_strategy
        scope = strategy.scope()
    with scope:
        args = tuple(map(native, sources))
        return strategy.extended.update(target, function, args=args, group=False)
