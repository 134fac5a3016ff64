"""Traces float32 BatchNormalization layers as TensorFlow's fused op, which a rewrite can lower.

Keras spells the layer out in a dozen ops, most of which need float32. As one op with float32
statistics it takes and gives low-precision tensors once the graph is rewritten.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tfamp.layers.fused_norms import can_fuse, fits, normalize


class _Hook:
    """The replaced method, in place while any thread traces; it acts in threads that do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._restore: Callable[[], None] = lambda: None
        self._thread = threading.local()

    def depth(self) -> int:
        return int(getattr(self._thread, "depth", 0))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        from tfamp.interop.keras_intercept import intercept_batch_normalization

        with self._lock:
            if not self._users:
                self._restore = intercept_batch_normalization(self._call)
            self._users += 1
        depth = self.depth()
        self._thread.depth = depth + 1
        try:
            yield
        finally:
            self._thread.depth = depth
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _call(
        self, layer: Any, original: Callable[..., Any], inputs: Any, training: Any, mask: Any
    ) -> Any:
        if (
            self.depth()
            and mask is None
            and getattr(inputs, "dtype", None) == layer.compute_dtype == "float32"
            and can_fuse(type(layer))
            and fits(layer, inputs, "float32")
        ):
            return normalize(layer, inputs, training)
        return original(inputs, training=training, mask=mask)


_hook = _Hook()


def traces_for_a_rewrite() -> bool:
    """Whether this thread is tracing a function whose graph will be rewritten."""
    return _hook.depth() > 0


def fused_batch_normalization() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which this thread traces BatchNormalization layers as the fused op.

    Layers that Keras computes differently, by mask, axis or synchronization, stay as they are, as
    do all layers where Keras was not imported.
    """
    if "keras" not in sys.modules:
        return contextlib.nullcontext()
    return _hook.active()
