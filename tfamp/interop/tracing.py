"""What belongs to one trace of a `tf.function`; and methods that are run there as written."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import tensorflow as tf

_State = TypeVar("_State")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def as_written(method: _Method) -> _Method:
    """Keeps AutoGraph, which rewrites all that a `tf.function` calls, from rewriting a method."""
    kept: _Method = tf.autograph.experimental.do_not_convert(method)
    return kept


class PerTrace(threading.local, Generic[_State]):
    """One state for each graph that is traced and one for eager mode, in each thread.

    Whether a method has been called is a fact of the program text, not of a step: it belongs to
    the graph that is being traced. Keeping it per graph makes it hold under retracing and in
    several functions; per thread, because each replica of a `MirroredStrategy` traces in a thread
    of its own.

    Args:
        make: Returns a new state. A state must not keep tensors alive, they keep their graph alive.
    """

    def __init__(self, make: Callable[[], _State]) -> None:
        super().__init__()
        self._make = make
        self._eager = make()
        self._by_graph: weakref.WeakKeyDictionary[tf.Graph, _State] = weakref.WeakKeyDictionary()

    def current(self) -> _State:
        """The state of the graph being traced, or of eager mode."""
        if tf.executing_eagerly():
            return self._eager
        return self._by_graph.setdefault(tf.compat.v1.get_default_graph(), self._make())

    def __deepcopy__(self, memo: dict[int, Any]) -> PerTrace[_State]:
        return PerTrace(self._make)  # What was called on one object says nothing of its copy.
