"""A copy of a graph that also reports its values; the only place that adds such nodes.

Behind each tensor come a Max and a Min over all its elements. One recording op for each scope takes
the results of all of them, so that an execution of a loop's body costs one call of Python. In a
scope with TensorFlow 1's control flow, where some tensors have no value, each has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.planning.structures import MAIN_GRAPH

# The recording op has an effect: what calls it must not be taken for free of effects.
_WITH_EFFECTS = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}
CALLS = frozenset(_WITH_EFFECTS) | frozenset(_WITH_EFFECTS.values())
# An op that calls Python cannot be compiled.
_COMPILE_ATTRS = ("_XlaMustCompile", "_XlaCompile")
CONTROL_FLOW_V1 = frozenset(
    {"Enter", "Exit", "Merge", "NextIteration", "RefEnter", "RefMerge", "RefSwitch", "Switch"}
)


@dataclass(frozen=True, slots=True)
class Probe:
    """A tensor to report.

    Attributes:
        node: Name of the node, or the function's argument, that makes it.
        port: Which of its outputs it is.
        tensor: Its name, as its consumers spell it.
        with_shape: Whether its shape is reported as well.
        is_argument: Whether it is an argument of the function or fed.
        consumer: Name of a node that takes it and can wait until it is reported, or "".
    """

    node: str
    port: int
    tensor: str
    with_shape: bool
    is_argument: bool
    consumer: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one recording op reports.

    Attributes:
        scope: The function it is in; "" for the graph itself.
        probes: The tensors, in the order of the values.
    """

    scope: str
    probes: tuple[Probe, ...]


def instrument(
    graph_def: Any, probes: Iterable[tuple[str, Sequence[Probe]]], recorder: Any
) -> tuple[tuple[Report, ...], tuple[str, ...]]:
    """Adds to a graph what reports tensors.

    Args:
        graph_def: The `tf.compat.v1.GraphDef` to change.
        probes: For each scope, by name, the tensors to report.
        recorder: A `PyFunc` node that calls Python with the number of a report, the largest and the
            smallest values, the ranks of those tensors that report a shape, and the shapes.

    Returns:
        The reports, by number, and the names of the operations of the graph itself to fetch.
    """
    functions = {function.signature.name: function for function in graph_def.library.function}
    reports: list[Report] = []
    fetched: tuple[str, ...] = ()
    for scope, wanted in probes:
        nodes = functions[scope].node_def if scope != MAIN_GRAPH else graph_def.node
        prepare(nodes)
        alone = any(node.op in CONTROL_FLOW_V1 for node in nodes)
        groups = _groups(wanted, alone)
        names = []
        for number, group in enumerate(groups, len(reports)):
            writer = _Writer(nodes, scope != MAIN_GRAPH, number, group[0] if alone else None)
            names.append(writer.add_report(group, recorder))
        reports += [Report(scope, group) for group in groups]
        if alone:
            names = let_consumers_wait(nodes, groups, names)
        else:
            # A call is not kept for the recording op in its function alone.
            names += [node.name for node in nodes if node.op in CALLS or node.op in functions]
        if scope == MAIN_GRAPH:
            fetched = tuple(names)
        else:
            run_always(functions[scope], names)
    return tuple(reports), fetched


def recorder_node(
    callback: Any, dtypes: Sequence[Any] = (tf.int64, tf.float32, tf.int32, tf.int32)
) -> tuple[Any, Any]:
    """Returns a `PyFunc` node that calls Python, and the graph that has to be kept meanwhile."""
    with tf.Graph().as_default() as graph:
        arguments = [tf.compat.v1.placeholder(dtype) for dtype in dtypes]
        op = tf.numpy_function(callback, arguments, tf.int64).op
        return op.node_def, graph


def prepare(nodes: Any) -> None:
    """Makes the nodes of a scope, and the calls among them, fit for recording ops."""
    for node in nodes:
        node.op = _WITH_EFFECTS.get(node.op, node.op)
        _allow_python(node)


def _allow_python(node_or_function: Any) -> None:
    for attr in _COMPILE_ATTRS:
        if attr in node_or_function.attr:
            del node_or_function.attr[attr]


def _groups(probes: Sequence[Probe], alone: bool) -> list[tuple[Probe, ...]]:
    if not probes:
        return []
    return [(probe,) for probe in probes] if alone else [tuple(probes)]


