"""`find_nonfinite`: which op made the first NaN or infinity of a step, why, and what to change.

The step is traced. Data, loss scale and variables are checked first, then it runs in its low
dtype and in float32, and all float tensors are observed. A tensor is *bad* if it has an
infinity or a NaN. The report names the first op on the way to a bad result that made a bad
tensor from finite inputs. An infinite constant alone is not a fault: masks are made of these,
and softmax returns finite values for them. It is the cause if it leads to a NaN or to a bad
result.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.core.kinds import Layer, Nest
from tfamp.core.names import ComputeDtypeLike
from tfamp.diagnostics.model_runs import check_batch, check_compute_dtype, layer_path, unchanged
from tfamp.diagnostics.nonfinite_report import Finding, NonFiniteReport, ValueRange, report_of
from tfamp.diagnostics.nonfinite_step import (
    LOSS_SCOPE,
    Path,
    Place,
    Step,
    bare_name,
    check_arguments,
    trace_step,
)
from tfamp.graph.graph import Graph
from tfamp.graph.observe import Observer, low_dtypes, observed_scopes, retyped, used_part
from tfamp.planning import kernels
from tfamp.planning.ranges import TensorKey
from tfamp.planning.structures import ARGUMENT, MAIN_GRAPH, GraphIndex, IndexedNode, op_types, reach

# Where dynamic scales start, and a scale that many models have been trained with.
_USUAL_START, _USUAL_SCALE = 2.0**16, 2.0**7
_CONSTANTS = op_types("Const HostConst")
_READS = op_types("ReadVariableOp ResourceGather")
_INPUTS = op_types("Placeholder PlaceholderV2")
# Ops whose result is infinite only if their finite inputs are large.
_GROWING = op_types("""
    AddV2 BatchMatMulV2 Conv2D Cumsum Einsum MatMul Mean Mul Prod Square SquaredDifference Sub
    Sum
""")
_PASSING_ON = op_types("""
    Cast EnsureShape ExpandDims Identity IdentityN Reshape Squeeze StopGradient Transpose
""")
# Ops between attention's product and its softmax: scales, masks, caps.
_TO_SOFTMAX = op_types("""
    AddV2 Cast Div Identity Maximum Minimum Mul RealDiv Reshape Select SelectV2 Sub Tanh Transpose
