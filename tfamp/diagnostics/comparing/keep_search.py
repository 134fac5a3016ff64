"""Finds a short list of names to keep in float32 that brings an error under a bound; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """What a search came to.

    Attributes:
        names: The list, in the order of the suspects; None where none was found.
        error: The error with it, from a run of its own; None where none was found.
        runs: How many lists were tried.
    """

    names: tuple[str, ...] | None
    error: float | None
    runs: int


def search_list(
    suspects: Sequence[str],
    error_of: Callable[[frozenset[str]], float],
    bound: float,
    *,
    most_runs: int = 200,
) -> Found:
    """Searches for a short list whose error is at most a bound.

    The suspects are kept one after the other, the first ones first, until the error is low enough;
    then each of them that is not needed is taken out again. What is left is minimal: without any
    one of its names the error is too large, unless the runs were used up before that was tried.

    Args:
        suspects: Names, the most suspicious first.
        error_of: Runs with a list of names kept in float32 and returns the error.
        bound: The largest error allowed.
        most_runs: How many lists to try at most.

    Returns:
        The list that was found; the empty one where nothing needs to be kept.

    Example:
        >>> culprits = {"b", "d"}
        >>> search_list("abcde", lambda kept: float(len(culprits - kept)), 0.5).names
        ('b', 'd')
    """
    runs = _Runs(error_of, bound, most_runs)
    if runs.suffices(()):
        return runs.proved(())
    count = _shortest_prefix(suspects, runs)
    if count is None:
        return Found(None, None, runs.count)
    names = list(suspects[:count])
    for name in reversed(suspects[:count]):
        fewer = [each for each in names if each != name]
        if len(names) > 1 and runs.left > 1 and runs.suffices(fewer):
            names = fewer
    return runs.proved(names)


def _shortest_prefix(suspects: Sequence[str], runs: _Runs) -> int | None:
    """The length of the shortest prefix that suffices, if longer ones suffice too."""
    total = len(suspects)
    too_short, enough = 0, min(1, total)
    while not runs.suffices(suspects[:enough]):
        if enough == total:
            return None
        too_short, enough = enough, min(2 * enough, total)
    while enough - too_short > 1 and runs.left > 1:
        middle = (too_short + enough) // 2
        if runs.suffices(suspects[:middle]):
            enough = middle
        else:
            too_short = middle
    return enough


class _Runs:
    """Runs, each list once, and counts."""

    def __init__(
        self, error_of: Callable[[frozenset[str]], float], bound: float, most_runs: int
    ) -> None:
        self._error_of, self._bound, self._most = error_of, bound, most_runs
        self._errors: dict[frozenset[str], float] = {}
        self.count = 0

    @property
    def left(self) -> int:
        return self._most - self.count

    def suffices(self, names: Iterable[str]) -> bool:
        key = frozenset(names)
        if key not in self._errors:
            self._errors[key] = self._run(key)
        return self._errors[key] <= self._bound

    def proved(self, names: Sequence[str]) -> Found:
        """Runs with the list once more, so that its error is not one that was remembered."""
        error = self._run(frozenset(names))
        if error <= self._bound:
            return Found(tuple(names), error, self.count)
        return Found(None, None, self.count)

    def _run(self, key: frozenset[str]) -> float:
        self.count += 1
        error = self._error_of(key)
        return math.inf if math.isnan(error) else error
