"""How long an op would take at the machine's peaks: its arithmetic or its memory, the longer one.

The counts and the peaks are those that `tfamp.rewrite` places Casts by, `tfamp.planning.cost` and
the machine profile; the shapes are those of the step that ran.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.step_graph import Node, Tensor
from benchmarks.widths import WIDTHS, is_float
from tfamp.core.profile import DTYPES, MachineProfile
from tfamp.planning.cost import FLOP_RULES, FREE_OPS, MOVING_OPS, SPECIAL_OPS

# Ops that update a variable in place: how many tensors of the update's size they read and write.
_UPDATES = {
    "AssignAddVariableOp": 3,
    "AssignSubVariableOp": 3,
    "ResourceApplyGradientDescent": 3,
    "ResourceApplyKerasMomentum": 5,
    "ResourceApplyMomentum": 5,
    "ResourceApplyAdam": 7,
}
# They move pointers only.
_FREE = FREE_OPS | {"AssignVariableOp", "VarHandleOp", "_Arg", "_Retval", "_Recv", "_Send"}
CALLS = frozenset({"StatefulPartitionedCall", "PartitionedCall", "_XlaRun", "XlaLaunch"})


@dataclass(frozen=True)
class Work:
    """What an op does when it runs once.

    Attributes:
        kind: Which peak limits it, a kind of `MachineProfile.peaks`; or "cast", "move", "free",
            "call" for a function, of which nothing is known.
        flops: Floating-point operations, or elements for what is no multiplication.
        bytes: Bytes read and written.
        seconds: The longer of both at the machine's peaks.
    """

    kind: str
    flops: float
    bytes: int
    seconds: float


def work(node: Node, profile: MachineProfile) -> Work:
    """Counts what an op does."""
    kind, flops = _arithmetic(node)
    moved = tensor_bytes(node)
    if kind == "free":
        return Work(kind, 0.0, 0, 0.0)
    bandwidth = profile.cast_bandwidth if kind == "cast" else profile.bandwidth
    seconds = moved / bandwidth
    if kind in profile.peaks:
        peaks = profile.peaks[kind]
        dtype = compute_dtype(node)
        seconds = max(seconds, flops / peaks[dtype if dtype in DTYPES else "float32"])
    return Work(kind, flops, moved, seconds)


def compute_dtype(node: Node) -> str:
    """The dtype an op computes in: that of its first float tensor, inputs before outputs.

    A Cast has two, with "to" between; an op without floats has that of its first tensor.
    """
    inputs = [each.dtype for each in node.inputs if each is not None]
    outputs = [each.dtype for each in node.outputs if each is not None]
    if node.op == "Cast" and inputs and outputs:
        return f"{inputs[0]} to {outputs[0]}"
    dtypes = [dtype for dtype in (*inputs, *outputs) if dtype not in ("resource", "variant")]
    floats = [dtype for dtype in dtypes if is_float(dtype)]
    return (floats or dtypes or ["none"])[0]


def tensor_bytes(node: Node) -> int:
    """Bytes that an op reads and writes."""
    if node.op in _UPDATES:
        return _UPDATES[node.op] * max((_size(each) for each in node.inputs), default=0)
    written = sum(_size(each) for each in node.outputs)
    # What only moves values reads as much as it writes: a Gather does not read its table.
    read = written if node.op in MOVING_OPS else sum(_size(each) for each in node.inputs)
    return read + written


def _size(tensor: Tensor | None) -> int:
    return 0 if tensor is None else math.prod(tensor.shape) * WIDTHS.get(tensor.dtype, 4)


def _arithmetic(node: Node) -> tuple[str, float]:
    if node.op in _FREE:
        return "free", 0.0
    if node.op in CALLS:
        return "call", 0.0
    if node.op == "Cast":
        return "cast", 0.0
    if node.op in MOVING_OPS:
        return "move", 0.0
    rule = FLOP_RULES.get(node.op)
    if rule is not None:
        inputs = {i: each.shape for i, each in enumerate(node.inputs) if each is not None}
        outputs = {i: each.shape for i, each in enumerate(node.outputs) if each is not None}
        return rule.kind, rule.flops(inputs, outputs, node.equation) or 0.0
    tensors = [each for each in (*node.inputs, *node.outputs) if each is not None]
    elements = float(max((math.prod(each.shape) for each in tensors), default=0))
    return "special" if node.op in SPECIAL_OPS else "elementwise", elements
