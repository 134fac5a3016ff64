"""Replaces a method of one object, and of no other object of its class."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

# Which functions are ours: what another library puts on top copies our attributes.
_wrappers: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def wrap_method(obj: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method of one Keras layer by `around(method, *args, **kwargs)`.

    Args:
        obj: The layer. It keeps the replacement for as long as it lives, or until
            `unwrap_methods`.
        name: Name of the method.
        around: Gets the method as it was, and what it is called with.
    """
    method = getattr(obj, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    _wrappers.add(wrapped)
    # Around Layer.__setattr__: nothing here is state to track, to save or to check-point.
    object.__setattr__(obj, name, wrapped)


def wrapped_methods(obj: Any) -> dict[str, Callable[..., Any]]:
    """Returns the replacements that an object has now, by name of the method."""
    return {name: value for name, value in vars(obj).items() if _is_wrapper(value)}


def unwrap_methods(obj: Any) -> None:
    """Gives an object its own methods back, however often they were replaced.

    Args:
        obj: The layer. A method that something else was put on top of is left alone.
    """
    for name, value in wrapped_methods(obj).items():
        original: Any = value
        while _is_wrapper(original):
            original = original.__wrapped__
        if _is_of_class(obj, name, original):
            object.__delattr__(obj, name)
        else:
            object.__setattr__(obj, name, original)


def rewrap_methods(obj: Any, methods: dict[str, Callable[..., Any]]) -> None:
    """Puts replacements that `wrapped_methods` returned back in place."""
    unwrap_methods(obj)
    for name, method in methods.items():
        object.__setattr__(obj, name, method)


def _is_wrapper(value: Any) -> bool:
    return callable(value) and isinstance(value, type(_is_wrapper)) and value in _wrappers


def _is_of_class(obj: Any, name: str, method: Any) -> bool:
    """Whether a method is what the object's class gives it, and nothing of the object's own."""
    return (
        isinstance(method, MethodType)
        and method.__self__ is obj
        and method.__func__ is getattr(type(obj), name, None)
    )