""")
_BACKWARD = re.compile(r"(^|/)(gradient_tape|gradients)/")
_LOSS = re.compile(r"loss|cross_?entropy", re.IGNORECASE)


def find_nonfinite(
    model_or_fn: Any,
    x: Any = (),
    y: Any = None,
    *,
    loss: Any = None,
    dtype: ComputeDtypeLike | None = None,
) -> NonFiniteReport | None:
    """Finds the first infinity or NaN of a training step, its cause and how to fix it.

    Use it when a loss is NaN, or when a loss scale keeps falling. The step is traced and run
    twice, in mixed precision and in float32, with the same weights, data and random numbers,
    and every float tensor is observed: forward pass, loss, gradients, the bodies of loops. This
    takes seconds, so give it one batch.

    Weights, optimizer, seeds, moving statistics and policies are restored, also after an
    exception. Side effects of a Python function on Python objects during tracing are not
    undone, an iterator that it reads advances, and other threads must not call the model
    meanwhile.

    Infinite constants, as in masks, are accepted if all results are finite. So is a dynamic
    loss scale of up to 2**16 that is too large, if 2**7 is not: it backs off by itself.

    Args:
        model_or_fn: A Keras model under any policy; or a function, a `tf.function`, or what
            `tfamp.rewrite` returned: a forward pass, or a whole training step with its tape,
            autocast and optimizer inside. Called as `fn(x)`, or `fn(x, y)`.
        x: One batch: arrays or tensors in the structure that the model or function takes. A
            tuple becomes the arguments of a function that takes as many; leave it out for none.
        y: Targets of the batch, if any.
        loss: The name of a Keras loss, a loss object, or a function of targets and outputs.
            None is the loss that the model is compiled with, or its class's own `train_step`.
            With a loss, a function is a forward pass `fn(x)`, and gradients are taken with
            respect to the variables it uses.
        dtype: "float16", "bfloat16" or "float32" to run the step in that dtype: a model as
            under that mixed policy, a function as rewritten by `tfamp.rewrite`. None keeps its
            own.

    Returns:
        The report; None if everything is finite. The loss is scaled if the model is compiled
        with an optimizer that scales it, or if the function scales it.

    Raises:
        TypeError: `model_or_fn` cannot be called or needs an `x`, which is missing; `x` is a
            data set; or `loss` is not a loss.
        ValueError: The dtype is unknown; there are targets, but no loss; or a model's batch is
            empty.

    Example:
        >>> import keras, numpy, tfamp
        >>> from tfamp.diagnostics import find_nonfinite
        >>> with tfamp.policy_scope("mixed_float16"):
        ...     model = keras.Sequential([
        ...         keras.Input((3,)),
        ...         keras.layers.Activation("exponential", name="growing"),
        ...         keras.layers.Dense(1),
        ...     ])
        >>> x, y = numpy.ones((2, 3)), numpy.ones((2, 1))
        >>> find_nonfinite(model, x, y, loss="mse") is None
        True
        >>> report = find_nonfinite(model, 12 * x, y, loss="mse")
        >>> report.stage, report.layer, report.op, report.kind
        ('forward', 'growing', 'Exp', 'overflow')
    """
    given: Any = dtype
    name: str | None = getattr(given, "name", given)  # A dtype of TensorFlow equals its name.
    _check(model_or_fn, x, name)
    check_arguments(model_or_fn, x, None if loss is not None else y)
    step = trace_step(model_or_fn, x, y, loss, name)
    finding = _bad_before(step, x, y) or _search(step, name)
    return None if finding is None else report_of(finding)


def _check(model_or_fn: Any, x: Nest, dtype: Any) -> None:
    if not callable(model_or_fn):
        raise TypeError(
            "model_or_fn must be a Keras model, a function or what tfamp.rewrite returned; got "
            f"{type(model_or_fn).__name__}."
        )
    check_compute_dtype(dtype)
    check_batch(x)


def _bad_before(step: Step, x: Nest, y: Nest) -> Finding | None:
    """Returns a finding if data, loss scale or variables are not finite before the step."""
    for stage, op, name, value in _values_before(step, x, y):
        # Ragged tensors and variants cannot become arrays; these have no float dtype.
        if not getattr(getattr(value, "dtype", None), "is_floating", True):
            continue
        array = np.asarray(value)
        if array.dtype.name not in FLOAT_DTYPES:
            continue
        values = ValueRange.of(name, array)
        if not values.finite or (stage == "loss_scale" and values.max <= 0):
            index = np.argwhere(~np.isfinite(array.astype(np.float64))).tolist()
            return Finding(
                stage=stage,
                op=op,
                layer=(name.rpartition("/")[0] or None) if stage == "weights" else None,
                variable=None if stage == "input" else name,
                kind="also_in_float32",
                ranges={"inputs": (), "outputs": (values,)},
                dtype=values.dtype,
                at=f", the first at index {index[0]} of {name}" if array.ndim else "",
                scale=float(array) if stage == "loss_scale" else None,
            )
    return None


def _values_before(step: Step, x: Nest, y: Nest) -> Iterator[tuple[str, str, str, Nest]]:
    for name, value in (("x", x), ("y", y)):
        for number, leaf in enumerate(tf.nest.flatten(value, expand_composites=True)):
            part = name if leaf is value else f"{name}, part {number}"
            yield "input", "Placeholder", part, leaf
    if step.scale is not None:
        yield "loss_scale", "ReadVariableOp", bare_name(step.scale), step.scale.value()
    for name, variable in step.variables:
        yield "weights", "ReadVariableOp", name, tf.convert_to_tensor(variable)


# ---- Two runs of a step --------------------------------------------------------------------------


class Seen(list[ValueRange]):
    """The ranges of a tensor, execution by execution, up to the first that was not finite."""

    @staticmethod
    def look(before: Seen | None, values: np.ndarray) -> Seen:
        """Adds an execution; for an `Observer`."""
        seen = Seen() if before is None else before
        if not seen.is_bad:
            seen.append(ValueRange.of("", values))
        return seen

    @property
    def is_bad(self) -> bool:
        """Whether an execution, which is the last one then, was not finite."""
        return bool(self) and not self[-1].finite

    @property
    def bad_at(self) -> int:
        """Number of the execution that was not finite; larger than any other if all were."""
        return len(self) - 1 if self.is_bad else sys.maxsize

    def at(self, execution: int) -> ValueRange:
        """Returns the range in an execution; after the last one seen, the range in that."""
        return self[min(execution, len(self) - 1)] if self else _NO_VALUES


_NO_VALUES = ValueRange("", "float32", (), 0.0, 0.0)


class _Run(dict[TensorKey, Seen]):
    """The ranges of all tensors in a run of a step; empty for one that was not computed."""

    def __missing__(self, key: TensorKey) -> Seen:
        return Seen()

    def ranges(self, keys: Sequence[TensorKey], execution: int, of: str) -> tuple[ValueRange, ...]:
        """Returns the ranges of the inputs or outputs of an op, with numbered names."""
        seen = ((i, self[key].at(execution)) for i, key in enumerate(keys) if key in self)
        return tuple(dataclasses.replace(values, name=f"{of} {i}") for i, values in seen)


class _Twins:
    """A step in its low dtype, or in `dtype`, and its float32 twin with the same nodes."""

    def __init__(self, step: Step, dtype: str | None) -> None:
        self.step = step
        results = dict.fromkeys([*step.outputs, *step.gradients])
        self._fetches = [*results, *step.operations]
        graph = used_part(step.graph, step.inputs, self._fetches)
        indexes = observed_scopes(graph)
        low = low_dtypes(indexes)
        if low and dtype is not None and low != [dtype]:
            graph = retyped(graph, indexes, dtype)
            indexes = observed_scopes(graph)
        self._graph, self._indexes = graph, indexes
        self._low = self._observed(graph, indexes)
        self.results = list(map(_key_of, results))
        self.nodes = _Nodes(indexes, self.results)

    def run(self, scale: float) -> _Runs | None:
        """Runs both with a loss scale; returns None if all is finite in the low dtype."""
        low = self._run(self._low, scale)
        if not any(seen.is_bad for seen in low.values()):
            return None
        is_float32 = self._float32 is self._low
        float32 = low if is_float32 else self._run(self._float32, scale)
        return _Runs(self.step, self.nodes, low, float32)

    @functools.cached_property
    def _float32(self) -> Observer[Seen]:
        if not low_dtypes(self._indexes):
            return self._low
        graph = retyped(self._graph, self._indexes, "float32")
        return self._observed(graph, observed_scopes(graph))

    def _observed(self, graph: Graph, indexes: Sequence[GraphIndex]) -> Observer[Seen]:
        return Observer(graph, indexes, self.step.inputs, self._fetches, Seen.look)

    def _run(self, observer: Observer[Seen], scale: float) -> _Run:
        if self.step.scale is None:
            return _Run(observer.run([self.step.values]))
        with unchanged([self.step.scale]):
            self.step.scale.assign(scale)
            return _Run(observer.run([self.step.values]))


def _key_of(tensor: str) -> TensorKey:
    """Returns the key of a tensor of the main graph."""
    name, _, port = tensor.partition(":")
    return MAIN_GRAPH, name, int(port)


class _Nodes:
    """The nodes of all scopes by place, with their inputs and used outputs."""

    def __init__(self, indexes: Sequence[GraphIndex], results: Iterable[TensorKey]) -> None:
        self.at: dict[Place, IndexedNode] = {}
        self.inputs: dict[Place, list[TensorKey]] = defaultdict(list)
        self.outputs: dict[Place, set[TensorKey]] = defaultdict(set)
        self.variants: set[TensorKey] = set()
        self.order: dict[str, list[Place]] = {}  # By scope, in topological order.
        for index in indexes:
            places = [(index.scope, node.name) for node in index.nodes]
            self.at.update(zip(places, index.nodes, strict=True))
            self.order[index.scope] = [places[position] for position in index.producers_first]
            for edge in index.edges:
                source, target = index.slots[edge.source], index.slots[edge.target]
                tensor = (*places[source.node], edge.port)
                self.inputs[places[target.node]].append(tensor)
                self.outputs[tensor[:2]].add(tensor)
                if source.dtype == "variant":
                    self.variants.add(tensor)
        for tensor in results:
            self.outputs[tensor[:2]].add(tensor)

    def sources(self, place: Place) -> list[Place]:
        """Returns the producers of a node's inputs."""
        return [tensor[:2] for tensor in self.inputs[place]]

    def is_constant(self, place: Place) -> bool:
        """Whether a node is computed from constants only."""
        ends = (at for at in reach([place], self.sources) if not self.sources(at))
        return all(self.at[end].op in _CONSTANTS for end in ends)

    def bodies(self, place: Place) -> list[str]:
        """Returns the functions that a node calls, as scopes."""
        return [name for _, name in self.at[place].calls if name in self.order]

    def scopes_in(self, place: Place) -> Iterable[str]:
        """Returns the scopes that a node runs, directly or through other calls."""

        def called(scope: str) -> Iterable[str]:
            return chain.from_iterable(map(self.bodies, self.order[scope]))

        return reach(self.bodies(place), called)


