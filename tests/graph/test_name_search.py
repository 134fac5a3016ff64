"""Searches in node names, with and without a bound."""

import re
import signal
import threading

import pytest

from tfamp.planning.name_search import (
    MOST_CALLERS,
    caller_names,
    full_name,
    is_found,
    limited,
    nearest_names,
)

ENDLESS = re.compile(r"(a+)+$")
NAME = "a" * 60 + "b"


@pytest.mark.parametrize("bound", [None, 5.0])
def test_what_is_found_is_what_re_finds(bound):
    def both():
        assert is_found(re.compile("dense.*/MatMul$"), "model/dense_1/MatMul")
        assert not is_found(re.compile("^dense"), "model/dense_1/MatMul")

    if bound is None:
        both()
    else:
        with limited(bound):
            both()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs Unix")
def test_an_endless_search_is_a_value_error_and_the_alarm_is_put_back():
    before = signal.getsignal(signal.SIGALRM)
    with limited(0.05), pytest.raises(ValueError, match=re.escape("'(a+)+$' takes more than 0.05")):
        is_found(ENDLESS, NAME)
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_the_limit_is_for_the_block_and_leaves_other_threads_alone():
    found = []
    with limited(0.05):
        thread = threading.Thread(target=lambda: found.append(is_found(re.compile("b$"), NAME)))
        thread.start()
        thread.join()
    assert found == [True]
    before = signal.getsignal(signal.SIGALRM)
    assert is_found(re.compile("b$"), NAME)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_function_has_the_names_of_all_its_callers_and_ends_where_it_calls_itself():
    calls = {
        "": [("one", ["f"]), ("two/cond", ["f", "g"])],
        "f": [("cond/while", ["body"])],
        "body": [("again", ["f", "body"])],
    }
    found = caller_names(calls, "")
    assert found["g"] == ("two/cond",)
    assert found["f"][:2] == ("one", "two/cond")
    assert found["body"][:2] == ("one/cond/while", "two/cond/while")
    doubling = {str(i): [("a", [str(i + 1)]), ("b", [str(i + 1)])] for i in range(64)}
    assert len(caller_names(doubling, "0")["64"]) == MOST_CALLERS


def test_a_name_that_repeats_its_callers_is_not_written_twice():
    assert full_name("layer/call/cond", "cond/MatMul") == "layer/call/cond/MatMul"
    assert full_name("cond", "cond") == "cond/cond"
    assert full_name("a/b", "a/c") == "a/b/a/c"
    assert full_name("", "MatMul") == "MatMul"


@pytest.mark.parametrize(
    ("pattern", "nearest"),
    [
        (r"^dense_l/", "dense_1/MatMul"),
        (r"Softmx$", "head/Softmax"),
        (r"dense_1/(matmul|bias)", "dense_1/MatMul"),
        (r"\.\d+", "x"),
    ],
)
def test_the_nearest_names_are_those_like_the_pattern(pattern, nearest):
    names = ["x", "Const", "dense/MatMul", "dense_1/MatMul", "dense_1/MatMul/read", "head/Softmax"]
    assert nearest_names(pattern, names)[0] == nearest
