"""Which autocast is in force in a thread, and the casts it may reuse."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from tfamp.autocasting.trace_casts import trace_casts
from tfamp.graph.op_lists import OpLists


@dataclass(frozen=True)
class Mode:
    """One autocast in force.

    Attributes:
        dtype: "float16" or "bfloat16".
        targets: Op type -> the dtype its float inputs are cast to; "" for the widest among them.
        cache_casts: Whether casts may be reused.
        key: What tells this mode's traces from others'.
    """

    dtype: str
    targets: dict[str, str]
    cache_casts: bool
    key: Hashable

    @classmethod
    def of(cls, dtype: str, lists: OpLists, cache_casts: bool) -> Mode:
        """The mode for a dtype and op lists."""
        targets = dict.fromkeys(lists.widest, "")
        targets |= dict.fromkeys(lists.float32, "float32")
        targets |= dict.fromkeys(lists.low, dtype)
        return cls(dtype, targets, cache_casts, (dtype, lists))


class _Modes(threading.local):
    """The autocasts entered in this thread, innermost last."""

    def __init__(self) -> None:
        self._entered: list[tuple[Any, Mode | None]] = []
        self.casts = _CastCache()

    def push(self, owner: Any, mode: Mode | None) -> None:
        if not self._entered:
            # What began to record before, nobody was told of.
            trace_casts.recording_changed()
        self._entered.append((owner, mode))

    def pop(self, owner: Any) -> None:
        # Not simply the last one: a generator may be left after what was entered later.
        for index in range(len(self._entered) - 1, -1, -1):
            if self._entered[index][0] is owner:
                del self._entered[index]
                break
        if not self._entered:
            self.casts.clear()
            trace_casts.clear()

    @property
    def current(self) -> Mode | None:
        """The mode in force; None where nothing is cast."""
        return self._entered[-1][1] if self._entered else None

    @contextlib.contextmanager
    def set_to(self, mode: Mode | None) -> Iterator[None]:
        """Puts a mode in force; None pauses what is."""
        owner = object()
        self.push(owner, mode)
        try:
            yield
        finally:
            self.pop(owner)


class _CastCache:
    """Casts of eager tensors, each kept no longer than the tensor it was made from."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, str], tuple[weakref.ref[Any], Any]] = {}

    def __len__(self) -> int:
        return len(self._casts)

    def get(self, value: Any, dtype: str) -> Any:
        found = self._casts.get((id(value), dtype))
        return found[1] if found is not None and found[0]() is value else None

    def set(self, value: Any, dtype: str, cast: Any) -> None:
        casts, key = self._casts, (id(value), dtype)

        def drop(dead: weakref.ref[Any]) -> None:
            # The number may have been given to a new tensor since.
            if key in casts and casts[key][0] is dead:
                del casts[key]

        casts[key] = (weakref.ref(value, drop), cast)

    def clear(self) -> None:
        self._casts.clear()


current_modes = _Modes()
