"""Which cases of a parametrised test run always, which in CI's slow step, and which at night."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def _marked(values: Iterable[Any], mark: Any) -> list[Any]:
    """A tuple is a value for each of several arguments."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=mark) for each in values
    ]


def first_of(values: Iterable[Any], others_are: Any = pytest.mark.slow) -> list[Any]:
    """The first value always, the others slow: for an axis that the test hardly depends on."""
    first, *others = values
    return [first, *_marked(others, others_are)]


def tiers(quick: Iterable[Any], slow: Iterable[Any], nightly: Iterable[Any] = ()) -> list[Any]:
    """Cases that run always, in CI's slow step, and at night."""
    return [*quick, *_marked(slow, pytest.mark.slow), *_marked(nightly, pytest.mark.nightly)]


def one_of_each(*axes: Iterable[Any], quick: int | None = None) -> list[Any]:
    """Every combination, most of them nightly: for axes that are independent.

    Each value of the first axis is always met, and each combination of the others; with `quick`,
    all but that many of these are slow.
    """
    first, *others = [list(axis) for axis in axes]
    rest = list(itertools.product(*others))
    always = [
        (first[number % len(first)], *rest[number % len(rest)])
        for number in range(max(len(first), len(rest)))
    ]
    quick = len(always) if quick is None else quick

    def mark(values: tuple[Any, ...]) -> Any:
        if values not in always:
            return pytest.mark.nightly
        return () if always.index(values) < quick else pytest.mark.slow

    return [pytest.param(*each, marks=mark(each)) for each in itertools.product(first, *others)]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """Every `number`-th value always, the others slow: for cases that are much alike."""
    return [
        value if position % number == 0 else _marked([value], pytest.mark.slow)[0]
        for position, value in enumerate(values)
    ]
