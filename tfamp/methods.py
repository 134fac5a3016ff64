"""Replaces a method of one object, and of no other object of its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap_method(obj: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a method of one Keras layer by `around(method, *args, **kwargs)`.

    Args:
        obj: The layer. It keeps the replacement for as long as it lives.
        name: Name of the method.
        around: Gets the method as it was, and what it is called with.
    """
    method = getattr(obj, name)

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(method, *args, **kwargs)

    # Around Layer.__setattr__: nothing here is state to track, to save or to check-point.
    object.__setattr__(obj, name, wrapped)
