"""Private symbols of Keras's optimizers, each with a small function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfamp.interop.keras_hooks import keras_symbol


def built_for(optimizer: Any) -> list[Any]:
    """The variables of a model that an optimizer was built for. Symbol: `_trainable_variables`."""
    return list(keras_symbol(optimizer, "_trainable_variables"))


def key_of(optimizer: Any) -> Callable[[Any], Hashable]:
    """Returns the function that gives a variable's key in an optimizer. Symbol: `_var_key`."""
    key: Callable[[Any], Hashable] = keras_symbol(optimizer, "_var_key")
    return key


def index_of(optimizer: Any, variable: Any) -> int:
    """The place of a variable in the slots. Symbol: `_get_variable_index`."""
    index: int = keras_symbol(optimizer, "_get_variable_index")(variable)
    return index


def slot(optimizer: Any, name: str, index: int) -> Any:
    """A slot of a variable: "momentums", "velocities", or "r", "c" and "v" of Adafactor.

    Symbols: `_momentums`, `_velocities`, `_r`, `_c`, `_v`.
    """
    return keras_symbol(optimizer, f"_{name}")[index]


def decays(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays a variable. Symbol: `_use_weight_decay`."""
    return bool(optimizer.weight_decay) and keras_symbol(optimizer, "_use_weight_decay")(variable)


def without_missing(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Leaves out gradients that are None, and warns as Keras does.

    Symbol: `_filter_empty_gradients`.
    """
    kept: tuple[list[Any], list[Any]] = keras_symbol(optimizer, "_filter_empty_gradients")(
        gradients, variables
    )
    return kept


def clipped(optimizer: Any, gradients: Sequence[Any]) -> list[Any]:
    """Gradients clipped as an optimizer is told. Symbol: `_clip_gradients`."""
    return list(keras_symbol(optimizer, "_clip_gradients")(gradients))


def rate_is_called(optimizer: Any) -> bool:
    """Whether the learning rate is a function or schedule. Symbol: `_learning_rate`."""
    return callable(keras_symbol(optimizer, "_learning_rate"))


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The optimizers of a `MultiOptimizer`. Symbol: `_inner_optimizers`."""
    return list(keras_symbol(optimizer, "_inner_optimizers"))


def excluded_from_decay(optimizer: Any) -> tuple[set[Any], Any]:
    """Keys of the variables that are not decayed, and the pattern of such names.

    Symbols: `_exclude_from_weight_decay`, `_exclude_from_weight_decay_pattern`, which an optimizer
    has where `exclude_from_weight_decay` was called.
    """
    keys: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    return keys, getattr(optimizer, "_exclude_from_weight_decay_pattern", None)


def exclude_pattern(optimizer: Any, pattern: Any) -> None:
    """Sets the pattern of names that are not decayed: see `excluded_from_decay`."""
    optimizer._exclude_from_weight_decay_pattern = pattern
