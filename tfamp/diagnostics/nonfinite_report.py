"""What `find_nonfinite` tells: the report, and how it is written from a finding; framework-free."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tfamp.core.dtypes import LOW_PRECISION, float_format
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

if TYPE_CHECKING:
    from tfamp.graph.observe import TensorStats

OVERFLOW, UNDERFLOW, INVALID = "overflow", "underflow", "invalid"
ALSO_IN_FLOAT32 = "also_in_float32"
_LOGS = frozenset({"Log", "Log1p", "Xlogy"})
_DIVISIONS = frozenset({"Div", "DivNoNan", "RealDiv", "Reciprocal", "Inv", "Rsqrt", "RsqrtGrad"})
_ROOTS = frozenset({"Sqrt", "SqrtGrad"})
_SQUARES = frozenset({"Square", "SquaredDifference"})
_SUMS = frozenset({"Mean", "Sum", "Prod", "Cumsum", "BiasAddGrad"})
_MATMULS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})
_EXPONENTIALS = frozenset({"Exp", "Expm1", "Pow", "Cosh", "Sinh"})
_CONSTANTS = frozenset({"Const", "Cast", "Fill", "Neg"})


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
        size = math.prod(self.shape)
        text = f"{self.dtype} {list(self.shape)}"
        if self.infs + self.nans < size:
            text += f" in [{self.min:.4g}, {self.max:.4g}]"
        words = {"infs": "inf", "nans": "NaN", "zeros": "zero", "subnormals": "subnormal"}
        found = [f"{n} {word}" for name, word in words.items() if (n := getattr(self, name))]
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
        lines = [self._title()]
        lines += [f"  {name:<7}  {text}" for name, text in self._made()]
        lines += [f"  {line}" for line in (*table_lines(self._shown_ranges()), *self.details)]
        return "\n".join([*lines, f"  fix: {self.fix}"])

    def _title(self) -> str:
        of = "gradient of" if self.stage in ("backward", "loss_scale") else "variable"
        place = {"{}": self.op, "in layer {}": self.layer, f"({of} {{}})": self.variable}
        found = " ".join(text.format(name) for text, name in place.items() if name)
        return f"{self.kind} in {self.stage}: {found}".rstrip(": ")

    def _made(self) -> list[tuple[str, str]]:
        made = {"node": self.node, "made in": self.where}
        return [(name, text) for name, text in made.items() if text]

    def _shown_ranges(self) -> list[tuple[str, str]]:
        shown = {"inputs": "", "float32_inputs": "float32: ", "outputs": "", "float32": "float32: "}
        alike = self.ranges.get("float32") == self.ranges.get("outputs")
        return [
            (f"{title}{each.name}", each.to_text())
            for key, title in shown.items()
            if not (title and alike)
            for each in self.ranges.get(key, ())
        ]

    def _repr_html_(self) -> str:
        rows = [*self._made(), *self._shown_ranges(), ("fix", self.fix)]
        parts = tables.facts(rows), tables.lines_of(self.details)
        return tables.fragment(self._title(), *parts)

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def to_dict(self) -> dict[str, Any]:
        """Returns what `to_json` writes, as a dict."""
        found: dict[str, Any] = json.loads(self.to_json())
        return found


@dataclass(frozen=True)
class Finding(NonFiniteReport):
    """What in a step is not finite, where and why: its report but for the words, and more."""

    fix: str = ""
    dtype: str = "float32"
    layer_class: str | None = None
    gradient_of: str | None = None  # The first variable whose gradient is bad because of it.
    rewritten_by: str = ""  # The function of tfamp's that rewrites the step's graph, if one does.
    float32_max: float | None = None  # Largest magnitude of the result in float32, if finite.
    spread: str = ""  # The node that made a NaN of it, where it is a constant that does not fit.
    callers: tuple[str, ...] = ()  # The nodes whose functions it is in, the outermost first.
    execution: int = 0  # In which execution of the function, from 0.
    # Of an underflow, where a value became zero, and its magnitude in float32 if all of it did.
    vanished_op: str | None = None
    vanished_layer: str | None = None
    vanished: float | None = None
    scale: float | None = None  # The loss scale, if that is the cause.
    best_scale: float | None = None  # The largest one with which the step is finite.
    note: str = ""  # What else is known, a sentence.


def report_of(finding: Finding) -> NonFiniteReport:
    """Returns what the user is told of a finding."""
    told = (each.name for each in dataclasses.fields(NonFiniteReport))
    facts = {name: getattr(finding, name) for name in told}
    return NonFiniteReport(**facts | {"fix": _fix(finding), "details": _details(finding)})


def _details(finding: Finding) -> list[str]:
    found = [finding.note] if finding.note else []
    if finding.spread:
        found.append(f"The first NaN came of it in {finding.spread}.")
    if finding.callers:
        callers = " in ".join(reversed(finding.callers))
        number = finding.execution + 1
        found.append(f"It is in the function that {callers} runs, in its execution {number}.")
    if finding.scale is not None:
        found.append(f"The loss scale is {finding.scale:g}.")
    return found


# ---- What to change ------------------------------------------------------------------------------


def _fix(finding: Finding) -> str:
    by_stage = {"input": _input, "weights": _weights, "loss_scale": _loss_scale}
    by_kind = {OVERFLOW: _overflow, UNDERFLOW: _underflow, INVALID: _invalid}
    by_kind[ALSO_IN_FLOAT32] = _in_float32_too
    return by_stage.get(finding.stage, by_kind[finding.kind])(finding)


def _input(finding: Finding) -> str:
    if finding.kind == OVERFLOW:
        return (
            f"Scale the input: its largest magnitude is {_number(finding.float32_max)} and "
            f"{finding.dtype} ends at {_end(finding)}. Divide it by its range or standardize it "
            f'(keras.layers.Rescaling or Normalization with dtype="float32")'
            f"{_or_bfloat16(finding)}."
        )
    return (
        "Clean the data: the input itself has values that are not finite. Look for missing values, "
        "divisions by zero and logarithms of zero in the preprocessing; drop or replace these."
    )


def _weights(finding: Finding) -> str:
    name = f'"{finding.variable}"'
    if finding.kind == OVERFLOW:
        return (
            f"The variable {name} is finite, but its largest magnitude {_exceeds(finding)}. "
            f"{_keep(finding)} Weights this large also suggest a smaller learning rate or weight "
            f"decay{_or_bfloat16(finding)}."
        )
    return (
        f"The variable {name} was not finite before this step: load a checkpoint from before that. "
        "So that a bad step cannot write into the weights again, train with "
        "tfamp.LossScaleOptimizer, which skips it, and lower the learning rate."
    )


def _loss_scale(finding: Finding) -> str:
    scale = finding.scale
    if scale is not None and (not math.isfinite(scale) or scale <= 0):
        return (
            f"The loss scale is {scale:g}. Use tfamp.LossScaleOptimizer, whose scale stays within "
            "min_scale and max_scale, and start again from a scale such as 2**15."
        )
    text = f"The loss scale {_power(scale)} is too large."
    if finding.best_scale is not None:
        best = _power(finding.best_scale)
        text += (
            f" The largest power of two with which this step is finite is {best}: "
            f"tfamp.LossScaleOptimizer(optimizer, initial_scale={best}), and max_scale={best} "
            "where this goes on."
        )
    return text + (
        " A dynamic scale backs off by itself; that skips a few steps and does no harm."
        " bfloat16 needs no loss scale."
    )


def _overflow(finding: Finding) -> str:
    if finding.op in ("Const", "HostConst") or finding.spread:
        return _constant(finding)
    start, largest = f"{_exceeds(finding)}.", float_format(finding.dtype).max
    if finding.op in _SUMS:
        values = f" of {count} values" if (count := _added_up(finding)) else ""
        start = f"Add up in float32: each result is the sum{values}."
        if finding.stage == "backward":
            start = f"{_exceeds(finding, f'The sum{values}')}: add up in float32."
    elif finding.op in _EXPONENTIALS:
        start += (
            f" {finding.op} of anything above {math.log(largest):.3g} does so in {finding.dtype}: "
            "compute it in float32, subtract the maximum first, or clip its argument."
        )
    elif finding.op in _SQUARES:
        start += (
            f" A square does so from {math.sqrt(largest):.3g} on, so that variances and norms of "
            "large activations have to be computed in float32."
        )
    elif finding.op in _MATMULS:
        start += (
            " If these are attention logits, scale the queries by 1/sqrt(depth) before the product "
            "and normalize queries and keys."
        )
    return f"{start} {_keep(finding)}{_bfloat16_sentence(finding)}"


def _added_up(finding: Finding) -> int:
    """How many values a sum adds up for each result; 0 where that is not known."""
    inputs, outputs = (
        [math.prod(each.shape) for each in finding.ranges[key]] for key in ("inputs", "outputs")
    )
    is_known = inputs and outputs and outputs[0] and finding.op != "Cumsum"
    return inputs[0] // outputs[0] if is_known else 0


def _constant(finding: Finding) -> str:
    given = "" if finding.float32_max is None else f" of magnitude {_number(finding.float32_max)}"
    return (
        f"The constant{given} does not fit into {finding.dtype}, which ends at {_end(finding)}, "
        f"and became infinite. For a mask use {-6e4:.0e} in float16, or half of x.dtype.min, or "
        f"add the mask in float32{_or_bfloat16(finding)}."
    )


def _underflow(finding: Finding) -> str:
    tiny = float_format("float16" if finding.dtype not in LOW_PRECISION else finding.dtype).tiny
    layer = f' in layer "{finding.vanished_layer}"' if finding.vanished_layer else ""
    where = f"{finding.vanished_op or 'an earlier op'}{layer}"
    size = f" ({_number(finding.vanished)} in float32)" if finding.vanished else ""
    start = f"A value that is not zero in float32 became zero in {where}{size}."
    if finding.vanished_op in ("Softmax", "Sigmoid") or (
        finding.op in _LOGS and "oftmax" in str(finding.vanished_layer)
    ):
        return (
            f"{start} Take the logarithm and the {finding.vanished_op} in one: tf.nn.log_softmax "
            "or tf.math.log_sigmoid, or a loss with from_logits=True. Otherwise clip to at least "
            f"{tiny:.1e} before {finding.op}. {_keep(finding)}"
        )
    advice = (
        f"Before {finding.op} add an epsilon of {tiny:.1e} or larger, or compute both in float32"
    )
    if finding.vanished_op in _CONSTANTS and (finding.vanished or math.inf) < tiny:
        larger = max(1e-4, 10.0 ** math.ceil(math.log10(tiny)))
        advice = (
            f"It is an epsilon too small for float16, whose smallest normal number is {tiny:.1e}: "
            f"use an epsilon of {larger:.0e} or larger"
        )
    return f"{start} {advice}. {_keep(finding)}{_bfloat16_sentence(finding)}"


def _invalid(finding: Finding) -> str:
    return (
        f"{finding.op} made a NaN of finite values in {finding.dtype} and does not in float32: "
        "rounding took a value out of its domain, as when a variance is computed as a difference "
        f"and becomes negative. {_keep(finding)}"
    )


def _in_float32_too(finding: Finding) -> str:
    advice = {
        _LOGS: "Clip its argument away from zero, or take log_softmax or from_logits=True",
        _DIVISIONS: "Add an epsilon to what it divides by, or use tf.math.divide_no_nan",
        _ROOTS: "Keep its argument above zero: the gradient of a square root at 0 is infinite",
        _EXPONENTIALS: "Clip its argument, or subtract the maximum first",
    }
    found = (text for ops, text in advice.items() if finding.op in ops)
    fix = next(found, "Look at the ranges of its inputs")
    return (
        f"Precision is not the cause: float32 has it too. {fix}. Lower the learning rate or "
        "clip gradients if it appeared in the course of training."
    )


def _keep(finding: Finding) -> str:
    if finding.rewritten_by == "prepare":
        if finding.layer_class is None:
            return 'Level "O2" computes in float32 what is in no layer.'
        return (
            f'Keep layer "{finding.layer}" float32: '
            f'tfamp.prepare(..., keep_float32=["{finding.layer}"]).'
        )
    if finding.rewritten_by:
        return f'Keep it float32: tfamp.rewrite(..., keep_float32=["{finding.node}"]).'
    if finding.layer is not None and finding.layer_class is not None:
        return (
            f'Keep layer "{finding.layer}" float32: dtype="float32" where it is made, or '
            f"tfamp.Policy(..., float32_layers=[{finding.layer_class}])."
        )
    return (
        "Compute it in float32: tf.cast(x, tf.float32) before it, or, under autocast, "
        "`with tfamp.autocast(enabled=False)` around it."
    )


def _bfloat16_sentence(finding: Finding) -> str:
    return " Or use bfloat16, which has float32's range." if finding.dtype == "float16" else ""


def _or_bfloat16(finding: Finding) -> str:
    return ", or use bfloat16, which has float32's range" if finding.dtype == "float16" else ""


def _exceeds(finding: Finding, what: str = "") -> str:
    return f"{what or _number(finding.float32_max)} exceeds {finding.dtype}'s {_end(finding)}"


def _end(finding: Finding) -> str:
    return f"{float_format(finding.dtype).max:g}"


def _number(value: float | None) -> str:
    return "A value" if value is None else f"{value:.4g}"


def _power(value: float | None) -> str:
    if value is None:
        return "in use"
    exponent = math.log2(value)
    return f"2**{int(exponent)}" if exponent == int(exponent) else f"{value:g}"
