"""Runs a graph and looks at every value of its float tensors, in loops, branches and functions too.

Behind each tensor comes an op that hands it to Python. In a scope they run one after another, in
the order of the graph, and loops do one iteration at a time, so that the number of an execution is
that of the iteration.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.graph.editor import replace_nodes
from tfamp.graph.functions import (
    bodies,
    copied,
    has_old_control_flow,
    library_of,
    new_suffix,
    rename_functions,
)
from tfamp.graph.index import build_indexes
from tfamp.interop import tf_private
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import MAIN_GRAPH, RESULT, GraphIndex, node_name, reach

T = TypeVar("T")

_PLACEHOLDERS = ("Placeholder", "PlaceholderV2", "PlaceholderWithDefault")
_MUST_BE_FED = _PLACEHOLDERS[:2]
# Tensors handed to Python at once, which stay in memory until all are computed.
_GROUP = 16
# How many executions of an op are known one by one.
_KEPT = 100
# A recording op has an effect: what calls it must not be taken for free of effects.
_WITH_EFFECTS = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}
_CALLS = frozenset(_WITH_EFFECTS) | frozenset(_WITH_EFFECTS.values())
# An op that calls Python cannot be compiled.
_COMPILE_ATTRS = ("_XlaMustCompile", "_XlaCompile")


def drop_unused_nodes(graph_def: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """Returns a copy of a graph without the nodes that a run does not need.

    Without outputs the run is of all that needs no other placeholder than the inputs.
    """
    nodes = {node.name: node for node in graph_def.node}
    fed = set(map(node_name, inputs))
    unfed = [n for n, node in nodes.items() if node.op in _MUST_BE_FED and n not in fed]
    taken = {n: [*map(node_name, () if n in fed else node.input)] for n, node in nodes.items()}
    if missing := [name for name in outputs if node_name(name) not in nodes]:
        raise ValueError(f"outputs: the graph has no node {missing[0]!r}.")
    if outputs:
        needed = set(reach(map(node_name, outputs), taken.__getitem__))
        for name in sorted(needed.intersection(unfed)):
            raise ValueError(
                f"The outputs need the placeholder {name!r}, which inputs does not hold; it "
                f"holds {list(inputs)}."
            )
    else:
        consumers = collections.defaultdict[str, list[str]](list)
        for name, each in ((name, each) for name, sources in taken.items() for each in sources):
            consumers[each].append(name)
        needed = nodes.keys() - reach(unfed, consumers.__getitem__)
    result = copied(graph_def)
    needed |= fed
    replace_nodes(result.node, (node for node in result.node if node.name in needed))
    return result


def observed_scopes(graph_def: Any) -> list[GraphIndex]:
    """Returns the indexes of a graph and of the functions that run as part of it."""
    indexes = build_indexes(graph_def)
    by_scope = {index.scope: index for index in indexes}

    def called(scope: str) -> Iterable[str]:
        for node in by_scope[scope].nodes:
            # Functions of a `tf.data` pipeline do not run as part of the graph.
            yield from (name for attr, name in node.calls if not attr or node.op in _CALLS)

    reached = reach([MAIN_GRAPH], called)
    return [index for index in indexes if index.scope in reached]


def input_specs(graph_def: Any, inputs: Sequence[str]) -> list[Any]:
    """Returns what the inputs of a graph take, by the names of their tensors."""
    if isinstance(inputs, str):
        raise TypeError(f"inputs must be a collection of strings; got the string {inputs!r}.")
    # TensorFlow makes a constant of a captured tensor that is small.
    nodes = {node.name: node for node in graph_def.node if node.op in (*_PLACEHOLDERS, "Const")}
    specs = []
    for name in inputs:
        if node_name(name) not in nodes:
            raise ValueError(f"inputs: the graph has no placeholder {name!r}.")
        attrs = nodes[node_name(name)].attr
        shape = tf.TensorShape(attrs["shape"].shape if "shape" in attrs else None)
        specs.append(tf.TensorSpec(shape, tf.as_dtype(attrs["dtype"].type)))
    return specs


class Observer(Generic[T]):
    """A graph to run, and what is made of the values of each of its float tensors.

    `look` makes, of what was seen of a tensor before (None at first) and a value, what is seen now.
    Looked at are the tensors of the scopes that an op takes, and those that are fetched.
    """

    def __init__(
        self,
        graph_def: Any,
        indexes: Sequence[GraphIndex],
        inputs: Sequence[str],
        fetches: Sequence[str],
        look: Callable[[T | None, Any], T],
    ) -> None:
        graph = copied(graph_def)
        self._look = look
        self._seen: dict[TensorKey, T] = {}
        self._lock = threading.Lock()
        # That graph keeps Python's side of the recording ops alive.
        with tf.init_scope(), tf.Graph().as_default() as self._keeping:
            fetches = [*fetches, *_add_recorders(graph, indexes, fetches, self._record)]
        self._specs = input_specs(graph, inputs)
        with tf.init_scope():
            graph = rename_functions(graph, new_suffix())
            self._run = _runnable(graph, inputs, self._specs, fetches)

    def run(self, calls: Iterable[Sequence[Any]]) -> dict[TensorKey, T]:
        """Runs the graph on the values of its inputs, call by call, and returns what was seen.

        Variables among the values are as before afterwards, also if a call fails.
        """
        self._seen = {}
        held: list[tuple[Any, Any]] = []
        # Neither a function that is traced meanwhile nor a tape must see these runs.
        with tf.init_scope():
            try:
                for values in calls:
                    held = held or held_variables(values)
                    # A graph that was retyped may take other dtypes.
                    given = zip(values, self._specs, strict=True)
                    self._run(args=[tf.cast(value, spec.dtype) for value, spec in given])
            finally:
                put_back(held)
        return self._seen

    def _record(self, group: Sequence[_Tensor], *values: Any) -> np.int64:
        """Takes what an op hands over; several threads may do so at once."""
        with self._lock:
            for tensor, value in zip(group, values, strict=True):
                self._seen[tensor.key] = self._look(self._seen.get(tensor.key), value)
        return np.int64(0)


def held_variables(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Returns the variables among captured values, by handle, and copies of what they hold."""
    handles = [each for each in values if each.dtype == tf.resource]
    dtypes = map(tf_private.held_dtype, handles)
    return [
        (handle, _own_copy(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)))
        for handle, dtype in zip(handles, dtypes, strict=True)
        if dtype and tf.raw_ops.VarIsInitializedOp(resource=handle)
    ]


