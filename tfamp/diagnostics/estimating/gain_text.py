"""A `ModelReport` in words: the findings, and the table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tfamp.diagnostics.estimating.padding import MULTIPLE
from tfamp.machine.hardware import Hardware, automatic_policy

if TYPE_CHECKING:
    from tfamp.diagnostics.estimating.expected_gain import ModelReport
    from tfamp.diagnostics.estimating.padding import Misfit

# From here on something is worth a sentence.
_NOTABLE = 0.1
_VISIBLE = 0.005
_GAINS_NOTHING = 1.05
_LOSES = 0.95
_ROWS = 10


def findings(report: ModelReport, machine: Hardware) -> tuple[str, ...]:
    """Returns why low precision does not gain more, the most important first; empty if it does."""
    return tuple(_findings(report, machine))


def _findings(report: ModelReport, machine: Hardware) -> Iterator[str]:
    policy, reason = automatic_policy(machine)
    if policy != f"mixed_{report.dtype}":
        yield f"{report.dtype} is not what this machine is fast in: auto is {policy}, as {reason}."
    if report.speed_up is None:
        yield (
            "The graph does not tell the shapes of its tensors, so no gain can be estimated: give "
            "the batch size, or arguments of a call with known shapes."
        )
    elif report.low_nodes == 0:
        yield f"No op is worth lowering to {report.dtype} here: stay with float32."
    elif report.speed_up < _GAINS_NOTHING:
        gain = "Time is lost" if report.speed_up < _LOSES else "Next to nothing is gained"
        yield f"{gain}: {report.low_share:.0%} of the time is spent in {report.dtype} ops."
    if report.overhead_share > _NOTABLE:
        yield (
            f"{report.overhead_share:.0%} of the time is the cost of starting ops, which no dtype "
            "makes less: use larger batches or layers, or compile with XLA."
        )
    if report.casts_share > _NOTABLE:
        yield f"{report.casts_share:.0%} of the time is Casts between the dtypes."
    for each in report.float32_ops:
        if each.share > _NOTABLE:
            yield (
                f"{each.share:.0%} of the time is {each.nodes} {each.op} in float32: {each.reason}."
            )
    heavy = [each for each in report.misfits if each.share > _NOTABLE]
    if heavy:
        where = "here" if machine.gpus else "on a GPU; a CPU's kernels pad by themselves"
        yield (
            f"Sizes that are no multiples of {MULTIPLE}, in {len(heavy)} of the expensive matmuls "
            f"and convolutions, cost Tensor Cores some of their speed {where}."
        )


def report_lines(report: ModelReport) -> Iterator[str]:
    """Yields the lines of a report for people."""
    gain = "unknown" if report.speed_up is None else f"{report.speed_up:.2f} times as fast"
    batch = "unknown, unknown sizes count as 32" if report.batch_size is None else report.batch_size
    rows: list[tuple[str, object]] = [
        ("model", report.source),
        ("batch", batch),
        ("profile", report.profile_source),
        ("float32", f"{_milliseconds(report.seconds_float32)}, estimated"),
        (report.dtype, f"{_milliseconds(report.seconds_planned)}, estimated: {gain}"),
        ("lowered", f"{report.low_nodes} of {report.nodes} float nodes"),
        ("time", f"{report.low_share:.0%} of it in {report.dtype} ops"),
        ("casts", f"{report.casts}, {report.casts_share:.0%} of the time"),
        ("overhead", f"{report.overhead_share:.0%} of the time is the cost of starting ops"),
    ]
    width = max(len(label) for label, _ in rows)
    yield from (f"{label:<{width}}  {value}" for label, value in rows)
    costly = [each for each in report.float32_ops if each.share >= _VISIBLE]
    if costly:
        yield "\nstays float32"
        for each in costly[:_ROWS]:
            yield f"  {each.share:4.0%}  {each.nodes:3d} {each.op}: {each.reason}"
    if report.misfits:
        yield f"\nsizes that are no multiples of {MULTIPLE}"
        for misfit in sorted(report.misfits, key=lambda each: -each.share)[:_ROWS]:
            yield f"  {misfit.share:4.0%}  {misfit.layer} ({misfit.op}): {_advice(misfit)}"
        if len(report.misfits) > _ROWS:
            yield f"        and {len(report.misfits) - _ROWS} more"
    if report.findings:
        yield "\nwhy it is not faster"
        yield from (f"  {finding}" for finding in report.findings)


def _advice(misfit: Misfit) -> str:
    sizes = " x ".join("?" if size is None else str(size) for size in misfit.sizes.values())
    pads = (f"{what} {misfit.sizes[what]} -> {to}" for what, to in misfit.padded.items())
    return f"{sizes}, pad {', '.join(pads)}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
