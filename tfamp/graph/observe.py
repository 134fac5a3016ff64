"""Runs a graph, also in another dtype, and records every value of its float tensors.

An op behind each tensor, in loops, branches and functions too, passes it to Python. In a scope
these ops run one after another, in the order of the graph, and loops run one iteration at a
time, so that the n-th execution is the n-th iteration.

The graph in another dtype is the same node for node, so that values can be compared. Low
variables and random numbers keep their dtypes; Casts connect them to the rest.
"""

from __future__ import annotations

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, LOW_PRECISION
from tfamp.core.errors import RewriteError
from tfamp.core.kinds import FunctionDef, GraphDef, Handle, NodeDef, Tensor
from tfamp.core.names import LowDtype
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph, new_suffix
from tfamp.graph.index import index_bodies
from tfamp.graph.ops import LOW_TYPES, PYTHON
from tfamp.interop import tf_private
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import MAIN_GRAPH, GraphIndex, node_name, reach

T = TypeVar("T")

# The attribute with the unrounded value of a constant.
UNROUNDED = "_tfamp_unrounded"
_RANDOM = re.compile(r"Random|(Uniform|Normal|Multinomial)(Int|V2)?$")
_SEEDS = ("seed", "seed2")

# Tensors passed to Python at once, which stay in memory until all are computed: few calls of
# Python, and little memory. The number is a choice.
_GROUP = 16
# A recording op has side effects, so its callers must be stateful.
_WITH_EFFECTS = {
    "PartitionedCall": "StatefulPartitionedCall",
    "StatelessCase": "Case",
    "StatelessIf": "If",
    "StatelessWhile": "While",
}
_CALLS = frozenset(_WITH_EFFECTS) | frozenset(_WITH_EFFECTS.values())
# An op that calls Python cannot be compiled.
_COMPILE_ATTRS = ("_XlaMustCompile", "_XlaCompile")


def used_part(graph: Graph, inputs: Sequence[str], outputs: Sequence[str]) -> Graph:
    """Returns a copy of a graph with its inputs and the ancestors of its outputs only."""
    result = graph.copy()
    result.main.keep(result.main.ancestors((*inputs, *outputs), fed=inputs))
    return result


def observed_scopes(graph: Graph) -> list[GraphIndex]:
    """Returns the indexes of a graph and of the functions that run as part of it."""
    indexes = index_bodies(graph, None, "cpu")
    by_scope = {index.scope: index for index in indexes}

    def called(scope: str) -> Iterable[str]:
        for node in by_scope[scope].nodes:
            # Functions of a `tf.data` pipeline do not run as part of the graph.
            yield from (name for attr, name in node.calls if not attr or node.op in _CALLS)

    reached = reach([MAIN_GRAPH], called)
    return [index for index in indexes if index.scope in reached]


def input_specs(graph: Graph, inputs: Sequence[str]) -> list[tf.TensorSpec]:
    """Returns dtypes and shapes of the inputs of a graph, by the names of their tensors."""
    # Small captured tensors are constants: these have no shape attribute.
    attributes = [graph.main.by_name[node_name(name)].attr for name in inputs]
    return [
        tf.TensorSpec(attrs["shape"].shape if "shape" in attrs else None, attrs["dtype"].type)
        for attrs in attributes
    ]


class Observer(Generic[T]):
    """A graph to run, and a record of the values of each of its float tensors.

    `look` returns the record of a tensor from the previous one, None at first, and a value.
    Observed are the tensors of the scopes that have consumers, and the fetched ones.
    """

    def __init__(
        self,
        graph: Graph,
        indexes: Sequence[GraphIndex],
        inputs: Sequence[str],
        fetches: Sequence[str],
        look: Callable[[T | None, np.ndarray], T],
    ) -> None:
        graph = graph.copy()
        self._look = look
        self._seen: dict[TensorKey, T] = {}
        self._lock = threading.Lock()
        # That graph keeps the Python functions of the recording ops alive.
        with tf.init_scope(), tf.Graph().as_default() as self._keeping:
            fetches = [*fetches, *_add_recorders(graph, indexes, fetches, self._record)]
        self._specs = input_specs(graph, inputs)
        with tf.init_scope():
            graph_def = graph.rename_functions(new_suffix()).graph_def
            self._run = _runnable(graph_def, inputs, self._specs, fetches)

    def run(self, calls: Iterable[Sequence[Tensor]]) -> dict[TensorKey, T]:
        """Runs the graph on the values of its inputs, call by call, and returns the records.

        Variables among the values are restored, also if a call fails.
        """
        self._seen = {}
        held: list[tuple[Handle, Tensor]] = []
        # Hidden from tapes and from functions that are being traced.
        with tf.init_scope():
            try:
                for values in calls:
                    held = held or held_variables(values)
                    # A graph that was retyped may take other dtypes.
                    pairs = zip(values, self._specs, strict=True)
                    self._run(args=[tf.cast(value, spec.dtype) for value, spec in pairs])
            finally:
                put_back(held)
        return self._seen

    def _record(self, group: Sequence[_Tensor], *values: np.ndarray) -> np.int64:
        """Records the values that an op passes; thread-safe."""
        with self._lock:
            for tensor, value in zip(group, values, strict=True):
                self._seen[tensor.key] = self._look(self._seen.get(tensor.key), value)
        return np.int64(0)


