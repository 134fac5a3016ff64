"""What a monitor remembers of some steps -> one record, a plain dict; framework-free but counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tfamp.diagnostics.monitoring.exponents import ExponentHistogram, suggested_scale, total
from tfamp.diagnostics.monitoring.step_statistics import Sample
from tfamp.diagnostics.monitoring.value_counts import histogram


def make_record(
    sample: Sample,
    names: Sequence[str],
    *,
    past: Sequence[tuple[int, float, int]],
    skipped: int,
    consecutive: int,
) -> dict[str, Any]:
    """Makes the record of a sample of gradients.

    Args:
        sample: The sample.
        names: Names of the variables, in the sample's order.
        past: Step, loss scale and number of steps skipped before, of the steps since the last
            record.
        skipped: Number of steps skipped so far.
        consecutive: Number of them since the last that was not.

    Returns:
        The record, as `NumericsMonitor` describes it.
    """
    # Of scales that are no power of two the next one below stands for them.
    exponent = math.frexp(sample.loss_scale)[1] - 1
    unscaled: dict[str, ExponentHistogram] = {}
    scaled: dict[str, ExponentHistogram] = {}
    for name, rows in zip(names, sample.counts, strict=True):
        unscaled[name], over = histogram(rows, sample.divisor)
        scaled[name] = unscaled[name].shifted(exponent, over)
    everything = total(unscaled.values()), total(scaled.values())
    bad = [name for name, each in unscaled.items() if each.nonfinite]
    return {
        "step": sample.step,
        "loss_scale": sample.loss_scale,
        "suggested_scale": suggested_scale(everything[0]),
        "skipped_steps": skipped,
        "consecutive_skipped_steps": consecutive,
        "loss_scales": _changes(past),
        "skipped": _skipped(past, skipped),
        "first_nonfinite": bad[0] if bad else None,
        "gradients": _described(*everything),
        "variables": {name: _described(unscaled[name], scaled[name]) for name in names},
    }


def activations_of(samples: Iterable[tuple[str, Sample]]) -> dict[str, Any]:
    """Returns the part of a record that tells of layers' outputs.

    Args:
        samples: Names of layers with what was sampled of them.
    """
    described = {}
    for name, sample in samples:
        if sample.step:
            found, _ = histogram(sample.counts[0], 1.0)
            described[name] = {"step": sample.step, **found.to_dict(), **found.shares()}
    return described


def _described(unscaled: ExponentHistogram, scaled: ExponentHistogram) -> dict[str, Any]:
    return {**unscaled.to_dict(), **scaled.shares(), "unscaled": unscaled.shares()}


def _changes(past: Sequence[tuple[int, float, int]]) -> list[list[float]]:
    changes: list[list[float]] = []
    for step, scale, _ in past:
        if not changes or changes[-1][1] != scale:
            changes.append([step, scale])
    return changes


def _skipped(past: Sequence[tuple[int, float, int]], skipped: int) -> list[int]:
    after = [before for _, _, before in past[1:]] + [skipped]
    return [step for (step, _, before), then in zip(past, after, strict=False) if then > before]
