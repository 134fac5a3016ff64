"""Runs a float32 graph on given data and measures the range of every tensor in it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.graph.function_names import new_suffix, rename_functions
from tfamp.graph.index import build_indexes
from tfamp.graph.measuring import instrument
from tfamp.graph.measuring.feeding import Feeds
from tfamp.graph.measuring.running import restored, runnable
from tfamp.graph.transforms.pruning import PLACEHOLDERS, called_scopes, drop_unused_nodes
from tfamp.planning.ranges import Ranges, TensorKey, TensorRange
from tfamp.planning.reductions import REDUCING, reduction_depth
from tfamp.planning.structures import ARGUMENT, FLOAT32, MAIN_GRAPH, RESULT, GraphIndex


def measure(
    graph_def: Any,
    inputs: Sequence[str],
    batches: Iterable[Sequence[Any]],
    captures: Sequence[Any] = (),
    outputs: Sequence[str] = (),
    variables: Sequence[Any] = (),
) -> Ranges:
    """Runs a graph on data and returns the range of each float32 tensor.

    Seen are the tensors of the graph that the outputs need and those of the functions it calls, in
    loops and branches also, over all batches and executions. Functions of a `tf.data` pipeline are
    not looked into. What the batches are computed to is dropped.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        inputs: Tensors that are given, such as "x:0": first those of a batch, then the captures.
        batches: What to run on, one call each: values for the inputs, in their order.
        captures: Values of the last inputs, the same for all batches, such as handles of variables.
        outputs: Tensors or operations to compute; all that the inputs suffice for if empty.
        variables: The `tf.Variable`s that the graph may assign. They are as before afterwards, also
            if a batch fails. The state of random number generators, tables and iterators is not
            restored.

    Returns:
        What was measured.

    Raises:
        ValueError: There is no batch, one does not fit the inputs, or the graph assigns variables
            that are not given.
        RewriteError: The graph is not valid.

    Example:
        >>> function = tf.function(lambda x: 100.0 * x).get_concrete_function(tf.TensorSpec([2]))
        >>> graph_def = function.graph.as_graph_def()
        >>> ranges = measure(graph_def, ["x:0"], [([1.0, -7.0],), ([2.0, 3.0],)])
        >>> [found.max_abs for key, found in ranges.tensors.items() if key[1] == "mul"]
        [700.0]
    """
    # Also called while a function is traced or a tape records: neither must see these runs.
    with tf.init_scope():
        return _measure(graph_def, Feeds(graph_def, inputs, captures), batches, outputs, variables)


def _measure(
    graph_def: Any,
    feeds: Feeds,
    batches: Iterable[Sequence[Any]],
    outputs: Sequence[str],
    variables: Sequence[Any],
) -> Ranges:
    used = drop_unused_nodes(graph_def, feeds.inputs, outputs)
    feeds.check_variables(used, variables)
    indexes = _measured_scopes(used)
    recorder = _Recorder()
    # The graph keeps Python's side of the recording op alive.
    node, keeping = instrument.recorder_node(recorder.record)
    recorder.reports, fetches = instrument.instrument(
        used, [(index.scope, _probes(index)) for index in indexes], node
    )
    run = runnable(rename_functions(used, new_suffix()), feeds, [*outputs, *fetches])
    is_empty, bad = True, ""
    with restored(variables):
        for number, values in enumerate(feeds.each(batches)):
            is_empty = False
            bad = bad or _nan_input(number, feeds, values)
            run(*values)
    del keeping
    if is_empty:
        raise ValueError("Calibration needs at least one batch of data; got none.")
    if bad:
        warnings.warn(bad, TfampWarning, stacklevel=2)
    tensors = _constants(used, indexes) | recorder.ranges()
    return Ranges(tensors, _depths(used, indexes, tensors))


def _nan_input(number: int, feeds: Feeds, values: Sequence[Any]) -> str:
    """What to say of a batch with a NaN, which few models know what to do with."""
    for name, value in zip(feeds.inputs, values, strict=True):
        if value.dtype.is_floating and np.isnan(tf.cast(value, tf.float32).numpy()).any():
            return (
                f"Calibration batch {number}: the input {name} holds NaN. What is computed from it "
                "cannot be measured and stays float32. Give data without NaN, unless the model is "
                "made for it."
            )
    return ""


def _measured_scopes(graph_def: Any) -> list[GraphIndex]:
    reached = called_scopes(graph_def, instrument.CALLS)
    # The dtype and the device only matter for kernels, which nothing here asks for.
    indexes = build_indexes(graph_def, dtype="float16", device="cpu")
    return [index for index in indexes if index.scope in reached]


def _probes(index: GraphIndex) -> list[instrument.Probe]:
    shaped = _reduced_tensors(index)
    consumers: dict[tuple[int, int], str] = {}
    names = {}
    for edge in index.edges:
        source, target = index.slots[edge.source], index.node_of(edge.target)
        # What goes into a Merge, or through a reference, is the same where it comes out.
        merged = target.op == "Merge" or index.nodes[source.node].uses_references
        if source.dtype != FLOAT32 or merged or index.nodes[source.node].op == "Const":
            continue
        place = source.node, edge.port
        names[place] = edge.tensor
        can_wait = target.op != RESULT and place not in consumers
        if can_wait:
            consumers[place] = target.name
    return [
        instrument.Probe(
            node=index.nodes[place[0]].name,
            port=place[1],
            tensor=names[place],
            with_shape=place in shaped,
            is_argument=index.nodes[place[0]].op in (ARGUMENT, *PLACEHOLDERS),
            consumer=consumers.get(place, ""),
        )
        for place in sorted(names)
    ]


def _reduced_tensors(index: GraphIndex) -> set[tuple[int, int]]:
    """Tensors, by producer and port, whose shapes tell how deep a reduction is."""
    shaped = set()
    for edge in index.edges:
        source, target = index.slots[edge.source], index.slots[edge.target]
        if index.nodes[target.node].op in REDUCING or index.nodes[source.node].op in REDUCING:
            shaped.add((source.node, edge.port))
    return shaped


class _Recorder:
    """Takes reports, from several threads at once, and keeps the largest values."""

    def __init__(self) -> None:
        self.reports: tuple[instrument.Report, ...] = ()
        self._lock = threading.Lock()
        self._largest: dict[int, np.ndarray[Any, Any]] = {}
        self._nonfinite: dict[int, np.ndarray[Any, Any]] = {}
        self._shapes: dict[TensorKey, tuple[int, ...]] = {}

    def record(self, number: Any, values: Any, ranks: Any, dims: Any) -> np.int64:
        """Takes one report: the largest values, then the smallest; see `instrument`."""
        largest, smallest = np.split(values, 2)
        found = np.maximum(np.abs(largest), np.abs(smallest))
        # Of no elements the largest is -inf and the smallest inf.
        found[largest < smallest] = 0.0
        report = self.reports[int(number)]
        shapes = np.split(dims, np.cumsum(ranks)[:-1]) if len(ranks) else []
        with self._lock:
            before = self._largest.get(int(number), np.zeros_like(found))
            # fmax takes a NaN for a missing value.
            self._largest[int(number)] = np.fmax(before, found)
            odd = self._nonfinite.get(int(number), np.zeros(found.shape, bool))
            self._nonfinite[int(number)] = odd | ~np.isfinite(found)
            self._keep_shapes(report, shapes)
        return np.int64(0)

    def ranges(self) -> dict[TensorKey, TensorRange]:
        """Returns what was reported."""
        return {
            key: TensorRange(float(largest), bool(nonfinite), self._shapes.get(key))
            for number, values in sorted(self._largest.items())
            for key, largest, nonfinite in zip(
                _keys(self.reports[number]), values, self._nonfinite[number], strict=True
            )
        }

    def _keep_shapes(self, report: instrument.Report, shapes: Sequence[Any]) -> None:
        keys = [
            key for key, probe in zip(_keys(report), report.probes, strict=True) if probe.with_shape
        ]
        for key, shape in zip(keys, shapes, strict=True):
            if np.prod(shape) >= np.prod(self._shapes.get(key, (0,))):
                self._shapes[key] = tuple(map(int, shape))


def _keys(report: instrument.Report) -> list[TensorKey]:
    return [(report.scope, probe.node, probe.port) for probe in report.probes]


def _nodes(graph_def: Any, indexes: Sequence[GraphIndex]) -> Iterator[tuple[str, Any]]:
    functions = {function.signature.name: function for function in graph_def.library.function}
    for index in indexes:
        nodes = functions[index.scope].node_def if index.scope != MAIN_GRAPH else graph_def.node
        for node in nodes:
            yield index.scope, node


def _constants(graph_def: Any, indexes: Sequence[GraphIndex]) -> dict[TensorKey, TensorRange]:
    """The ranges of constants, which need no run."""
    found = {}
    for scope, node in _nodes(graph_def, indexes):
        if node.op == "Const" and node.attr["dtype"].type == tf.float32.as_datatype_enum:
            value = np.abs(tf.make_ndarray(node.attr["value"].tensor))
            largest = float(np.fmax.reduce(value, axis=None, initial=0.0))
            finite = bool(np.isfinite(value).all())
            found[scope, node.name, 0] = TensorRange(largest, not finite, value.shape)
    return found


def _depths(
    graph_def: Any, indexes: Sequence[GraphIndex], tensors: Mapping[TensorKey, TensorRange]
) -> dict[tuple[str, str], int]:
    nodes = {
        (scope, node.name): node
        for scope, node in _nodes(graph_def, indexes)
        if node.op in REDUCING
    }
    inputs: dict[tuple[str, str], dict[int, tuple[int, ...]]] = {place: {} for place in nodes}
    for index in indexes:
        for edge in index.edges:
            place = index.scope, index.node_of(edge.target).name
            found = tensors.get((index.scope, index.node_of(edge.source).name, edge.port))
            if place in nodes and found and found.shape is not None:
                inputs[place][edge.input] = found.shape
    depths = {}
    for place, node in nodes.items():
        output = tensors.get((*place, 0))
        equation = node.attr["equation"].s.decode() if node.op == "Einsum" else ""
        shape = output.shape if output else None
        depth = reduction_depth(node.op, inputs[place], shape, equation)
        if depth is not None:
            depths[place] = depth
    return depths
