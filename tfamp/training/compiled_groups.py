"""Which of many tensors are put together in one compiled call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tfamp.interop.tf_private import device_kind_of

_Item = TypeVar("_Item")


def grouped(
    items: Sequence[_Item],
    device: str,
    tensor: Callable[[_Item], Any],
    kind: Callable[[_Item], Any],
    room: int,
) -> list[list[_Item]]:
    """Items that are computed together: on GPUs all of them, on CPUs what caches hold.

    That is as many as have `room` numbers in their tensors. Groups of the same kinds and shapes, as
    layers that repeat have them, are compiled once.
    """
    if device_kind_of(device) != "cpu":
        return [list(items)]

    def size(item: _Item) -> int:
        return int(tensor(item).shape.num_elements())

    kinds: dict[Any, list[_Item]] = defaultdict(list)
    for each in items:
        kinds[tensor(each).shape, tensor(each).dtype, kind(each)].append(each)
    groups: list[list[_Item]] = []
    others: list[_Item] = []
    for alike in kinds.values():
        count = max(1, room // max(1, size(alike[0])))
        whole = len(alike) - len(alike) % count
        groups += [alike[i : i + count] for i in range(0, whole, count)]
        others += alike[whole:]
    left = 0
    for each in others:
        if size(each) > left:
            groups.append([])
            left = room
        groups[-1].append(each)
        left -= size(each)
    return groups
