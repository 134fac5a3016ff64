"""A stand-in for a Keras optimizer that applies gradients in another way, with the same state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.interop.keras_hooks import native
from tfamp.interop.keras_optimizers import inner_optimizers
from tfamp.interop.tf_private import strategy_needs_merge_call


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
