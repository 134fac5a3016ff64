"""A trace, converted to low precision, as part of the function that is being traced now.

trace -> flat graph -> measured ranges -> converted graph -> nodes of the current graph

The nodes become nodes of the current graph, so TensorFlow differentiates them like any others. What
names alone do not carry over is put right here: functions get names of their own, and gradients
that refer to tensors of the first trace refer to their counterparts.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfamp.core.errors import NothingToLowerWarning
from tfamp.core.profile import MachineProfile
from tfamp.graph.calibration import Calibration, measure
from tfamp.graph.functions import (
    INLINED_INTO,
    called_functions,
    inline_calls,
    new_suffix,
    reached_functions,
    rename_functions,
    unshare_branches,
)
from tfamp.graph.op_lists import OpLists
from tfamp.graph.rewrite import PLACEMENTS, check_lists, convert, make_request
from tfamp.interop import tf_functions
from tfamp.machine.profile_choice import check_profile, resolve_profile
from tfamp.planning.choices import NodeChoices, check_choice, patterns
from tfamp.planning.ranges import Ranges
from tfamp.planning.structures import LOOPS, RewritePlan
from tfamp.rewriting.custom_gradients import adopt_gradients, gradient_dtypes
from tfamp.rewriting.weight_cache import WeightCache, cacheable_variables, cached_casts

_ON_ERROR = ("raise", "keep")
_SCOPES = itertools.count(1)


@dataclass(frozen=True)
class FlatGraph:
    """The graph of a trace with its calls inlined; its owner may change it.

    Attributes:
        traced: The `tf.types.experimental.ConcreteFunction`.
        graph_def: The graph.
        inputs: Names of its inputs, captured ones included.
        outputs: Names of its outputs.
    """

    traced: Any
    graph_def: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, traced: Any, keep: Iterable[str] = ()) -> FlatGraph:
        """Returns the graph of a trace; TensorFlow hands out a new message each time.

        Args:
            traced: The trace.
            keep: Names of more nodes that are needed.
        """
        inputs = tuple(tensor.name for tensor in traced.inputs)
        outputs = tuple(tensor.name for tensor in traced.outputs)
        graph_def = traced.graph.as_graph_def(add_shapes=True)
        inline_calls(graph_def, (*outputs, *inputs, *keep))
        return cls(traced, unshare_branches(graph_def), inputs, outputs)

    def ranges(self, batches: Iterable[Sequence[Any]]) -> Ranges:
        """Runs it on data, each a value for every input that is not captured."""
        captured = self.traced.captured_inputs
        return measure(self.graph_def, self.inputs, batches, captured, self.outputs)


@dataclass(frozen=True)
class RewriteSettings:
    """How to rewrite a graph; see `rewrite`.

    A pattern that matches no node is an error, one that changes none a warning, unless
    `patterns_may_miss`.
    """

    dtype: str | None
    op_lists: OpLists | None
    keep_float32: tuple[str, ...]
    force_low: tuple[str, ...]
    calibration: Calibration | None
    placement: str
    profile: MachineProfile | str | None
    on_error: str
    cache_weights: bool = False
    patterns_may_miss: bool = False

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, _ON_ERROR)
        check_choice("placement", self.placement, PLACEMENTS)
        check_lists(self.op_lists)
        check_profile(self.profile)
        patterns("keep_float32", self.keep_float32)
        patterns("force_low", self.force_low)

    def for_gradients(self) -> RewriteSettings:
        """Returns the settings for custom gradients, where no pattern need match a node."""
        return dataclasses.replace(self, patterns_may_miss=True, calibration=None)

    def convert(
        self, graph: FlatGraph, ranges: Ranges | None = None, cached: Iterable[str] = ()
    ) -> RewritePlan | None:
        """Converts a graph in place; None where it stays float32, as these settings say.

        Args:
            graph: The graph.
            ranges: What was measured on the calibration data.
            cached: Names of handles of variables of which low-precision copies are kept.
        """
        if self.dtype is None:
            return None
        own = (*self.keep_float32, *self.force_low)
        limits = None
        if self.calibration is not None and ranges is not None:
            limits = self.calibration.limits(self.dtype)
        request = make_request(
            NodeChoices(
                graph.outputs,
                graph.inputs,
                self.keep_float32,
                self.force_low,
                own if self.patterns_may_miss else (),
            ),
            dtype=self.dtype,
            op_lists=self.op_lists,
            placement=self.placement,
            profile=resolve_profile(self.profile, self.placement),
            ranges=ranges,
            limits=limits,
            cached=tuple(cached),
        )
        return convert(graph.graph_def, request).plan


AS_IT_IS = RewriteSettings(
    dtype=None,
    op_lists=None,
    keep_float32=(),
    force_low=(),
    calibration=None,
    placement="lists",
    profile=None,
    on_error="raise",
)


def into_current_graph(
    graph: FlatGraph,
    values: Sequence[Any],
    settings: RewriteSettings = AS_IT_IS,
    ranges: Ranges | None = None,
    cache: WeightCache | None = None,
) -> tuple[list[Any], RewritePlan | None]:
    """Converts a graph and adds it to the function that is being traced.

    Args:
        graph: The graph; it is changed.
        values: A tensor for each of its inputs; dtypes as there.
        settings: How to convert it.
        ranges: What was measured on the calibration data.
        cache: Holds low-precision copies of weights to take instead of casting them.

    Returns:
        The tensors of the current graph that stand for the outputs, and the plan.
    """
    dtypes = gradient_dtypes(graph.graph_def)
    variables = {} if cache is None else cacheable_variables(graph.traced, graph.graph_def)
    plan = settings.convert(graph, ranges, variables)
    low: Mapping[str, Any] = {}
    if cache is not None and plan is not None:
        low = cached_casts(graph.graph_def, variables, cache, plan.dtype)
    return _add(graph, values, low, dtypes, settings.for_gradients()), plan


def _add(
    graph: FlatGraph,
    values: Sequence[Any],
    low: Mapping[str, Any],
    dtypes: Mapping[tuple[str, str], Sequence[int]],
    settings: RewriteSettings,
) -> list[Any]:
    """Adds a converted graph to the function that is being traced.

    Args:
        graph: The graph.
        values: A tensor for each of its inputs.
        low: Tensors to take in the place of some of the graph's, by name.
        dtypes: Dtypes of the outputs of nodes with custom gradients, before they were converted.
        settings: How to convert custom gradients, when they are needed.
    """
    traced, outputs = graph.traced, graph.outputs
    suffix = new_suffix()
    graph_def = rename_functions(graph.graph_def, suffix)
    current = tf.compat.v1.get_default_graph()
    captured = [tf_functions.capture_into_graph(value) for value in values]
    by_name = dict(zip(graph.inputs, captured, strict=True))
    scope = _free_scope(graph_def, current, graph.inputs)

    def differentiate(gradient: Any, tensors: Sequence[Any]) -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NothingToLowerWarning)  # There is often nothing.
            return into_current_graph(FlatGraph.of(gradient), tensors, settings)[0]

    named = {(each and f"{each}{suffix}", node): kinds for (each, node), kinds in dtypes.items()}
    host = _Host(current, scope, by_name)
    adopt_gradients(graph_def, named, traced.graph, host, differentiate)
    results = _import_graph_def(graph_def, {**by_name, **low}, outputs, scope)
    tf_functions.note_variables(traced.graph.variables)
    return results


class _Host:
    """The graph a function was grafted onto; finds the counterparts of the function's tensors."""

    def __init__(self, graph: Any, scope: str, inputs: Mapping[str, Any]) -> None:
        self.graph = graph
        self.scope = scope
        self._inputs = inputs

    def counterpart(self, name: str) -> Any:
        """Returns the tensor that stands for one of the function's own; KeyError if none does."""
        if name in self._inputs:
            return self._inputs[name]
        return self.graph.get_tensor_by_name(self._full(name))

    def operation(self, name: str) -> Any:
        """Returns the operation that stands for one of the function's own."""
        return self.graph.get_operation_by_name(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self.scope}/{name}" if self.scope else name


