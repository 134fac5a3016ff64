"""Which autocast is in force in a context of a thread, and the casts it may reuse."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tfamp.autocasting.trace_casts import TraceCasts
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


class Block:
    """An autocast that was entered: a link in the stack that a context holds.

    Attributes:
        mode: What it puts in force; None where nothing is cast.
        outer: The block around it.
        casts: What it and the blocks around it may reuse.
        thread: The thread it counts in.
        left: Whether it was left. A context it was not left in may hold it still.
    """

    __slots__ = ("casts", "left", "mode", "outer", "thread")

    def __init__(self, mode: Mode | None, outer: Block | None) -> None:
        self.mode = mode
        self.outer = outer
        self.casts: Casts = Casts() if outer is None else outer.casts
        self.thread = threading.get_ident()
        self.left = False


class _Modes:
    """The autocasts in force: a stack of blocks for each context, innermost first.

    A context is that of `contextvars`: coroutines have one each. A block also counts only in its
    thread, as all of TensorFlow's scopes do, whoever runs a copy of its context elsewhere.
    """

    def __init__(self) -> None:
        self._stack: ContextVar[Block | None] = ContextVar("tfamp_autocast", default=None)

    def enter(self, mode: Mode | None) -> Block:
        """Puts a mode in force here, until its block is left."""
        block = Block(mode, self._innermost())
        if block.outer is None:
            # What began to record before, nobody was told of.
            block.casts.traced.recording_changed()
        block.casts.blocks.append(block)
        self._stack.set(block)
        return block

    def leave(self, block: Block) -> None:
        """Ends a block, in whatever order, context and thread."""
        block.left = True
        block.casts.blocks.remove(block)
        if not block.casts.blocks:
            block.casts.clear()
        if self._stack.get() is block:
            self._stack.set(self._innermost())

    def holds(self, block: Block) -> bool:
        """Whether a block was entered in this context, or in one that it is a copy of."""
        each = self._innermost()
        while each is not None and each is not block:
            each = each.outer
        return each is not None

    @property
    def current(self) -> Mode | None:
        """The mode in force; None where nothing is cast."""
        block = self._innermost()
        return None if block is None else block.mode

    @property
    def casts(self) -> Casts | None:
        """What may be reused here; None outside of every autocast."""
        block = self._innermost()
        return None if block is None else block.casts

    @contextlib.contextmanager
    def set_to(self, mode: Mode | None) -> Iterator[None]:
        """Puts a mode in force; None pauses what is."""
        if mode is None and self.current is None:
            yield
            return
        block = self.enter(mode)
        try:
            yield
        finally:
            self.leave(block)

    def _innermost(self) -> Block | None:
        block = self._stack.get()
        if block is None or block.thread != threading.get_ident():
            return None
        while block is not None and block.left:
            block = block.outer
        return block


class Casts:
    """What the blocks of one stack may reuse, until the last of them is left.

    Attributes:
        blocks: Those in force.
        eager: Casts of eager tensors.
        traced: Casts of variables in traces.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.eager = _CastCache()
        self.traced = TraceCasts()

    def clear(self) -> None:
        """Forgets all casts."""
        self.eager.clear()
        self.traced.clear()


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
