"""How messages write what was given: an argument as its user writes it, and a foreign object.

A message that names an argument writes `argument(name, value)` instead of the name itself. The
command line puts its own spelling in force while it runs.
"""

from __future__ import annotations

import contextlib
import re
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


def described(value: object) -> str:
    """Describes a value that is not of Keras 3, with advice, to end a message."""
    owner = value if isinstance(value, type) else type(value)
    name = f"{owner.__module__}.{owner.__qualname__}".removeprefix("builtins.")
    text = f"the class {name}" if value is owner else f"{value!r:.80} of type {name}"
    return f"{text}.{advice(value)}"


def advice(value: object) -> str:
    """Advice for an object or class of tf_keras, TensorFlow 1 or PyTorch; "" for others."""
    owner = value if isinstance(value, type) else type(value)
    names = [f"{base.__module__}.{base.__name__}" for base in owner.__mro__]
    for pattern, library in (
        (r"tf_keras\.", "tf_keras (Keras 2, which tf.keras is with TF_USE_LEGACY_KERAS)"),
        (r"tensorflow\..*Optimizer$", "TensorFlow 1"),
        (r"torch\.", "PyTorch"),
    ):
        if any(re.match(pattern, name) for name in names):
            return f" That is of {library}: use its counterpart in keras, which is Keras 3."
    return ""
