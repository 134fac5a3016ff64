"""GraphDef -> GraphDef in low precision: inline, transform, index, decide, apply, verify."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.metadata
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.errors import NothingConvertedWarning, TfampWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph.apply import apply_plan, verify_rewrite
from tfamp.graph.editor import GraphEditor
from tfamp.graph.functions import FRAMES, copied, inline_calls
from tfamp.graph.index import build_indexes
from tfamp.graph.op_lists import OpLists
from tfamp.interop import tf_private
from tfamp.interop.patching import level_of_user
from tfamp.machine import hardware
from tfamp.planning.decision import Decision, decide
from tfamp.planning.exact_values import CHOICES
from tfamp.planning.options import GraphUse, RewriteOptions, check_choice
from tfamp.planning.ranges import RULE as CALIBRATION
from tfamp.planning.structures import (
    LOOPS,
    RewritePlan,
    RewriteResult,
    op_types,
)


def rewrite_graph_def(
    graph_def: Any,
    fetches: Iterable[str],
    *,
    feeds: Iterable[str] = (),
    dtype: str = "float16",
    op_lists: OpLists | None = None,
    keep_float32: Iterable[str] = (),
    force_low: Iterable[str] = (),
    placement: str = RewriteOptions.placement,
    device: str = RewriteOptions.device,
    profile: MachineProfile | None = None,
) -> RewriteResult:
    """Returns a graph that computes in low precision where that is safe and worth it.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`, float32; it is not modified.
        fetches: Tensors ("dense/Relu:0") or operations that are used; they keep their dtypes.
        feeds: Tensors that are given a value; they keep their dtypes, as placeholders do anyway.
        dtype: "float16" or "bfloat16".
        op_lists: Which ops may be low; `OpLists.default(dtype, device)` if None.
        keep_float32: Regular expressions, searched for in node names: these stay float32. Nodes of
            branches, loops and other functions have the name of their caller in front too, as in
            "gate/cond/MatMul".
        force_low: The same: these are converted wherever the op has a kernel for it.
        placement: "min_cut": the lists decide what may be low, a minimum cut what is worth it, by
            the times that `profile` gives for the shapes in the graph. They are there in
            `graph.as_graph_def(add_shapes=True)`. Without them, and where the cut gains next to
            nothing, the lists decide, as with "lists". "fused": as "min_cut", and XLA compiles the
            arithmetic between products and convolutions; the plan tells of the nodes as they were
            before.
        device: Kind of device of the nodes that are pinned to none: "cpu", "gpu", "tpu", or "auto"
            for this machine's. A node without a kernel there stays float32. "gpu" needs a
            TensorFlow that has kernels for GPUs, not a GPU.
        profile: How fast the machine is in each dtype; None for built-in figures, which depend on
            the kind of device and on what it multiplies natively. No profile is measured or read
            here, whatever TFAMP_PROFILE says: `tfamp.rewrite` does that.

    Returns:
        The new graph, with functions rewritten under their names, and the plan.

    Raises:
        TypeError, ValueError: An argument is wrong; the message names what is allowed.
        RewriteError: The graph is not valid or has an unknown op; it names node, op and cause.

    Example:
        >>> import tensorflow as tf
        >>> graph = tf.function(lambda x: x @ x).get_concrete_function(tf.TensorSpec((2, 2))).graph
        >>> from tfamp.core.profile import builtin_profile
        >>> profile = builtin_profile("cpu", bfloat16=True)
        >>> result = rewrite_graph_def(
        ...     graph.as_graph_def(), ["Identity:0"], dtype="bfloat16", profile=profile
        ... )
        >>> [(node.name, node.dtype) for node in result.plan.nodes]
        [('x', 'float32'), ('matmul', 'bfloat16'), ('Identity', 'float32')]
    """
    if not isinstance(graph_def, tf.compat.v1.GraphDef):
        raise TypeError(
            f"graph_def must be a tf.compat.v1.GraphDef; got {type(graph_def).__name__}. "
            "That of a concrete function is `function.graph.as_graph_def()`."
        )
    check_choice("dtype", dtype, LOW_PRECISION)
    options = RewriteOptions(
        dtype=dtype,
        op_lists=op_lists,
        keep_float32=keep_float32,
        force_low=force_low,
        placement=placement,
        device=device,
        profile="builtin" if profile is None else profile,
    )
    use = GraphUse(fetches, feeds)
    owned = inline_calls(copied(graph_def), use.names)
    return RewriteResult(owned, convert(owned, resolved(options), use).plan)


def resolved(options: RewriteOptions) -> RewriteOptions:
    """Fills in what options leave to this machine: kind of device, op lists and profile.

    Raises:
        ValueError: This machine cannot rewrite for the device, or XLA does not work here.
    """
    kind = hardware.device_kind(options.device)
    _check_kernels(kind)
    _check_fusion(options.placement)
    profile = options.profile
    # The placement "lists" needs no measurement: its plan only holds estimated times.
    if profile is None and options.placement != "lists":
        profile = hardware.find_profile().profile
    return dataclasses.replace(
        options,
        device=kind,
        op_lists=options.op_lists or OpLists.default(options.dtype, kind),
        profile=profile if isinstance(profile, MachineProfile) else hardware.profile_of(kind),
    )


def _check_kernels(device: str) -> None:
    """Raises a ValueError if TensorFlow has no kernels that tell what may be low on GPUs."""
    if device == "gpu" and all(kernel.device != device for kernel in tf_private.kernels("MatMul")):
        wheels = importlib.metadata.packages_distributions().get("tensorflow", ["tensorflow"])
        raise ValueError(
            f"device is 'gpu', but the wheel {' or '.join(sorted(set(wheels)))} {tf.__version__} "
            "was built without GPU kernels, and these tell what may be low there. Convert with one "
            "that has them, such as tensorflow for Linux on x86-64, or give device='cpu'."
        )


def _check_fusion(placement: str) -> None:
    """Raises a ValueError where XLA is to compile and does not work."""
    if placement == "fused" and not tf_private.xla_works(""):
        raise ValueError(
            "placement='fused' has XLA compile arithmetic, and XLA does not work here. Give "
            "placement='min_cut', which is the same without it."
        )


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """A rewrite makes millions of objects and no cycles; looking for these takes a third of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Pass(NamedTuple):
    """A rewrite of a whole graph, in place: the function `run` of a file of `tfamp.graph.passes`.

    It takes the editor of the graph and the options, behind the decision the plan too.

    Attributes:
        file: The file, which is loaded where there is work for it.
        ops: Op types, of which a graph has to have one; None for any graph.
        applies: Whether the pass pays, or is asked for, with some options.
        carries_plan: Whether it runs behind the decision, on the graph that the plan made.
        in_frames: Whether it can run on graphs with loops of TensorFlow 1.
    """

    file: str
    ops: frozenset[str] | None
    applies: Callable[[RewriteOptions], bool]
    carries_plan: bool = False
    in_frames: bool = False


def _not_grapplers(options: RewriteOptions) -> bool:
    """Grappler's own lists give Grappler's result, node by node."""
    return options.updates != "low"


def _on_cpus(options: RewriteOptions) -> bool:
    return options.device == "cpu" and _not_grapplers(options)


def _in_bfloat16(options: RewriteOptions) -> bool:
    return options.dtype == "bfloat16" and _not_grapplers(options)


_FILTER_GRADIENTS = op_types("Conv2DBackpropFilter DepthwiseConv2dNativeBackpropFilter")
_BIAS_SUMS = Pass("bias_sums", frozenset({"BiasAddGrad"}), _in_bfloat16, carries_plan=True)
# All passes, in the order in which they run. The first ones make a graph faster, with the same
# results but for rounding; then it is indexed and decided about, and the plan is carried out. The
# others make low ops more accurate, or have XLA compile them.
PASSES = (
    Pass("attention_products", frozenset({"Einsum"}), _on_cpus),
    Pass("loop_sums", LOOPS, _not_grapplers),
    Pass("filter_gradients", _FILTER_GRADIENTS, _on_cpus),
    Pass("loop_reads", LOOPS, lambda options: True),
    _BIAS_SUMS,
    Pass("constants", CHOICES, _not_grapplers, carries_plan=True, in_frames=True),
    Pass("fusion", None, lambda options: options.placement == "fused", carries_plan=True),
)


def _passes_for(graph: GraphEditor, options: RewriteOptions, carries_plan: bool) -> list[Pass]:
    """The passes before or behind the decision that have work to do on a graph."""
    ops = frozenset(op for body in graph.bodies for op in body.by_op)
    framed = not FRAMES.isdisjoint(ops)
    return [
        each
        for each in PASSES
        if each.carries_plan == carries_plan
        and (each.in_frames or not framed)
        and (each.ops is None or not each.ops.isdisjoint(ops))
        and each.applies(options)
    ]


def _run(passes: Iterable[Pass], *args: Any) -> None:
    for each in passes:
        importlib.import_module(f"tfamp.graph.passes.{each.file}").run(*args)


def convert(graph_def: Any, options: RewriteOptions, use: GraphUse) -> Decision:
    """Converts a graph of the caller's own, in place; returns what was decided.

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
        RewriteError: The graph is not valid or has an unknown op.
    """
    with _collector_paused():
        graph = GraphEditor(graph_def, use.names)
        _run(_passes_for(graph, options, carries_plan=False), graph, options)
        indexes = build_indexes(graph_def, dtype=options.dtype, device=options.device)
        passes = _passes_for(graph, options, carries_plan=True)
        if _BIAS_SUMS in passes:
            from tfamp.graph.passes.bias_sums import with_sums  # Few graphs need it.

            options = with_sums(options, indexes)
        decision = decide(indexes, graph.weights, options, use)
        apply_plan(graph, decision.plan)
        verify_rewrite(graph_def, decision.scopes, decision.plan)
        _run(passes, graph, options, decision.plan)
    for text in decision.idle:
        warnings.warn(text, TfampWarning, stacklevel=level_of_user())
    if not decision.plan.summary.low_nodes:
        text = _nothing_converted(decision.plan, decision)
        warnings.warn(text, NothingConvertedWarning, stacklevel=level_of_user())
    return decision


def _nothing_converted(plan: RewritePlan, decision: Decision) -> str:
    rules = {node.reason.rule: node for node in reversed(plan.nodes)}
    able = "is worth converting" if "cut" in rules else "can be converted"
    because = ""
    if (node := rules.get(CALIBRATION)) is not None:
        because = f" with this calibration data ({node.name}: {node.reason.text})"
    slots = [slot for scope in decision.scopes for slot in scope.index.slots]
    for dtype in sorted({slot.dtype for slot in slots if slot.dtype in LOW_PRECISION}):
        because += f"; some compute in {dtype} already, as they do under a mixed policy of Keras"
    return f"The graph has no op that {able} to {plan.dtype}{because}: it stays as it is."
