"""Finds loop variables that stay float32, as they add up over the iterations; framework-free.

A loop variable is a sum if its next value is the old one plus something. It is one as well if
it is only scaled and added to: by constants, as in `0.999 * h + 0.001 * new`, or in a linear
recurrence, where neither the gates nor what is added depend on it. In low precision such a
state stops where a step is less than half of its last digit, and one that is only scaled, as the
gradient of such a state is, is rounded in every iteration. A TensorArray whose elements are
computed so from each other is a state too. The body of a branch, or of another function that is
called, is not looked into: it takes and returns float32, so that a low state would only be cast
there and back. The same holds for a loop inside that adds to the state, or hands it on.

The gates of an LSTM depend on its state, by products and bounded functions: it keeps the dtype
of the values that its products take.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence

from tfamp.planning.structures import (
    ARGUMENT,
    FLOAT32,
    LOOPS,
    RESULT,
    GraphIndex,
    Reason,
    along,
    op_types,
    reach,
)

_ADDING = op_types("AccumulateNV2 Add AddN AddV2 Sub TensorScatterAdd TensorScatterSub")
# What a state may go through besides, in an iteration.
_SCALING = op_types("Div Mul Neg RealDiv")
_HOLDING = op_types("""
    ClipByValue ConcatV2 EnsureShape ExpandDims GatherV2 Identity IdentityN Maximum Minimum Pack
    Relu Reshape ReverseV2 Roll Select SelectV2 Slice Split SplitV Squeeze StridedSlice
    TensorScatterUpdate Transpose Unpack