def let_consumers_wait(
    nodes: Any, groups: Sequence[tuple[Probe, ...]], names: Sequence[str]
) -> list[str]:
    """Makes recording ops run, which cannot be fetched from within a loop of TensorFlow 1.

    Returns:
        The names of those that nothing waits for.
    """
    by_name = {node.name: node for node in nodes}
    waited_for = set()
    for (probe,), name in zip(groups, names, strict=True):
        if probe.consumer:
            by_name[probe.consumer].input.append(f"^{name}")
            waited_for.add(name)
    return [name for name in names if name not in waited_for]


def run_always(function: Any, names: Sequence[str]) -> None:
    """Makes recording ops of a function run, though nothing it returns needs them."""
    _allow_python(function)
    function.signature.is_stateful = True
    for name in names:
        # A function has control results of its own; their names are free to choose.
        result = f"tfamp_report_of_{name}"
        function.signature.control_output.append(result)
        function.control_ret[result] = name


class _Writer:
    """Adds the nodes of one report to a scope.

    Args:
        nodes: The nodes of the scope.
        in_function: Whether the scope is a function, where tensors are spelled in another way.
        number: The report's number.
        only: The one tensor of the report, in a scope with TensorFlow 1's control flow.
    """

    def __init__(self, nodes: Any, in_function: bool, number: int, only: Probe | None) -> None:
        self._nodes = nodes
        self._output = ":output:0" if in_function else ""
        self._number = number
        # Constants have to be in the same loop as the tensor that is reported.
        self._control = [f"^{only.node}"] if only and not only.is_argument else []
        self._prefix = f"tfamp_report_{number}"
        while any(node.name.startswith(self._prefix) for node in nodes):
            self._prefix += "_"

    def add_report(self, probes: Sequence[Probe], recorder: Any) -> str:
        minus_one = self._constant("all", np.array([-1], np.int32))
        zero = self._constant("axis", np.array([0], np.int32))
        largest, smallest, ranks, shapes = [], [], [], []
        for i, probe in enumerate(probes):
            flat = self._add(f"flat_{i}", "Reshape", [probe.tensor, minus_one], ("T", "Tshape"))
            reduced = ("T", "Tidx")
            largest.append(self._add(f"max_{i}", "Max", [flat, zero], reduced))
            smallest.append(self._add(f"min_{i}", "Min", [flat, zero], reduced))
            if probe.with_shape:
                ranks.append(self._add(f"rank_{i}", "Rank", [probe.tensor], ("T", "")))
                shapes.append(self._add(f"shape_{i}", "Shape", [probe.tensor], ("T", "out_type")))
        nothing = self._constant("nothing", np.zeros([0], np.int32))
        values = self._joined("values", "Pack", largest + smallest, tf.float32)
        dims, count = nothing, nothing
        if shapes:
            count = self._joined("ranks", "Pack", ranks, tf.int32)
            axis = self._constant("joint", np.array(0, np.int32))
            dims = self._joined("dims", "ConcatV2", [nothing, *shapes], tf.int32, axis)
        number = self._constant("number", np.array(self._number, np.int64))
        node = self._new("record", "PyFunc", [number, values, count, dims])
        for attr, value in recorder.attr.items():
            if not attr.startswith("_"):
                node.attr[attr].CopyFrom(value)
        return str(node.name)

    def _new(self, name: str, op: str, inputs: Sequence[str]) -> Any:
        return self._nodes.add(name=f"{self._prefix}/{name}", op=op, input=inputs)

    def _add(self, name: str, op: str, inputs: Sequence[str], attrs: tuple[str, str]) -> str:
        """Adds an op on a float32 tensor whose second dtype, if any, is that of indices."""
        node = self._new(name, op, inputs)
        node.attr[attrs[0]].type = tf.float32.as_datatype_enum
        if attrs[1]:
            node.attr[attrs[1]].type = tf.int32.as_datatype_enum
        return f"{node.name}{self._output}"

    def _joined(
        self, name: str, op: str, inputs: Sequence[str], dtype: Any, axis: str | None = None
    ) -> str:
        node = self._new(name, op, [*inputs, axis] if axis else inputs)
        node.attr["T"].type = dtype.as_datatype_enum
        node.attr["N"].i = len(inputs)
        if axis:
            node.attr["Tidx"].type = tf.int32.as_datatype_enum
        else:
            node.attr["axis"].i = 0
        return f"{node.name}{self._output}"

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        node = self._new(name, "Const", self._control)
        proto = tf.make_tensor_proto(value)
        node.attr["dtype"].type = proto.dtype
        node.attr["value"].tensor.CopyFrom(proto)
        return f"{node.name}{self._output}"
