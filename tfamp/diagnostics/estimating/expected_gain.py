"""What low precision would gain on a model, estimated, and what stands in its way."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning
from tfamp.core.profile import MachineProfile
from tfamp.diagnostics.estimating.gain_text import findings, report_lines
from tfamp.diagnostics.estimating.model_files import TracedModel, traced_model
from tfamp.diagnostics.estimating.padding import Misfit, find_misfits
from tfamp.graph.observe import drop_unused_nodes
from tfamp.graph.rewrite import convert, make_request
from tfamp.machine import hardware
from tfamp.machine.profile_choice import FoundProfile, check_profile, find_profile
from tfamp.planning.choices import NodeChoices
from tfamp.planning.cost import ScopeCosts, scope_seconds
from tfamp.planning.structures import GraphIndex, NodePlan, RewritePlan
from tfamp.rewriting.fused_tracing import fused_batch_normalization
from tfamp.rewriting.pipeline import FlatGraph


@dataclass(frozen=True, slots=True)
class OpTime:
    """Ops of one type that stay float32 by one rule.

    Attributes:
        op: Op type.
        reason: Why they stay float32; where it names a node, that of the first of them.
        nodes: How many there are.
        seconds: Their estimated time, the cost of starting them left out.
        share: The same as a share of the planned time.
    """

    op: str
    reason: str
    nodes: int
    seconds: float
    share: float


@dataclass(frozen=True)
class ModelReport:
    """What low precision would gain on a model, and why it is not more.

    All times are estimates from the shapes in the graph and the machine's profile; each function of
    the graph counts as run once.

    Attributes:
        source: The path, or the model's name.
        dtype: The low dtype.
        batch_size: Size of the batch the times are for; None where the graph does not tell it, and
            every unknown size counts as 32.
        profile_source: Where the machine's profile comes from.
        seconds_float32: Time in float32.
        seconds_planned: Time after a rewrite with placement "min_cut".
        speed_up: The first over the second; None where the graph does not tell the shapes.
        low_share: Share of the planned time that is spent in low-precision ops.
        casts: How many Casts the plan inserts.
        casts_share: Share of the planned time that they take.
        overhead_share: Share of the planned time that is the fixed cost of starting ops.
        nodes: Number of nodes that compute with floats.
        low_nodes: Number of these in the low dtype.
        float32_ops: What stays float32 and takes time, the most expensive first.
        misfits: Matmuls and convolutions with sizes that are no multiples of 8, as `Misfit`.
        findings: The answer in sentences, the most important first.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, name="odd")])
        >>> report = model_report(model, dtype="bfloat16", batch_size=8, profile="builtin")
        >>> report.batch_size, report.low_nodes <= report.nodes
        (8, True)
    """

    source: str
    dtype: str
    batch_size: int | None
    profile_source: str
    seconds_float32: float
    seconds_planned: float
    speed_up: float | None
    low_share: float
    casts: int
    casts_share: float
    overhead_share: float
    nodes: int
    low_nodes: int
    float32_ops: tuple[OpTime, ...]
    misfits: tuple[Misfit, ...]
    findings: tuple[str, ...] = ()

    def to_text(self) -> str:
        """Returns the report as lines for people."""
        return "\n".join(report_lines(self))

    def to_json(self) -> str:
        """Returns the report as one JSON object with the attributes as keys."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def model_report(
    path_or_model: Any,
    *,
    dtype: Any = None,
    batch_size: int | None = None,
    signature: str | None = None,
    training: bool = False,
    example_args: Sequence[Any] | None = None,
    profile: MachineProfile | str | None = None,
) -> ModelReport:
    """Tells what low precision would gain on a model, and why it is not more.

    The model's graph is traced in float32 and rewritten with placement "min_cut" and the machine's
    profile, as `tfamp.rewrite` would; nothing of it is run. The times of both are estimates.

    A `.keras` file is loaded with Keras's `safe_mode` on: it runs no code that the file brings, but
    builds the layers it names. Loading a SavedModel runs what initialises it, and a SavedModel's
    graph can read and write files: as with any program, only load what you trust.

    Args:
        path_or_model: Directory of a SavedModel, a `.keras` file, a Keras model, a function or a
            concrete function.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        batch_size: Size of the batch, where the model leaves it open.
        signature: Which signature of a SavedModel; None is "serving_default", or the first.
        training: Whether to look at a Keras model's forward and backward pass in place of its call.
        example_args: Arguments of a call, for a function or a model that does not tell its inputs.
        profile: What the times go by: a `tfamp.graph.MachineProfile`, "builtin" for fixed figures,
            or None for this machine's, measured in 3 s once and cached; see `TFAMP_PROFILE`.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says what is needed.
        SavedModelError: The file cannot be read.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="head")])
        >>> report = model_report(model, dtype="bfloat16", batch_size=32, profile="builtin")
        >>> report.misfits[0].op, report.misfits[0].padded
        ('MatMul', {'columns': 16})
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1; got {batch_size}.")
    check_profile(profile)
    low = _low_dtype(dtype)
    with fused_batch_normalization():
        traced = traced_model(
            path_or_model,
            batch_size=batch_size,
            signature=signature,
            training=training,
            example_args=example_args,
        )
    estimated = _Estimate.of(traced, low, _profile(profile))
    report = estimated.report(_name(path_or_model), batch_size or _batch_of(traced.concrete))
    return dataclasses.replace(report, findings=findings(report, hardware.detect()))


def _low_dtype(dtype: Any) -> str:
    name = getattr(dtype, "name", dtype)
    if name in (None, "auto"):
        policy, _ = hardware.automatic_policy(hardware.detect())
        automatic = policy.removeprefix("mixed_")
        return automatic if automatic in LOW_PRECISION else "bfloat16"
    if name not in LOW_PRECISION:
        raise ValueError(f"dtype must be one of {', '.join(LOW_PRECISION)}, auto; got {dtype!r}.")
    return str(name)


def _profile(profile: MachineProfile | str | None) -> FoundProfile:
    if isinstance(profile, MachineProfile):
        return FoundProfile(profile, f"given: {profile.name}")
    if profile is None:
        return find_profile()
    kind = hardware.device_kind("auto")
    return FoundProfile(hardware.profile_of(kind), "the built-in table")


def _name(source: Any) -> str:
    if isinstance(source, str | os.PathLike):
        return os.fspath(source)
    return str(getattr(source, "name", getattr(source, "__name__", type(source).__name__)))


def _batch_of(traced: Any) -> int | None:
    captured = len(traced.captured_inputs)
    own = traced.inputs[: len(traced.inputs) - captured]
    sizes = [tensor.shape[0] for tensor in own if tensor.shape.rank]
    return sizes[0] if sizes else None


@dataclass(frozen=True)
class _Estimate:
    """A float32 graph with its times, and the plan of its rewrite."""

    dtype: str
    profile: FoundProfile
    scopes: tuple[tuple[GraphIndex, ScopeCosts], ...]
    plan: RewritePlan
    layers: Mapping[str, str]

    @classmethod
    def of(cls, model: TracedModel, dtype: str, profile: FoundProfile) -> _Estimate:
        needed = tuple(op.name for op in model.concrete.graph.control_outputs)
        graph = FlatGraph.of(model.concrete, needed)
        used = drop_unused_nodes(graph.graph_def, graph.inputs, (*graph.outputs, *needed))
        request = make_request(
            NodeChoices(graph.outputs, graph.inputs, (), ()),
            dtype=dtype,
            op_lists=None,
            placement="min_cut",
            profile=profile.profile,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingConvertedWarning)  # The report says it.
            converted = convert(used, request)
        scopes = tuple((each.index, each.costs) for each in converted.scopes if each.costs)
        return cls(dtype, profile, scopes, converted.plan, model.layers)

    def report(self, source: str, batch_size: int | None) -> ModelReport:
        before = sum(scope_seconds(index, costs, ()) for index, costs in self.scopes)
        speed_up = self.plan.summary.estimated_speed_up
        after = before / speed_up if speed_up else before
        planned = {(node.scope, node.name): node for node in self.plan.nodes}
        ops = low = overhead = 0.0
        for index, costs in self.scopes:
            for position, node in enumerate(index.nodes):
                decided = planned.get((index.scope, node.name))
                seconds = costs.node(index, position, ())
                if decided is not None and decided.cost is not None:
                    seconds = decided.cost
                ops += seconds
                overhead += costs.overheads[position]
                low += seconds if decided is not None and decided.dtype == self.dtype else 0.0
        return ModelReport(
            source=source,
            dtype=self.dtype,
            batch_size=batch_size,
            profile_source=self.profile.source,
            seconds_float32=before,
            seconds_planned=after,
            speed_up=speed_up,
            low_share=_share(low, after),
            casts=self.plan.summary.casts,
            casts_share=_share(max(after - ops, 0.0), after),
            overhead_share=_share(overhead, after),
            nodes=self.plan.summary.nodes,
            low_nodes=self.plan.summary.low_nodes,
            float32_ops=self._float32_ops(after),
            misfits=self._misfits(before),
        )

    def _float32_ops(self, total: float) -> tuple[OpTime, ...]:
        # Of a rule's reasons, which may name nodes, the first stands for all.
        found: dict[tuple[str, str], list[NodePlan]] = defaultdict(list)
        for node in self.plan.nodes:
            if node.dtype != self.dtype and node.cost is not None:
                found[node.op, node.reason.rule].append(node)
        overhead = self.profile.profile.op_overhead
        times = []
        for (op, _), nodes in found.items():
            seconds = sum(max((node.cost or 0.0) - overhead, 0.0) for node in nodes)
            if not seconds:
                continue
            times.append(
                OpTime(op, nodes[0].reason.text, len(nodes), seconds, _share(seconds, total))
            )
        return tuple(sorted(times, key=lambda each: -each.seconds))

    def _misfits(self, total: float) -> tuple[Misfit, ...]:
        found = []
        for index, costs in self.scopes:
            positions = {node.name: i for i, node in enumerate(index.nodes)}
            for misfit in find_misfits(index):
                seconds = costs.node(index, positions[misfit.node], ())
                layer = self.layers.get(misfit.node, misfit.layer)
                share = _share(seconds, total)
                found.append(dataclasses.replace(misfit, layer=layer, share=share))
        return tuple(found)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
