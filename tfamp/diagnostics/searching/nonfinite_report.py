"""What `find_nonfinite` reports."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfamp.graph.measuring.tensor_stats import TensorStats

STAGES = ("input", "weights", "forward", "loss", "backward", "loss_scale")
KINDS = ("overflow", "underflow", "invalid", "also_in_float32")


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What the values of a tensor were like.

    Attributes:
        name: What it is: "input 0" of the op, "output 0", "x" or a variable's path.
        dtype: Its dtype.
        shape: Its shape.
        min: Smallest finite value.
        max: Largest finite value.
        infs: Number of infinite values.
        nans: Number of NaNs.
        zeros: Number of zeros.
        subnormals: Number of values that are not zero, but too small for the dtype's full
            precision.

    Example:
        >>> ValueRange("x", "float16", (4,), -2.0, 3.0, infs=1).to_text()
        'float16 [4] in [-2, 3], 1 inf of 4'
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    infs: int = 0
    nans: int = 0
    zeros: int = 0
    subnormals: int = 0

    @classmethod
    def of(cls, name: str, stats: TensorStats) -> ValueRange:
        """Returns the range of a tensor from what was seen of it."""
        fields = {each.name for each in dataclasses.fields(cls)} - {"name"}
        return cls(name=name, **{each: getattr(stats, each) for each in fields})

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite value."""
        return max(abs(self.min), abs(self.max))

    @property
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.infs or self.nans)

    def to_text(self) -> str:
        """Returns the range as one line."""
        size = 1
        for dim in self.shape:
            size *= dim
        text = f"{self.dtype} {list(self.shape)}"
        if self.infs + self.nans < size:
            text += f" in [{self.min:.4g}, {self.max:.4g}]"
        counts = {"inf": self.infs, "NaN": self.nans, "zero": self.zeros}
        counts["subnormal"] = self.subnormals
        found = [f"{count} {what}" for what, count in counts.items() if count]
        return f"{text}, {', '.join(found)} of {size}" if found else text


@dataclass(frozen=True, slots=True)
class NonFiniteReport:
    """The first thing in a step that is not finite, why, and what to change.

    Attributes:
        stage: "input", "weights", "forward", "loss", "backward" or "loss_scale".
        layer: Path of the layer; of raw ops their name scope; None where there is neither.
        op: Type of the op, such as "Exp".
        variable: The variable concerned: one that is not finite, or does not fit the dtype; for
            backward the one whose gradient is not finite; else one the op reads. None if there is
            none.
        kind: "overflow": the value exceeds the dtype's range. "underflow": a value became zero that
            is not zero in float32, and then was divided by or its logarithm taken. "invalid": a NaN
            that float32 does not have, for another reason. "also_in_float32": float32 has it too.
        ranges: "inputs" and "outputs" of the op as they were, and what they are in float32:
            "float32_inputs", and "float32" for the outputs.
        fix: What to change.
        node: Name of the op in the graph.
        dtype: Dtype of what is not finite.
        where: File, line and function in which the op was made, if known.
        details: More that was found out, a sentence each.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.diagnostics import find_nonfinite
        >>> report = find_nonfinite(lambda x: tf.exp(tf.cast(x, tf.float16)), tf.constant([12.0]))
        >>> report.stage, report.op, report.kind
        ('forward', 'Exp', 'overflow')
        >>> print(report.to_text())
        overflow in forward: Exp ...
    """

    stage: str
    layer: str | None
    op: str | None
    variable: str | None
    kind: str
    ranges: Mapping[str, Sequence[ValueRange]]
    fix: str
    node: str | None = None
    dtype: str | None = None
    where: str | None = None
    details: Sequence[str] = field(default=())

    def to_text(self) -> str:
        """Returns the report for people."""
        place = [self.op or "", f"in layer {self.layer}" if self.layer else ""]
        of = "gradient of" if self.stage in ("backward", "loss_scale") else "variable"
        place += [f"({of} {self.variable})" if self.variable else ""]
        lines = [f"{self.kind} in {self.stage}: {' '.join(filter(None, place))}".rstrip(": ")]
        if self.node:
            lines.append(f"  node     {self.node}")
        if self.where:
            lines.append(f"  made in  {self.where}")
        titles = {
            "inputs": "",
            "outputs": "",
            "float32_inputs": "float32: ",
            "float32": "float32: ",
        }
        shown = ["inputs", "float32_inputs", "outputs", "float32"]
        if self.ranges.get("float32") == self.ranges.get("outputs"):
            shown = ["inputs", "outputs"]
        rows = [
            (f"{titles.get(key, '')}{each.name}", each.to_text())
            for key in shown
            for each in self.ranges.get(key, ())
        ]
        width = max((len(name) for name, _ in rows), default=0)
        lines += [f"  {name:<{width}}  {text}" for name, text in rows]
        lines += [f"  {detail}" for detail in self.details]
        return "\n".join([*lines, f"  fix: {self.fix}"])

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        fields["ranges"] = {
            key: [dataclasses.asdict(each) for each in ranges]
            for key, ranges in self.ranges.items()
        }
        fields["details"] = list(self.details)
        return json.dumps(fields, indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `to_json` writes, as a dict."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found
