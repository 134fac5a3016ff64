"""Searches for the few names to keep in float32 so that an error is at most a bound.

Layers of a model and name scopes of a graph are searched in the same way; the caller runs them.
Framework-free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

# Each tried list is a run, so this bounds the time of a search. A choice.
_MOST_RUNS = 200

# The list to keep in float32 and the error with it; None without one.
KeptList: TypeAlias = tuple[tuple[str, ...] | None, float | None]


def search_list(
    suspects: Sequence[str], error_of: Callable[[frozenset[str]], float], bound: float
) -> KeptList:
    """Searches for a short list of names to keep in float32 whose error is at most a bound.

    Twice as many suspects are kept each time until the error is low enough; then each that is
    not needed is removed again. The list is minimal: without any one of its names the error is
    too large, unless the number of runs ended the search. A last run with the list proves it.
    """
    errors: dict[frozenset[str], float] = {}

    def suffices(names: Sequence[str]) -> bool:
        key = frozenset(names)
        if key not in errors:
            errors[key] = error_of(key)
        return errors[key] <= bound

    enough = 0
    while not suffices(suspects[:enough]):
        if enough >= len(suspects):
            return None, None
        enough = 2 * enough or 1
    names = suspects[:enough]
    for name in reversed(names):
        fewer = [other for other in names if other != name]
        if fewer and len(errors) < _MOST_RUNS and suffices(fewer):
            names = fewer
    # In a random model an earlier error may have been chance.
    error = error_of(frozenset(names))
    return (tuple(names), error) if error <= bound else (None, None)
