"""What a picture or report is made from: records in the forms people have them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def records_of(history: Any) -> list[Mapping[str, Any]]:
    """Returns the records of a monitor.

    Args:
        history: A `NumericsMonitor`, its `history`, one record of it, or the path of its JSON
            lines.

    Raises:
        ValueError: There is no record.
        TypeError: It is none of these.
    """
    records = _listed(history)
    if not records:
        raise ValueError(
            "There is no record to show. A NumericsMonitor makes one every `every` steps: train "
            "for more steps, or make `every` smaller."
        )
    if not all(isinstance(each, Mapping) and "gradients" in each for each in records):
        raise TypeError(f"Expected records of a NumericsMonitor; got {records[0]!r:.80}.")
    return records


def _listed(history: Any) -> list[Mapping[str, Any]]:
    history = getattr(history, "history", history)
    if isinstance(history, Mapping):
        return [history]
    if isinstance(history, (str, os.PathLike)):
        lines = Path(history).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    if isinstance(history, Iterable):
        return list(history)
    raise TypeError(
        "history must be a NumericsMonitor, its history, one of its records or the path of its "
        f"JSON lines; got {type(history).__name__}."
    )


def scale_steps(records: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[float]]:
    """Returns the steps at which the loss scale changed, with the first and last; and the scales.

    Args:
        records: The records, in order.

    Returns:
        Steps and the scale from each on; the last step repeats the last scale.
    """
    steps: list[int] = []
    scales: list[float] = []
    for record in records:
        for step, scale in record["loss_scales"]:
            if not scales or scales[-1] != scale:
                steps.append(int(step))
                scales.append(float(scale))
    last = max([record["step"] for record in records] + [s for r in records for s in r["skipped"]])
    return [*steps, last], [*scales, scales[-1]] if scales else []


def exponents_of(described: Mapping[str, Any]) -> dict[int, int]:
    """Returns exponent -> number of values; in JSON the exponents are text."""
    return {int(exponent): number for exponent, number in described["exponents"].items()}
