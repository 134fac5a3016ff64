"""The caller's options of a rewrite, and the nodes that they select by name; framework-free.

Options are one value, checked in its constructor. Fetches, feeds and name patterns select
nodes. A node of a function also has a name for each caller of the function, so that the
branches of a conditional belong to the layer of the conditional.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

from tfamp.core import messages
from tfamp.core.dtypes import LOW_PRECISION, dtype_hint
from tfamp.core.names import ComputeDtype, Device, OnError, Placement
from tfamp.core.options import PLACEMENTS, checked_pattern, checked_word
from tfamp.core.profile import MachineProfile
from tfamp.planning import op_sets, structures
from tfamp.planning.coloring import Updates
from tfamp.planning.ranges import Limits, Ranges

Color = Literal["allow", "infer", "deny", "clear"]

COLORS: tuple[Color, ...] = ("allow", "infer", "deny", "clear")
DEVICES: tuple[Device, ...] = get_args(Device)
_ON_ERROR: tuple[OnError, ...] = get_args(OnError)
# Ops that accept float32 only, with successors that also accept low precision and keep
# statistics in float32.
SUCCESSORS = {
    "FusedBatchNorm": "FusedBatchNormV2",
    "FusedBatchNormGrad": "FusedBatchNormGradV2",
}


class OpColors:
    """The part of `tfamp.OpLists` that decisions need; changes of the lists need TensorFlow."""

    allow: frozenset[str]
    infer: frozenset[str]
    deny: frozenset[str]
    clear: frozenset[str]
    exact_statistics: bool


@dataclass(frozen=True)
class RewriteOptions:
    """How to rewrite graphs: the arguments of `tfamp.rewrite`, with the defaults it has.

    Open values (`op_lists`, `device`, `profile` and `onednn`) depend on the machine;
    `tfamp.graph.rewrite.resolved` fills them in.

    Attributes:
        dtype: The low dtype; "float32" converts nothing.
        op_lists: Which ops can be converted; tfamp's lists for the device if None.
        keep_float32: Name patterns of nodes that stay float32.
        force_low: Name patterns of nodes that are converted regardless of the lists.
        calibration: A `tfamp.graph.Calibration`, or None.
        placement: "min_cut", "lists" or "fused".
        device: Kind of device for nodes without a device.
        profile: Speed of the machine; "builtin" for fixed figures, None for this machine's.
        on_error: "raise" or "keep".
        may_miss: Patterns that may match no node.
        onednn: The low dtypes for which oneDNN's kernels run on the CPU.
        moved_ops: Ops that the caller's lists moved: what kernels lose does not
            keep them float32.

    Raises:
        TypeError, ValueError: A value is wrong; the message names what is allowed.

    Example:
        >>> RewriteOptions("bfloat16", keep_float32=["head/"]).keep_float32
        ('head/',)
    """

    dtype: ComputeDtype = structures.FLOAT32
    op_lists: OpColors | None = None
    keep_float32: Iterable[str] = ()
    force_low: Iterable[str] = ()
    calibration: Any = None
    placement: Placement = "min_cut"
    device: Device = "auto"
    profile: MachineProfile | str | None = None
    on_error: OnError = "raise"
    may_miss: tuple[str, ...] = ()
    onednn: frozenset[str] = frozenset()
    moved_ops: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.dtype != structures.FLOAT32:
            hint = dtype_hint(self.dtype, LOW_PRECISION)
            self._check("dtype", LOW_PRECISION, hint)
        self._check("on_error", _ON_ERROR)
        self._check("device", DEVICES)
        self._check("placement", PLACEMENTS, " To measure which is the fastest, use tfamp.tune.")
        _check_types(self.op_lists, self.profile)
        for name in ("keep_float32", "force_low"):
            # The dataclass is frozen for its users only.
            object.__setattr__(self, name, strings(name, getattr(self, name)))
        self.patterns  # noqa: B018 -- It raises for an invalid regular expression.

    def _check(self, name: str, words: Iterable[str], hint: str = "") -> None:
        checked_word(name, getattr(self, name), words, hint, exact=True)

    @functools.cached_property
    def patterns(self) -> Mapping[str, tuple[re.Pattern[str], ...]]:
        """The regular expressions in `keep_float32` and `force_low`, compiled."""
        texts = {"keep_float32": self.keep_float32, "force_low": self.force_low}
        return {
            name: tuple(checked_pattern(messages.argument(name), x) for x in patterns)
            for name, patterns in texts.items()
        }

    @functools.cached_property
    def colors(self) -> Mapping[str, Color]:
        """Colour of op types that are on a list or have a successor there; needs `op_lists`."""
        colors = {op: color for color in COLORS for op in getattr(self.op_lists, color)}
        successors = {op: colors[new] for op, new in SUCCESSORS.items() if new in colors}
        return successors | colors

    @functools.cached_property
    def updates(self) -> Updates:
        """How far arithmetic on gradients of variables can be converted; needs `op_lists`.

        Only Grappler's unchanged lists give Grappler's result. Otherwise optimizers compute in
        float32: with bfloat16, which has float32's range, from the last reduction on; with
        float16 from the start, as squares of gradients and unscaled gradients underflow.
        """
        if not self.exact_statistics and self._has_grapplers_lists():
            return "low"
        return "reduced" if self.dtype == "bfloat16" else "float32"

    def _has_grapplers_lists(self) -> bool:
        theirs = (getattr(op_sets, f"{self.dtype}_{color}".upper()) for color in COLORS)
        lists = (getattr(self.op_lists, color) for color in COLORS)
        return all(ops == known for ops, known in zip(lists, theirs, strict=True))

    @property
    def exact_statistics(self) -> bool:
        """Whether normalizations stay float32 unless they are forced low; needs `op_lists`."""
        return cast(OpColors, self.op_lists).exact_statistics

    @property
    def machine(self) -> MachineProfile:
        """The profile, after `resolved`."""
        return cast(MachineProfile, self.profile)

    def keeping(self, more: Iterable[str]) -> RewriteOptions:
        """Returns the options with more `keep_float32` patterns, which may match no node."""
        more = tuple(more)
        return dataclasses.replace(
            self, keep_float32=(*self.keep_float32, *more), may_miss=(*self.may_miss, *more)
        )

    def for_gradients(self) -> RewriteOptions:
        """Returns the options for custom gradients, where patterns may match no node."""
        every = (*self.keep_float32, *self.force_low)
        return dataclasses.replace(self, may_miss=every, calibration=None)


@dataclass(frozen=True)
class GraphUse:
    """The inputs and outputs of one graph, and measurements on it.

    Attributes:
        fetches: Names of tensors or operations whose results are used.
        feeds: Names of tensors that are fed.
        ranges: Measured ranges of its tensors, or None.
        limits: Bounds of measured values; nodes beyond them stay float32 unless forced low.

    Raises:
        TypeError: `fetches` or `feeds` is a string, or holds something else.
    """

    fetches: Iterable[str]
    feeds: Iterable[str] = ()
    ranges: Ranges | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        for name in ("fetches", "feeds"):
            # The dataclass is frozen for its users only.
            object.__setattr__(self, name, strings(name, getattr(self, name)))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all fetches and feeds."""
        return (*self.fetches, *self.feeds)