class _Runs(NamedTuple):
    """A step's run in its low dtype and its run in float32, which may be the same."""

    step: Step
    nodes: _Nodes
    low: _Run
    float32: _Run

    def observed(self, tensors: Iterable[TensorKey]) -> list[TensorKey]:
        """Selects the float tensors that were computed."""
        return [tensor for tensor in tensors if tensor in self.low]


def _search(step: Step, dtype: str | None) -> Finding | None:
    """Runs a step; if it is not finite, runs it again with a loss scale of 1 to test that."""
    twins = _Twins(step, dtype)
    scale = 1.0 if step.scale is None else float(step.scale.numpy())
    finding = _look(twins, scale)
    if finding is None or scale == 1.0:
        return finding
    unscaled = _look(twins, 1.0)
    if unscaled is not None:
        return unscaled
    # The largest power of two that keeps the step finite.
    exponents = range(1, max(math.ceil(math.log2(scale)), 1))
    bad = bisect.bisect_left(exponents, True, key=lambda n: _look(twins, 2.0**n) is not None)
    best = 2.0**bad
    if step.scale_adapts and scale <= _USUAL_START and best >= _USUAL_SCALE:
        return None  # A dynamic scale backs off by itself within a few skipped steps.
    return dataclasses.replace(
        finding,
        stage="loss_scale",
        kind="overflow",
        variable=finding.gradient_of or finding.variable,
        scale=scale,
        best_scale=best,
    )


