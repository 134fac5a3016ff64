"""What a caller of the rewrite asks for, checked and resolved to node names and colours."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfamp.core.dtypes import LOW_PRECISION
from tfamp.core.profile import MachineProfile, builtin_profile
from tfamp.graph.op_lists import COLORS, DEVICES, OpLists
from tfamp.graph.op_signatures import SUCCESSORS
from tfamp.machine import hardware
from tfamp.planning.coloring import Updates
from tfamp.planning.name_search import is_found
from tfamp.planning.ranges import Limits, Ranges
from tfamp.planning.structures import ARGUMENT, MAIN_GRAPH, RESULT, GraphIndex, IndexedNode, Reason
from tfamp.planning.tensor_names import node_name

PLACEMENTS = ("min_cut", "lists")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises a ValueError that names the allowed values unless `value` is one."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def check(
    graph_def: Any,
    *,
    dtype: str,
    placement: str,
    device: str,
    op_lists: OpLists | None,
    profile: MachineProfile | None,
) -> None:
    """Checks the arguments that need no look at the graph.

    Raises:
        TypeError: The graph is no GraphDef, the lists no OpLists, or the profile no MachineProfile.
        ValueError: A dtype, a placement or a device is not known; the message names those that are.
    """
    if not isinstance(graph_def, tf.compat.v1.GraphDef):
        raise TypeError(
            f"graph_def must be a tf.compat.v1.GraphDef; got {type(graph_def).__name__}. "
            "That of a concrete function is `function.graph.as_graph_def()`."
        )
    check_lists(op_lists)
    if profile is not None and not isinstance(profile, MachineProfile):
        raise TypeError(
            f"profile must be a tfamp.graph.MachineProfile or None; got {type(profile).__name__}."
        )
    check_choice("dtype", dtype, LOW_PRECISION)
    check_choice("placement", placement, PLACEMENTS)
    check_choice("device", device, DEVICES)


def check_lists(op_lists: Any) -> None:
    """Raises a TypeError unless the lists are an OpLists or None."""
    if op_lists is not None and not isinstance(op_lists, OpLists):
        raise TypeError(
            f"op_lists must be a tfamp.OpLists or None; got {type(op_lists).__name__}. Start from "
            "OpLists.default(dtype).with_changes(...)."
        )


def device_kind(device: str) -> str:
    """Returns the kind of device of nodes that are pinned to none; "auto" is this machine's."""
    if device != "auto":
        return device
    return "gpu" if tf.config.list_physical_devices("GPU") else "cpu"


def profile_of(kind: str) -> MachineProfile:
    """Returns the built-in profile of a kind of device, as far as this machine has one.

    Args:
        kind: "cpu", "gpu" or "tpu".
    """
    found = hardware.detect()
    if kind == "cpu":
        return builtin_profile(kind, bfloat16=found.cpu_bfloat16, float16=found.cpu_float16)
    if kind == "gpu" and found.gpus:
        weakest = min(gpu.capability or (0, 0) for gpu in found.gpus)
        return builtin_profile(
            kind,
            bfloat16=weakest >= hardware.BFLOAT16_CAPABILITY,
            float16=weakest >= hardware.FLOAT16_CAPABILITY,
        )
    return builtin_profile(kind)


def colors_of(lists: OpLists) -> dict[str, str]:
    """Returns the colour of every op type that is on a list, or whose successor is."""
    colors: dict[str, str] = {op: color for color in COLORS for op in getattr(lists, color)}
    successors = {op: colors[new] for op, new in SUCCESSORS.items() if new in colors}
    return successors | colors


def updates_of(lists: OpLists, dtype: str) -> Updates:
    """Returns how far arithmetic on gradients, on its way to variables, may be low.

    Only Grappler's own lists, unchanged, give Grappler's result. Elsewhere optimizers compute in
    float32: with bfloat16 from the last reduction on, as it has float32's range; with float16 from
    the start, as squares of gradients, and gradients whose loss scale is taken off, vanish.
    """
    if lists == OpLists.grappler(dtype):
        return "low"
    return "reduced" if dtype == "bfloat16" else "float32"


def measured(ranges: Ranges | None, limits: Limits | None, dtype: str) -> tuple[Ranges, Limits]:
    """Returns what was measured and the limits for it; without ranges nothing exceeds a limit."""
    for name, value, kind in (("ranges", ranges, Ranges), ("limits", limits, Limits)):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{name} must be a {kind.__name__} of tfamp.planning.ranges or None; got "
                f"{type(value).__name__}."
            )
    if limits is not None and ranges is None:
        raise ValueError("limits need ranges: measure them with tfamp.graph.calibration.measure.")
    return ranges or Ranges(), limits or Limits.default(dtype)


