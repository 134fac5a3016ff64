"""Gradients of biases, which a CPU adds up in bfloat16 -> sums, which it adds up in float32.

On CPUs the bfloat16 kernel of BiasAddGrad loses small terms: over 8192 rows it is off by half, so
the op is on no list, and a Cast of the whole upstream gradient comes before it. Sum of the same
rows adds up in float32 and rounds once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.graph.functions import called_functions, function_attributes, reached_functions
from tfamp.graph.op_signatures import PYTHON, writes_variable
from tfamp.interop import tf_private
from tfamp.planning.structures import (
    FLOAT32,
    LOOPS,
    MAIN_GRAPH,
    NodePlan,
    Reason,
    RewritePlan,
    node_name,
)

_GRADIENT, _SUM = "BiasAddGrad", "Sum"
_SHAPES = "_output_shapes"
_FLOAT32 = tf.float32.as_datatype_enum
# Where the channels are, by data_format.
_CHANNELS = {b"NHWC": -1, b"NCHW": 1}
_LEAST_RANK = 2

# (scope, name) of each node that became a Sum -> the node as it was.
Sums = Mapping[tuple[str, str], Any]


def sums_are_better(colors: Mapping[str, str], dtype: str, device: str) -> bool:
    """Returns whether gradients of biases are to be lowered as sums.

    Not where they are on a list, as on Grappler's: then that list decides.
    """
    safe = _GRADIENT not in colors and colors.get(_SUM) in ("allow", "infer")
    return dtype == "bfloat16" and device == "cpu" and safe


def as_sums(graph_def: Any) -> Sums:
    """Makes every float32 BiasAddGrad of known rank a Sum, with a constant for its axes, in place.

    Returns:
        Which nodes these are.
    """
    sums: dict[tuple[str, str], Any] = {}
    for scope, nodes, arguments in _scopes(graph_def):
        gradients = [node for node in nodes if _is_gradient(node)]
        makers = {node.name: node for node in nodes} if gradients else {}
        for node in gradients:
            rank = _rank(node.input[0], makers, arguments)
            channels = _channels(node)
            if rank < _LEAST_RANK or channels is None or _axes_name(node) in makers:
                continue
            before = sums[scope, node.name] = type(node)()
            before.CopyFrom(node)
            axes = [axis for axis in range(rank) if axis != channels % rank]
            nodes.append(_constant(node, axes))
            _become_sum(node, "" if scope == MAIN_GRAPH else ":output:0")
    return sums


def without_idle_sums(graph_def: Any, plan: RewritePlan, sums: Sums) -> RewritePlan:
    """Takes back, in place, the Sums that were not lowered.

    Returns:
        The plan, which speaks of the nodes as they were.
    """
    if not sums:
        return plan
    idle = set()
    for scope, nodes, _ in _scopes(graph_def):
        unused = set()
        for node in nodes:
            was = sums.get((scope, node.name))
            if was is not None and node.attr["T"].type == _FLOAT32:
                idle.add((scope, node.name))
                unused.add(_axes_name(node))
                given = node.input[0]
                node.CopyFrom(was)
                node.input[0] = given  # Perhaps a Cast now.
        for position in reversed(range(len(nodes))):
            if nodes[position].name in unused:
                del nodes[position]
    nodes = tuple(
        _described(each, idle) if (each.scope, each.name) in sums else each for each in plan.nodes
    )
    return dataclasses.replace(plan, nodes=nodes)


def _described(plan: NodePlan, idle: Set[tuple[str, str]]) -> NodePlan:
    """What a plan says of a Sum, said of what it was."""
    inputs = tuple(name for name in plan.inputs if name != _axes_name(plan))
    reason = plan.reason
    if (plan.scope, plan.name) not in idle:
        reason = Reason(reason.rule, f"{reason}; as a Sum, which adds up in float32")
    return dataclasses.replace(plan, op=_GRADIENT, inputs=inputs, reason=reason)


def _is_gradient(node: Any) -> bool:
    """Whether a node is a float32 BiasAddGrad that runs on the CPU."""
    if node.op != _GRADIENT or "T" not in node.attr or not node.input:
        return False
    return node.attr["T"].type == _FLOAT32 and "GPU" not in node.device.upper()


def _rank(tensor: str, makers: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """The rank of a tensor, as far as the graph tells; else 0."""
    name, _, place = tensor.partition(":")
    attrs = makers[name].attr if name in makers else arguments.get(name, {})
    shapes = attrs[_SHAPES].list.shape if _SHAPES in attrs else ()
    # In functions "name:output:0", where only an op with one output has no other "0".
    port = int(place) if place.isdigit() else 0
    if port >= len(shapes) or (":" in place and len(shapes) > 1) or shapes[port].unknown_rank:
        return 0
    return len(shapes[port].dim)


def _scopes(graph_def: Any) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Name, nodes and attributes of the arguments of the graph itself and of each function."""
    yield MAIN_GRAPH, graph_def.node, {}
    for function in graph_def.library.function:
        arguments = {
            each.name: function.arg_attr[i].attr
            for i, each in enumerate(function.signature.input_arg)
            if i in function.arg_attr
        }
        yield function.signature.name, function.node_def, arguments


