"""Applying gradients to weights with a Keras optimizer, unless they are not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from tfamp.core.errors import UnsupportedVersionError
from tfamp.interop.keras_hooks import native, runs_tensorflow
from tfamp.interop.keras_optimizers import inner_optimizers
from tfamp.interop.tf_private import strategy_needs_merge_call
from tfamp.training.fused_update import fused_update, has_fused_update
from tfamp.training.gradients import Gradients, call_if, is_next_value
from tfamp.training.weights import PlainWeights

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
    weights: PlainWeights,
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


def _apply(weights: PlainWeights, gradients: Gradients) -> None:
    """Divides gradients by their divisor and applies them, with the same result as Keras."""
    optimizer = weights.optimizer
    if has_fused_update(optimizer):
        others = fused_update(optimizer, gradients, weights.chance())
        if others is None:
            return
        gradients = others
    weights.check_all_updated(gradients.variables)
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


def applied(optimizer: Any) -> Sequence[Any]:
    """The optimizers that are applied: those of a MultiOptimizer, else the optimizer itself."""
    inside: Sequence[Any] = getattr(optimizer, "_inner_optimizers", [optimizer])
    return inside


def view_of(
    optimizer: Any,
    make_class: Callable[[type], type],
) -> Any:
    """An object with the attributes of an optimizer, thus its variables, to call `apply` on.

    It is of the class that is made of the optimizer's. Keras counts iterations with a `merge_call`,
    which a condition in a replica allows not: where there is one, the view counts in the replica's
    own copy. The optimizer itself is not touched, which matters where replicas run in threads of
    their own.
    """
    view: Any = object.__new__(make_class(type(optimizer)))
    # Past Keras's __setattr__, which would track the variables a second time.
    state = vars(view)
    state.update(vars(optimizer))
    if tf.distribute.has_strategy() and not strategy_needs_merge_call():
        state["_iterations"] = tf.distribute.get_strategy().extended.update(
            native(optimizer._iterations), lambda own: own, group=False
        )
    if "_inner_optimizers" in state:  # MultiOptimizer hands each its share.
        state["_inner_optimizers"] = [
            view_of(each, make_class) for each in inner_optimizers(optimizer)
        ]
    return view
