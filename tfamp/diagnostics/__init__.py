"""Reports on a machine, a model or a training run in mixed precision.

Importing this module loads nothing else: every public name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfamp import lazy_names

if TYPE_CHECKING:
    from tfamp.diagnostics.comparison import Comparison as Comparison
    from tfamp.diagnostics.comparison import ComparisonRow as ComparisonRow
    from tfamp.diagnostics.comparison import compare as compare
    from tfamp.diagnostics.doctor import DeviceReport as DeviceReport
    from tfamp.diagnostics.doctor import device_report as device_report
    from tfamp.diagnostics.model_plan import ModelReport as ModelReport
    from tfamp.diagnostics.model_plan import model_report as model_report
    from tfamp.diagnostics.monitor import NumericsMonitor as NumericsMonitor
    from tfamp.diagnostics.nonfinite import find_nonfinite as find_nonfinite
    from tfamp.diagnostics.nonfinite_report import NonFiniteReport as NonFiniteReport
    from tfamp.diagnostics.nonfinite_report import ValueRange as ValueRange
    from tfamp.diagnostics.operator_stats import op_counts as op_counts
    from tfamp.diagnostics.plots import plot_exponents as plot_exponents
    from tfamp.diagnostics.plots import plot_loss_scale as plot_loss_scale

__all__, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".comparison": ("Comparison", "ComparisonRow", "compare"),
        ".doctor": ("DeviceReport", "device_report"),
        ".model_plan": ("ModelReport", "model_report"),
        ".monitor": ("NumericsMonitor",),
        ".nonfinite": ("find_nonfinite",),
        ".nonfinite_report": ("NonFiniteReport", "ValueRange"),
        ".operator_stats": ("op_counts",),
        ".plots": ("plot_exponents", "plot_loss_scale"),
    },
)
