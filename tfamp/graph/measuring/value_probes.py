"""Runs a graph and looks at every value of every float tensor in it, loops and branches included.

Behind each tensor comes an op that hands it to Python. In a scope they run one after another, in
the order of the graph, and loops do one iteration at a time, so that the number of an execution is
that of the iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.graph.function_names import new_suffix, rename_functions
from tfamp.graph.index import build_indexes
from tfamp.graph.measuring import instrument
from tfamp.graph.measuring.feeding import Feeds
from tfamp.graph.measuring.running import restored_handles, runnable
from tfamp.graph.measuring.tensor_stats import Run, Seen, stats_of
from tfamp.graph.transforms.pruning import PLACEHOLDERS, called_scopes
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import MAIN_GRAPH, RESULT, GraphIndex
from tfamp.planning.tensor_names import node_name

# Tensors handed to Python at once, which stay in memory until all are computed.
_GROUP = 16
_LOOPS = frozenset({"While", "StatelessWhile"})


def measured_scopes(graph_def: Any) -> list[GraphIndex]:
    """Returns the indexes of a graph and of the functions that run as part of it.

    Raises:
        RewriteError: The graph is not valid.
    """
    reached = called_scopes(graph_def, instrument.CALLS)
    # The dtype and the device only matter for kernels, which nothing here asks for.
    indexes = build_indexes(graph_def, dtype="float16", device="cpu")
    return [index for index in indexes if index.scope in reached]


class Observer:
    """Runs a graph and returns what every float tensor in it was like.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        indexes: What `measured_scopes` says of it.
        inputs: Tensors that are given, such as "x:0".
        outputs: Tensors to compute.
        operations: Operations to run as well.
    """

    def __init__(
        self,
        graph_def: Any,
        indexes: Sequence[GraphIndex],
        inputs: Sequence[str],
        outputs: Sequence[str],
        operations: Sequence[str] = (),
    ) -> None:
        graph = tf.compat.v1.GraphDef()
        graph.CopyFrom(graph_def)
        self._recorder = _Recorder()
        self._inputs = inputs
        with tf.init_scope():
            # The graph of the node keeps Python's side of the recording ops alive.
            dtypes = (tf.int64, tf.float32)
            node, self._keeping = instrument.recorder_node(self._recorder.record, dtypes)
            fetches = _instrument(graph, indexes, self._recorder, node, outputs)
        self._graph = rename_functions(graph, new_suffix())
        self._fetches = [*outputs, *operations, *fetches]
        self._run: Callable[..., None] | None = None

    def run(self, values: Sequence[Any], settings: Sequence[tuple[Any, Any]] = ()) -> Run:
        """Runs the graph once. Its variables are as before afterwards.

        Args:
            values: The values of its inputs, handles of variables included.
            settings: Pairs of one of its variables and a value it has during the run.

        Returns:
            What was seen.
        """
        self._recorder.seen = {}
        with tf.init_scope():
            # Every input is a capture: there are no batches.
            feeds = Feeds(self._graph, self._inputs, self._in_its_dtypes(values))
            if self._run is None:
                self._run = runnable(self._graph, feeds, self._fetches)
            with restored_handles(values):
                for variable, value in settings:
                    variable.assign(value)
                for given in feeds.each([()]):
                    self._run(*given)
        return Run(self._recorder.seen)

    def _in_its_dtypes(self, values: Sequence[Any]) -> list[Any]:
        """The values as a graph takes them that may have been retyped."""
        nodes = (node for node in self._graph.node if node.op in PLACEHOLDERS)
        dtypes = {node.name: node.attr["dtype"].type for node in nodes}
        found = []
        for name, value in zip(self._inputs, values, strict=True):
            number = dtypes.get(node_name(name), value.dtype.as_datatype_enum)
            fits = number == value.dtype.as_datatype_enum
            found.append(value if fits else tf.cast(value, tf.as_dtype(number)))
        return found


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to hand to Python; `consumer` as in `instrument.Probe`."""

    key: TensorKey
    dtype: str
    name: str
    consumer: str


class _Recorder:
    """Takes what the ops hand over, from several threads at once."""

    def __init__(self) -> None:
        self.groups: list[Sequence[_Tensor]] = []
        self.seen: dict[TensorKey, Seen] = {}
        self._lock = threading.Lock()

    def record(self, number: Any, *values: Any) -> np.int64:
        for tensor, each in zip(self.groups[int(number)], values, strict=True):
            stats = stats_of(each)
            with self._lock:
                self.seen[tensor.key] = self.seen.get(tensor.key, Seen()).then(stats)
        return np.int64(0)