""")
_LISTS = op_types("AddN TensorListGetItem TensorListSetItem")
_ON_THE_WAY = _ADDING | _SCALING | _HOLDING | _LISTS
_ADDS_UP = Reason("loop", "it adds up over the iterations of a loop")
_INVARIANT = Reason("loop", "it is the same in every iteration, and its gradient adds up over them")


def kept_variables(
    body: GraphIndex,
    places: Sequence[int],
    weights: Collection[tuple[str, str]],
    inner: Mapping[int, Reason],
) -> Mapping[int, Reason]:
    """The loop variables that stay float32, and the ops that accumulate them.

    Args:
        body: The function of a loop; nothing is kept for a condition.
        places: For each slot of the body the slot of the joined graph.
        weights: Invariant arguments, as (function, argument), that may be low.
        inner: Variables of loops, as slots of the joined graph, that stay float32: in the loops
            inside a state goes through these as through a called function.
    """
    loop = _Body(body, {slot: inner[at] for slot, at in enumerate(places) if at in inner})
    if len(loop.arguments) != len(loop.results):
        return {}
    kept: dict[int, Reason] = {}
    for argument, result in zip(loop.arguments, loop.results, strict=True):
        (way,) = loop.ways_to(result)
        made = way[-1]
        is_weight = (body.scope, body.node_of(argument).name) in weights
        dtype = body.slots[argument].dtype
        if dtype not in (FLOAT32, "variant") or (made == argument and is_weight):
            continue
        if made != argument:
            kept.update((places[slot], _ADDS_UP) for slot in loop.adding_up(argument, way))
        elif dtype == FLOAT32:
            kept.update((places[slot], _INVARIANT) for slot in way)
    return kept


class _Body:
    """The body of a loop; its variables are slots.

    Args:
        index: The body.
        inner: Its slots that are float32 variables of loops inside.
    """

    def __init__(self, index: GraphIndex, inner: Mapping[int, Reason]) -> None:
        self._index, self._ops, self._inner = index, index.ops, inner
        self.arguments = [node.slots[0] for node in index.nodes if node.op == ARGUMENT]
        self.results = [node.slots[0] for node in index.nodes if node.op == RESULT]

    def ways_to(self, slot: int) -> list[list[int]]:
        """For each source of a slot the way back to where it is made, past Identity nodes."""

        def made(source: int) -> Iterable[int]:
            return self._index.fanin[source] if self._ops[source] == "Identity" else ()

        return [list(reach([source], made)) for source in self._index.fanin[slot]]

    def adding_up(self, argument: int, way: Sequence[int]) -> list[int]:
        """The float32 slots from a variable to its next value, if that is such a sum."""
        slots, between = self._index.slots, self._adding_up(argument, way[-1])
        return [s for s in (*way, *between) if between and slots[s].dtype == FLOAT32]

    def _adding_up(self, argument: int, made: int) -> list[int]:
        for way in self.ways_to(made) if self._ops[made] in _ADDING else ():
            if way[-1] == argument:
                return [*way, made]
        before = reach([made], self._made_from)
        if argument not in before:
            return []
        behind = reach([argument], along(before.__contains__, self._made_of))
        between = [slot for slot in before if slot in behind]
        if any(self._adds_inside(slot) for slot in between):
            return between
        fanin = self._index.fanin
        factors, terms = (
            [
                source
                for slot in between
                if self._ops[slot] in ops
                for source in fanin[slot]
                if source not in behind
            ]
            for ops in (_SCALING, _ADDING)
        )
        changes = any(self._ops[slot] in _ADDING | _SCALING for slot in between)
        by_constants = not self._depends_on(factors)
        if changes and (by_constants or argument not in self._depends_on([*factors, *terms])):
            return between
        return []

    def _made_from(self, slot: int) -> Sequence[int]:
        """The inputs of an op that a state may go through."""
        known = self._ops[slot] in _ON_THE_WAY or slot in self._inner
        return self._taken[slot] if known or self._is_called(slot) else ()

    def _is_called(self, slot: int) -> bool:
        node = self._index.node_of(slot)
        return bool(node.calls) and node.op not in LOOPS

    def _adds_inside(self, slot: int) -> bool:
        """Whether a function, or a loop inside, may add to the state, and does so in float32."""
        return self._is_called(slot) or self._inner.get(slot, _INVARIANT) != _INVARIANT

    @functools.cached_property
    def _taken(self) -> Sequence[Sequence[int]]:
        """For each slot the slots of what its op takes, also for other slots of its node.

        Calls have others for their results, and lists for their elements.
        """
        index = self._index
        return [
            [source for s in index.node_of(slot).slots for source in index.fanin[s]]
            if self._is_called(slot) or self._ops[slot] in _LISTS
            else index.fanin[slot]
            for slot in range(len(index.slots))
        ]

    @functools.cached_property
    def _made_of(self) -> Sequence[Sequence[int]]:
        """For each slot those whose op takes it."""
        takers: list[list[int]] = [[] for _ in self._taken]
        for slot, sources in enumerate(self._taken):
            for source in sources:
                takers[source].append(slot)
        return takers

    def _depends_on(self, slots: Iterable[int]) -> Collection[int]:
        """The variables, of this or earlier iterations, that some slots are computed from.

        Those that are the same in every iteration are constants.
        """
        index = self._index
        nodes = reach(
            (index.slots[slot].node for slot in slots),
            lambda node: [*self._producers[node], *self._results_of.get(node, ())],
        )
        return [
            argument
            for argument, result in zip(self.arguments, self.results, strict=True)
            if index.slots[argument].node in nodes and self._made(result) != argument
        ]

    def _made(self, result: int) -> int:
        (way,) = self.ways_to(result)
        return way[-1]

    @functools.cached_property
    def _producers(self) -> Sequence[Sequence[int]]:
        """For each node those whose tensors it takes, of any dtype."""
        slots = self._index.slots
        return [[slots[edge.source].node for edge in edges] for edges in self._index.inputs]

    @functools.cached_property
    def _results_of(self) -> Mapping[int, Sequence[int]]:
        """For each argument's node the node of the result that is its next value."""
        slots = self._index.slots
        pairs = zip(self.arguments, self.results, strict=True)
        return {slots[argument].node: [slots[result].node] for argument, result in pairs}