def _channels(node: Any) -> int | None:
    given = node.attr["data_format"].s if "data_format" in node.attr else b"NHWC"
    return _CHANNELS.get(given)


def _axes_name(node: Any) -> str:
    return f"{node.name}/axes"


def _constant(node: Any, axes: Sequence[int]) -> Any:
    constant = type(node)(name=_axes_name(node), op="Const", device=node.device)
    constant.attr["dtype"].type = tf.int32.as_datatype_enum
    constant.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(axes, tf.int32))
    return constant


def _become_sum(node: Any, output: str) -> None:
    node.op = _SUM
    node.input.insert(1, f"{_axes_name(node)}{output}")
    node.attr.pop("data_format", None)
    node.attr["Tidx"].type = tf.int32.as_datatype_enum
    node.attr["keep_dims"].b = False


# How many of a loop's first results TensorFlow differentiates: those behind them are what the loop
# keeps for a gradient that is in the graph already.
_ORIGINAL = "_num_original_outputs"
_SHAPES = "_output_shapes"


@dataclass(frozen=True, slots=True)
class _Read:
    """A read of a variable in the body of a loop.

    Attributes:
        node: The node in the body.
        handle: Position of the variable's handle among the loop's inputs.
    """

    node: Any
    handle: int


def read_before_loops(graph_def: Any, keep: Collection[str] = ()) -> frozenset[tuple[str, str]]:
    """Takes reads of float32 variables out of the loops of a training step, in place.

    Only reads of variables that the graph writes behind the loop, with what the loop led to: such a
    graph is the last to need gradients by them. In others, one that clips its weights before it
    uses them included, a loop's constants stay float32, as their gradients, which would get the
    same dtype, add up over the rounds.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`. Loops in functions stay.
        keep: Tensors ("x:0") or nodes ("x") that are used from outside: loops among them stay.

    Returns:
        The new arguments of loops' functions as (function, argument): what was read. The reads in
        the bodies are Identities of these now.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    used = _uses(graph_def.node, library)
    kept = {node_name(name) for name in keep}
    found = {}
    for loop in graph_def.node:
        if loop.op not in LOOPS or loop.name in kept:
            continue
        functions = dict(function_attributes(loop))
        names = [functions.get(part, "") for part in ("body", "cond")]
        if all(name in library and used[name] == 1 for name in names):
            reads = _invariant_reads(loop, library)
            handles = {loop.input[each.handle] for each in reads}
            written = _written_behind(loop, graph_def.node, library, handles)
            reads = [each for each in reads if loop.input[each.handle] in written]
            if reads:
                found[loop.name] = reads
    added: set[tuple[str, str]] = set()
    for loop in [node for node in graph_def.node if node.name in found]:
        added |= _hoist(graph_def, loop, found[loop.name], library)
    return frozenset(added)


def _uses(nodes: Sequence[Any], library: Mapping[str, Any]) -> Counter[str]:
    """How often functions are called, by functions that are called themselves."""
    reached = reached_functions(library, [n for node in nodes for n in called_functions(node)])
    bodies = [nodes, *(library[name].node_def for name in reached)]
    return Counter(name for body in bodies for node in body for name in called_functions(node))


def _invariant_reads(loop: Any, library: Mapping[str, Any]) -> list[_Read]:
    """The reads of float32 variables in the body of a loop in which nothing can be written."""
    if _writes(loop, library):
        return []
    body = library[loop.attr["body"].func.name]
    arguments, results = body.signature.input_arg, body.signature.output_arg
    if not len(arguments) == len(results) == len(loop.attr["T"].list.type):
        return []  # No valid loop.
    # A loop may carry handles, and exchange them.
    same = {
        argument.name: i
        for i, (argument, result) in enumerate(zip(arguments, results, strict=True))
        if _origin(body, body.ret[result.name]) == argument.name
    }
    return [
        _Read(node, same[node.input[0]])
        for node in body.node_def
        if node.op == "ReadVariableOp"
        and node.input[0] in same
        and tf_private.dtype_name(node.attr["dtype"].type) == FLOAT32
    ]


def _origin(body: Any, tensor: str) -> str:
    """Where a tensor of a body comes from, past Identity nodes."""
    identities = {f"{n.name}:output:0": n.input[0] for n in body.node_def if n.op == "Identity"}
    passed: set[str] = set()  # In a broken function a node may feed itself.
    while tensor in identities and tensor not in passed:
        passed.add(tensor)
        tensor = identities[tensor]
    return tensor


def _writes(node: Any, library: Mapping[str, Any]) -> bool:
    """Whether a node, or a function that it runs, may write variables."""
    inside = reached_functions(library, called_functions(node))
    return _may_write(node) or any(_may_write(n) for name in inside for n in library[name].node_def)


def _may_write(node: Any) -> bool:
    return writes_variable(node.op) or node.op in PYTHON


def _written_behind(
    loop: Any, nodes: Sequence[Any], library: Mapping[str, Any], handles: Set[str]
) -> set[str]:
    """Those of some handles that are written with values that depend on a loop."""
    consumers = [
        node
        for node in nodes
        if node.op not in LOOPS and handles & set(node.input) and _writes(node, library)
    ]
    if not consumers:
        return set()
    behind = _behind(loop.name, nodes)
    return {name for node in consumers if node.name in behind for name in handles & set(node.input)}


def _behind(start: str, nodes: Sequence[Any]) -> set[str]:
    """The nodes that a node's results lead to, also through variables that are written and read."""
    loops = {node.name for node in nodes if node.op in LOOPS}
    users = defaultdict(list)
    for node in nodes:
        for name in node.input:
            # A read waits for a write. What only waits for a loop does not depend on its results.
            if not (name.startswith("^") and node_name(name) in loops):
                users[node_name(name)].append(node.name)
    found, pending = {start}, [start]
    while pending:
        for name in users[pending.pop()]:
            if name not in found:
                found.add(name)
                pending.append(name)
    return found