def _instrument(
    graph_def: Any,
    indexes: Sequence[GraphIndex],
    recorder: _Recorder,
    node: Any,
    outputs: Sequence[str],
) -> list[str]:
    """Adds the recording ops; returns the operations of the graph itself to fetch."""
    functions = {function.signature.name: function for function in graph_def.library.function}
    fetched: list[str] = []
    for index in indexes:
        is_main = index.scope == MAIN_GRAPH
        nodes = graph_def.node if is_main else functions[index.scope].node_def
        instrument.prepare(nodes)
        for each in nodes:
            if each.op in _LOOPS:
                each.attr["parallel_iterations"].i = 1
        tensors = _float_tensors(index, outputs if is_main else ())
        old_loops = any(each.op in instrument.CONTROL_FLOW_V1 for each in nodes)
        # Where some tensors have no value, each is on its own.
        size = 1 if old_loops else _GROUP
        groups = [tensors[i : i + size] for i in range(0, len(tensors), size)]
        first = len(recorder.groups)
        recorder.groups += groups
        names = _add_recorders(nodes, groups, first, node, not is_main, not old_loops)
        if old_loops:
            names = _let_consumers_wait(nodes, tensors, names)
        else:
            names += [n.name for n in nodes if n.op in instrument.CALLS or n.op in functions]
        if is_main:
            fetched = names
        else:
            instrument.run_always(functions[index.scope], names)
    return fetched


def _float_tensors(index: GraphIndex, outputs: Sequence[str]) -> list[_Tensor]:
    names: dict[tuple[int, int], tuple[str, str, str]] = {}
    for edge in index.edges:
        source, target = index.slots[edge.source], index.node_of(edge.target)
        # What goes into a Merge, or through a reference, is the same where it comes out.
        merged = target.op == "Merge" or index.nodes[source.node].uses_references
        place = source.node, edge.port
        if source.dtype in FLOAT_DTYPES and not merged and place not in names:
            consumer = "" if target.op == RESULT else target.name
            names[place] = source.dtype, edge.tensor, consumer
    positions = {node.name: i for i, node in enumerate(index.nodes)}
    for output in outputs:
        name, _, port = output.partition(":")
        node = index.nodes[positions[name]]
        place = positions[name], int(port or 0)
        dtypes = {index.slots[slot].dtype for slot in node.slots}
        # What is fetched is made by an Identity, or is an input: either has one dtype.
        if place not in names and len(dtypes) == 1 and dtypes <= set(FLOAT_DTYPES):
            names[place] = dtypes.pop(), output, ""
    return [
        _Tensor((index.scope, index.nodes[place[0]].name, place[1]), *names[place])
        for place in sorted(names)
    ]


def _add_recorders(
    nodes: Any,
    groups: Sequence[Sequence[_Tensor]],
    first: int,
    node: Any,
    in_function: bool,
    chained: bool,
) -> list[str]:
    suffix = ":output:0" if in_function else ""
    prefix = "tfamp_values"
    known = {each.name for each in nodes}
    while any(name.startswith(prefix) for name in known):
        prefix += "_"
    names: list[str] = []
    for number, group in enumerate(groups, first):
        constant = nodes.add(name=f"{prefix}/number_{number}", op="Const")
        proto = tf.make_tensor_proto(np.array(number, np.int64))
        constant.attr["dtype"].type = proto.dtype
        constant.attr["value"].tensor.CopyFrom(proto)
        if not chained and group[0].key[1] in known:
            constant.input.append(f"^{group[0].key[1]}")  # It has to be in the same loop.
        record = nodes.add(name=f"{prefix}/record_{number}", op="PyFunc")
        record.input.extend([f"{constant.name}{suffix}", *(each.name for each in group)])
        for attr, value in node.attr.items():
            if not attr.startswith("_"):
                record.attr[attr].CopyFrom(value)
        types = [tf.int64, *(tf.as_dtype(each.dtype) for each in group)]
        record.attr["Tin"].list.type[:] = [each.as_datatype_enum for each in types]
        if chained and names:
            record.input.append(f"^{names[-1]}")
        names.append(record.name)
    return names


def _let_consumers_wait(nodes: Any, tensors: Sequence[_Tensor], names: Sequence[str]) -> list[str]:
    """Makes ops run that cannot be fetched from within a loop of TensorFlow 1.

    Returns:
        The names of those that nothing waits for.
    """
    by_name = {node.name: node for node in nodes}
    left = []
    for tensor, name in zip(tensors, names, strict=True):
        if tensor.consumer:
            by_name[tensor.consumer].input.append(f"^{name}")
        else:
            left.append(name)
    return left