def _look(twins: _Twins, scale: float) -> Finding | None:
    """Runs a step with a loss scale; returns the first fault in it."""
    runs = twins.run(scale)
    if runs is None:
        return None
    origin = _first_bad(runs, twins.results)
    return None if origin is None else _explained(runs, origin)


# ---- Where ---------------------------------------------------------------------------------------

_OK, _EXCUSED, _BAD = 0, 1, 2
_States: TypeAlias = dict[TensorKey, int]


def _first_bad(runs: _Runs, results: Iterable[TensorKey]) -> Path | None:
    """Finds the first op whose result is not finite although its inputs are.

    If a result is bad, only ops that led to it count. Otherwise only faults count, see
    `is_fault`.
    """
    bad_results = [key[:2] for key in results if runs.low[key].is_bad]
    excuses = (True, False) if bad_results else (True,)
    for excuse_constants in excuses:
        walk = _Walk(runs, excuse_constants)
        states = walk.states(MAIN_GRAPH)
        leading = reach(bad_results, functools.partial(walk.sources_with, _BAD, states))
        for origin in walk.origins(MAIN_GRAPH, states):
            counts = origin in leading if bad_results else walk.is_fault(origin)
            if counts:
                return walk.descend(origin, states, ())
    return None


class _Walk:
    """Classifies tensors: finite, infinite because of an infinite constant, or bad."""

    def __init__(self, runs: _Runs, excuse: bool) -> None:
        self._nodes, self._float32, self._excuse = runs.nodes, runs.float32, excuse
        self._low = _Run((key, seen) for key, seen in runs.low.items() if seen.is_bad)
        self._bad_scopes = {key[0] for key in self._low}

    def states(self, scope: str, execution: int = sys.maxsize - 1) -> _States:
        """Returns the states of a scope's tensors, up to an execution of its function."""
        nodes = self._nodes
        states: _States = {}
        for place in nodes.order[scope]:
            inputs = nodes.inputs[place]
            worst = max((states.get(tensor, _OK) for tensor in inputs), default=_OK)
            for tensor in nodes.outputs[place]:
                if tensor in nodes.variants:
                    # List elements are observed where they are written or read.
                    bad = worst == _BAD or self._is_bad_inside(place)
                    states[tensor] = _BAD if bad else _OK
                elif (seen := self._low[tensor]).bad_at <= execution:
                    can_be = self._excuse and worst != _BAD and not seen[-1].nans
                    is_excused = can_be and (worst == _EXCUSED or nodes.is_constant(place))
                    states[tensor] = _EXCUSED if is_excused else _BAD
        return states

    def _is_bad_inside(self, place: Place) -> bool:
        return not self._bad_scopes.isdisjoint(self._nodes.scopes_in(place))

    def sources_with(self, state: int, states: _States, place: Place) -> list[Place]:
        """Returns the producers of a node's inputs that are in a state."""
        inputs = self._nodes.inputs[place]
        return [tensor[:2] for tensor in inputs if states.get(tensor) == state]

    def origins(self, scope: str, states: _States) -> list[Place]:
        """Returns the nodes with a bad output and no bad input, in topological order."""
        nodes = self._nodes

        def is_bad(place: Place) -> bool:
            return self._is_bad_inside(place) or _BAD in map(states.get, nodes.outputs[place])

        return [
            place
            for place in nodes.order[scope]
            if nodes.at[place].op != ARGUMENT
            and is_bad(place)
            and not self.sources_with(_BAD, states, place)
        ]

    def descend(self, place: Place, states: _States, callers: Path) -> Path:
        """Follows calls from an origin to the first origin in their functions."""
        path = (*callers, place)
        for body in self._nodes.bodies(place) if place not in callers else ():
            numbers = [seen.bad_at for key, seen in self._low.items() if key[0] == body]
            inner = self.states(body, min(numbers, default=sys.maxsize - 1))
            if origins := self.origins(body, inner):
                return self.descend(origins[0], inner, path)
        # A constant that is infinite in low precision only causes the NaN.
        constant = place
        while excused := self.sources_with(_EXCUSED, states, constant):
            constant = excused[0]
        tensor = *constant, 0
        is_its = constant != place and not self._float32[tensor].is_bad
        return (*callers, constant) if is_its else path

    def is_fault(self, place: Place) -> bool:
        """Whether a bad value is a fault although all results are finite.

        It is if it, or a value inside a call, is bad in low precision only or overflowed, like
        an infinite variance that makes a normalization return zeros. Divisions by zero and
        logarithms of zero are often masked on purpose.
        """
        inside = self._nodes.scopes_in(place)
        return any(
            self._nodes.at[key[:2]].op in _GROWING or self._float32[key].bad_at > seen.bad_at
            for key, seen in self._low.items()
            if key[:2] == place or key[0] in inside
        )


