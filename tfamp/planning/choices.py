"""Which nodes the caller chose, by name: fetches, feeds, and patterns of names.

A node of a function has a name for each place that runs the function, too: what makes the branches
of a conditional part of the layer that the conditional is in.
"""

from __future__ import annotations

import difflib
import functools
import heapq
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

from tfamp.planning.options import GraphUse, RewriteOptions
from tfamp.planning.structures import (
    ARGUMENT,
    MAIN_GRAPH,
    RESULT,
    GraphIndex,
    IndexedNode,
    Reason,
    node_name,
    reach,
)

# A node by the positions of its scope and of itself there.
Place: TypeAlias = tuple[int, int]
# The nodes, each with the names of what runs its scope.
_Nodes: TypeAlias = Mapping[Place, tuple[IndexedNode, Sequence[str]]]
# A function, the name of what runs it, and the functions around it.
_Call: TypeAlias = tuple[str, str, frozenset[str]]
# Functions that call one another twice have a number of callers that doubles at every level.
MOST_CALLERS = 1000


@dataclass(frozen=True, slots=True)
class Match:
    """The nodes that one pattern of the caller's means.

    Attributes:
        argument: "keep_float32" or "force_low".
        pattern: The regular expression.
        nodes: The nodes, each with the name that matches.
    """

    argument: str
    pattern: str
    nodes: Mapping[Place, str]

    def text(self) -> str:
        """Returns the first of the nodes' names, for a message."""
        names = list(self.nodes.values())
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"what it matches ({', '.join(map(repr, names[:3]))}{more})"


@dataclass(frozen=True, slots=True)
class ChosenNodes:
    """What the caller decides about the nodes of a graph and its functions.

    Attributes:
        used: The nodes that are fetched or fed, with the reason.
        kept: The nodes that stay float32, these among them, with the reason.
        forced: The nodes that are converted whatever their op. A node that is also kept stays
            float32.
        names: A name for each node by which patterns find it, callers in front.
        must_matter: The patterns that are meant to change something.
    """

    used: Mapping[Place, Reason]
    kept: Mapping[Place, Reason]
    forced: frozenset[Place]
    names: Mapping[Place, str]
    must_matter: tuple[Match, ...]

    def idle(self, argument: str, low: Set[Place]) -> list[Match]:
        """Returns the patterns of an argument that mean none of these nodes."""
        matches = (each for each in self.must_matter if each.argument == argument)
        return [each for each in matches if low.isdisjoint(each.nodes)]


def choose_nodes(
    indexes: Sequence[GraphIndex], options: RewriteOptions, use: GraphUse
) -> ChosenNodes:
    """Returns the nodes of a graph and its functions that the caller means.

    A pattern is searched for in the name of a node; for a node of a branch, a body or any other
    function also in that name behind the names of its callers, as in "gate/cond/MatMul".

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
    """
    used = _used_nodes(indexes[0], use)
    callers = _callers(indexes)
    nodes = {
        (number, position): (node, callers.get(index.scope, ()))
        for number, index in enumerate(indexes)
        for position, node in enumerate(index.nodes)
        if node.op not in (ARGUMENT, RESULT)
    }
    matches = [
        Match(argument, each.pattern, dict(_found(each, nodes)))
        for argument, expressions in options.patterns.items()
        for each in expressions
    ]
    names = {
        place: full_name(next(iter(around), ""), node.name)
        for place, (node, around) in nodes.items()
    }
    must_matter = tuple(each for each in matches if each.pattern not in options.may_miss)
    for each in must_matter:
        if not each.nodes:
            near = nearest_names(each.pattern, names.values()) or ["dense/MatMul"]
            raise ValueError(
                f"{each.argument}: no node's name matches {each.pattern!r}. The pattern is "
                f"searched for in names such as {', '.join(map(repr, near))}."
            )
    forced = frozenset(
        place
        for each in matches
        for place in each.nodes
        # Casts follow their neighbours.
        if each.argument == "force_low" and nodes[place][0].op != "Cast"
    )
    return ChosenNodes(used, {**_kept(matches, nodes), **used}, forced, names, must_matter)


def _used_nodes(index: GraphIndex, use: GraphUse) -> dict[Place, Reason]:
    """The nodes that are fetched or fed, with the reason."""
    positions = {node.name: position for position, node in enumerate(index.nodes)}
    why = {"fetches": "its result is fetched", "feeds": "its value is fed"}
    used = {}
    for argument, names in (("fetches", use.fetches), ("feeds", use.feeds)):
        for name in names:
            own, (_, colon, port) = node_name(name), name.partition(":")
            if own not in positions:
                near = difflib.get_close_matches(own, sorted(positions))
                hint = f" The nearest names are {near}." if near else ""
                raise ValueError(f"{argument}: the graph has no node {name!r}.{hint}")
            if colon and not port.isdecimal():
                raise ValueError(
                    f"{argument}: {name!r} is no name of a tensor; those of the node are "
                    f"'{own}:0', '{own}:1' and so on."
                )
            used[0, positions[own]] = Reason(argument, why[argument])
    return used


