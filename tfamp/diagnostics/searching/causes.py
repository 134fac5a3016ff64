"""Why an op's result is not finite, from what was seen of it in low precision and in float32."""

from __future__ import annotations

from dataclasses import dataclass

from tfamp.core.dtypes import float_format
from tfamp.graph.measuring.first_nonfinite import Place, Scopes
from tfamp.graph.measuring.tensor_stats import Run, TensorStats
from tfamp.planning.ranges import TensorKey

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
        vanished: Its largest magnitude in float32, if all of it became zero.
        execution: In which execution of the function that the op is in, from 0.
    """

    kind: str
    dtype: str
    float32_max: float | None = None
    vanished_in: Place | None = None
    vanished: float | None = None
    execution: int = 0


def cause_of(place: Place, scopes: Scopes, low: Run, reference: Run | None) -> Cause:
    """Says why the result of an op is not finite.

    Args:
        place: The op.
        scopes: The graph it is in.
        low: What was seen in the run in which it is not finite.
        reference: What was seen in float32; None where that is the same run.
    """
    bad = [key for key in place.outputs if low.get(key).bad is not None]
    if not bad:
        return Cause(ALSO_IN_FLOAT32, "float32")
    execution = min(low.get(key).bad_at for key in bad)
    dtype = _at(low, bad[0], execution).dtype
    only_here = []
    if reference is not None:
        only_here = [key for key in bad if not _at(reference, key, execution).nonfinite]
    if reference is None or not only_here:
        return Cause(ALSO_IN_FLOAT32, dtype, execution=execution)
    largest = max(_at(reference, key, execution).max_abs for key in only_here)
    if largest > float_format(dtype).max:
        return Cause(OVERFLOW, dtype, largest, execution=execution)
    both = _Runs(low, reference, execution)
    vanished = [key for key in place.inputs if both.vanished(key)]
    if vanished:
        root, key = _where_vanished(vanished[-1], scopes, both)
        mine, theirs = _at(low, key, execution), _at(reference, key, execution)
        size = theirs.max_abs if mine.max_abs == 0.0 else None
        return Cause(UNDERFLOW, dtype, largest, root, size, execution)
    if any(_at(low, key, execution).infs for key in bad):
        return Cause(OVERFLOW, dtype, largest, execution=execution)  # In a sum inside, for example.
    return Cause(INVALID, dtype, largest, execution=execution)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Two runs, at one execution of a function."""

    low: Run
    reference: Run
    execution: int

    def vanished(self, key: TensorKey) -> bool:
        """Whether values are zero that are not in float32."""
        mine = _at(self.low, key, self.execution)
        theirs = _at(self.reference, key, self.execution)
        return mine.zeros > theirs.zeros and not theirs.nonfinite


def _at(run: Run, key: TensorKey, execution: int) -> TensorStats:
    stats = run.get(key).at(execution)
    return stats if stats is not None else TensorStats("float32", (), 0.0, 0.0, 0.0)


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


def _where_vanished(key: TensorKey, scopes: Scopes, both: _Runs) -> tuple[Place, TensorKey]:
    graph = scopes.by_name[key[0]]
    position = graph.positions[key[1]]
    while earlier := [each for each in graph.float_inputs(position) if both.vanished(each)]:
        key = earlier[-1]
        position = graph.positions[key[1]]
    return graph.place(position), key


def reduced_values(place: Place, low: Run) -> int | None:
    """Returns how many values an op adds up for each result, None if it reduces none."""
    if place.op not in ("Mean", "Sum", "Prod", "BiasAddGrad"):
        return None
    given = [_at(low, key, 0).size for key in place.inputs]
    made = [_at(low, key, 0).size for key in place.outputs]
    return given[0] // made[0] if given and made and made[0] else None
