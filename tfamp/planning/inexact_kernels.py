"""Nodes that stay float32 as their low kernels lose digits or fail, by the table; framework-free.

`planning.kernels` says what is wrong with kernels; here are the nodes of a graph that it is asked
about. An unknown shape counts as a large one. Unlike a denied op, such
a node does not make the nodes behind it float32.
"""

from __future__ import annotations

from collections.abc import Iterator

from tfamp.core.device_names import device_kind_of
from tfamp.planning.kernel_calls import call_of_indexed_node
from tfamp.planning.kernels import (
    OPS,
    Fault,
    KernelFact,
    OpCall,
    fact_about,
    facts_of,
    library_of,
)
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import GraphIndex, Reason

# Names of the rules: for kernels that add up low, and for those with another fault.
RULE, FAULT_RULE = "sum", "kernel"
# Of the input of a node that becomes another op: its axes must be known. A BiasAddGrad, the
# only such op in the table, adds up over all axes but the channels: at least two axes.
_LEAST_RANK = 2


def inexact_nodes(index: GraphIndex, options: RewriteOptions) -> Iterator[tuple[int, Reason]]:
    """Finds the nodes of a scope whose low kernels add up too many values, or are unusable.

    A node whose row names another op that is exact instead, and may be low, is left out:
    `graph.passes.bias_sums` puts that op in its place. So are ops that the
    caller's lists moved.

    Args:
        index: The scope, with its shapes.
        options: How to rewrite, resolved.
    """
    for position, node in enumerate(index.nodes):
        if node.op not in OPS or node.op in options.moved_ops:
            continue
        call = call_of_indexed_node(index, position)
        fact = fact_of(call, node.device, options)
        if fact is None:
            continue
        replaced = exact_instead(call, node.device, options)
        if options.colors.get(replaced) not in ("allow", "infer"):
            rule = RULE if fact.fault == Fault.ADDS_UP_LOW else FAULT_RULE
            kind = _kind(node.device, options)
            library = library_of(node.op, options.dtype, kind, options.onednn)
            yield position, Reason(rule, fact.text(options.dtype, library, call))
    yield from _added_over_devices(index)


def fact_of(call: OpCall, device: str, options: RewriteOptions) -> KernelFact | None:
    """The row of the table that keeps a call from being low on a device, named as graphs do."""
    return fact_about(call, options.dtype, _kind(device, options), options.onednn)


def exact_instead(call: OpCall, device: str, options: RewriteOptions) -> str:
    """The op that gives a call's result exactly, where its low kernel may not; "" for none."""
    shape = call.inputs[0] if call.inputs else None
    kind = _kind(device, options)
    for fact in facts_of(call.op, options.dtype, kind, options.onednn):
        other = OpCall(fact.instead, call.inputs, call.output)
        known = shape is not None and len(shape) >= _LEAST_RANK
        if fact.instead != "float32" and known and not fact_of(other, device, options):
            return fact.instead
    return ""


def _kind(device: str, options: RewriteOptions) -> str:
    return device_kind_of(device) or options.device


def _added_over_devices(index: GraphIndex) -> Iterator[tuple[int, Reason]]:
    """Sums of tensors of several devices: how gradients are all-reduced without collectives."""
    devices: dict[int, set[str]] = {}
    for edge in index.edges:
        target = index.slots[edge.target].node
        if index.nodes[target].op == "AddN":
            devices.setdefault(target, set()).add(index.node_of(edge.source).device)
    for position, names in devices.items():
        if len(names - {""}) > 1:
            yield position, Reason(RULE, "it adds tensors of several devices")
