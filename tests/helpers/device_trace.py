"""Reads what TensorFlow's profiler saw on GPUs: the copies to the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tensorflow.tsl.profiler.protobuf import xplane_pb2

_TO_HOST = re.compile(r"memcpy\s*d(?:to|2)h", re.IGNORECASE)
_SIZE = re.compile(r"size:(\d+)")


def copies_to_host(folder: Path) -> list[int] | None:
    """Bytes of each copy from a GPU to the host in the profile that was written to a folder.

    None where the profile has no event of a GPU: NVIDIA's driver may keep them to administrators.
    """
    events = [each for path in sorted(folder.rglob("*.xplane.pb")) for each in _events(path)]
    if not events:
        return None
    return [_bytes(plane, event) for plane, event in events if _TO_HOST.search(_name(plane, event))]


def _events(path: Path) -> Iterator[tuple[xplane_pb2.XPlane, xplane_pb2.XEvent]]:
    """Yields the events of GPU streams; other lines of a device repeat them by op or module."""
    for plane in xplane_pb2.XSpace.FromString(path.read_bytes()).planes:
        for line in plane.lines:
            if plane.name.startswith("/device:GPU") and line.name.startswith("Stream"):
                for event in line.events:
                    yield plane, event


def _name(plane: xplane_pb2.XPlane, event: xplane_pb2.XEvent) -> str:
    return plane.event_metadata[event.metadata_id].name


def _bytes(plane: xplane_pb2.XPlane, event: xplane_pb2.XEvent) -> int:
    """The copy's size, which the profiler gives as text: "kind_src:device ... size:8 ..."."""
    for stat in event.stats:
        if plane.stat_metadata[stat.metadata_id].name == "memcpy_details":
            text = stat.str_value or plane.stat_metadata[stat.ref_value].name
            if match := _SIZE.search(text):
                return int(match[1])
    return 0
