"""The report of `find_nonfinite`: a finding, the values around it, and how to fix it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.planning.structures import op_types
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

_LOGS = op_types("Log Log1p Xlogy")
_DIVISIONS = op_types("Div DivNoNan RealDiv Reciprocal Inv Rsqrt RsqrtGrad")
_ROOTS = op_types("Sqrt SqrtGrad")
_SQUARES = op_types("Square SquaredDifference")
_SUMS = op_types("Mean Sum Prod Cumsum BiasAddGrad")
_MATMULS = op_types("BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul")
_EXPONENTIALS = op_types("Exp Expm1 Pow Cosh Sinh")
_CONSTANTS = op_types("Const Cast Fill Neg")


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Range and counts of a tensor's values.

    Attributes:
        name: "input 0" or "output 0" of the op, "x", or a variable's path.
        dtype: Its dtype.
        shape: Its shape.
        min: Smallest finite value.
        max: Largest finite value.
        infs: Number of infinite values.
        nans: Number of NaNs.
        zeros: Number of zeros.
        subnormals: Number of nonzero values below the dtype's smallest normal number.

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
    def of(cls, name: str, values: Any) -> ValueRange:
        """Returns the range of an array of any float dtype, bfloat16 included.

        Args:
            name: Name of the values.
            values: The array.
        """
        array = np.asarray(values)
        dtype = array.dtype.name
        wide = array if dtype == "float64" else array.astype(np.float32)
        finite = wide[np.isfinite(wide)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        zeros = finite.size - np.count_nonzero(finite)
        small = np.count_nonzero(np.abs(finite) < float_format(dtype).tiny) - zeros
        nans = np.count_nonzero(np.isnan(wide))
        counts = map(int, (wide.size - finite.size - nans, nans, zeros, small))
        return cls(name, dtype, array.shape, low, high, *counts)

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
        size = math.prod(self.shape)
        text = f"{self.dtype} {list(self.shape)}"
        if self.infs + self.nans < size:
            text += f" in [{self.min:.4g}, {self.max:.4g}]"
        words = {"infs": "inf", "nans": "NaN", "zeros": "zero", "subnormals": "subnormal"}
        counts = ((getattr(self, name), word) for name, word in words.items())
        special = [f"{count} {word}" for count, word in counts if count]
        return f"{text}, {', '.join(special)} of {size}" if special else text


@dataclass(frozen=True)
class NonFiniteReport:
    """The first value in a step that is not finite, its cause, and how to fix it.

    Attributes:
        stage: "input", "weights", "forward", "loss", "backward" or "loss_scale".
        layer: Path of the layer; for raw ops their name scope; None without either.
        op: Type of the op, such as "Exp".
        variable: The variable that is not finite or does not fit the dtype; for backward the
            one whose gradient is not finite; else one that the op reads, or None.
        kind: "overflow": the value exceeds the dtype's range. "underflow": a value that is
            nonzero in float32 became zero, and then was a divisor or the argument of a
            logarithm. "invalid": a NaN that float32 does not have, for another reason.
            "also_in_float32": float32 has it too.
        ranges: "inputs" and "outputs" of the op, and the same in float32: "float32_inputs", and
            "float32" for the outputs.
        fix: What to change.
        node: Name of the op in the graph.
        dtype: Dtype of the value.

    Example:
        >>> import tensorflow as tf
        >>> from tfamp.diagnostics import find_nonfinite
        >>> def exp(x):
        ...     return tf.exp(tf.cast(x, tf.float16))
        >>> report = find_nonfinite(exp, tf.constant([12.0]))
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

    def to_text(self) -> str:
        """Returns the report as text."""
        lines = [self._title()]
        lines += [f"  {line}" for line in table_lines(self._rows())]
        return "\n".join([*lines, f"  fix: {self.fix}"])

    def _title(self) -> str:
        of = "gradient of" if self.stage in ("backward", "loss_scale") else "variable"
        place = {"{}": self.op, "in layer {}": self.layer, f"({of} {{}})": self.variable}
        where = " ".join(text.format(name) for text, name in place.items() if name)
        return f"{self.kind} in {self.stage}: {where}".rstrip(": ")

    def _rows(self) -> list[tuple[str, str]]:
        shown = {
            "inputs": "",
            "float32_inputs": "float32: ",
            "outputs": "",
            "float32": "float32: ",
        }
        alike = self.ranges.get("float32") == self.ranges.get("outputs")
        rows = [("node", self.node)] if self.node else []
        return rows + [
            (f"{title}{values.name}", values.to_text())
            for key, title in shown.items()
            if not (title and alike)
            for values in self.ranges.get(key, ())
        ]

    def _repr_html_(self) -> str:
        return tables.fragment(self._title(), tables.facts([*self._rows(), ("fix", self.fix)]))

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)


