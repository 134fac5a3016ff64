"""Reads the kind of a device from its name, as graphs and eager tensors spell it."""

from __future__ import annotations

import functools
import re

_KIND = re.compile(r"(?:^|/|device:)(cpu|gpu|tpu)(?=[:_]|$)", re.IGNORECASE)


@functools.cache
def device_kind_of(name: str) -> str:
    """Kind of device in a device's name: "cpu", "gpu" or "tpu"; "" without one."""
    match = _KIND.search(name)
    return match[1].lower() if match else ""