def put_back(held: Iterable[tuple[Any, Any]]) -> None:
    """Gives variables the values that they held, as often as it is called."""
    for handle, value in held:
        tf.raw_ops.AssignVariableOp(resource=handle, value=_own_copy(value))


def _own_copy(value: Any) -> Any:
    # A variable that shares its memory with a tensor is moved by the next write, which takes time.
    return tf.raw_ops.DeepCopy(x=value)


def _runnable(
    graph_def: Any, inputs: Sequence[str], specs: Sequence[Any], fetches: Sequence[str]
) -> Callable[..., Any]:
    """A function of `args`, the values of all inputs, that runs a graph for its effects."""
    names = [name if ":" in name else f"{name}:0" for name in inputs]

    def imported(*values: Any) -> Any:
        fetched = tf.graph_util.import_graph_def(
            graph_def,
            input_map=dict(zip(names, values, strict=True)),
            return_elements=list(fetches),
            name="observed",
        )
        with tf.control_dependencies(fetched):
            return tf.constant(0)

    function = tf.compat.v1.wrap_function(imported, specs)
    function.add_to_graph()
    config = tf.compat.v1.ConfigProto()
    # TensorFlow's optimizers take ten times as long as a run, and there are only a few.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    settings = config.SerializeToString()
    call = tf.raw_ops.StatefulPartitionedCall
    return functools.partial(call, Tout=[tf.int32], f=function, config_proto=settings)