def held_variables(values: Iterable[Tensor]) -> list[tuple[Handle, Tensor]]:
    """Returns the handles among captured values, with copies of the variables' values."""
    handles = [value for value in values if value.dtype == tf.resource]
    dtypes = map(tf_private.held_dtype, handles)
    return [
        (handle, _unshared(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)))
        for handle, dtype in zip(handles, dtypes, strict=True)
        if dtype and tf.raw_ops.VarIsInitializedOp(resource=handle)
    ]


def put_back(held: Iterable[tuple[Handle, Tensor]]) -> None:
    """Restores the values of variables; may be called repeatedly."""
    for handle, value in held:
        tf.raw_ops.AssignVariableOp(resource=handle, value=_unshared(value))


def _unshared(value: Tensor) -> Tensor:
    # A variable that shares its buffer with a tensor is copied by the next write, which takes
    # time.
    return tf.raw_ops.DeepCopy(x=value)


def _runnable(
    graph_def: GraphDef,
    inputs: Sequence[str],
    specs: Sequence[tf.TensorSpec],
    fetches: Sequence[str],
) -> Callable[..., Any]:
    """A function of `args`, the values of all inputs: it runs a graph for its side effects."""
    names = [name if ":" in name else f"{name}:0" for name in inputs]

    def imported(*values: Tensor) -> Tensor:
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


# ---- Recording ops -------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor, with its name in its scope."""

    key: TensorKey
    dtype: str
    name: str


# Called with the tensors of a group and their values.
_Record: TypeAlias = Callable[..., np.int64]


def _add_recorders(
    graph: Graph, indexes: Sequence[GraphIndex], fetches: Sequence[str], record: _Record
) -> list[str]:
    """Adds recording ops to scopes; returns the operations of the graph itself to fetch."""
    by_scope = {index.scope: index for index in indexes}
    fetched: list[str] = []
    for body in graph.bodies:
        if body.scope not in by_scope:
            continue
        if body.has_old_control_flow:
            raise RewriteError(
                "The values in a loop or a conditional of TensorFlow 1 cannot be observed, for "
                "a calibration or by find_nonfinite. Use tf.while_loop and tf.cond of "
                "TensorFlow 2."
            )
        calls = [n.name for n in body.nodes if n.op in _CALLS or n.op in graph.functions]
        for node in body.nodes:
            _allow_effects(body, node)
        tensors = _float_tensors(by_scope[body.scope], () if body.is_function else fetches)
        names: list[str] = []
        for start in range(0, len(tensors), _GROUP):
            group = tensors[start : start + _GROUP]
            names.append(_add_recorder(body, group, record, names[-1:]))
        # Grappler prunes a call that only has a recording op in its function.
        names += calls
        if body.is_function:
            _run_always(body, names)
        else:
            fetched = names
    return fetched


def _allow_effects(body: Body, node: NodeDef) -> None:
    if node.op in _WITH_EFFECTS:
        body.set_op(node, _WITH_EFFECTS[node.op])
    _allow_python(node)
    if node.op == "While":
        node.attr["parallel_iterations"].i = 1


def _allow_python(node_or_function: NodeDef | FunctionDef) -> None:
    for attr in _COMPILE_ATTRS:
        node_or_function.attr.pop(attr, None)


def _float_tensors(index: GraphIndex, fetches: Sequence[str]) -> list[_Tensor]:
    tensors: dict[tuple[int, int], tuple[str, str]] = {}
    for edge in index.edges:
        source = index.slots[edge.source]
        tensors[source.node, edge.port] = source.dtype, edge.tensor
    positions = {node.name: i for i, node in enumerate(index.nodes)}
    for name in (fetch for fetch in fetches if ":" in fetch):  # Others are operations.
        place = positions[node_name(name)], int(name.partition(":")[2])
        dtypes = {index.slots[slot].dtype for slot in index.nodes[place[0]].slots}
        # What is fetched is made by an Identity, or is an input: either has one dtype.
        if len(dtypes) == 1:
            tensors.setdefault(place, (dtypes.pop(), name))
    return [
        _Tensor((index.scope, index.nodes[position].name, port), dtype, name)
        for (position, port), (dtype, name) in sorted(tensors.items())
        if dtype in FLOAT_DTYPES
    ]


