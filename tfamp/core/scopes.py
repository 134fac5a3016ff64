"""Scopes: what a `with` block puts in force, in its own coroutine and thread.

`autocast` and `policy_scope` share this mechanism. A stack of scopes belongs to a context of
`contextvars`, so each coroutine has its own. A scope applies only to its thread, as
TensorFlow's scopes do, even if a copy of its context runs in another thread. It may be
left in any order, context and thread: leaving marks the scope, and every stack that still
holds it skips it.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar


@dataclass(eq=False)
class Scope:
    """A `with` block that was entered."""

    # The thread it applies to.
    thread: int = field(default_factory=threading.get_ident, init=False)
    # Stacks of other contexts may still hold one that was left.
    left: bool = field(default=False, init=False)


_Scope = TypeVar("_Scope", bound=Scope)
_Callable = TypeVar("_Callable", bound=Callable[..., Any])


class ScopeStack(Generic[_Scope]):
    """The scopes of one kind, one stack per context, innermost last."""

    def __init__(self, name: str) -> None:
        self._stack: ContextVar[tuple[_Scope, ...]] = ContextVar(name, default=())

    def open(self) -> tuple[_Scope, ...]:
        """Returns the scopes in force here."""
        here = threading.get_ident()
        return tuple(x for x in self._stack.get() if x.thread == here and not x.left)

    @property
    def innermost(self) -> _Scope | None:
        """The innermost scope in force here; None outside of all."""
        here, stack = threading.get_ident(), reversed(self._stack.get())
        return next((x for x in stack if x.thread == here and not x.left), None)

    def enter(self, scope: _Scope) -> None:
        """Puts a scope in force here, until it is left."""
        self._stack.set((*self.open(), scope))

    def leave(self, scope: _Scope) -> None:
        """Ends a scope, in whatever order, context and thread."""
        scope.left = True
        self._stack.set(self.open())

    def leave_one(self, entered: list[_Scope], name: str) -> _Scope:
        """Ends one of the scopes that a context manager has entered, and takes it off the list.

        The innermost of those in force here, or else the last one: an asynchronous
        generator, for one, may be closed in another context. The name is the context
        manager's, for messages.
        """
        if not entered:
            raise RuntimeError(
                f"{name} was left more often than it was entered. Use it in a `with` "
                "statement, which leaves it once."
            )
        here = self.open()
        scope = ([scope for scope in entered if scope in here] or entered)[-1]
        entered.remove(scope)
        self.leave(scope)
        return scope


def decorated(manager: AbstractContextManager[object], name: str, function: _Callable) -> _Callable:
    """Returns a function that runs in a context manager; a coroutine function is awaited in it.

    A TypeError refuses generators, whose caller's code would run in it too, and other objects.
    """
    yields = inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if not callable(function) or any(is_generator(function) for is_generator in yields):
        raise TypeError(
            f"{name} decorates functions that do not yield; got {function!r}. Inside a "
            f"generator use `with tfamp.{name}(...)` around code that does not yield."
        )
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited_inside(*args: Any, **kwargs: Any) -> Any:
            with manager:
                return await function(*args, **kwargs)

        return awaited_inside  # type: ignore[return-value]

    @functools.wraps(function)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with manager:
            return function(*args, **kwargs)

    return inside  # type: ignore[return-value]