@dataclass(frozen=True)
class Finding(NonFiniteReport):
    """A report without its fix, and the facts that the fix is chosen by."""

    fix: str = ""
    dtype: str = "float32"
    layer_class: str | None = None
    gradient_of: str | None = None  # The first variable whose gradient is bad because of it.
    rewritten_by: str = ""  # "rewrite" or "prepare" if that rewrote the step's graph.
    float32_max: float | None = None  # Largest magnitude of the result in float32, if finite.
    is_constant: bool = False  # Whether it is a constant that does not fit its dtype.
    is_logits: bool = False  # Whether it multiplies computed values for a softmax.
    # Where a value underflowed, and its magnitude in float32 if all of the tensor did.
    vanished_op: str | None = None
    vanished_layer: str | None = None
    vanished: float | None = None
    scale: float | None = None  # The loss scale, if that is the cause.
    best_scale: float | None = None  # The largest one that keeps the step finite.
    at: str = ""  # Index of the first bad value in the data.


def report_of(finding: Finding) -> NonFiniteReport:
    """Returns the report of a finding."""
    fields = (field.name for field in dataclasses.fields(NonFiniteReport))
    facts = {name: getattr(finding, name) for name in fields}
    return NonFiniteReport(**facts | {"fix": _fix(finding)})


# ---- What to change ------------------------------------------------------------------------------

_FIXES = {
    "data": (
        "Clean the data: the input itself is not finite{at}. Look for missing values, "
        "divisions by zero and logarithms of zero in the preprocessing."
    ),
    "large data": (
        "Scale the input: its largest magnitude {exceeds}. Divide it by its range or "
        "standardize "
        'it (keras.layers.Rescaling or Normalization with dtype="float32").{bfloat16}'
    ),
    "weights": (
        'The variable "{variable}" was not finite before this step: load an earlier '
        "checkpoint. "
        "tfamp.LossScaleOptimizer skips bad steps; a lower learning rate makes them rarer."
    ),
    "large weights": (
        'The largest magnitude of the variable "{variable}" {exceeds}. {keep} Weights this '
        "large "
        "also suggest a smaller learning rate or weight decay.{bfloat16}"
    ),
    "bad scale": (
        "The loss scale is {power}. Start again from a scale such as 2**15, with a tfamp."
        "LossScaleOptimizer or tfamp.GradScaler, which keep it within bounds."
    ),
    "large scale": (
        "The loss scale {power} is too large for this step, {best} is not: give "
        "initial_scale={best}, or loss_scale= for a fixed one, to tfamp.LossScaleOptimizer, or "
        "init_scale={best} to tfamp.GradScaler. bfloat16 needs no loss scale."
    ),
    "constant": (
        "The constant is infinite in {dtype}: its magnitude {exceeds}. For a mask use -6e+04 "
        "in float16, or half of x.dtype.min, or add the mask in float32.{bfloat16}"
    ),
    "overflow": "The result {exceeds}.{advice} {keep}{bfloat16}",
    "log of softmax": (
        "{vanished}. Take the logarithm and the {vanished_op} in one: tf.nn.log_softmax or "
        "tf.math.log_sigmoid, or a loss with from_logits=True. {keep}"
    ),
    "epsilon": (
        "{vanished}. It is an epsilon too small for {dtype}, whose smallest normal number is "
        "{tiny:.1e}: use an epsilon of {larger:.0e} or larger. {keep}{bfloat16}"
    ),
    "underflow": (
        "{vanished}. Before {op} add an epsilon of {tiny:.1e} or larger, or compute both in "
        "float32. {keep}{bfloat16}"
    ),
    "invalid": (
        "{op} made a NaN of finite values in {dtype} and does not in float32: rounding took a "
        "value out of its domain, such as a variance, a difference, below zero. {keep}"
    ),
    "also in float32": (
        "Precision is not the cause: float32 has it too. {advice}. If training led to it, "
        "lower the learning rate or clip gradients."
    ),
}
_PRODUCT = "Each result is a sum of products: normalize its inputs, or scale them."
_LOGITS = "These are attention logits: scale the queries by 1/sqrt(depth) and normalize them."
# Advice by type of the op that overflowed.
_LARGE = {
    _SUMS: " Add up in float32: each result is the sum{count}.",
    _EXPONENTIALS: (
        " {op} exceeds it for anything above {log:.3g}: compute it in float32, subtract the "
        "maximum first, or clip its argument."
    ),
    _SQUARES: " A square exceeds it from {root:.3g} on: compute variances and norms in float32.",
    _MATMULS: " {product}",
}
_IN_FLOAT32 = {
    _LOGS: "Clip its argument away from zero, or take log_softmax or from_logits=True",
    _DIVISIONS: "Add an epsilon to its divisor, or use tf.math.divide_no_nan",
    _ROOTS: "Keep its argument above zero: the gradient of a square root at 0 is infinite",
    _EXPONENTIALS: "Clip its argument, or subtract the maximum first",
}


