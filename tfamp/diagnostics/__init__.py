"""What a machine, a model or a training run does in mixed precision.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp.diagnostics.device import DeviceReport as DeviceReport
    from tfamp.diagnostics.device import device_report as device_report
    from tfamp.diagnostics.monitor import NumericsMonitor as NumericsMonitor
    from tfamp.diagnostics.plots import plot_compare as plot_compare
    from tfamp.diagnostics.plots import plot_exponents as plot_exponents
    from tfamp.diagnostics.plots import plot_loss_scale as plot_loss_scale
    from tfamp.diagnostics.report import training_report as training_report

# Public name -> module that defines it.
_HOMES = {
    "DeviceReport": "tfamp.diagnostics.device",
    "NumericsMonitor": "tfamp.diagnostics.monitor",
    "device_report": "tfamp.diagnostics.device",
    "plot_compare": "tfamp.diagnostics.plots",
    "plot_exponents": "tfamp.diagnostics.plots",
    "plot_loss_scale": "tfamp.diagnostics.plots",
    "training_report": "tfamp.diagnostics.report",
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
