"""Compares the ops of a function under autocast, or rewritten, with float32.

Both graphs are run on the same values, and every float tensor is looked at. Ops inside loops,
branches and functions that cannot be inlined are not looked at: their results are.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.autocasting.context import autocast
from tfamp.core.errors import TfampWarning
from tfamp.diagnostics.comparing.comparison import ComparisonRow
from tfamp.diagnostics.comparing.error_measures import largest_error, range_shares, relative_error
from tfamp.graph.functions import inline_calls, unshare_branches
from tfamp.graph.observe import Observer, observed_scopes
from tfamp.graph.op_lists import OpLists
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import MAIN_GRAPH, GraphIndex, node_name, producers_first
from tfamp.rewriting.flat_call import FlatCall
from tfamp.rewriting.function import RewrittenFunction
from tfamp.rewriting.traced_function import TracedFunction

# Hold or pass on a value, or change its dtype: no op of the function's own has their errors.
_NO_ROW = frozenset(
    {"Cast", "Const", "Identity", "IdentityN", "Placeholder", "ReadVariableOp", "StopGradient"}
)

_Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Values:
    """What a graph gave.

    Attributes:
        outputs: The function's outputs.
        ops: Name of an op -> its type, the names of the ops its inputs come from, and its values.
    """

    outputs: list[_Array]
    ops: Mapping[str, tuple[str, tuple[str, ...], list[_Array]]]


class OpComparison:
    """A function with its float32 run, to compare others with.

    Args:
        fn: A function, a `tf.function` or what `tfamp.rewrite` returned.
        args: Arguments of a call.
        dtype: The low dtype.
    """

    def __init__(self, fn: Any, args: Sequence[Any], dtype: str) -> None:
        self._dtype = dtype
        self._rewritten = fn if isinstance(fn, RewrittenFunction) else None
        self._traced = TracedFunction.of(fn)
        self._call = FlatCall(tuple(args), {})
        self._float32 = self._values(self._trace())
        self.outputs = self._float32.outputs
        self.noise = largest_error(self._values(self._trace()).outputs, self.outputs)
        self._mixed = self._values(*self._lowered(()))
        self._rows = tuple(self._compared())

    def rows(self) -> tuple[tuple[ComparisonRow, ...], float]:
        """Returns the rows, in the order of the graph, and the output error in mixed precision."""
        return self._rows, largest_error(self._mixed.outputs, self.outputs)

    def output_error(self, kept: Collection[str]) -> float:
        """Runs in mixed precision with some op types, or nodes of a rewrite, in float32.

        Args:
            kept: Op types; for a rewrite, names of nodes.

        Returns:
            The relative error of the outputs.
        """
        return largest_error(self._values(*self._lowered(kept)).outputs, self.outputs)

    def suspects(self) -> list[str]:
        """Returns what may be kept in float32, the largest own error first."""
        low = [row for row in self._rows if row.dtype == self._dtype]
        low.sort(key=lambda row: -(row.own_error or 0.0))
        named = (row.layer if self._rewritten else row.kind for row in low)
        return list(dict.fromkeys(named))

    # Graphs

    def _trace(self) -> Any:
        if self._rewritten is not None:
            return self._rewritten.float32_trace(self._call)
        with autocast(enabled=False):
            return self._traced.trace(self._call)[0]

    def _lowered(self, kept: Collection[str]) -> tuple[Any, Any]:
        """Returns a trace, and the graph to run in its place or None for its own."""
        # Only errors count here, not that the dtype is slow or that no op is low.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TfampWarning)
            if self._rewritten is not None:
                patterns = tuple(f"^{re.escape(name)}$" for name in kept)
                graph = self._rewritten.rewritten_graph(self._call, keep_float32=patterns)
                return graph.traced, graph.graph_def
            lists = OpLists.default(self._dtype).with_changes(deny_add=kept) if kept else None
            with autocast(self._dtype, op_lists=lists):
                return self._traced.trace(self._call)[0], None

    # Runs

    def _values(self, traced: Any, graph_def: Any = None) -> _Values:
        outputs = [tensor.name for tensor in traced.outputs]
        inputs = [tensor.name for tensor in traced.inputs]
        if graph_def is None:
            graph_def = inline_calls(traced.graph.as_graph_def(), (*outputs, *inputs))
        graph_def = unshare_branches(graph_def)
        index = observed_scopes(graph_def)[0]
        observer = Observer(graph_def, [index], inputs, outputs, lambda _, value: np.array(value))
        given = map(tf.convert_to_tensor, self._call.values())
        seen = observer.run([[*given, *traced.captured_inputs]])
        keys = [(MAIN_GRAPH, node_name(name), int(name.partition(":")[2])) for name in outputs]
        return _Values([seen[key] for key in keys if key in seen], _ops(index, seen))

    def _compared(self) -> Iterator[ComparisonRow]:
        pairs = self._pairs()
        errors: dict[str, float] = {}
        for name, (kind, inputs, values) in self._float32.ops.items():
            if name not in pairs or len(pairs[name]) != len(values):
                continue
            mixed = pairs[name]
            errors[name] = max(map(relative_error, mixed, values), default=0.0)
            if kind in _NO_ROW:
                continue
            before = max((errors.get(each, 0.0) for each in inputs), default=0.0)
            shares = range_shares(values, self._dtype)
            dtype = next((str(a.dtype) for a in mixed if str(a.dtype) == self._dtype), "float32")
            own = max(errors[name] - before, 0.0) if before < errors[name] else 0.0
            yield ComparisonRow(
                layer=name,
                kind=kind,
                dtype=dtype,
                relative_error=errors[name],
                own_error=own if dtype == self._dtype else None,
                max=shares.max_abs,
                overflow=shares.overflow,
                underflow=shares.underflow,
            )

    def _pairs(self) -> dict[str, list[_Array]]:
        """For each op of the float32 graph the values of its counterpart."""
        if self._rewritten is not None:
            return {name: values for name, (_, _, values) in self._mixed.ops.items()}
        # Autocast adds Casts only: the n-th op of a type is the n-th of that type.
        numbered: dict[tuple[str, int], list[_Array]] = {}
        counts: Counter[str] = Counter()
        for kind, _, values in self._mixed.ops.values():
            numbered[kind, counts[kind]] = values
            counts[kind] += 1
        pairs, counts = {}, Counter()
        for name, (kind, _, _) in self._float32.ops.items():
            if kind != "Cast" and (kind, counts[kind]) in numbered:
                pairs[name] = numbered[kind, counts[kind]]
            counts[kind] += 1
        return pairs


def _ops(
    index: GraphIndex, seen: Mapping[TensorKey, _Array]
) -> dict[str, tuple[str, tuple[str, ...], list[_Array]]]:
    sources: dict[int, list[str]] = {}
    for edge in index.edges:
        node = index.slots[edge.target].node
        sources.setdefault(node, []).append(index.node_of(edge.source).name)
    values: dict[str, list[_Array]] = {}
    for _, name, port in sorted(seen):
        values.setdefault(name, []).append(seen[index.scope, name, port])
    nodes = [(position, index.nodes[position]) for position in producers_first(index)]
    return {
        node.name: (node.op, tuple(sources.get(position, ())), values[node.name])
        for position, node in nodes
        if node.name in values
    }
