"""Which gradients were unscaled since the last apply; `tracing.PerTrace` keeps one per graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class UnscaledWindow:
    """The gradients unscaled since the last apply, in one graph or in eager mode."""

    def __init__(self) -> None:
        # Weak: the window must not keep a step's gradients alive.
        self._seen: list[weakref.ref[Any]] = []
        self._unscaled: list[weakref.ref[Any]] = []
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

    def remember(self, gradients: Sequence[Any], unscaled: Sequence[Any]) -> None:
        """Notes gradients that were unscaled, what came out, and that this was checked."""
        self._open = True
        came_out = [weakref.ref(values) for values in _tensors(unscaled)]
        self._unscaled += came_out
        self._seen += [weakref.ref(values) for values in _tensors(gradients)] + came_out

    def came_out(self, gradients: Sequence[Any]) -> list[bool]:
        """Whether each of the gradients is one that came out, unchanged, since the last apply."""
        unscaled = {id(tensor) for ref in self._unscaled if (tensor := ref()) is not None}
        return [id(gradient) in unscaled for gradient in gradients]

    def is_open(self) -> bool:
        """Whether anything was unscaled since the last apply."""
        return self._open

    def close(self) -> bool:
        """Starts anew and returns whether anything had been unscaled."""
        was_open, self._open, self._seen, self._unscaled = self._open, False, [], []
        return was_open


def _tensors(gradients: Sequence[Any]) -> list[Any]:
    values = (g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients)
    return [value for value in values if tf.is_tensor(value)]
