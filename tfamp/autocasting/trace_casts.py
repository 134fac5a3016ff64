"""Casts of variables in a trace, each made once; no assignment, tape or graph is forgotten."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp._tf_private import no_tape_is_active, place_in_trace

_READ = "ReadVariableOp"
# Whatever else takes a variable's handle, a call of a function included, may assign.
_ONLY_READ = {_READ, "VariableShape", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd"}


@dataclass(frozen=True, slots=True)
class _Cast:
    """A cast that may be used again.

    Attributes:
        result: The tensor; weak, as it keeps its graph alive.
        read: Place in the trace of the read that was cast.
        recorded: Whether a tape saw the cast.
        watching: Number of times anything had begun to record.
    """

    result: weakref.ref[Any]
    read: int
    recorded: bool
    watching: int


class TraceCasts(threading.local):
    """The casts of variables in the graphs this thread traces, until the last autocast is left."""

    def __init__(self) -> None:
        self._by_graph: weakref.WeakKeyDictionary[Any, dict[tuple[str, str], _Cast]] = (
            weakref.WeakKeyDictionary()
        )
        self._watching = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_graph.values()))

    def recording_changed(self) -> None:
        """Notes that a tape begins to record or to watch: it did not see what was cast before."""
        self._watching += 1

    def clear(self) -> None:
        """Forgets all casts."""
        self._by_graph.clear()

    def once(self, value: Any, dtype: str, cast: Callable[[], Any]) -> Any:
        """Casts a tensor, or takes what the same variable was cast to before.

        Args:
            value: The tensor.
            dtype: What it is cast to.
            cast: Casts it.

        Returns:
            The tensor in the other dtype.
        """
        if not _is_read_in_this_trace(value):
            return cast()
        handle = value.op.inputs[0]
        casts = self._by_graph.setdefault(value.graph, {})
        known = casts.get((handle.name, dtype))
        found = None if known is None else known.result()
        if known is not None and found is not None and self._holds(known, handle, value):
            return found
        made = cast()
        recorded = not no_tape_is_active()
        place = place_in_trace(value.op)
        casts[handle.name, dtype] = _Cast(weakref.ref(made), place, recorded, self._watching)
        return made

    def _holds(self, known: _Cast, handle: Any, value: Any) -> bool:
        """Whether a cast is what casting this read would give, for values and for gradients."""
        seen = known.recorded and known.watching == self._watching
        if not seen and not no_tape_is_active():
            return False
        first, last = sorted((known.read, place_in_trace(value.op)))
        return all(
            op.type in _ONLY_READ or not first < place_in_trace(op) < last
            for op in handle.consumers()
        )


def _is_read_in_this_trace(value: Any) -> bool:
    return (
        not tf.executing_eagerly()
        and tf.is_tensor(value)
        and getattr(value, "graph", None) is tf.compat.v1.get_default_graph()
        and value.op.type == _READ
    )


trace_casts = TraceCasts()
