"""What to change so that a value becomes finite, in words; framework-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tfamp.core.dtypes import LOW_PRECISION, float_format

_LOGS = frozenset({"Log", "Log1p", "Xlogy"})
_DIVISIONS = frozenset({"Div", "DivNoNan", "RealDiv", "Reciprocal", "Inv", "Rsqrt", "RsqrtGrad"})
_SQUARES = frozenset({"Square", "SquaredDifference"})
_SUMS = frozenset({"Mean", "Sum", "Prod", "Cumsum", "BiasAddGrad"})
_MATMULS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"})
_EXPONENTIALS = frozenset({"Exp", "Expm1", "Pow", "Cosh", "Sinh"})
_CONSTANTS = frozenset({"Const", "Cast", "Fill", "Neg"})


@dataclass(frozen=True, slots=True)
class Fault:
    """What a fix is chosen by.

    Attributes:
        stage: As in a `NonFiniteReport`.
        kind: As there.
        op: Op type.
        dtype: Dtype of the result that is not finite.
        how: "model", "function" or "rewritten": what can be kept in float32, and how.
        layer: Path of the layer, or None.
        layer_class: Its class's name, or None.
        node: Name of the node.
        variable: Name of a variable, or None.
        float32_max: Largest magnitude of the result in float32, or None.
        count: Number of values that are added up for each result, or None.
        vanished_op: Of an underflow, the op in which a value became zero.
        vanished_layer: And its layer.
        vanished: Its largest magnitude in float32, if all of it became zero.
        is_constant: Whether it is a constant that does not fit.
        scale: The loss scale, or None.
        best_scale: The largest one with which the step is finite, or None.
    """

    stage: str
    kind: str
    op: str = ""
    dtype: str = "float32"
    how: str = "model"
    layer: str | None = None
    layer_class: str | None = None
    node: str = ""
    variable: str | None = None
    float32_max: float | None = None
    count: int | None = None
    vanished_op: str | None = None
    vanished_layer: str | None = None
    vanished: float | None = None
    is_constant: bool = False
    scale: float | None = None
    best_scale: float | None = None


def fix_for(fault: Fault) -> str:
    """Returns what to change.

    Args:
        fault: What is known.

    Example:
        >>> print(fix_for(Fault("forward", "overflow", "Sum", "float16", count=9000)))
        Add up in float32: each result is the sum of 9000 values. Compute it in float32: ...
    """
    by_stage = {"input": _input, "weights": _weights, "loss_scale": _loss_scale}
    if fault.stage in by_stage:
        return by_stage[fault.stage](fault)
    by_kind = {
        "overflow": _overflow,
        "underflow": _underflow,
        "invalid": _invalid,
        "also_in_float32": _in_float32_too,
    }
    return by_kind[fault.kind](fault)


def _input(fault: Fault) -> str:
    if fault.kind == "overflow":
        largest = float_format(fault.dtype).max
        return (
            f"Scale the input: its largest magnitude is {_number(fault.float32_max)} and "
            f"{fault.dtype} ends at {largest:g}. Divide it by its range or standardize it "
            f'(keras.layers.Rescaling or Normalization with dtype="float32")'
            f"{_or_bfloat16(fault)}."
        )
    return (
        "Clean the data: the input itself has values that are not finite. Look for missing values, "
        "divisions by zero and logarithms of zero in the preprocessing; drop or replace these."
    )


def _weights(fault: Fault) -> str:
    name = f'"{fault.variable}"'
    if fault.kind == "overflow":
        return (
            f"The variable {name} is finite, but its largest magnitude "
            f"{_number(fault.float32_max)} exceeds {fault.dtype}'s "
            f"{float_format(fault.dtype).max:g}. {_keep(fault)} Weights this large also "
            f"suggest a smaller learning rate or weight decay{_or_bfloat16(fault)}."
        )
    return (
        f"The variable {name} was not finite before this step: load a checkpoint from before that. "
        "So that a bad step cannot write into the weights again, train with "
        "tfamp.LossScaleOptimizer, which skips it, and lower the learning rate."
    )


def _loss_scale(fault: Fault) -> str:
    scale = fault.scale
    if scale is not None and (not math.isfinite(scale) or scale <= 0):
        return (
            f"The loss scale is {scale:g}. Use tfamp.LossScaleOptimizer, whose scale stays within "
            "min_scale and max_scale, and start again from a scale such as 2**15."
        )
    text = f"The loss scale {_power(scale)} is too large."
    if fault.best_scale is not None:
        best = _power(fault.best_scale)
        text += (
            f" The largest power of two with which this step is finite is {best}: "
            f"tfamp.LossScaleOptimizer(optimizer, initial_scale={best}), and max_scale={best} "
            "where this goes on."
        )
    return text + (
        " A dynamic scale backs off by itself; that skips a few steps and does no harm."
        " bfloat16 needs no loss scale."
    )


def _overflow(fault: Fault) -> str:
    largest = float_format(fault.dtype).max
    if fault.is_constant:
        return _constant(fault)
    start = f"{_number(fault.float32_max)} exceeds {fault.dtype}'s {largest:g}."
    if fault.op in _SUMS:
        values = f" of {fault.count} values" if fault.count else ""
        start = (
            f"Add up in float32: each result is the sum{values}."
            if fault.stage != "backward"
            else f"The sum{values} exceeds {fault.dtype}'s {largest:g}: add up in float32."
        )
    elif fault.op in _EXPONENTIALS:
        argument = math.log(largest)
        start += (
            f" {fault.op} of anything above {argument:.3g} does so in {fault.dtype}: compute it in "
            "float32, subtract the maximum first, or clip its argument."
        )
    elif fault.op in _SQUARES:
        start += (
            f" A square does so from {math.sqrt(largest):.3g} on, so that variances and norms of "
            "large activations have to be computed in float32."
        )
    elif fault.op in _MATMULS:
        start += (
            " If these are attention logits, scale the queries by 1/sqrt(depth) before the product "
            "and normalize queries and keys."
        )
    return f"{start} {_keep(fault)}{_bfloat16_sentence(fault)}"


def _constant(fault: Fault) -> str:
    largest = float_format(fault.dtype).max
    given = "" if fault.float32_max is None else f" of magnitude {_number(fault.float32_max)}"
    return (
        f"The constant{given} does not fit into {fault.dtype}, which ends at {largest:g}, and "
        f"became infinite. For a mask use {-6e4:.0e} in float16, or half of x.dtype.min, or add "
        f"the mask in float32{_or_bfloat16(fault)}."
    )


def _underflow(fault: Fault) -> str:
    tiny = float_format("float16" if fault.dtype not in LOW_PRECISION else fault.dtype).tiny
    where = f"{fault.vanished_op}" if fault.vanished_op else "an earlier op"
    if fault.vanished_layer:
        where += f' in layer "{fault.vanished_layer}"'
    size = f" ({_number(fault.vanished)} in float32)" if fault.vanished else ""
    start = f"A value that is not zero in float32 became zero in {where}{size}."
    if fault.vanished_op in ("Softmax", "Sigmoid") or (
        fault.op in _LOGS and "oftmax" in str(fault.vanished_layer)
    ):
        return (
            f"{start} Take the logarithm and the {fault.vanished_op} in one: tf.nn.log_softmax or "
            "tf.math.log_sigmoid, or a loss with from_logits=True. Otherwise clip to at least "
            f"{tiny:.1e} before {fault.op}. {_keep(fault)}"
        )
    if fault.vanished_op in _CONSTANTS and fault.vanished is not None and fault.vanished < tiny:
        advice = max(1e-4, 10.0 ** math.ceil(math.log10(tiny)))
        return (
            f"{start} It is an epsilon too small for float16, whose smallest normal number is "
            f"{tiny:.1e}: use an epsilon of {advice:.0e} or larger. {_keep(fault)}"
            f"{_bfloat16_sentence(fault)}"
        )
    return (
        f"{start} Before {fault.op} add an epsilon of {tiny:.1e} or larger, or compute both in "
        f"float32. {_keep(fault)}{_bfloat16_sentence(fault)}"
    )


def _invalid(fault: Fault) -> str:
    return (
        f"{fault.op} made a NaN of finite values in {fault.dtype} and does not in float32: "
        "rounding took a value out of its domain, as when a variance is computed as a difference "
        f"and becomes negative. {_keep(fault)}"
    )


def _in_float32_too(fault: Fault) -> str:
    advice = "Look at the ranges of its inputs"
    if fault.op in _LOGS:
        advice = "Clip its argument away from zero, or take log_softmax or from_logits=True"
    elif fault.op in _DIVISIONS:
        advice = "Add an epsilon to what it divides by, or use tf.math.divide_no_nan"
    elif fault.op in ("Sqrt", "SqrtGrad"):
        advice = "Keep its argument above zero: the gradient of a square root at 0 is infinite"
    elif fault.op in _EXPONENTIALS:
        advice = "Clip its argument, or subtract the maximum first"
    return (
        f"Precision is not the cause: float32 has it too. {advice}. Lower the learning rate or "
        "clip gradients if it appeared in the course of training."
    )


def _keep(fault: Fault) -> str:
    if fault.how == "rewritten":
        return f'Keep it float32: tfamp.rewrite(..., keep_float32=["{fault.node}"]).'
    if fault.layer is not None and fault.layer_class is not None:
        return (
            f'Keep layer "{fault.layer}" float32: dtype="float32" where it is made, or '
            f"tfamp.Policy(..., float32_layers=[{fault.layer_class}])."
        )
    return (
        "Compute it in float32: tf.cast(x, tf.float32) before it, or, under autocast, "
        "`with tfamp.autocast(enabled=False)` around it."
    )


def _bfloat16_sentence(fault: Fault) -> str:
    return " Or use bfloat16, which has float32's range." if fault.dtype == "float16" else ""


def _or_bfloat16(fault: Fault) -> str:
    return ", or use bfloat16, which has float32's range" if fault.dtype == "float16" else ""


def _number(value: float | None) -> str:
    return "A value" if value is None else f"{value:.4g}"


def _power(value: float | None) -> str:
    if value is None:
        return "in use"
    exponent = math.log2(value)
    return f"2**{int(exponent)}" if exponent == int(exponent) else f"{value:g}"