def _hoist(
    graph: Any, loop: Any, reads: Sequence[_Read], library: Mapping[str, Any]
) -> set[tuple[str, str]]:
    """Reads before a loop, and gives the loop what was read."""
    body, condition = (library[loop.attr[name].func.name] for name in ("body", "cond"))
    place = _place(loop)
    before = _reads_before(graph, loop, reads)
    _extend_loop(loop, place, before)
    _renumber(graph.node, loop.name, place, len(reads))
    names = _free_names([each.node.name for each in reads], (body, condition))
    kind = type(body.signature.input_arg[0])
    arguments = [kind(name=name, type=tf.float32.as_datatype_enum) for name in names]
    for function in (body, condition):
        _insert(function.signature.input_arg, place, arguments)
        for table in (function.arg_attr, function.resource_arg_unique_id):
            _shift(table, place, len(names))
        for position, node in enumerate(before, place):
            if _SHAPES in node.attr:
                attrs = function.arg_attr[position].attr
                attrs[_SHAPES].CopyFrom(node.attr[_SHAPES])
    _insert(body.signature.output_arg, place, arguments)
    for name, read in zip(names, reads, strict=True):
        body.ret[name] = name
        _pass_on(body, read.node.name, name)
    return {(body.signature.name, name) for name in names}


