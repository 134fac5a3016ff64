"""Which gradients were unscaled since the last apply, per thread and per graph being traced.

Whether gradients have been unscaled is a fact of the program text, not of a step: it belongs to
the graph that is being traced (or to eager mode). Keeping it per graph makes it hold under
retracing and in several functions; per thread, because each replica of a `MirroredStrategy`
traces in a thread of its own.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class UnscaledWindow:
    """The gradients unscaled since the last apply, in one graph or in eager mode."""

    def __init__(self) -> None:
        # Weak: the window must not keep a step's gradients alive.
        self._seen: list[weakref.ref[Any]] = []
        self._open = False

    def check_not_unscaled(self, gradients: Sequence[Any]) -> None:
        """Raises if one of the gradients went in or came out since the last apply.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None.

        Raises:
            ValueError: One did.
        """
        seen = {id(tensor) for ref in self._seen if (tensor := ref()) is not None}
        if any(id(values) in seen for values in _tensors(gradients)):
            raise ValueError(
                "These gradients have been unscaled already since the last apply; unscaling them "
                "again would divide by the loss scale twice. Call get_unscaled_gradients once on "
                "the gradients of each backward pass, then apply_gradients."
            )

    def remember(self, *gradients: Sequence[Any]) -> None:
        """Notes gradients that were unscaled and what came out."""
        self._open = True
        self._seen += [weakref.ref(values) for group in gradients for values in _tensors(group)]

    def close(self) -> bool:
        """Starts anew and returns whether anything had been unscaled."""
        was_open, self._open, self._seen = self._open, False, []
        return was_open


def _tensors(gradients: Sequence[Any]) -> list[Any]:
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return [value for value in values if tf.is_tensor(value)]


class UnscaledWindows(threading.local):
    """The windows of one optimizer in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self._eager = UnscaledWindow()
        self._by_graph: weakref.WeakKeyDictionary[tf.Graph, UnscaledWindow] = (
            weakref.WeakKeyDictionary()
        )

    def current(self) -> UnscaledWindow:
        """The window of the graph being traced, or of eager mode."""
        if tf.executing_eagerly():
            return self._eager
        return self._by_graph.setdefault(tf.compat.v1.get_default_graph(), UnscaledWindow())

    def __deepcopy__(self, memo: dict[int, Any]) -> UnscaledWindows:
        return UnscaledWindows()  # What was unscaled with one optimizer says nothing of its copy.
