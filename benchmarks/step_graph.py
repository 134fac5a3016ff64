"""The graph that TensorFlow runs for a step, with shapes, times and Casts: from a traced session.

A `tf.function` does not expose its graph as TensorFlow's own optimizers leave it; a session
does, with the shape of every tensor and the time of every op. The session gets variables of its own
with the values of the function's, so that the function's stay as they are.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from tfamp.interop.tf_private import private_symbol

v1 = tf.compat.v1
# oneDNN's kernels stand in for ops under names of their own.
_STAND_IN = re.compile(r"^_Mkl(?:Native)?(?=[A-Z])")
_FUSED = {"FusedMatMul": "_FusedMatMul", "FusedConv2D": "_FusedConv2D"}
_FUSED |= {"FusedBatchMatMulV2": "BatchMatMulV2", "FusedBatchNormEx": "_FusedBatchNormEx"}
_FUSED |= {f"Conv{n}DBackpropFilterWithBias": f"Conv{n}DBackpropFilter" for n in (2, 3)}


# Bytes of an element.
_FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


class Tensor(NamedTuple):
    """A tensor as it was in a step."""

    dtype: str
    shape: tuple[int, ...]


@dataclass
class Node:
    """An op that ran in a step.

    Attributes:
        name: Its name.
        op: Its op type; what oneDNN stands in for has the name of the op itself.
        inputs: The tensors it took; None for one whose shape was not recorded, as resources are.
        outputs: The tensors it made.
        count: How often it ran in a step: more than once in loops.
        seconds: Their time in each traced step.
    """

    name: str
    op: str
    inputs: tuple[Tensor | None, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    count: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class Trace:
    """A step as TensorFlow ran it.

    Attributes:
        nodes: Every op that ran, on all devices.
        walls: Seconds of each untraced step.
    """

    nodes: tuple[Node, ...]
    walls: tuple[float, ...]


class CastTotals(NamedTuple):
    """The Casts of a step: how many ran, one in a loop each time, and bytes read and written."""

    count: int
    bytes: int


def count_casts(nodes: Iterable[Node]) -> CastTotals:
    """Counts the Casts from a float dtype to another; others do not change precision."""
    count = size = 0
    for node in nodes:
        ends = [each for each in (*node.inputs[:1], *node.outputs[:1]) if each is not None]
        if node.op == "Cast" and len(ends) == 2 and all(each.dtype in _FLOATS for each in ends):
            count += node.count
            size += node.count * sum(math.prod(each.shape) * _FLOATS[each.dtype] for each in ends)
    return CastTotals(count, size)


def trace(
    concrete: Any,
    args: Sequence[tf.Tensor],
    *,
    runs: int = 0,
    rewriter_options: Mapping[str, bool] | None = None,
) -> Trace:
    """Runs a step's graph in a session, first as it is, then traced.

    Args:
        concrete: The concrete function of a step.
        args: The tensors it is called with.
        runs: How many steps to time of each kind; with 0 one is traced, for what runs in it.
        rewriter_options: Names of TensorFlow's graph optimizers to switch on, such as
            "auto_mixed_precision"; the others are as TensorFlow has them.

    Returns:
        Its nodes and times.
    """
    config = v1.ConfigProto()
    for name, on in (rewriter_options or {}).items():
        choices = config.graph_options.rewrite_options
        setattr(choices, name, choices.ON if on else choices.OFF)
    graph, fetches, initial, feeds = _copy(concrete, args)
    with v1.Session(graph=graph, config=config) as session:
        for op, value, numbers in initial:
            session.run(op, {value: numbers})
        step = session.make_callable(fetches, list(feeds))
        values = list(feeds.values())
        for _ in range(2 if runs else 0):
            step(*values)
        walls = tuple(_timed(step, values) for _ in range(runs))
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        steps = [v1.RunMetadata() for _ in range(1 + runs)]
        for found in steps:
            session.run(fetches, dict(feeds), options=options, run_metadata=found)
    # The first run that is traced makes new executors: its times are longer than a step's.
    return Trace(_nodes(steps[1 if runs else 0 :]), walls)


def _timed(step: Any, values: list[Any]) -> float:
    start = time.perf_counter()
    step(*values)
    return time.perf_counter() - start


def _copy(concrete: Any, args: Sequence[tf.Tensor]) -> tuple[Any, ...]:
    """The graph of a function with variables of its own, and what sets them."""
    own = len(concrete.inputs) - len(concrete.captured_inputs)
    captured = [_captured(each) for each in concrete.captured_inputs]
    graph_def = concrete.graph.as_graph_def()
    graph, feeds, initial, inputs = tf.Graph(), {}, [], {}
    with graph.as_default():
        for inner, arg in zip(concrete.inputs[:own], (each.numpy() for each in args), strict=True):
            inputs[inner.name] = v1.placeholder(inner.dtype, arg.shape)
            feeds[inputs[inner.name]] = arg
        for number, (inner, (is_variable, value)) in enumerate(
            zip(concrete.inputs[own:], captured, strict=True)
        ):
            if not is_variable:
                inputs[inner.name] = tf.constant(value, inner.dtype)
                continue
            dtype = tf.as_dtype(value.dtype)
            handle = tf.raw_ops.VarHandleOp(
                dtype=dtype, shape=value.shape, shared_name=f"variable{number}"
            )
            fed = v1.placeholder(dtype, value.shape)
            assign = tf.raw_ops.AssignVariableOp(resource=handle, value=fed)
            initial.append((assign, fed, value))
            inputs[inner.name] = handle
        names = [each.name for each in concrete.outputs]
        names += [each.name for each in concrete.graph.control_outputs]
        fetches = tf.graph_util.import_graph_def(
            graph_def, input_map=inputs, return_elements=names, name=""
        )
    return graph, fetches, initial, feeds


def _captured(tensor: Any) -> tuple[bool, Any]:
    """Whether a tensor that a function captured is a variable, and its value."""
    if tensor.dtype != tf.resource:
        return False, tensor.numpy()
    # A function's list of variables leaves out those it only reads by their handle.
    about = private_symbol(tensor, "_handle_data")
    if about is None or not about.is_set:
        raise ValueError("A step that reads a table, or another such resource, cannot be traced.")
    dtype = tf.as_dtype(about.shape_and_type[0].dtype)
    return True, tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype).numpy()


def _nodes(steps: Sequence[Any]) -> tuple[Node, ...]:
    definitions = {node.name: node for graph in steps[-1].partition_graphs for node in graph.node}
    tensors: dict[str, tuple[Tensor | None, ...]] = {}
    nodes: dict[str, Node] = {}
    for number, step in enumerate(steps):
        for name, stats, seconds in _executions(step.step_stats):
            if name not in definitions:
                continue
            node = nodes.setdefault(name, Node(name, plain_op(definitions[name].op)))
            if len(node.seconds) <= number:
                node.seconds.append(0.0)
            node.seconds[-1] += seconds
            node.count += number == 0
            # A Switch has one of its outputs at a time.
            tensors[name] = _merged(tensors.get(name, ()), _outputs(stats))
    for name, node in nodes.items():
        definition = definitions[name]
        node.outputs = tensors.get(name, ())
        node.inputs = tuple(_input(each, tensors) for each in definition.input if each[0] != "^")
    return tuple(nodes.values())


def plain_op(op: str) -> str:
    """Returns the op type that a kernel of oneDNN stands in for; others as they are."""
    plain = _STAND_IN.sub("", op)
    return op if plain == op else _FUSED.get(plain, plain)


def _executions(stats: Any) -> list[tuple[str, Any, float]]:
    """Node names, records and seconds; on a GPU of kernels, not of launches."""
    found = []
    on_gpu = any("/stream:all" in each.device for each in stats.dev_stats)
    for device in stats.dev_stats:
        if "stream:" in device.device and "/stream:all" not in device.device:
            continue
        launches = on_gpu and "GPU" in device.device and "stream:" not in device.device
        for each in device.node_stats:
            seconds = (each.op_end_rel_nanos - each.op_start_rel_nanos) / 1e9
            found.append((each.node_name.partition(":")[0], each, 0.0 if launches else seconds))
    return found


def _outputs(stats: Any) -> tuple[Tensor | None, ...]:
    count = 1 + max((each.slot for each in stats.output), default=-1)
    outputs: list[Tensor | None] = [None] * count
    for each in stats.output:
        about = each.tensor_description
        if about.dtype and not about.shape.unknown_rank:
            dtype = tf.as_dtype(about.dtype).base_dtype.name
            outputs[each.slot] = Tensor(dtype, tuple(dim.size for dim in about.shape.dim))
    return tuple(outputs)


def _merged(
    known: tuple[Tensor | None, ...], new: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(now or before for before, now in itertools.zip_longest(known, new))


def _input(name: str, tensors: Mapping[str, tuple[Tensor | None, ...]]) -> Tensor | None:
    producer, _, port = name.partition(":")
    outputs = tensors.get(producer, ())
    return outputs[int(port or 0)] if int(port or 0) < len(outputs) else None