def strings(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns an argument that holds names; a single string is an error."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        kind = "the string " if isinstance(names, str) else ""
        raise TypeError(f"{argument} must be a collection of strings; got {kind}{names!r}.")
    result = tuple(names)
    for name in result:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must hold strings; got {name!r}.")
    return result


def _check_types(op_lists: Any, profile: Any) -> None:
    if not isinstance(op_lists, OpColors | None):
        raise TypeError(
            f"op_lists must be a tfamp.OpLists or None; got {type(op_lists).__name__}. Start from "
            "OpLists.default(dtype).with_changes(...)."
        )
    if not isinstance(profile, MachineProfile | None) and profile != "builtin":
        raise (ValueError if isinstance(profile, str) else TypeError)(
            f'profile must be a tfamp.graph.MachineProfile, None, or "builtin" for fixed figures; '
            f"got {profile!r}. A file's is MachineProfile.from_json(text)."
        )


# ---- Nodes selected by name ------------------------------------------------------------

# Most names that a function has by its callers. With functions that call each other twice their
# number doubles at every level; 1,000 is a choice, more than the layers of deep models.
MOST_CALLERS = 1000


class Pattern(NamedTuple):
    """A pattern of `keep_float32` or `force_low` that has to change something.

    Attributes:
        argument: The argument that holds it.
        text: The regular expression.
        nodes: Positions of the nodes that it matches.
    """

    argument: str
    text: str
    nodes: Sequence[int]


class ChosenNodes(NamedTuple):
    """The nodes that the options and the use select.

    Positions are consecutive through the graph and then its functions.

    Attributes:
        used: The fetched and the fed nodes, which stay float32, with the reason.
        kept: All nodes that stay float32, these included, with the reason.
        forced: Nodes that are converted whatever their op, unless they are also kept.
        patterns: The patterns that have to change something.
        names: For each node its name, alone and after its callers' names, if there are
            patterns.
    """

    used: Mapping[int, structures.Reason]
    kept: Mapping[int, structures.Reason]
    forced: frozenset[int]
    patterns: Sequence[Pattern]
    names: Sequence[Sequence[str]]


def choose_nodes(
    indexes: Sequence[structures.GraphIndex], options: RewriteOptions, use: GraphUse
) -> ChosenNodes:
    """Returns the nodes of a graph and its functions that the options and the use select.

    A pattern is searched for in the name of a node; for a node of a branch, a body or any other
    function also in that name after the names of its callers, as in "gate/cond/MatMul".

    Raises:
        ValueError: The graph has no node of a name, or that matches a pattern.
    """
    used = _used_nodes(indexes[0], use)
    kept, forced, needed = dict(used), set[int](), list[Pattern]()
    names = _node_names(indexes) if options.keep_float32 or options.force_low else []
    for argument, patterns in options.patterns.items():
        for pattern in patterns:
            matches = [
                node
                for node, names_of_node in enumerate(names)
                if any(map(pattern.search, names_of_node))
            ]
            if pattern.pattern not in options.may_miss:
                needed.append(Pattern(argument, pattern.pattern, matches))
                if not matches:
                    raise _no_match(argument, pattern.pattern, names)
            if argument == "force_low":
                forced.update(matches)
            for node in matches if argument == "keep_float32" else ():
                text = f"its name matches keep_float32 {pattern.pattern!r}"
                kept.setdefault(node, structures.Reason("keep_float32", text))
    # Casts follow their neighbours.
    nodes = [node for index in indexes for node in index.nodes]
    forced = {node for node in forced if nodes[node].op != "Cast"}
    return ChosenNodes(used, kept, frozenset(forced), needed, names)


def _used_nodes(index: structures.GraphIndex, use: GraphUse) -> dict[int, structures.Reason]:
    """The fetched or fed nodes, with the reason."""
    positions = {node.name: position for position, node in enumerate(index.nodes)}
    fetched = structures.Reason("fetches", "its result is fetched")
    fed = structures.Reason("feeds", "its value is fed")
    used = {}
    for reason, name in (*((fetched, n) for n in use.fetches), *((fed, n) for n in use.feeds)):
        node, (_, colon, port) = structures.node_name(name), name.partition(":")
        if node not in positions:
            near = difflib.get_close_matches(node, sorted(positions))
            hint = f" The nearest names are {near}." if near else ""
            raise ValueError(f"{reason.rule}: the graph has no node {name!r}.{hint}")
        if colon and not port.isdecimal():
            raise ValueError(
                f"{reason.rule}: {name!r} is not the name of a tensor; give '{node}:0'."
            )
        used[positions[node]] = reason
    return used


def _node_names(indexes: Sequence[structures.GraphIndex]) -> list[list[str]]:
    """The names of the nodes, alone and after their callers' names; none for arguments."""
    # A NoOp holds functions without running them.
    calls = {
        index.scope: [
            (n.name, called) for n in index.nodes if n.op != "NoOp" for _, called in n.calls
        ]
        for index in indexes
    }
    callers = caller_names(calls)
    return [
        [node.name, *(full_name(caller, node.name) for caller in callers.get(index.scope, ()))]
        if node.op not in (structures.ARGUMENT, structures.RESULT)
        else []
        for index in indexes
        for node in index.nodes
    ]


def _no_match(argument: str, pattern: str, names: Iterable[Sequence[str]]) -> ValueError:
    near = nearest_names(pattern, names) or "'dense/MatMul'"
    return ValueError(
        f"{messages.argument(argument)}: no node's name matches {pattern!r}. The "
        f"pattern is searched for in names such as {near}."
    )


def nearest_names(pattern: str, names: Iterable[Sequence[str]]) -> str:
    """Returns the names most like a pattern as text, after callers' names; "" for none."""
    known = dict.fromkeys(names_of_node[:2][-1] for names_of_node in names if names_of_node)
    return ", ".join(map(repr, difflib.get_close_matches(pattern, known, cutoff=0.0)))


# A function, the name of its caller, and the functions around it.
_Call: TypeAlias = tuple[str, str, frozenset[str]]


def caller_names(calls: Mapping[str, Iterable[tuple[str, str]]]) -> dict[str, Sequence[str]]:
    """Returns for functions the names of the nodes that run them, after their callers' names.

    Args:
        calls: The calls of each function, and of "", the graph itself: pairs of a node's name
            and a function that it runs.

    Returns:
        The first 1,000 names of a function, in graph order. Recursive calls count once.

    Example:
        >>> caller_names({"": [("gate/cond", "then")], "then": [("while", "body")]})
        {'then': ['gate/cond'], 'body': ['gate/cond/while']}
    """
    names_of: dict[str, dict[str, None]] = {}

    def called_by(call: _Call) -> Iterator[_Call]:
        function, caller, around = call
        for node, called in calls.get(function, ()):
            name, names = full_name(caller, node), names_of.setdefault(called, {})
            is_new = called not in around and name not in names
            if is_new and len(names) < MOST_CALLERS:
                names[name] = None
                yield called, name, around | {called}

    graph = structures.MAIN_GRAPH
    structures.reach([(graph, "", frozenset([graph]))], called_by)
    return {function: list(names) for function, names in names_of.items()}


def full_name(caller: str, node: str) -> str:
    """Returns the name of a node of a function after its caller's name.

    In a branch TensorFlow starts names with the name of the conditional, which was different
    before the function around it was inlined.

    Example:
        >>> full_name("gate/PartitionedCall/cond", "cond/MatMul"), full_name("call", "MatMul")
        ('gate/PartitionedCall/cond/MatMul', 'call/MatMul')
    """
    around, within = caller.split("/"), node.split("/")
    for length in range(min(len(around), len(within) - 1), 0, -1):
        if around[-length:] == within[:length]:
            return "/".join([*around, *within[length:]])
    return f"{caller}/{node}" if caller else node