def tensor_names(argument: str, names: Iterable[str]) -> tuple[str, ...]:
    """Returns an argument that holds names, which must not be a single string."""
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a collection of strings; got the string {names!r}.")
    result = tuple(names)
    for name in result:
        if not isinstance(name, str):
            raise TypeError(f"{argument} must hold strings; got {name!r}.")
    return result


def patterns(argument: str, expressions: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Returns an argument that holds regular expressions, compiled."""
    compiled = []
    for pattern in tensor_names(argument, expressions):
        try:
            compiled.append(re.compile(pattern))
        except re.error as error:
            raise ValueError(
                f"{argument} must hold regular expressions; got {pattern!r}: {error}."
            ) from error
    return tuple(compiled)


def matching_patterns(graph_def: Any, patterns: Iterable[str]) -> tuple[str, ...]:
    """Returns those patterns that are found in the name of a node of the graph or its functions."""
    names = [node.name for node in graph_def.node]
    names += [node.name for each in graph_def.library.function for node in each.node_def]
    return tuple(
        each for each in patterns if any(is_found(re.compile(each), name) for name in names)
    )


class NodeChoices:
    """Which nodes must stay as they are and which are to be lowered.

    Args:
        fetches: Names of tensors or operations whose results are used.
        feeds: Names of tensors that are given a value.
        keep_float32: Patterns of names of nodes that stay float32.
        force_low: Patterns of names of nodes that are lowered whatever the lists say.

    Raises:
        TypeError: An argument is a string or holds something else.
        ValueError: A pattern is no regular expression.
    """

    def __init__(
        self,
        fetches: Iterable[str],
        feeds: Iterable[str],
        keep_float32: Iterable[str],
        force_low: Iterable[str],
    ) -> None:
        self._used = {
            "fetches": tensor_names("fetches", fetches),
            "feeds": tensor_names("feeds", feeds),
        }
        self._keep = patterns("keep_float32", keep_float32)
        self._force = patterns("force_low", force_low)

    @property
    def used_names(self) -> tuple[str, ...]:
        """The names of all fetches and feeds."""
        return tuple(name for names in self._used.values() for name in names)

    def check(self, indexes: Sequence[GraphIndex]) -> None:
        """Raises a ValueError for a name or a pattern that no node of the graph has."""
        nodes = {node.name for node in indexes[0].nodes}
        for argument, names in self._used.items():
            for name in names:
                if node_name(name) not in nodes:
                    near = difflib.get_close_matches(node_name(name), sorted(nodes))
                    hint = f" The nearest names are {near}." if near else ""
                    raise ValueError(f"{argument}: the graph has no node {name!r}.{hint}")
                _, colon, port = name.partition(":")
                if colon and not port.isdecimal():
                    raise ValueError(
                        f"{argument}: {name!r} is no name of a tensor; those of the node are "
                        f"'{node_name(name)}:0', '{node_name(name)}:1' and so on."
                    )
        everywhere = [node for index in indexes for node in _real_nodes(index)]
        for argument, patterns in (("keep_float32", self._keep), ("force_low", self._force)):
            for pattern in patterns:
                if not any(is_found(pattern, node.name) for node in everywhere):
                    raise ValueError(
                        f"{argument}: no node's name matches {pattern.pattern!r}. The pattern is "
                        "searched for in names such as "
                        f"{everywhere[0].name if everywhere else 'dense/MatMul'!r}."
                    )

    def unchanging(self, index: GraphIndex) -> dict[str, Reason]:
        """Returns the nodes of a scope that stay as they are, with the reason."""
        chosen: dict[str, Reason] = {}
        if self._keep:
            for node in _real_nodes(index):
                if pattern := _match(self._keep, node):
                    text = f"its name matches keep_float32 {pattern!r}"
                    chosen[node.name] = Reason("keep_float32", text)
        if index.scope == MAIN_GRAPH:
            words = {"fetches": "its result is fetched", "feeds": "its value is fed"}
            for argument, names in self._used.items():
                reason = Reason(argument, words[argument])
                chosen.update((node_name(name), reason) for name in names)
        return chosen

    def forced(self, index: GraphIndex) -> frozenset[int]:
        """Returns the positions of the nodes of a scope that are lowered whatever their op.

        A name that both arguments match stays float32. Casts follow their neighbours.
        """
        if not self._force:
            return frozenset()
        return frozenset(
            position
            for position, node in enumerate(index.nodes)
            if node.op not in (ARGUMENT, RESULT, "Cast") and _match(self._force, node)
        )


def _match(patterns: Sequence[re.Pattern[str]], node: IndexedNode) -> str | None:
    return next((each.pattern for each in patterns if is_found(each, node.name)), None)


def _real_nodes(index: GraphIndex) -> list[IndexedNode]:
    return [node for node in index.nodes if node.op not in (ARGUMENT, RESULT)]
