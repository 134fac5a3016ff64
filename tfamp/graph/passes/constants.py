"""Stores constants in the dtype to which they are cast.

w (Const) -> read (Identity) -> Cast -> MatMul becomes Const -> MatMul in a frozen graph: the
value is cast when the graph is written, not each time it runs, and the constant takes half the
bytes. w -> While(body: w -> Cast -> MatMul) becomes w -> Cast -> While(body: w -> MatMul)
before that.

In any rewritten graph the constants that Selects choose stay finite. In softmax(where(mask,
logits, -2e38)) a fully masked row has equal weights in float32; cast to float16, the constant
is -inf and the row NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from tfamp.core.kinds import NodeDef
from tfamp.graph.body import Body
from tfamp.graph.graph import Graph
from tfamp.graph.index import largest_finite
from tfamp.graph.loops import Loop
from tfamp.graph.nodes import control_inputs_of, tensor_inputs
from tfamp.graph.ops import FLOAT32_TYPE, LOW_TYPES
from tfamp.planning.op_sets import CHOICES
from tfamp.planning.options import RewriteOptions
from tfamp.planning.structures import CastSite, RewritePlan, node_name, reach

# Ops, with positions of inputs, that bound values from above, and from below.
_UPPER = frozenset({("Minimum", 0), ("Minimum", 1), ("ClipByValue", 2)})
_LOWER = frozenset({("Maximum", 0), ("Maximum", 1), ("ClipByValue", 1)})


def run(graph: Graph, options: RewriteOptions, plan: RewritePlan) -> None:
    """Clips constants that are cast for a choice to the range of the low dtype, in place.

    Only for ops that select or compare: in arithmetic infinity is a visible error, and a
    clipped value a silent one. An upper bound above the range is infinite, and so none: clipped,
    it would make a finite number of a value that has overflowed. One below the range holds for
    every value, and is clipped. Lower bounds are the other way round.
    """
    limit = float(tf.as_dtype(plan.dtype).max)
    for cast in plan.casts:
        body = graph.body(cast.scope)
        constant = body.by_name.get(cast.producer)
        if constant is None or constant.op != "Const":
            continue
        users = [body.by_name.get(consumer) for consumer, _ in cast.consumers]
        ops = {"" if user is None else user.op for user in users}
        if ops <= CHOICES and abs(largest_finite(constant.attr["value"].tensor)) > limit:
            _clip(body, constant, cast, limit)


def _clip(body: Body, constant: NodeDef, cast: CastSite, limit: float) -> None:
    """Stores a cast constant low, once for each range to which its consumers want it clipped."""
    values = tf.make_ndarray(constant.attr["value"].tensor)
    finite = values[np.isfinite(values)]
    consumers: dict[tuple[float, float], list[tuple[str, int]]] = {}
    for name, position in cast.consumers:
        use = body.by_name[name].op, position
        ends = -math.inf if use in _LOWER else -limit, math.inf if use in _UPPER else limit
        consumers.setdefault(ends, []).append((name, position))
    first, dtypes = True, (tf.as_dtype(cast.from_), tf.as_dtype(cast.to))
    for ends, places in consumers.items():
        node = body.by_name[cast.name]
        if not first:
            tensor = body.cast(cast.name, cast.tensor, dtypes, body.shape(cast.tensor), cast.device)
            body.connect(tensor, places)
            node = body.by_name[node_name(tensor)]
        first = False
        if finite.min() < ends[0] or finite.max() > ends[1]:
            _store(body, constant, [node], ends)
            body.set_inputs(node, control_inputs_of(constant))
            body.settle()


def fold_casts(graph: Graph) -> frozenset[tuple[str, str]]:
    """Folds Casts of float32 constants to a low dtype, in functions also, in place.

    A constant that is used in float32 as well keeps its Casts: two copies of it would take more
    bytes than one. So does one that is used from outside, among the kept tensors or nodes. A
    value beyond the range of the dtype becomes infinite, as it does in a Cast. Casts of
    constants that enter loops are hoisted out of them first, where the loop does nothing else
    with them.

    Returns:
        The Casts that are gone as (function, name); the function is "" for the graph itself.

    Example:
        >>> import tensorflow as tf
        >>> half = tf.function(lambda: tf.cast(tf.constant([1.0, 2.0]), tf.float16))
        >>> graph_def = half.get_concrete_function().graph.as_graph_def()
        >>> graph = Graph(graph_def, kept=["Identity:0"])
        >>> sorted(fold_casts(graph)), [node.op for node in graph.main.nodes]
        ([('', 'Cast')], ['Const', 'Identity'])
    """
    gone = set(_cast_before_loops(graph))
    for body in graph.bodies:
        gone |= {(body.scope, name) for name in _fold_body(body)}
    return frozenset(gone)


# ---- Constants -----------------------------------------------------------------------------------


def _fold_body(body: Body) -> list[str]:
    """Folds the Casts of a body; returns their names."""

    def identities(name: str) -> Iterator[str]:
        return (user for user in body.consumers[name] if body.by_name[user].op == "Identity")

    gone: list[str] = []
    removed: set[str] = set()
    kept = body.kept
    for constant in body.of_types("Const"):
        if constant.attr["dtype"].type != FLOAT32_TYPE:
            continue
        passing = reach([str(constant.name)], identities)
        users = [body.by_name[user] for name in passing for user in body.consumers[name]]
        casts = sorted((n for n in users if n.op == "Cast"), key=lambda n: n.name)
        if casts and kept.isdisjoint(passing) and all(map(_only_casts, users)):
            _store(body, constant, casts)
            removed.update(passing)
            gone += [node.name for node in casts]
    body.settle()
    body.drop(removed)
    return gone


def _only_casts(node: NodeDef) -> bool:
    """Whether a node only passes a constant on or casts it to a low dtype."""
    casts = node.op == "Cast" and node.attr["DstT"].type in LOW_TYPES
    alone = len(node.input) == 1 == len(tensor_inputs(node))
    return alone and (casts or node.op == "Identity")


def _store(
    body: Body,
    constant: NodeDef,
    casts: Iterable[NodeDef],
    ends: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Replaces the first Cast to each dtype with a constant, and the others with copies of it.

    Finite values are clipped to a range.
    """
    stored: dict[int, NodeDef] = {}
    proto = constant.attr["value"].tensor
    values = tf.make_ndarray(proto)
    clipped = np.where(np.isfinite(values), np.clip(values, *ends), values)
    for node in casts:
        low = int(node.attr["DstT"].type)
        if low in stored:
            body.become(node, "Identity", [body.tensor(stored[low])], T=tf.as_dtype(low))
            continue
        stored[low] = node
        with np.errstate(over="ignore"):
            content = clipped.astype(tf.as_dtype(low).as_numpy_dtype)
        value = tf.compat.v1.AttrValue()
        value.tensor.dtype = low
        value.tensor.tensor_shape.CopyFrom(proto.tensor_shape)
        # Not make_tensor_proto's half_val, which takes up to four bytes for a number of two.
        value.tensor.tensor_content = content.tobytes()
        node.device = constant.device
        body.become(node, "Const", (), dtype=tf.as_dtype(low), value=value)


