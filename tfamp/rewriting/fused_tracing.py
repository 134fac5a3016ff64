"""Traces float32 BatchNormalization layers as TensorFlow's fused op, which a rewrite can lower.

Keras spells the layer out in a dozen ops, most of which need float32. As one op with float32
statistics it takes and gives low-precision tensors once the graph is rewritten.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tfamp.interop.patching import patched_here
from tfamp.layers.fused_norms import can_fuse, fits, normalize

_thread = threading.local()


def traces_for_a_rewrite() -> bool:
    """Whether this thread is tracing a function whose graph will be rewritten."""
    return getattr(_thread, "traces", False)


@contextlib.contextmanager
def fused_batch_normalization() -> Iterator[None]:
    """A context in which this thread traces BatchNormalization layers as the fused op.

    Layers that Keras computes differently, by mask, axis or synchronization, stay as they are, as
    do all layers where Keras was not imported.
    """
    if "keras" not in sys.modules:
        yield
        return
    outer, _thread.traces = traces_for_a_rewrite(), True
    try:
        with patched_here(batch_normalization=_call):
            yield
    finally:
        _thread.traces = outer


def _call(original: Any, layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
    if (
        mask is None
        and getattr(inputs, "dtype", None) == layer.compute_dtype == "float32"
        and can_fuse(type(layer))
        and fits(layer, inputs, "float32")
    ):
        return normalize(layer, inputs, training)
    return original(layer, inputs, training=training, mask=mask)
