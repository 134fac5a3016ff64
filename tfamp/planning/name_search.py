"""Searches for regular expressions in node names, for no longer than whoever asks allows.

A node of a function has a name for each place that runs the function, too: what makes the branches
of a conditional part of the layer that the conditional is in.

Python's matcher tries every way to match, which with `(a+)+$` takes for ever on a name of forty
letters. A program that compiles its own expressions may do so; the command line sets a limit.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import heapq
import re
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import FrameType

# Functions that call one another twice have a number of callers that doubles at every level.
MOST_CALLERS = 1000
# Seconds that one search may take; None outside of `limited`.
_LIMIT: ContextVar[float | None] = ContextVar("tfamp_search_limit", default=None)


class _TooLongError(Exception):
    """The timer rang."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Bounds every search inside: one that takes longer is a ValueError.

    The timer is the process's alarm signal, which interrupts Python's matcher. It exists in the
    main thread of a Unix process; elsewhere searches have no bound.

    Args:
        seconds: How long one search in one name may take.

    Example:
        >>> with limited(0.1):
        ...     is_found(re.compile("(a+)+$"), "a" * 40 + "b")
        Traceback (most recent call last):
        ...
        ValueError: The regular expression '(a+)+$' takes more than 0.1 s to search for in ...
    """
    token = _LIMIT.set(seconds)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def is_found(pattern: re.Pattern[str], name: str) -> bool:
    """Returns whether an expression is found in a name.

    Raises:
        ValueError: It takes longer than `limited` allows.
    """
    seconds = _LIMIT.get()
    if seconds is None or not _has_alarm():
        return pattern.search(name) is not None
    before = signal.signal(signal.SIGALRM, _ring)
    # Taken from here on: an alarm of somebody else's would be lost, and a command line has none.
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return pattern.search(name) is not None
    except _TooLongError:
        raise ValueError(
            f"The regular expression {pattern.pattern!r} takes more than {seconds:g} s to search "
            f"for in the name {name[:80]!r}. Repetitions inside one another, as in (a+)+, take a "
            "time that doubles with every letter; write it without them."
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def caller_names(
    calls: Mapping[str, Sequence[tuple[str, Sequence[str]]]], main: str
) -> dict[str, tuple[str, ...]]:
    """Returns for each function the names of the nodes that run it, callers of these in front.

    Args:
        calls: For each function the nodes in it that run others: name, and functions they run.
        main: The function that nothing runs: the graph itself.

    Returns:
        The first 1,000 names of each function, in the order of the graph. Calls of a function by
        itself count once.

    Example:
        >>> caller_names({"": [("gate/cond", ["then", "else"])], "then": [("while", ["body"])]}, "")
        {'then': ('gate/cond',), 'else': ('gate/cond',), 'body': ('gate/cond/while',)}
    """
    found: dict[str, dict[str, None]] = {}
    pending = deque([(main, "", frozenset([main]))])
    while pending:
        function, caller, around = pending.popleft()
        for node, called in calls.get(function, ()):
            name = full_name(caller, node)
            for each in called:
                names = found.setdefault(each, {})
                if each not in around and name not in names and len(names) < MOST_CALLERS:
                    names[name] = None
                    pending.append((each, name, around | {each}))
    return {function: tuple(names) for function, names in found.items()}


def full_name(caller: str, node: str) -> str:
    """Returns the name of a node of a function behind that of the node that runs the function.

    TensorFlow begins the names in a branch with that of the conditional, which was another one
    before the function that it is in was inlined.

    Example:
        >>> full_name("gate/PartitionedCall/cond", "cond/MatMul"), full_name("call", "MatMul")
        ('gate/PartitionedCall/cond/MatMul', 'call/MatMul')
    """
    around, own = caller.split("/"), node.split("/")
    for length in range(min(len(around), len(own) - 1), 0, -1):
        if around[-length:] == own[:length]:
            return "/".join([*around, *own[length:]])
    return f"{caller}/{node}" if caller else node


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names most like a regular expression that is found in none of them.

    Args:
        pattern: The expression; compared is what it holds of letters, digits, "_" and "/".
        names: Names of nodes; as many of their parts between "/" are compared as it has.
        count: How many to return.

    Example:
        >>> nearest_names("^dense_l/", ["x", "dense/MatMul", "dense_1/MatMul"], 1)
        ['dense_1/MatMul']
    """
    text = re.sub(r"\\.|[^\w/]", "", pattern).strip("/").lower()
    matcher = difflib.SequenceMatcher(b=text, autojunk=False)

    @functools.cache
    def likeness(part: str) -> float:
        matcher.set_seq1(part.lower())
        return matcher.ratio()

    def best(name: str) -> float:
        parts, length = name.split("/"), text.count("/") + 1
        starts = range(max(len(parts) - length, 0) + 1)
        return max(likeness("/".join(parts[start : start + length])) for start in starts)

    return heapq.nlargest(count, dict.fromkeys(names), key=lambda name: (best(name), -len(name)))


def _ring(number: int, frame: FrameType | None) -> None:
    raise _TooLongError


def _has_alarm() -> bool:
    return hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
