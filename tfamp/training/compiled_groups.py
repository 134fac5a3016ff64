"""Which of many tensors are put together in one compiled call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfamp.interop.tf_private import device_kind_of

_Item = TypeVar("_Item")

# Bytes that a cache which cores share holds of one call, while another one runs beside it.
_ROOM = 8 << 20


def grouped(
    items: Sequence[_Item], device: str, kind: Callable[[_Item], Any], size: Callable[[_Item], int]
) -> list[list[_Item]]:
    """Items that are computed together: on GPUs all of them, on CPUs what caches hold.

    `size` is how many bytes a call reads and writes for an item. What is computed of numbers that
    were just written then finds them in a cache. Groups of the same kinds, as layers that repeat
    have them, are compiled once.
    """
    if device_kind_of(device) != "cpu":
        return [list(items)]
    kinds: dict[Any, list[_Item]] = defaultdict(list)
    for each in items:
        kinds[kind(each)].append(each)
    groups: list[list[_Item]] = []
    others: list[_Item] = []
    for alike in kinds.values():
        count = max(1, _ROOM // max(1, size(alike[0])))
        whole = len(alike) - len(alike) % count
        groups += [alike[i : i + count] for i in range(0, whole, count)]
        others += alike[whole:]
    left = 0
    for each in others:
        if not groups or size(each) > left:
            groups.append([])
            left = _ROOM
        groups[-1].append(each)
        left -= size(each)
    return groups
