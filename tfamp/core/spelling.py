"""How messages write an argument: as in Python, or as a flag of the command line.

A message that names an argument writes `argument(name, value)` instead of the name itself. The
command line puts its own spelling in force while it runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

# Stands for no value: the message names the argument alone.
_NAME_ALONE = object()
# Takes a name and the values that the message gives it; None leaves the argument to Python.
Spelling = Callable[[str, tuple[object, ...]], str | None]

_spelling: ContextVar[Spelling | None] = ContextVar("tfamp_spelling", default=None)


def argument(name: str, value: object = _NAME_ALONE) -> str:
    """Returns an argument, with a value if one is given, as the user in front would write it.

    Example:
        >>> argument("freeze", True), argument("keep_float32")
        ('freeze=True', 'keep_float32')
        >>> with spelled_by(lambda name, values: f"--{name}"):
        ...     argument("freeze", True)
        '--freeze'
    """
    values = () if value is _NAME_ALONE else (value,)
    spelling = _spelling.get()
    special = None if spelling is None else spelling(name, values)
    return "=".join((name, *map(repr, values))) if special is None else special


@contextlib.contextmanager
def spelled_by(spelling: Spelling) -> Iterator[None]:
    """Lets `argument` use another spelling until the block ends."""
    token = _spelling.set(spelling)
    try:
        yield
    finally:
        _spelling.reset(token)