def _place(loop: Any) -> int:
    """Where new variables of a loop go: TensorFlow differentiates those before it only."""
    if _ORIGINAL in loop.attr:
        return int(loop.attr[_ORIGINAL].i)
    return len(loop.attr["T"].list.type)


def _reads_before(graph: Any, loop: Any, reads: Sequence[_Read]) -> list[Any]:
    control = [name for name in loop.input if name.startswith("^")]
    taken = {node.name for node in graph.node}
    nodes = []
    for read in reads:
        name = _free_name(f"{loop.name}/{read.node.name}", taken)
        taken.add(name)
        inputs = [loop.input[read.handle], *control]
        node = graph.node.add(name=name, op="ReadVariableOp", input=inputs, device=loop.device)
        for attr in ("dtype", _SHAPES):
            if attr in read.node.attr:
                node.attr[attr].CopyFrom(read.node.attr[attr])
        nodes.append(node)
    return nodes


def _extend_loop(loop: Any, place: int, before: Sequence[Any]) -> None:
    inputs = list(loop.input)
    loop.input[:] = [*inputs[:place], *(node.name for node in before), *inputs[place:]]
    types = list(loop.attr["T"].list.type)
    new = [node.attr["dtype"].type for node in before]
    loop.attr["T"].list.type[:] = [*types[:place], *new, *types[place:]]
    shapes = [_shape(node) for node in before]
    for name in ("output_shapes", _SHAPES):
        if name in loop.attr and len(loop.attr[name].list.shape):
            _insert(loop.attr[name].list.shape, place, shapes)
    if _ORIGINAL in loop.attr:
        loop.attr[_ORIGINAL].i += len(before)


def _shape(read: Any) -> Any:
    if _SHAPES in read.attr and len(read.attr[_SHAPES].list.shape):
        return read.attr[_SHAPES].list.shape[0]
    return tf.TensorShape(None).as_proto()


def _renumber(nodes: Iterable[Any], loop: str, place: int, count: int) -> None:
    """Follows the results of a loop that new ones came before."""
    for node in nodes:
        for i, name in enumerate(node.input):
            made, _, port = name.partition(":")
            if made == loop and port and int(port) >= place:
                node.input[i] = f"{loop}:{int(port) + count}"


def _insert(values: Any, place: int, new: Sequence[Any]) -> None:
    """Inserts messages into a repeated field."""
    copies = [type(each).FromString(each.SerializeToString()) for each in values]
    del values[:]
    values.extend([*copies[:place], *new, *copies[place:]])


def _shift(table: Any, place: int, count: int) -> None:
    """Moves what a map of protobuf says of arguments from a place on."""
    for position in sorted((each for each in table if each >= place), reverse=True):
        value = table.pop(position)
        if hasattr(value, "SerializeToString"):
            table[position + count].CopyFrom(value)
        else:
            table[position + count] = value


def _pass_on(body: Any, read: str, argument: str) -> None:
    """Makes a read in a body an Identity of an argument."""
    node = next(each for each in body.node_def if each.name == read)
    control = [name for name in node.input if name.startswith("^")]
    node.op = "Identity"
    node.input[:] = [argument, *control]
    node.attr["T"].type = node.attr["dtype"].type
    node.attr.pop("dtype")
    old, new = f"{read}:value:0", f"{read}:output:0"
    for each in body.node_def:
        each.input[:] = [new if name == old else name for name in each.input]
    for name, tensor in list(body.ret.items()):
        if tensor == old:
            body.ret[name] = new


