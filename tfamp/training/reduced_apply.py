"""Having a Keras optimizer apply gradients that have been summed over the replicas already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfamp.core.errors import UnsupportedVersionError

_SUMS = "_all_reduce_sum_gradients"


def apply_summed(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Any], variables: Sequence[Any]
) -> None:
    """Applies gradients with the optimizer's own `apply`, which must not sum them again.

    Keras's optimizers sum over the replicas inside `apply` and have no switch for it. So `apply` is
    called on a view of the optimizer: an object with the same attributes, thus the same variables,
    of a subclass whose sum returns what it is given. The optimizer itself is not touched, which
    matters where replicas run in threads of their own.

    Args:
        optimizer: A built Keras optimizer, or a `MultiOptimizer` of such.
        gradients: Finite float tensors, `tf.IndexedSlices` or None, summed over the replicas.
        variables: The variables they belong to, in the same order.

    Raises:
        UnsupportedVersionError: The optimizer did not go through the method that is replaced, so
            the gradients may have been summed twice.
    """
    asked: list[bool] = []
    _view(optimizer, asked).apply(gradients, variables)
    plain = [
        gradient
        for gradient, variable in zip(gradients, variables, strict=True)
        if gradient is not None and not getattr(variable, "overwrite_with_gradient", False)
    ]
    if plain and not asked:
        raise UnsupportedVersionError(
            f"{optimizer.name} ({type(optimizer).__name__}) does not sum gradients over the "
            f"replicas in Optimizer.{_SUMS}, as Keras 3.12 to 3.15 do, so tfamp cannot do it in "
            "its place. Leave out grad_clip and aggregate_in_float16 on several replicas."
        )


def _view(optimizer: Any, asked: list[bool]) -> Any:
    def as_given(self: Any, grads_and_vars: Any) -> list[Any]:
        asked.append(True)
        return list(grads_and_vars)

    kind = type(optimizer)
    view: Any = object.__new__(type(kind.__name__, (kind,), {_SUMS: as_given}))
    # Past Keras's __setattr__, which would track the variables a second time.
    vars(view).update(vars(optimizer))
    if "_inner_optimizers" in vars(view):  # MultiOptimizer hands each its share.
        vars(view)["_inner_optimizers"] = [
            _view(each, asked) for each in optimizer._inner_optimizers
        ]
    return view
