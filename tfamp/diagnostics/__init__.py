"""What a machine, a model or a training run does in mixed precision.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp.diagnostics.comparison import Comparison as Comparison
    from tfamp.diagnostics.comparison import ComparisonRow as ComparisonRow
    from tfamp.diagnostics.device import DeviceReport as DeviceReport
    from tfamp.diagnostics.device import device_report as device_report
    from tfamp.diagnostics.expected_gain import ModelReport as ModelReport
    from tfamp.diagnostics.expected_gain import model_report as model_report
    from tfamp.diagnostics.monitor import NumericsMonitor as NumericsMonitor
    from tfamp.diagnostics.nonfinite import find_nonfinite as find_nonfinite
    from tfamp.diagnostics.nonfinite_report import NonFiniteReport as NonFiniteReport
    from tfamp.diagnostics.nonfinite_report import ValueRange as ValueRange
    from tfamp.diagnostics.operator_stats import OpCounts as OpCounts
    from tfamp.diagnostics.operator_stats import op_counts as op_counts
    from tfamp.diagnostics.plots import plot_compare as plot_compare
    from tfamp.diagnostics.plots import plot_exponents as plot_exponents
    from tfamp.diagnostics.plots import plot_loss_scale as plot_loss_scale
    from tfamp.diagnostics.precision_comparison import compare as compare
    from tfamp.diagnostics.training_page import training_report as training_report

# Public name -> module that defines it.
_HOMES = {
    "Comparison": "tfamp.diagnostics.comparison",
    "ComparisonRow": "tfamp.diagnostics.comparison",
    "DeviceReport": "tfamp.diagnostics.device",
    "ModelReport": "tfamp.diagnostics.expected_gain",
    "NonFiniteReport": "tfamp.diagnostics.nonfinite_report",
    "NumericsMonitor": "tfamp.diagnostics.monitor",
    "OpCounts": "tfamp.diagnostics.operator_stats",
    "ValueRange": "tfamp.diagnostics.nonfinite_report",
    "compare": "tfamp.diagnostics.precision_comparison",
    "device_report": "tfamp.diagnostics.device",
    "find_nonfinite": "tfamp.diagnostics.nonfinite",
    "model_report": "tfamp.diagnostics.expected_gain",
    "op_counts": "tfamp.diagnostics.operator_stats",
    "plot_compare": "tfamp.diagnostics.plots",
    "plot_exponents": "tfamp.diagnostics.plots",
    "plot_loss_scale": "tfamp.diagnostics.plots",
    "training_report": "tfamp.diagnostics.training_page",
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
