"""Runs a graph and looks at every value of every float tensor in it, loops and branches included.

Behind each tensor comes an op that hands it to Python. In a scope they run one after another, in
the order of the graph, and loops do one iteration at a time, so that the number of an execution is
that of the iteration.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.dtypes import FLOAT_DTYPES
from tfamp.graph import instrument
from tfamp.graph.feeding import Feeds
from tfamp.graph.function_names import new_suffix, rename_functions
from tfamp.graph.index import build_indexes
from tfamp.graph.pruning import PLACEHOLDERS, called_scopes, node_name
from tfamp.graph.ranges import TensorKey
from tfamp.graph.running import restored, runnable
from tfamp.graph.structures import MAIN_GRAPH, RESULT, GraphIndex
from tfamp.graph.tensor_stats import Run, Seen, stats_of

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


def observe(
    graph_def: Any,
    indexes: Sequence[GraphIndex],
    inputs: Sequence[str],
    values: Sequence[Any],
    outputs: Sequence[str],
    operations: Sequence[str] = (),
    variables: Sequence[Any] = (),
    settings: Sequence[tuple[Any, Any]] = (),
) -> Run:
    """Runs a graph once and returns what every float tensor in it was like.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        indexes: What `measured_scopes` says of it.
        inputs: Tensors that are given, such as "x:0".
        values: Their values; handles of variables included.
        outputs: Tensors to compute.
        operations: Operations to run as well.
        variables: The `tf.Variable`s that the graph may assign; as before afterwards.
        settings: Pairs of one of these variables and a value it has during the run.

    Returns:
        What was seen.
    """
    copy = tf.compat.v1.GraphDef()
    copy.CopyFrom(graph_def)
    recorder = _Recorder()
    with tf.init_scope():
        node, keeping = instrument.recorder_node(recorder.record, (tf.int64, tf.float32))
        fetches = _instrument(copy, indexes, recorder, node, outputs)
        # Every input is a capture: there are no batches.
        feeds = Feeds(copy, inputs, _in_dtypes_of(copy, inputs, values))
        everything = [*outputs, *operations, *fetches]
        run = runnable(rename_functions(copy, new_suffix()), feeds, everything)
        with restored(variables):
            for variable, value in settings:
                variable.assign(value)
            for given in feeds.each([()]):
                run(*given)
    del keeping
    return Run(recorder.seen)


def _in_dtypes_of(graph_def: Any, inputs: Sequence[str], values: Sequence[Any]) -> list[Any]:
    """The values as a graph takes them that may have been retyped."""
    dtypes = {n.name: n.attr["dtype"].type for n in graph_def.node if n.op in PLACEHOLDERS}
    found = []
    for name, value in zip(inputs, values, strict=True):
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
        self.tensors: list[_Tensor] = []
        self.seen: dict[TensorKey, Seen] = {}
        self._lock = threading.Lock()

    def record(self, number: Any, values: Any) -> np.int64:
        stats = stats_of(values)
        key = self.tensors[int(number)].key
        with self._lock:
            self.seen[key] = self.seen.get(key, Seen()).then(stats)
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
        first = len(recorder.tensors)
        recorder.tensors += tensors
        old_loops = any(each.op in instrument.CONTROL_FLOW_V1 for each in nodes)
        names = _add_recorders(nodes, tensors, first, node, not is_main, not old_loops)
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
    nodes: Any, tensors: Sequence[_Tensor], first: int, node: Any, in_function: bool, chained: bool
) -> list[str]:
    suffix = ":output:0" if in_function else ""
    prefix = "tfamp_values"
    while any(each.name.startswith(prefix) for each in nodes):
        prefix += "_"
    arguments = {tensor.key[1] for tensor in tensors} - {each.name for each in nodes}
    names: list[str] = []
    for number, tensor in enumerate(tensors, first):
        constant = nodes.add(name=f"{prefix}/number_{number}", op="Const")
        proto = tf.make_tensor_proto(np.array(number, np.int64))
        constant.attr["dtype"].type = proto.dtype
        constant.attr["value"].tensor.CopyFrom(proto)
        if not chained and tensor.key[1] not in arguments:
            constant.input.append(f"^{tensor.key[1]}")  # It has to be in the same loop.
        record = nodes.add(name=f"{prefix}/record_{number}", op="PyFunc")
        record.input.extend([f"{constant.name}{suffix}", tensor.name])
        for attr, value in node.attr.items():
            if not attr.startswith("_"):
                record.attr[attr].CopyFrom(value)
        types = [tf.int64.as_datatype_enum, tf.as_dtype(tensor.dtype).as_datatype_enum]
        record.attr["Tin"].list.type[:] = types
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