# ---- Why -----------------------------------------------------------------------------------------


def _explained(runs: _Runs, path: Path) -> Finding:
    step, nodes = runs.step, runs.nodes
    place = path[-1]
    named = _guarded_op(nodes, place)
    inputs = runs.observed(nodes.inputs[named])
    outputs = runs.observed(sorted(nodes.outputs[place]))
    bad = [key for key in outputs if runs.low[key].is_bad]
    execution = min((runs.low[key].bad_at for key in bad), default=0)
    cause = _cause(runs, path, bad, execution)
    layer = step.layer_of(path)
    stage = _stage(runs, path, cause["kind"], layer)
    gradient_of = _bad_gradient(runs, path)
    read = _variable_read(runs, place)
    return Finding(
        **cause,
        stage=stage,
        op=nodes.at[named].op,
        node=named[1],
        layer=_layer_or_scope(layer, nodes.at[place]),
        layer_class=None if layer is None else type(layer).__name__,
        variable=(gradient_of or read) if stage == "backward" else read,
        gradient_of=gradient_of,
        ranges={
            "inputs": runs.low.ranges(inputs, execution, "input"),
            "outputs": runs.low.ranges(outputs, execution, "output"),
            "float32_inputs": runs.float32.ranges(inputs, execution, "input"),
            "float32": runs.float32.ranges(outputs, execution, "output"),
        },
        rewritten_by=step.rewritten_by,
        is_constant=nodes.is_constant(place),
        is_logits=read is None and _reaches_softmax(nodes, place),
    )


def _guarded_op(nodes: _Nodes, place: Place) -> Place:
    """The op that `kernel_guard` runs in float32 before a Cast; the place itself for others."""
    sources = nodes.sources(place) if nodes.at[place].op == "Cast" else []
    guarded = [source for source in sources if nodes.at[source].op in kernels.OPS]
    raised = (op for op in guarded if "Cast" in {nodes.at[s].op for s in nodes.sources(op)})
    return next(raised, place)


