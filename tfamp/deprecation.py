"""Names and arguments that were renamed: they go on working for a while, and say what to write."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from tfamp.core.errors import TfampDeprecationWarning

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


def renamed_arguments(*, removed_in: str, **new_names: str) -> Callable[[_Callable], _Callable]:
    """Decorates a function, or a class's `__init__`, whose keyword arguments have new names.

    The old ones are passed on under their new name, with a warning that is attributed to the
    caller.

    Args:
        removed_in: Version of tfamp from which on the old names are gone, "0.3".
        **new_names: The new name of each old one.

    Returns:
        The decorator. The function's signature shows the new names only.

    Raises:
        TypeError: At a call with both names of one argument; when decorating, if the function has
            no argument of the new name, or has one of the old name.

    Example:
        >>> import warnings
        >>> @renamed_arguments(removed_in="0.3", factor="growth_factor")
        ... def grow(scale, growth_factor=2.0):
        ...     return scale * growth_factor
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     grow(1.0, factor=4.0)
        4.0
        >>> print(caught[0].message)
        grow(factor=...) is now grow(growth_factor=...); the old name goes in tfamp 0.3.
    """

    def decorate(function: _Callable) -> _Callable:
        name = _name(function)
        parameters = inspect.signature(function).parameters
        for old, new in new_names.items():
            if new not in parameters or old in parameters:
                raise TypeError(
                    f"{name} must have an argument {new!r} and none {old!r}, the old name; it has "
                    f"{', '.join(parameters)}."
                )

        @functools.wraps(function)
        def renaming(*args: Any, **kwargs: Any) -> Any:
            for old in kwargs.keys() & new_names.keys():
                new = new_names[old]
                if new in kwargs:
                    raise TypeError(
                        f"{name} got {old!r} and {new!r}, which are the old and the new name of "
                        f"one argument; give {new!r} only."
                    )
                _warn(f"{name}({old}=...) is now {name}({new}=...)", removed_in)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renaming  # type: ignore[return-value]

    return decorate


def renamed_function(old: str, new: _Callable, *, removed_in: str) -> _Callable:
    """Returns a function that does what `new` does and says that its own name is old.

    Args:
        old: The old name.
        new: The function under its new name.
        removed_in: Version of tfamp from which on the old name is gone, "0.3".

    Returns:
        The function to keep under the old name.

    Example:
        >>> import warnings
        >>> def double(x):
        ...     return 2 * x
        >>> twice = renamed_function("twice", double, removed_in="0.3")
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     twice(4)
        8
        >>> print(caught[0].message)
        twice is now double; the old name goes in tfamp 0.3.
    """
    now = _name(new)

    @functools.wraps(new)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        _warn(f"{old} is now {now}", removed_in)
        return new(*args, **kwargs)

    renamed.__name__ = old
    renamed.__qualname__ = old
    renamed.__doc__ = f"The old name of `{now}`, gone in tfamp {removed_in}."
    return renamed  # type: ignore[return-value]


def _name(function: Callable[..., Any]) -> str:
    # A class is called by its own name.
    return function.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")


def _warn(change: str, removed_in: str) -> None:
    # Past this function and the wrapper: the line to change is the caller's.
    warnings.warn(
        f"{change}; the old name goes in tfamp {removed_in}.",
        TfampDeprecationWarning,
        stacklevel=3,
    )