def _free_names(names: Iterable[str], functions: Iterable[Any]) -> list[str]:
    """Names that functions have for no argument, result or node, for new arguments."""
    taken = {
        each.name
        for function in functions
        for group in (
            function.signature.input_arg,
            function.signature.output_arg,
            function.node_def,
        )
        for each in group
    }
    free = []
    for name in names:
        free.append(_free_name(f"{name.replace('/', '_').lower()}_before", taken))
        taken.add(free[-1])
    return free


def _free_name(name: str, taken: Collection[str]) -> str:
    numbered = (f"{name}_{i}" for i in itertools.count(1))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


def cast_before_loops(graph_def: Any) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Takes Casts of loop-invariant float32 arguments out of the loops of a graph.

    Only where the loop does nothing else with the argument, and nothing uses what it becomes.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified. Loops in functions stay.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts that loops no longer have as (function, name).
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    library = {function.signature.name: function for function in result.library.function}
    everything = [*result.node, *(n for f in result.library.function for n in f.node_def)]
    calls = Counter(
        value.func.name
        for node in everything
        for value in node.attr.values()
        if value.HasField("func")
    )
    used = {name.removeprefix("^") for node in result.node for name in node.input}
    gone: set[tuple[str, str]] = set()
    for (body_name, condition_name), loops in _groups(result.node).items():
        names = (body_name, condition_name)
        if any(name not in library or calls[name] != len(loops) for name in names):
            continue
        body, condition = library[body_name], library[condition_name]
        for i, number in enumerate(list(loops[0].attr["T"].list.type)):
            outputs = {loop.name if i == 0 else f"{loop.name}:{i}" for loop in loops}
            if tf_private.dtype_name(number) != FLOAT32 or outputs & used:
                continue
            casts = _casts_of_invariant(body, condition, i)
            if casts:
                gone |= {(body_name, name) for name in casts}
                low = _lower_body(body, condition, i, casts)
                for loop in loops:
                    _cast_before(result, loop, i, low)
    return result, frozenset(gone)


def _casts_of_invariant(body: Any, condition: Any, i: int) -> list[str]:
    """The Casts of a body's argument to one low dtype, if it is not changed nor used otherwise."""
    argument = body.signature.input_arg[i].name
    tested = condition.signature.input_arg[i].name
    if any(tested in node.input for node in condition.node_def):
        return []
    if tested in condition.ret.values():
        return []
    same, casts = {argument}, []
    for node in _behind(body, argument):
        if node.op == "Identity" and len(node.input) == 1:
            same.add(f"{node.name}:output:0")
        elif node.op == "Cast" and len(node.input) == 1:
            casts.append(node)
        else:
            return []
    results = [arg.name for arg in body.signature.output_arg]
    returned = [name for name in results if body.ret[name] in same]
    dtypes = {tf_private.dtype_name(node.attr["DstT"].type) for node in casts}
    if returned != [results[i]] or len(dtypes) != 1 or not dtypes <= set(LOW_PRECISION):
        return []
    return [node.name for node in casts]


def _behind(body: Any, tensor: str) -> list[Any]:
    """The nodes that take a tensor, or what Identities make of it."""
    found, pending = [], [tensor]
    while pending:
        name = pending.pop()
        for node in body.node_def:
            if name in node.input:
                found.append(node)
                if node.op == "Identity":
                    pending.append(f"{node.name}:output:0")
    return found