def _cause(runs: _Runs, path: Path, bad: Sequence[TensorKey], execution: int) -> dict[str, Any]:
    """Returns why outputs of an op are not finite in an execution, as fields of a finding."""
    if not bad:
        return {"kind": "also_in_float32", "dtype": "float32"}
    dtype = runs.low[bad[0]].at(execution).dtype
    float32 = [runs.float32[key].at(execution) for key in bad]
    finite = [values.max_abs for values in float32 if values.finite]
    largest = max(finite, default=None)
    facts: dict[str, Any] = {"dtype": dtype, "float32_max": largest}
    if largest is None:
        return facts | {"kind": "also_in_float32"}
    vanished = _first_vanished(runs, path[-1], execution)
    if vanished is None or largest > float_format(dtype).max:
        # The float32 value may be in range: a sum inside the op can overflow.
        is_infinite = any(runs.low[key].at(execution).infs for key in bad)
        is_large = largest > float_format(dtype).max or is_infinite
        return facts | {"kind": "overflow" if is_large else "invalid"}
    node = runs.nodes.at[vanished[:2]]
    layer = runs.step.layer_of((*path[:-1], vanished[:2]))
    is_all = runs.low[vanished].at(execution).max_abs == 0.0
    return facts | {
        "kind": "underflow",
        "vanished": runs.float32[vanished].at(execution).max_abs if is_all else None,
        "vanished_op": node.op,
        "vanished_layer": _layer_or_scope(layer, node),
    }


def _first_vanished(runs: _Runs, place: Place, execution: int) -> TensorKey | None:
    """Returns the first tensor on the way to an op with zeros that float32 does not have."""

    def has_vanished(tensor: TensorKey) -> bool:
        exact = runs.float32[tensor].at(execution)
        return exact.finite and runs.low[tensor].at(execution).zeros > exact.zeros

    vanished = None
    while inputs := list(filter(has_vanished, runs.observed(runs.nodes.inputs[place]))):
        vanished = inputs[-1]
        place = vanished[:2]
    return vanished


def _stage(runs: _Runs, path: Path, kind: str, layer: Layer) -> str:
    nodes, top = runs.nodes, path[0]

    # Through floats only: a loop of the forward pass takes lists for its gradient.
    def producers(at: Place) -> list[Place]:
        return [tensor[:2] for tensor in runs.observed(nodes.inputs[at])]

    sources = reach([top], producers)
    if any(_BACKWARD.search(name) for _, name in sources):
        return "backward"
    if len(path) == 1 and nodes.at[top].op == "Cast" and kind == "overflow":
        if _producers_of(nodes, top, _INPUTS):
            return "input"
        if _variable_read(runs, top) is not None:
            return "weights"
    in_loss = _LOSS.search(top[1]) if layer is None else LOSS_SCOPE in top[1]
    return "loss" if in_loss else "forward"


def _producers_of(nodes: _Nodes, place: Place, ops: frozenset[str]) -> list[Place]:
    """Returns producers of some op types, looking through casts and the like; nearest first."""

    def passed_on(at: Place) -> list[Place]:
        passes = at == place or nodes.at[at].op in _PASSING_ON
        return nodes.sources(at) if passes else []

    return [at for at in reach([place], passed_on) if nodes.at[at].op in ops]


def _variable_read(runs: _Runs, place: Place) -> str | None:
    """Returns the name of a variable that an op reads, perhaps through a cast."""
    nodes, names = runs.nodes, runs.step.reads
    reads = _producers_of(nodes, place, _READS)[:1]
    handles = (name for read in reads for _, name in nodes.sources(read))
    return next((names[handle] for handle in handles if handle in names), None)


def _reaches_softmax(nodes: _Nodes, place: Place) -> bool:
    """Whether a softmax takes an op's result, perhaps scaled or masked."""

    def before(taker: Place) -> list[Place]:
        sources = nodes.sources(taker)
        return [at for at in sources if at == place or nodes.at[at].op in _TO_SOFTMAX]

    in_scope = [at for at in nodes.at if at[0] == place[0]]
    softmaxes = (at for at in in_scope if nodes.at[at].op == "Softmax")
    return place in reach(softmaxes, before)


def _bad_gradient(runs: _Runs, path: Path) -> str | None:
    """Returns the first variable whose gradient is not finite because of the fault."""
    for tensor, variable in runs.step.gradients.items():
        key = _key_of(tensor)
        if runs.low[key].is_bad and path[0] in reach([key[:2]], runs.nodes.sources):
            return variable
    return None


def _layer_or_scope(layer: Layer, node: IndexedNode) -> str | None:
    if layer is not None:
        return layer_path(layer)
    return node.name.removeprefix("gradient_tape/").rpartition("/")[0] or None
