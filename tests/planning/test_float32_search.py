"""The search for a list to keep in float32: it is minimal, and its last run proves it."""

import math
import string

from hypothesis import given
from hypothesis import strategies as st

from tfamp.planning.float32_search import search_list

NAMES = string.ascii_letters


class Errors:
    """The error is the number of culprits that are not kept; counts its runs."""

    def __init__(self, culprits):
        self.culprits, self.runs = frozenset(culprits), []

    def __call__(self, kept):
        self.runs.append(kept)
        return float(len(self.culprits - kept))


@given(st.sets(st.sampled_from(NAMES)))
def test_exactly_the_culprits_are_found_and_proved_by_the_last_run(culprits):
    errors = Errors(culprits)
    names, error = search_list(NAMES, errors, 0.5)
    assert set(names) == culprits
    assert len(search_list(NAMES, Errors(culprits), 2.0)[0]) == max(len(culprits) - 2, 0)
    assert list(names) == sorted(names, key=NAMES.index)
    assert error == 0.0
    assert errors.runs[-1] == culprits


def test_without_a_list_and_with_errors_that_are_not_numbers():
    for names, error in (("abc", 1.0), ((), 1.0), ("ab", math.nan)):
        assert search_list(names, lambda kept, error=error: error, 0.5) == (None, None)
    found = search_list("ab", lambda kept: 0.0 if kept == {"a"} else math.nan, 0.5)
    assert found == (("a",), 0.0)
    answers = iter([1.0, 0.1, 1.0])  # An error that changes proves nothing.
    assert search_list("a", lambda kept: next(answers), 0.5) == (None, None)