# ---- The ops that hand tensors to Python ---------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor, as its consumers spell it; `consumer` is one that can wait until it is seen."""

    key: TensorKey
    dtype: str
    name: str
    consumer: str


def _add_recorders(
    graph_def: Any, indexes: Sequence[GraphIndex], fetches: Sequence[str], record: Any
) -> list[str]:
    """Adds recording ops to scopes; returns the operations of the graph itself to fetch."""
    functions = library_of(graph_def)
    by_scope = {index.scope: index for index in indexes}
    fetched: list[str] = []
    for scope, nodes, function in bodies(graph_def):
        if scope not in by_scope:
            continue
        index = by_scope[scope]
        calls = [node.name for node in nodes if node.op in _CALLS or node.op in functions]
        for node in nodes:
            _allow_effects(node)
        tensors = _float_tensors(index, fetches if function is None else ())
        if has_old_control_flow(nodes):
            # Some tensors have no value: each is on its own.
            names = [_add_recorder(nodes, [tensor], record) for tensor in tensors]
            names = _let_consumers_wait(nodes, tensors, names)
        else:
            names = []
            for start in range(0, len(tensors), _GROUP):
                group = tensors[start : start + _GROUP]
                names.append(_add_recorder(nodes, group, record, names[-1:]))
            # A call is not kept for a recording op in its function alone.
            names += calls
        if function is None:
            fetched = names
        else:
            _run_always(function, names)
    return fetched


def _allow_effects(node: Any) -> None:
    node.op = _WITH_EFFECTS.get(node.op, node.op)
    _allow_python(node)
    if node.op == "While":
        node.attr["parallel_iterations"].i = 1


def _allow_python(node_or_function: Any) -> None:
    for attr in _COMPILE_ATTRS:
        node_or_function.attr.pop(attr, None)


def _float_tensors(index: GraphIndex, fetches: Sequence[str]) -> list[_Tensor]:
    found: dict[tuple[int, int], tuple[str, str, str]] = {}
    for edge in index.edges:
        source, target = index.slots[edge.source], index.node_of(edge.target)
        # What goes into a Merge, or through a reference, is the same where it comes out.
        merged = target.op == "Merge" or index.nodes[source.node].uses_references
        if source.dtype in FLOAT_DTYPES and not merged:
            known = found.get((source.node, edge.port), ("", "", ""))[2]
            consumer = known or ("" if target.op == RESULT else target.name)
            found[source.node, edge.port] = source.dtype, edge.tensor, consumer
    positions = {node.name: i for i, node in enumerate(index.nodes)}
    for name in (each for each in fetches if ":" in each):  # Others are operations.
        place = positions[node_name(name)], int(name.partition(":")[2])
        dtypes = {index.slots[slot].dtype for slot in index.nodes[place[0]].slots}
        # What is fetched is made by an Identity, or is an input: either has one dtype.
        if place not in found and len(dtypes) == 1 and dtypes <= set(FLOAT_DTYPES):
            found[place] = dtypes.pop(), name, ""
    return [
        _Tensor((index.scope, index.nodes[position].name, port), *found[position, port])
        for position, port in sorted(found)
    ]


def _add_recorder(
    nodes: Any, group: Sequence[_Tensor], record: Any, before: Sequence[str] = ()
) -> str:
    """Adds the op that hands over a group of tensors, after another op."""
    arguments = [tf.compat.v1.placeholder(tensor.dtype) for tensor in group]
    op = tf.numpy_function(functools.partial(record, group), arguments, tf.int64).op
    node = nodes.add()
    node.CopyFrom(op.node_def)
    node.name = f"tfamp_observed_{len(nodes)}"
    node.input[:] = [*(tensor.name for tensor in group), *(f"^{name}" for name in before)]
    return str(node.name)


