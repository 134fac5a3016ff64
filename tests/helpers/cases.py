"""Which cases of a parametrised test run always, which in CI's slow step, and which at night."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def first_of(values: Iterable[Any], others_are: Any = pytest.mark.slow) -> list[Any]:
    """The first value always, the others slow: for an axis that the test hardly depends on."""
    first, *others = values
    return [first, *(pytest.param(value, marks=others_are) for value in others)]


def one_of_each(*axes: Iterable[Any]) -> list[Any]:
    """Every combination, most of them nightly: for axes that are independent.

    Each value of the first axis is always met, and each combination of the others.
    """
    first, *others = [list(axis) for axis in axes]
    rest = list(itertools.product(*others))
    always = [
        (first[number % len(first)], *rest[number % len(rest)])
        for number in range(max(len(first), len(rest)))
    ]
    return [
        pytest.param(*values, marks=[] if values in always else pytest.mark.nightly)
        for values in itertools.product(first, *others)
    ]


def one_in(number: int, values: Iterable[Any]) -> list[Any]:
    """Every `number`-th value always, the others slow: for cases that are much alike."""
    return [
        value if position % number == 0 else pytest.param(value, marks=pytest.mark.slow)
        for position, value in enumerate(values)
    ]
