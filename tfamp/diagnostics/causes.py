"""Why an op's result is not finite, from what was seen of it in low precision and in float32."""

from __future__ import annotations

from dataclasses import dataclass

from tfamp.dtypes import float_format
from tfamp.graph.first_nonfinite import Place, ScopeGraph, Scopes
from tfamp.graph.ranges import TensorKey
from tfamp.graph.tensor_stats import Run, TensorStats

OVERFLOW, UNDERFLOW, INVALID = "overflow", "underflow", "invalid"
ALSO_IN_FLOAT32 = "also_in_float32"
# What gives values on as they are.
_PASSING_ON = frozenset(
    {
        "Cast",
        "EnsureShape",
        "ExpandDims",
        "Identity",
        "IdentityN",
        "Reshape",
        "Squeeze",
        "StopGradient",
        "Transpose",
    }
)
READS = frozenset({"ReadVariableOp", "ResourceGather"})
INPUTS = frozenset({"Placeholder", "PlaceholderV2"})


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a result is not finite.

    Attributes:
        kind: "overflow", "underflow", "invalid" or "also_in_float32".
        dtype: Dtype of the result.
        float32_max: Largest magnitude it has in float32; None if that is not finite.
        vanished_in: Of an underflow, the node in which the value became zero.
        vanished: Largest magnitude in float32 of what became zero.
    """

    kind: str
    dtype: str
    float32_max: float | None = None
    vanished_in: Place | None = None
    vanished: float | None = None


def cause_of(place: Place, scopes: Scopes, low: Run, reference: Run | None) -> Cause:
    """Says why the result of an op is not finite.

    Args:
        place: The op.
        scopes: The graph it is in.
        low: What was seen in the run in which it is not finite.
        reference: What was seen in float32; None where that is the same run.
    """
    bad = [key for key in place.outputs if low.get(key).bad is not None]
    dtype = _stats(low, bad[0]).dtype if bad else "float32"
    if reference is None or not bad:
        return Cause(ALSO_IN_FLOAT32, dtype)
    if all(reference.get(key).bad is not None for key in bad):
        return Cause(ALSO_IN_FLOAT32, dtype)
    good = [reference.get(key).good for key in bad if reference.get(key).bad is None]
    largest = max((stats.max_abs for stats in good if stats is not None), default=None)
    if largest is not None and largest > float_format(dtype).max:
        return Cause(OVERFLOW, dtype, largest)
    vanished = [key for key in place.inputs if _vanished(key, low, reference)]
    if vanished:
        root = _where_vanished(vanished[-1], scopes, low, reference)
        stats = reference.get(root[1]).stats
        size = None if stats is None else stats.max_abs
        return Cause(UNDERFLOW, dtype, largest, root[0], size)
    if any(_stats(low, key).infs for key in bad):
        return Cause(OVERFLOW, dtype, largest)  # Inside the op, of a sum for example.
    return Cause(INVALID, dtype, largest)


def source_of(place: Place, scopes: Scopes, ops: frozenset[str]) -> str | None:
    """Returns the name of a node of some op type whose value an op takes, perhaps as a cast.

    Args:
        place: The op.
        scopes: The graph it is in.
        ops: Op types to look for.
    """
    graph = scopes.by_name[place.scope]
    pending = [graph.positions[place.node]]
    seen = set(pending)
    while pending:
        position = pending.pop(0)
        node = graph.index.nodes[position]
        if node.op in ops:
            return node.name
        if position == graph.positions[place.node] or node.op in _PASSING_ON:
            sources = [n for n, _, _ in graph.inputs[position] if n not in seen]
            seen.update(sources)
            pending += sources
    return None


def _stats(run: Run, key: TensorKey) -> TensorStats:
    stats = run.get(key).stats
    return stats if stats is not None else TensorStats("float32", (), 0.0, 0.0, 0.0)


def _vanished(key: TensorKey, low: Run, reference: Run) -> bool:
    """Whether values are zero that are not in float32."""
    mine, theirs = low.get(key), reference.get(key)
    if mine.stats is None or theirs.stats is None or theirs.bad is not None:
        return False
    return mine.stats.zeros * max(theirs.executions, 1) > theirs.stats.zeros * max(
        mine.executions, 1
    )


def _where_vanished(
    key: TensorKey, scopes: Scopes, low: Run, reference: Run
) -> tuple[Place, TensorKey]:
    graph = scopes.by_name[key[0]]
    position = graph.positions[key[1]]
    while True:
        earlier = [each for each in graph.float_inputs(position) if _vanished(each, low, reference)]
        if not earlier:
            return graph.place(position), key
        key = earlier[-1]
        position = graph.positions[key[1]]


def reduced_values(place: Place, low: Run) -> int | None:
    """Returns how many values an op adds up for each result, None if it reduces none."""
    if place.op not in ("Mean", "Sum", "Prod", "BiasAddGrad"):
        return None
    given = [_stats(low, key).size for key in place.inputs]
    made = [_stats(low, key).size for key in place.outputs]
    return given[0] // made[0] if given and made and made[0] else None


def graph_of(scopes: Scopes, place: Place) -> ScopeGraph:
    """Returns the scope that an op is in."""
    return scopes.by_name[place.scope]