def _groups(nodes: Iterable[Any]) -> dict[tuple[str, str], list[Any]]:
    """The loops of a graph by body and condition: signatures share those of one model."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for node in nodes:
        if node.op in LOOPS:
            key = node.attr["body"].func.name, node.attr["cond"].func.name
            groups.setdefault(key, []).append(node)
    return groups


def _lower_body(body: Any, condition: Any, i: int, casts: list[str]) -> int:
    """Makes an argument of a loop's functions low; returns the number of its dtype."""
    nodes = {node.name: node for node in body.node_def}
    low = int(nodes[casts[0]].attr["DstT"].type)
    for node in _behind(body, body.signature.input_arg[i].name):
        if node.op == "Cast":
            node.op = "Identity"
            for name in ("SrcT", "DstT", "Truncate"):
                node.attr.pop(name, None)
        node.attr["T"].type = low
    spelled = {f"{name}:y:0": f"{name}:output:0" for name in casts}
    for node in body.node_def:
        node.input[:] = [spelled.get(name, name) for name in node.input]
    for name, tensor in list(body.ret.items()):
        body.ret[name] = spelled.get(tensor, tensor)
    for function in (body, condition):
        function.signature.input_arg[i].type = low
    body.signature.output_arg[i].type = low
    return low


def _cast_before(graph: Any, loop: Any, i: int, low: int) -> None:
    name = f"{loop.name}/{i}-CastBefore"
    cast = graph.node.add(name=name, op="Cast", input=[loop.input[i]], device=loop.device)
    cast.attr["SrcT"].type, cast.attr["DstT"].type = loop.attr["T"].list.type[i], low
    cast.attr["Truncate"].b = False
    loop.attr["T"].list.type[i] = low
    loop.input[i] = name


def fold_casts(graph_def: Any, keep: Iterable[str] = ()) -> tuple[Any, frozenset[tuple[str, str]]]:
    """Folds Casts of float32 constants to a low dtype, in functions also.

    A constant that is used in float32 as well keeps its Casts: two copies of it would take more
    bytes than one. A value beyond the range of the dtype becomes infinite, as it does in a Cast.

    Args:
        graph_def: A `tf.compat.v1.GraphDef`; it is not modified.
        keep: Tensors ("x:0") or nodes ("x") that are used from outside the graph.

    Returns:
        A new `tf.compat.v1.GraphDef`, and the Casts it no longer has as (function, name); the
        function is "" for the graph itself.

    Example:
        >>> import tensorflow as tf
        >>> half = tf.function(lambda: tf.cast(tf.constant([1.0, 2.0]), tf.float16))
        >>> graph = half.get_concrete_function().graph.as_graph_def()
        >>> folded, casts = fold_casts(graph, keep=["Identity:0"])
        >>> [node.op for node in folded.node], sorted(casts)
        (['Const', 'Identity'], [('', 'Cast')])
    """
    result = tf.compat.v1.GraphDef()
    result.CopyFrom(graph_def)
    kept = {name.removeprefix("^").partition(":")[0] for name in keep}
    gone = {(MAIN_GRAPH, name) for name in _fold_scope(result.node, kept)}
    for function in result.library.function:
        used = {tensor.partition(":")[0] for tensor in function.ret.values()}
        used |= set(function.control_ret.values())
        name = function.signature.name
        casts = set(_fold_scope(function.node_def, used))
        _spell_outputs(function, casts)
        gone |= {(name, cast) for cast in casts}
    return result, frozenset(gone)


@dataclass(slots=True)
class _Uses:
    """A scope's nodes, and who uses each."""

    nodes: Mapping[str, Any]
    kept: set[str]
    consumers: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def find(self) -> None:
        for node in self.nodes.values():
            for name in node.input:
                self.consumers[name.removeprefix("^").partition(":")[0]].append(node.name)

    def way_to_casts(self, constant: str) -> tuple[list[str], list[str]] | None:
        """The Identities behind a constant and the Casts behind them, if there is nothing else."""
        passing, casts, pending = [], [], [constant]
        while pending:
            name = pending.pop()
            if name in self.kept:
                return None
            for each in self.consumers[name]:
                node = self.nodes[each]
                if len(node.input) != 1 or node.input[0].startswith("^"):
                    return None
                if node.op == "Identity":
                    passing.append(each)
                    pending.append(each)
                elif node.op == "Cast" and _low_target(node) is not None:
                    casts.append(each)
                else:
                    return None
        return passing, casts