def _let_consumers_wait(nodes: Any, tensors: Sequence[_Tensor], names: Sequence[str]) -> list[str]:
    """Makes ops run that cannot be fetched from within a loop of TensorFlow 1.

    Returns the names of those that nothing waits for.
    """
    by_name = {node.name: node for node in nodes}
    consumers = {n: by_name.get(each.consumer) for each, n in zip(tensors, names, strict=True)}
    for name, consumer in consumers.items():
        if consumer is not None:
            consumer.input.append(f"^{name}")
    return [name for name, consumer in consumers.items() if consumer is None]


def _run_always(function: Any, names: Sequence[str]) -> None:
    """Makes recording ops of a function run, though nothing it returns needs them."""
    _allow_python(function)
    function.signature.is_stateful = True
    for name in names:
        # A function has control results of its own; their names are free to choose.
        result = f"tfamp_observed_by_{name}"
        function.signature.control_output.append(result)
        function.control_ret[result] = name


# ---- A look that counts what there is ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What a tensor's values are like; `min` and `max` are of the finite ones, 0 without any."""

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    infs: int = 0
    nans: int = 0
    zeros: int = 0
    subnormals: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def max_abs(self) -> float:
        """Largest magnitude of a finite value."""
        return max(abs(self.min), abs(self.max))

    @property
    def nonfinite(self) -> bool:
        """Whether a value is infinite or NaN."""
        return bool(self.infs or self.nans)

    def joined(self, other: TensorStats) -> TensorStats:
        """Returns what this tensor is like over two executions, all finite, counts added."""
        ranges = [each for each in (self, other) if each.size] or [self]
        return dataclasses.replace(
            self,
            shape=max(self.shape, other.shape, key=math.prod),
            min=min(each.min for each in ranges),
            max=max(each.max for each in ranges),
            zeros=self.zeros + other.zeros,
            subnormals=self.subnormals + other.subnormals,
        )


def stats_of(values: Any) -> TensorStats:
    """Returns what the values of an array of any float dtype are like, bfloat16 included."""
    array = np.asarray(values)
    dtype = array.dtype.name
    wide = array if dtype == "float64" else array.astype(np.float32)
    finite = wide[np.isfinite(wide)]
    nans = int(np.isnan(wide).sum())
    zeros = int(finite.size - np.count_nonzero(finite))
    return TensorStats(
        dtype=dtype,
        shape=array.shape,
        min=float(finite.min()) if finite.size else 0.0,
        max=float(finite.max()) if finite.size else 0.0,
        infs=wide.size - finite.size - nans,
        nans=nans,
        zeros=zeros,
        subnormals=int(np.count_nonzero(np.abs(finite) < float_format(dtype).tiny)) - zeros,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a tensor: up to its first execution that was bad, then, and one by one."""

    executions: int = 0
    good: TensorStats | None = None
    bad: TensorStats | None = None
    bad_at: int = -1
    first: tuple[TensorStats, ...] = ()

    @property
    def stats(self) -> TensorStats | None:
        """What it was like where it first was not finite, else over all executions."""
        return self.good if self.bad is None else self.bad

    def at(self, execution: int) -> TensorStats | None:
        """Returns what it was like in one execution; of a late one, what it was like up to then."""
        if execution < len(self.first):
            return self.first[execution]
        return self.bad if self.is_bad_by(execution) else self.good

    def is_bad_by(self, execution: int) -> bool:
        """Whether it was not finite in an execution up to this one."""
        return self.bad is not None and self.bad_at <= execution

    def then(self, values: Any) -> Seen:
        """Returns what was seen after one more execution."""
        number, stats = self.executions, stats_of(values)
        first = (*self.first, stats) if number < _KEPT else self.first
        if self.bad is not None:
            return dataclasses.replace(self, executions=number + 1, first=first)
        if stats.nonfinite:
            return Seen(number + 1, self.good, stats, number, first)
        joined = stats if self.good is None else self.good.joined(stats)
        return Seen(number + 1, joined, first=first)

    @staticmethod
    def look(before: Seen | None, values: Any) -> Seen:
        """The look for an `Observer`."""
        return (before or NEVER).then(values)


NEVER = Seen()
