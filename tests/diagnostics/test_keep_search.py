"""`search_list`: what it finds is proved, minimal and cheap to find, on invented errors."""

import math
import string

from hypothesis import given
from hypothesis import strategies as st

from tfamp.diagnostics import comparison
from tfamp.diagnostics.comparison import search_list

NAMES = string.ascii_letters


class Errors:
    """The error is the number of culprits that are not kept; counts its runs."""

    def __init__(self, culprits):
        self.culprits, self.runs = frozenset(culprits), []

    def __call__(self, kept):
        self.runs.append(kept)
        return float(len(self.culprits - kept))


def test_nothing_is_kept_where_the_error_is_small_enough():
    errors = Errors("")
    found = search_list(NAMES, errors, 0.5)
    assert (found.names, found.error) == ((), 0.0)
    assert errors.runs == [frozenset(), frozenset()]  # Once to see, once to prove.


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_exactly_the_culprits_are_found_and_proved_by_the_last_run(culprits):
    errors = Errors(culprits)
    found = search_list(NAMES, errors, 0.5)
    assert set(found.names) == culprits
    assert list(found.names) == sorted(found.names, key=NAMES.index)
    assert found.error == 0.0
    assert errors.runs[-1] == culprits
    assert found.runs == len(errors.runs)


@given(st.sets(st.sampled_from(NAMES), min_size=2), st.integers(1, 5))
def test_some_errors_may_stay(culprits, allowed):
    found = search_list(NAMES, Errors(culprits), allowed)
    assert len(found.names) == max(len(culprits) - allowed, 0)


def test_where_no_list_is_enough_there_is_none():
    found = search_list("abc", lambda kept: 1.0, 0.5)
    assert (found.names, found.error) == (None, None)
    assert search_list((), lambda kept: 1.0, 0.5).names is None


def test_an_error_that_is_no_number_is_not_under_a_bound():
    assert search_list("ab", lambda kept: math.nan, 0.5).names is None
    found = search_list("ab", lambda kept: 0.0 if kept == {"a"} else math.nan, 0.5)
    assert found.names == ("a",)


def test_the_number_of_runs_is_limited_and_the_list_is_still_proved(monkeypatch):
    monkeypatch.setattr(comparison, "_MOST_RUNS", 14)
    errors = Errors("xyz")
    found = search_list(NAMES, errors, 0.5)
    assert set(found.names) >= {"x", "y", "z"}
    assert found.error == 0.0
    assert len(errors.runs) <= 15


def test_an_error_that_is_not_the_same_twice_is_no_proof():
    answers = iter([1.0, 0.1, 1.0])
    assert search_list("a", lambda kept: next(answers), 0.5).names is None