def _import_graph_def(
    graph_def: Any, values: Mapping[str, Any], outputs: Sequence[str], scope: str
) -> list[Any]:
    fed = {name.partition(":")[0] for name in values}
    nodes = [node for node in graph_def.node if node.name not in fed]
    bare = tf.compat.v1.GraphDef(versions=graph_def.versions, library=graph_def.library)
    bare.node.extend(in_topological_order(nodes))
    for node in itertools.chain(bare.node, *(each.node_def for each in bare.library.function)):
        # Shapes are inferred again; what nodes are colocated with may have been an input.
        for attr in ("_output_shapes", "_class", INLINED_INTO):
            if attr in node.attr:
                del node.attr[attr]
    tf_functions.register_functions(bare.library.function, tf.compat.v1.get_default_graph())
    used = {_full_name(name) for node in bare.node for name in node.input}
    waited_for = {f"^{name}" for name in fed} & {n for node in bare.node for n in node.input}
    mapped = {name: value for name, value in values.items() if name in used}
    mapped |= {name: values[f"{name[1:]}:0"] for name in waited_for}
    made = [name for name in dict.fromkeys(outputs) if name not in values]
    loops = _single_loops(bare)
    imported = tf.graph_util.import_graph_def(
        bare, input_map=mapped, return_elements=[*made, *loops], name=scope
    )
    for loop in imported[len(made) :]:
        tf_functions.copy_handle_data(loop.inputs, loop.outputs)
    found = dict(zip(made, imported, strict=False))
    return [found[name] if name in found else tf.identity(values[name]) for name in outputs]