def _fix(finding: Finding) -> str:
    limits = float_format(finding.dtype)
    # The value that underflowed may have been cast to float32 since.
    low = float_format(finding.dtype if finding.dtype in LOW_PRECISION else "float16")
    size = "" if finding.float32_max is None else f"{finding.float32_max:.4g} "
    maker = finding.vanished_op or "an earlier op"
    maker += f' in layer "{finding.vanished_layer}"' if finding.vanished_layer else ""
    maker += f" ({finding.vanished:.4g} in float32)" if finding.vanished else ""
    words = vars(finding) | {
        "exceeds": f"{size}exceeds {finding.dtype}'s {limits.max:g}",
        "keep": _keep(finding),
        "bfloat16": "",
        "power": _power(finding.scale),
        "best": _power(finding.best_scale),
        "vanished": f"A value that is not zero in float32 became zero in {maker}",
        "tiny": low.tiny,
        "larger": max(1e-4, 10.0 ** math.ceil(math.log10(low.tiny))),
        "log": math.log(limits.max),
        "root": math.sqrt(limits.max),
        "count": _count(finding),
        "product": _LOGITS if finding.is_logits else _PRODUCT,
    }
    if finding.dtype == "float16":
        words["bfloat16"] = " Or use bfloat16, which has float32's range."
    table, otherwise = _LARGE, ""
    if finding.kind == "also_in_float32":
        table, otherwise = _IN_FLOAT32, "Look at the ranges of its inputs"
    advice = next((text for ops, text in table.items() if finding.op in ops), otherwise)
    words["advice"] = advice.format(**words)
    return _FIXES[_case(finding, low.tiny)].format(**words)


def _case(finding: Finding, tiny: float) -> str:
    """Selects a fix."""
    is_large = finding.kind == "overflow"
    if finding.stage == "loss_scale":
        return "bad scale" if finding.best_scale is None else "large scale"
    if finding.stage in ("input", "weights"):
        name = "data" if finding.stage == "input" else "weights"
        return f"large {name}" if is_large else name
    if is_large:
        return "constant" if finding.is_constant else "overflow"
    if finding.kind != "underflow":
        return finding.kind.replace("_", " ")
    if finding.vanished_op in ("Softmax", "Sigmoid") or (
        finding.op in _LOGS and "oftmax" in str(finding.vanished_layer)
    ):
        return "log of softmax"
    is_epsilon = finding.vanished_op in _CONSTANTS and (finding.vanished or math.inf) < tiny
    return "epsilon" if is_epsilon else "underflow"


def _count(finding: Finding) -> str:
    """Returns " of N values" for a sum of N values; "" if unknown."""
    inputs = [math.prod(values.shape) for values in finding.ranges["inputs"]]
    outputs = [math.prod(values.shape) for values in finding.ranges["outputs"]]
    is_known = inputs and outputs and outputs[0] and finding.op != "Cumsum"
    return f" of {inputs[0] // outputs[0]} values" if is_known else ""


def _power(value: float | None) -> str:
    if value is None or not 0 < value < math.inf or not math.log2(value).is_integer():
        return f"{value}"
    return f"2**{int(math.log2(value))}"


def _keep(finding: Finding) -> str:
    """Returns how to keep the op in float32."""
    layer, of_layer = finding.layer, f'Keep layer "{finding.layer}" float32: '
    if finding.rewritten_by == "prepare" and finding.layer_class is not None:
        return f'{of_layer}tfamp.prepare(..., keep_float32=["{layer}"]).'
    if finding.rewritten_by == "rewrite":
        return f'Keep it float32: tfamp.rewrite(..., keep_float32=["{finding.node}"]).'
    if layer is not None and finding.layer_class is not None:
        return (
            f'{of_layer}dtype="float32" where it is made, or '
            f"tfamp.Policy(..., float32_layers=[{finding.layer_class}])."
        )
    return (
        "Compute it in float32: tf.cast(x, tf.float32) before it, or, under autocast, "
        "`with tfamp.autocast(enabled=False)` around it."
    )