def _add_recorder(
    body: Body, group: Sequence[_Tensor], record: _Record, before: Sequence[str]
) -> str:
    """Adds the op that records a group of tensors, after another op; returns its name."""
    arguments = [tf.compat.v1.placeholder(tensor.dtype) for tensor in group]
    op = tf.numpy_function(functools.partial(record, group), arguments, tf.int64).op
    inputs = [*(tensor.name for tensor in group), *(f"^{name}" for name in before)]
    name = f"tfamp_observed_{len(body.nodes) + 1}"
    return node_name(body.add(name, op.type, inputs, **dict(op.node_def.attr)))


def _run_always(body: Body, names: Sequence[str]) -> None:
    """Makes recording ops of a function run, though no result depends on them."""
    _allow_python(body.definition)
    body.definition.signature.is_stateful = True
    for name in names:
        # A function has control results of its own; their names are free to choose.
        body.add_control_result(f"tfamp_observed_by_{name}", name)


# ---- The same graph in another dtype -------------------------------------------------------------


def low_dtypes(indexes: Sequence[GraphIndex]) -> list[LowDtype]:
    """Returns the low dtypes in a graph, the most frequent first."""
    counts = Counter(slot.dtype for index in indexes for slot in index.slots)
    low = [dtype for dtype in LOW_PRECISION if counts[dtype]]
    return sorted(low, key=lambda dtype: counts[dtype], reverse=True)


def seed(graph: Graph) -> None:
    """Seeds random ops, so that every run is the same; in place."""
    for number, node in enumerate(graph.nodes):
        if [node.attr[name].i for name in _SEEDS if name in node.attr] == [0, 0]:
            node.attr["seed"].i = 1
            node.attr["seed2"].i = number + 1


def retyped(graph: Graph, indexes: Sequence[GraphIndex], dtype: str) -> Graph:
    """Returns a copy of a graph that computes in another dtype where it computes in a low one.

    Changes the scopes that have an index. Names stay, Casts are added.
    """
    result = graph.copy()
    for index in indexes:
        _change(index, result.body(index.scope), tf.as_dtype(dtype))
    return result


def _change(index: GraphIndex, body: Body, dtype: tf.DType) -> None:
    """Changes the dtypes of one scope."""
    keeping, number = _keeping(index), dtype.as_datatype_enum
    for name, node in body.by_name.items():
        if name not in keeping:
            _retype_node(node, number)
    for arg in (*body.arguments, *body.results):
        arg.type = number if arg.type in LOW_TYPES else arg.type
    casts: dict[tuple[str, tf.DType], str] = {}
    for edge in index.edges:
        before = tf.as_dtype(index.slots[edge.source].dtype)
        target = index.node_of(edge.target)
        made = before if index.node_of(edge.source).name in keeping else dtype
        wanted = before if target.name in keeping else dtype
        if before.name not in LOW_PRECISION or made == wanted:
            continue
        if (edge.tensor, wanted) not in casts:
            name = f"tfamp_retyped/cast_{len(casts)}"
            casts[edge.tensor, wanted] = body.cast(name, edge.tensor, (made, wanted))
        body.connect(casts[edge.tensor, wanted], [(target.name, edge.input)])


def _keeping(index: GraphIndex) -> set[str]:
    """Names of the nodes that keep their dtypes."""
    slots = index.slots
    targets = (slots[edge.target] for edge in index.edges)
    at_resources = {slot.node for slot in targets if slot.dtype == "resource"}
    return {
        node.name
        for position, node in enumerate(index.nodes)
        if node.op in (*PYTHON, "Bitcast", "VarHandleOp")
        or (not node.calls and (position in at_resources or _RANDOM.search(node.op)))
    }


def _retype_node(node: NodeDef, dtype: int) -> None:
    for name, value in node.attr.items():
        if name.startswith("_"):
            continue
        if value.type in LOW_TYPES:
            value.type = dtype
        if value.list.type:
            types = value.list.type
            types[:] = [dtype if old in LOW_TYPES else old for old in types]
        if value.tensor.dtype in LOW_TYPES:
            exact = node.attr[UNROUNDED].tensor if UNROUNDED in node.attr else value.tensor
            with np.errstate(over="ignore"):
                values = tf.make_ndarray(exact).astype(tf.as_dtype(dtype).as_numpy_dtype)
            value.tensor.CopyFrom(tf.make_tensor_proto(values))