def _single_loops(graph_def: Any) -> list[str]:
    """Names of the loops with no loop inside.

    Only these learn what their handles know of variables, which a gradient of a gradient asks for.
    An imported loop in a loop has lost it for good, and TensorFlow would take the inner gradient to
    be zero; without the outer loop's it raises an error.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    names = []
    for node in graph_def.node:
        if node.op in LOOPS:
            reached = reached_functions(library, called_functions(node))
            inside = (each for name in reached for each in library[name].node_def)
            if not any(each.op in LOOPS for each in inside):
                names.append(node.name)
    return names


def in_topological_order(nodes: Sequence[Any]) -> list[Any]:
    """Returns nodes in an order in which each follows its inputs, as given as far as possible.

    TensorFlow adds control edges between ops with side effects in the order they are in, so an op
    must not come before one that it waits for.
    """
    by_name = {node.name: node for node in nodes}
    done: set[str] = set()
    started: set[str] = set()
    ordered = []
    for node in nodes:
        pending = [node.name]
        while pending:
            name = pending[-1]
            current = by_name.get(name)
            if current is None or name in done:
                pending.pop()
            elif name in started:  # Its inputs are done, or it is in a loop of TensorFlow 1.
                pending.pop()
                done.add(name)
                ordered.append(current)
            else:
                started.add(name)
                names = (each.lstrip("^").partition(":")[0] for each in reversed(current.input))
                pending += [each for each in names if each not in started]
    return ordered


def _free_scope(graph_def: Any, host: Any, inputs: Sequence[str]) -> str:
    """A name scope for the nodes: none, so that names stay, unless one of them is taken."""
    fed = {name.partition(":")[0] for name in inputs}
    taken = {op.name for op in host.get_operations()}
    if not any(node.name in taken and node.name not in fed for node in graph_def.node):
        return ""
    return f"rewritten_{next(_SCOPES)}"


def _full_name(name: str) -> str:
    return name if ":" in name or name.startswith("^") else f"{name}:0"
