"""What a machine, a model or a training run does in mixed precision.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfamp.diagnostics.comparing.comparison import Comparison as Comparison
    from tfamp.diagnostics.comparing.comparison import ComparisonRow as ComparisonRow
    from tfamp.diagnostics.comparing.precision_comparison import compare as compare
    from tfamp.diagnostics.estimating.device import DeviceReport as DeviceReport
    from tfamp.diagnostics.estimating.device import device_report as device_report
    from tfamp.diagnostics.estimating.expected_gain import ModelReport as ModelReport
    from tfamp.diagnostics.estimating.expected_gain import model_report as model_report
    from tfamp.diagnostics.monitoring.monitor import NumericsMonitor as NumericsMonitor
    from tfamp.diagnostics.operator_stats import OpCounts as OpCounts
    from tfamp.diagnostics.operator_stats import op_counts as op_counts
    from tfamp.diagnostics.reporting.plots import plot_compare as plot_compare
    from tfamp.diagnostics.reporting.plots import plot_exponents as plot_exponents
    from tfamp.diagnostics.reporting.plots import plot_loss_scale as plot_loss_scale
    from tfamp.diagnostics.reporting.report import training_report as training_report
    from tfamp.diagnostics.searching.nonfinite import find_nonfinite as find_nonfinite
    from tfamp.diagnostics.searching.report import NonFiniteReport as NonFiniteReport
    from tfamp.diagnostics.searching.report import ValueRange as ValueRange

# Public name -> module that defines it.
_HOMES = {
    "Comparison": "tfamp.diagnostics.comparing.comparison",
    "ComparisonRow": "tfamp.diagnostics.comparing.comparison",
    "DeviceReport": "tfamp.diagnostics.estimating.device",
    "ModelReport": "tfamp.diagnostics.estimating.expected_gain",
    "NonFiniteReport": "tfamp.diagnostics.searching.report",
    "NumericsMonitor": "tfamp.diagnostics.monitoring.monitor",
    "OpCounts": "tfamp.diagnostics.operator_stats",
    "ValueRange": "tfamp.diagnostics.searching.report",
    "compare": "tfamp.diagnostics.comparing.precision_comparison",
    "device_report": "tfamp.diagnostics.estimating.device",
    "find_nonfinite": "tfamp.diagnostics.searching.nonfinite",
    "model_report": "tfamp.diagnostics.estimating.expected_gain",
    "op_counts": "tfamp.diagnostics.operator_stats",
    "plot_compare": "tfamp.diagnostics.reporting.plots",
    "plot_exponents": "tfamp.diagnostics.reporting.plots",
    "plot_loss_scale": "tfamp.diagnostics.reporting.plots",
    "training_report": "tfamp.diagnostics.reporting.report",
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
