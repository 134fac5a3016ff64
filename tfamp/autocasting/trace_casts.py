"""Casts of variables in a trace, each made once; no assignment, tape or graph is forgotten."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfamp.interop.tf_private import no_tape_is_active, place_in_trace

_READ = "ReadVariableOp"
# Whatever else takes a variable's handle, a call of a function included, may assign.
_ONLY_READ = {_READ, "VariableShape", "VarIsInitializedOp", "ResourceGather", "ResourceGatherNd"}


@dataclass(frozen=True, slots=True)
class _Cast:
    """A cast that may be used again.

    Attributes:
        result: The tensor; weak, as it keeps its graph alive.
        read: Place in the trace of the read that was cast.
        made: Place of the cast.
        recorded: Whether a tape saw the cast.
    """

    result: weakref.ref[Any]
    read: int
    made: int
    recorded: bool


@dataclass(slots=True)
class _Trace:
    """What is known of one graph.

    Attributes:
        casts: The last cast of each variable, by its handle and the dtype.
        recordings: After which places a tape began to record or to watch.
    """

    casts: dict[tuple[str, str], _Cast] = field(default_factory=dict)
    recordings: list[int] = field(default_factory=list)

    def recording(self, place: int) -> int:
        """How often something had begun to record at a place."""
        return bisect.bisect_left(self.recordings, place)


class TraceCasts:
    """The casts of variables in the graphs that are traced under one stack of autocasts."""

    def __init__(self) -> None:
        self._traces: weakref.WeakKeyDictionary[Any, _Trace] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return sum(len(trace.casts) for trace in self._traces.values())

    def recording_changed(self) -> None:
        """Notes that a tape begins to record or to watch: it did not see what was made before."""
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
        if made := graph.get_operations():
            trace = self._traces.setdefault(graph, _Trace())
            trace.recordings.append(place_in_trace(made[-1]))

    def clear(self) -> None:
        """Forgets all casts."""
        self._traces.clear()

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
        handle, read = value.op.inputs[0], place_in_trace(value.op)
        trace = self._traces.setdefault(value.graph, _Trace())
        known = trace.casts.get((handle.name, dtype))
        found = None if known is None else known.result()
        if known is not None and found is not None and _holds(known, trace, handle, read):
            return found
        made = cast()
        place, recorded = place_in_trace(made.op), not no_tape_is_active()
        trace.casts[handle.name, dtype] = _Cast(weakref.ref(made), read, place, recorded)
        return made


def _holds(known: _Cast, trace: _Trace, handle: Any, read: int) -> bool:
    """Whether a cast is what casting a read would give now, for values and for gradients."""
    seen = (
        known.recorded
        and trace.recording(known.read) == trace.recording(read)
        and trace.recording(known.made) == len(trace.recordings)
    )
    if not seen and not no_tape_is_active():
        return False
    first, last = sorted((known.read, read))
    return all(
        op.type in _ONLY_READ or not first < place_in_trace(op) < last for op in handle.consumers()
    )


def _is_read_in_this_trace(value: Any) -> bool:
    return (
        not tf.executing_eagerly()
        and tf.is_tensor(value)
        and getattr(value, "graph", None) is tf.compat.v1.get_default_graph()
        and value.op.type == _READ
    )
