"""Records as a `NumericsMonitor` makes them, made up."""

from __future__ import annotations

import math

from tfamp.diagnostics.step_statistics import ExponentHistogram, suggested_scale


def made_record(
    step=100,
    counts=None,
    *,
    scale=2.0**15,
    changes=None,
    skipped=(),
    names=("dense/kernel", "dense/bias"),
    nans=0,
):
    """A record in which every variable has the same histogram."""
    counts = {-20: 30, -8: 60, 0: 10} if counts is None else counts
    unscaled = ExponentHistogram(counts, zeros=25, nans=nans, largest=1.5)
    scaled = unscaled.shifted(int(math.log2(scale)), 0)
    described = {**unscaled.to_dict(), **scaled.shares(), "unscaled": unscaled.shares()}
    return {
        "step": step,
        "loss_scale": scale,
        "suggested_scale": suggested_scale(unscaled),
        "skipped_steps": len(skipped),
        "consecutive_skipped_steps": 0,
        "loss_scales": changes or [[step - 99, scale]],
        "skipped": list(skipped),
        "first_nonfinite": names[0] if nans else None,
        "gradients": described,
        "variables": dict.fromkeys(names, described),
    }