# ---- Loops ---------------------------------------------------------------------------------------


def _cast_before_loops(graph: Graph) -> Iterator[tuple[str, str]]:
    """Hoists Casts of invariant float32 arguments out of loops; yields the removed ones."""
    for loop in graph.changeable_loops():
        for i, (argument, _) in enumerate(loop.variables):
            if argument.type != FLOAT32_TYPE or any(
                _uses(graph.main, node, i) for node in loop.nodes
            ):
                continue
            users = _casting_users(loop, i)
            if casts := [node for node in users if node.op == "Cast"]:
                yield from ((loop.body.scope, node.name) for node in casts)
                _cast_before(loop, i, users, int(casts[0].attr["DstT"].type))


def _uses(graph: Body, loop: NodeDef, i: int) -> bool:
    """Whether a result of a loop has consumers."""
    outputs = {graph.tensor(loop, i), f"{loop.name}:{i}"}
    users = (graph.by_name[user] for user in graph.consumers[loop.name])
    return loop.name in graph.kept or any(not outputs.isdisjoint(user.input) for user in users)


def _casting_users(loop: Loop, i: int) -> list[NodeDef]:
    """The consumers of an invariant argument of a body, if they only cast it to one dtype."""
    body, (argument, result) = loop.body, loop.variables[i]
    same = set(loop.copies(argument.name))
    names = (user for tensor in sorted(same) for user in body.consumers[node_name(tensor)])
    users = [body.by_name[name] for name in dict.fromkeys(names)]
    dtypes = {node.attr["DstT"].type for node in users if node.op == "Cast"}
    returned = [name for name, tensor in body.returned.items() if tensor in same]
    unchanged = returned == [result.name] and not loop.is_tested(i)
    return users if unchanged and len(dtypes) == 1 and all(map(_only_casts, users)) else []


def _cast_before(loop: Loop, i: int, users: Iterable[NodeDef], low: int) -> None:
    """Converts a variable of a loop to a low dtype."""
    dtype, graph = tf.as_dtype(low), loop.graph
    for node in users:
        loop.body.become_identity(node, low)
    loop.body.settle()
    for entries in (loop.body.arguments, loop.body.results, loop.condition.arguments):
        entries[i].type = low
    for node in loop.nodes:
        wanted, dtypes = f"{node.name}/{i}-CastBefore", (tf.float32, dtype)
        made = graph.cast(wanted, node.input[i], dtypes, device=node.device)
        graph.connect(made, [(node.name, i)])
        node.attr["T"].list.type[i] = low
