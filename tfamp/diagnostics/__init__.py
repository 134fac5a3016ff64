"""What a machine, a model or a training run does in mixed precision.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp.diagnostics.device import DeviceReport as DeviceReport
    from tfamp.diagnostics.device import device_report as device_report
    from tfamp.diagnostics.nonfinite import find_nonfinite as find_nonfinite
    from tfamp.diagnostics.nonfinite_report import NonFiniteReport as NonFiniteReport
    from tfamp.diagnostics.nonfinite_report import ValueRange as ValueRange

# Public name -> module that defines it.
_HOMES = {
    "DeviceReport": "tfamp.diagnostics.device",
    "NonFiniteReport": "tfamp.diagnostics.nonfinite_report",
    "ValueRange": "tfamp.diagnostics.nonfinite_report",
    "device_report": "tfamp.diagnostics.device",
    "find_nonfinite": "tfamp.diagnostics.nonfinite",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tfamp.diagnostics' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