def _fold_scope(nodes: Any, kept: set[str]) -> Iterator[str]:
    """Folds in place; gives the names of the Casts that are gone."""
    uses = _Uses({node.name: node for node in nodes}, kept)
    uses.find()
    removed: set[str] = set()
    for name, node in uses.nodes.items():
        if node.op != "Const" or tf_private.dtype_name(node.attr["dtype"].type) != FLOAT32:
            continue
        way = uses.way_to_casts(name)
        if way is None or not way[1]:
            continue
        passing, casts = way
        _fold(uses.nodes, name, casts)
        removed |= {name, *passing}
        yield from casts
    if not removed:
        return
    left = [node for node in nodes if node.name not in removed]
    for node in left:
        _forget_places(node, removed)
    copies = [tf.compat.v1.NodeDef.FromString(node.SerializeToString()) for node in left]
    del nodes[:]
    nodes.extend(copies)


def _fold(nodes: Mapping[str, Any], constant: str, casts: list[str]) -> None:
    """Makes the first Cast the constant, and the others its copies."""
    values: dict[str, str] = {}
    value = tf.make_ndarray(nodes[constant].attr["value"].tensor)
    for name in sorted(casts):
        node = nodes[name]
        low = _low_target(node)
        if low is None:
            continue
        attr = nodes[constant].attr
        if low in values:
            suffix = ":output:0" if ":" in node.input[0] else ""
            node.op = "Identity"
            node.input[:] = [f"{values[low]}{suffix}"]
            _set_attributes(node, {"T": tf_private.dtype_number(low)})
            continue
        values[low] = name
        node.op, node.device = "Const", nodes[constant].device
        del node.input[:]
        _set_attributes(node, {"dtype": tf_private.dtype_number(low)})
        with np.errstate(over="ignore"):
            content = value.astype(tf.as_dtype(low).as_numpy_dtype)
        tensor = node.attr["value"].tensor
        tensor.dtype = tf_private.dtype_number(low)
        tensor.tensor_shape.CopyFrom(attr["value"].tensor.tensor_shape)
        # Not make_tensor_proto's half_val, which takes up to four bytes for a number of two.
        tensor.tensor_content = content.tobytes()


def _spell_outputs(function: Any, casts: set[str]) -> None:
    """A function spells an output by its name: a Cast's is "y", that of what it became "output"."""
    spelled = {f"{name}:y:0": f"{name}:output:0" for name in casts}
    for node in function.node_def if casts else ():
        node.input[:] = [spelled.get(name, name) for name in node.input]
    for name, tensor in list(function.ret.items()):
        function.ret[name] = spelled.get(tensor, tensor)


def _set_attributes(node: Any, types: Mapping[str, int]) -> None:
    kept = {name: value for name, value in node.attr.items() if name.startswith("_")}
    copies = {
        name: type(value).FromString(value.SerializeToString()) for name, value in kept.items()
    }
    node.attr.clear()
    for name, value in copies.items():
        node.attr[name].CopyFrom(value)
    for name, number in types.items():
        node.attr[name].type = number


def _low_target(node: Any) -> str | None:
    target = tf_private.dtype_name(node.attr["DstT"].type)
    return target if target in LOW_PRECISION else None


def _forget_places(node: Any, removed: set[str]) -> None:
    """Takes out the wish to be on the device of a node that is no longer there."""
    if "_class" not in node.attr:
        return
    places = [
        each
        for each in node.attr["_class"].list.s
        if each.decode().removeprefix("loc:@") not in removed
    ]
    if places:
        node.attr["_class"].list.s[:] = places
    else:
        del node.attr["_class"]
