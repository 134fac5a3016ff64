"""Searches in node names, with and without a bound."""

import re
import signal
import threading

import pytest

from tfamp.planning.name_search import is_found, limited

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