def _callers(indexes: Sequence[GraphIndex]) -> Mapping[str, Sequence[str]]:
    # What a NoOp holds it does not run.
    return caller_names(
        {
            index.scope: [
                (node.name, [name for _, name in node.calls])
                for node in index.nodes
                if node.calls and node.op != "NoOp"
            ]
            for index in indexes
        },
        MAIN_GRAPH,
    )


def _found(pattern: re.Pattern[str], nodes: _Nodes) -> Iterator[tuple[Place, str]]:
    for place, (node, around) in nodes.items():
        longer = (full_name(caller, node.name) for caller in around)
        name = next(filter(pattern.search, itertools.chain([node.name], longer)), None)
        if name is not None:
            yield place, name


def _kept(matches: Iterable[Match], nodes: _Nodes) -> dict[Place, Reason]:
    kept: dict[Place, Reason] = {}
    for each in matches:
        if each.argument == "keep_float32":
            for place, name in each.nodes.items():
                longer = "" if name == nodes[place][0].name else f" {name}"
                text = f"its name{longer} matches keep_float32 {each.pattern!r}"
                kept.setdefault(place, Reason("keep_float32", text))
    return kept


def caller_names(
    calls: Mapping[str, Sequence[tuple[str, Sequence[str]]]], main: str
) -> dict[str, tuple[str, ...]]:
    """Returns for each function the names of the nodes that run it, callers of these in front.

    Args:
        calls: For each function the nodes in it that run others: name, and functions they run.
        main: The function that nothing runs: the graph itself.

    Returns:
        The first 1,000 names of each function, in the order of the graph. Calls of a function by
        itself count once.

    Example:
        >>> caller_names({"": [("gate/cond", ["then", "else"])], "then": [("while", ["body"])]}, "")
        {'then': ('gate/cond',), 'else': ('gate/cond',), 'body': ('gate/cond/while',)}
    """
    found: dict[str, dict[str, None]] = {}

    def called_by(call: _Call) -> Iterator[_Call]:
        function, caller, around = call
        for node, called in calls.get(function, ()):
            name = full_name(caller, node)
            for each in called:
                names = found.setdefault(each, {})
                if each not in around and name not in names and len(names) < MOST_CALLERS:
                    names[name] = None
                    yield each, name, around | {each}

    reach([(main, "", frozenset([main]))], called_by)
    return {function: tuple(names) for function, names in found.items()}


def full_name(caller: str, node: str) -> str:
    """Returns the name of a node of a function behind that of the node that runs the function.

    TensorFlow begins the names in a branch with that of the conditional, which was another one
    before the function that it is in was inlined.

    Example:
        >>> full_name("gate/PartitionedCall/cond", "cond/MatMul"), full_name("call", "MatMul")
        ('gate/PartitionedCall/cond/MatMul', 'call/MatMul')
    """
    around, own = caller.split("/"), node.split("/")
    for length in range(min(len(around), len(own) - 1), 0, -1):
        if around[-length:] == own[:length]:
            return "/".join([*around, *own[length:]])
    return f"{caller}/{node}" if caller else node


def nearest_names(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names most like a regular expression that is found in none of them.

    Args:
        pattern: The expression; compared is what it holds of letters, digits, "_" and "/".
        names: Names of nodes; as many of their parts between "/" are compared as it has.
        count: How many to return.

    Example:
        >>> nearest_names("^dense_l/", ["x", "dense/MatMul", "dense_1/MatMul"], 1)
        ['dense_1/MatMul']
    """
    text = re.sub(r"\\.|[^\w/]", "", pattern).strip("/").lower()
    matcher = difflib.SequenceMatcher(b=text, autojunk=False)

    @functools.cache
    def likeness(part: str) -> float:
        matcher.set_seq1(part.lower())
        return matcher.ratio()

    def best(name: str) -> float:
        parts, length = name.split("/"), text.count("/") + 1
        starts = range(max(len(parts) - length, 0) + 1)
        return max(likeness("/".join(parts[start : start + length])) for start in starts)

    return heapq.nlargest(count, dict.fromkeys(names), key=lambda name: (best(name), -len(name)))
