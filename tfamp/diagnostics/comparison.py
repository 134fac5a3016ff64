"""`compare`: float32 against mixed precision, layer by layer.

The model itself runs, not a clone: only its policies are replaced during a run. Every run
starts from the same values of all variables, seeds included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

import tfamp.diagnostics.model_runs as model_runs
from tfamp.core.dtypes import FLOAT_DTYPES, float_format
from tfamp.core.kinds import Layer, Nest, Tensor
from tfamp.core.messages import advice
from tfamp.core.names import LowDtypeLike
from tfamp.core.options import checked_number
from tfamp.diagnostics.comparison_notes import (
    hides_error,
    largest_inexact,
    variation_notes,
    whole_numbers_note,
)
from tfamp.graph.relative_errors import in_float64, largest_error
from tfamp.interop.keras_hooks import layers_of
from tfamp.layers import model_roles
from tfamp.layers.layer_dtypes import policy_with
from tfamp.layers.model_calls import described_plan
from tfamp.planning.float32_search import KeptList, search_list
from tfamp.policy import low_dtype
from tfamp.reports import tables
from tfamp.reports.tables import table_lines

# Raised by a layer that cannot run in the low dtype on float32 inputs.
_REFUSALS = (tf.errors.InvalidArgumentError, TypeError, ValueError)
# An error of a container is not explained by its sublayers if it is so many times their
# largest: twice, as less may be rounding. A choice.
_OWN_FACTOR = 2.0

_Tensors: TypeAlias = list[np.ndarray]


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A layer of a comparison.

    Attributes:
        layer: The layer's path.
        kind: Class of the layer.
        dtype: The dtype it computes in, in the mixed run.
        relative_error: Largest difference of its outputs between the mixed and the float32 run,
            over their largest float32 magnitude. It includes the errors of all layers before;
            inf if a value is not finite but is in float32.
        own_error: The same with this layer alone in the low dtype, on float32 inputs; None if
            it computes in float32 or cannot run on these.
        max: Largest magnitude of its float32 outputs.
        overflow: Share of its float32 outputs that are too large for the low dtype.
        underflow: Share of its float32 outputs that are too small for it, and not 0.
        calls: Number of calls; the errors are the largest of all calls.
        plan: What the policy that made the layer does in its calls, and why, in a few words; ""
            for nothing, or without one.

    Example:
        >>> row = ComparisonRow("dense", "Dense", "float16", 0.01, 0.01, 7e4, 0.25, 0.5)
        >>> row.share_out_of_range
        0.75
    """

    layer: str
    kind: str
    dtype: str
    relative_error: float
    own_error: float | None
    max: float
    overflow: float
    underflow: float
    calls: int = 1
    plan: str = ""

    @property
    def share_out_of_range(self) -> float:
        """Share of the float32 outputs that the low dtype cannot hold."""
        return self.overflow + self.underflow


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        model: Name of the model.
        dtype: The low dtype.
        rows: Its layers, in the order in which their calls ended.
        output_error: Relative error of the outputs in mixed precision.
        bound: The bound on the output error, or None.
        keep_float32: The shortest list of layers to keep in float32, with their
            sublayers, that brings the output error under the bound. Empty if it is under the
            bound already or no bound was given; None if no list brings it there.
        proved_error: The output error of a run with these layers in float32; None without a
            list.
        noise: Relative error of a second run in float32: 0 unless the model is random. Errors
            below it mean nothing.
        notes: Sentences about errors that the columns do not show: layers that round whole
            numbers, such as positions, and outputs that hardly vary for their size.

    Example:
        >>> rows = [ComparisonRow(n, "Dense", "float16", e, e, 1.0, 0.0, 0.0) for n, e in
        ...         [("first", 0.001), ("second", 0.1)]]
        >>> Comparison("model", "float16", tuple(rows), output_error=0.1).worst.layer
        'second'
    """

    model: str
    dtype: str
    rows: tuple[ComparisonRow, ...]
    output_error: float
    bound: float | None = None
    keep_float32: tuple[str, ...] | None = ()
    proved_error: float | None = None
    noise: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> ComparisonRow | None:
        """The row with the largest own error, the first one of equals; None without any."""
        rows = [row for row in self.rows if row.own_error is not None]
        return max(rows, key=lambda row: row.own_error or 0.0, default=None)

    def to_text(self) -> str:
        """Returns a table with the largest errors first, and what to keep in float32."""
        lines = table_lines([self._head(), *self._ordered_cells()], left=3, texts=self._has_plans())
        return "\n".join([*lines, "", *self._verdict()])

    def _has_plans(self) -> bool:
        return any(row.plan for row in self.rows)

    def _head(self) -> tuple[str, ...]:
        return (*_HEAD, "plan") if self._has_plans() else _HEAD

    def _ordered_cells(self) -> list[tuple[str, ...]]:
        ordered = sorted(self.rows, key=_largest_first)
        return [(*_cells(row), row.plan)[: len(self._head())] for row in ordered]

    def _repr_html_(self) -> str:
        rows = tables.table(
            self._head(),
            self._ordered_cells(),
            left=3,
            texts=int(self._has_plans()),
            rest=": to_json() has all",
        )
        verdict = tables.lines_of(self._verdict())
        title = f"Comparison of {self.model}"
        return tables.fragment(title, verdict, rows)

    def _verdict(self) -> Iterator[str]:
        yield f"output error of {self.model} in {self.dtype}: {_number(self.output_error)}"
        if not any(row.dtype == self.dtype for row in self.rows):
            yield f"nothing of it computes in {self.dtype}: there was nothing to compare"
        if self.noise:
            yield (
                f"two runs in float32 differ by {_number(self.noise)}: the model is random, "
                "and smaller errors mean nothing"
            )
        yield from self.notes
        if self.bound is None:
            return
        bound = _number(self.bound)
        if self.keep_float32 is None:
            yield f"no list of layers in float32 brings it under {bound}"
        elif not self.keep_float32:
            yield f"it is under {bound} with no layer kept in float32"
        else:
            proved = _number(self.proved_error or 0.0)
            yield f"under {bound} with these in float32, proved by a run ({proved}):"
            yield from (f"  {layer}" for layer in self.keep_float32)

    def to_json(self) -> str:
        """Returns one JSON object with the attributes as keys; inf is written as "inf"."""
        facts = dataclasses.asdict(self)
        for row, values in zip(self.rows, facts["rows"], strict=True):
            values["share_out_of_range"] = row.share_out_of_range
        # JSON has no inf and no NaN.
        plain = json.loads(json.dumps(facts), parse_constant=lambda name: str(float(name)))
        return json.dumps(plain, indent=2)


_HEAD = ("layer", "kind", "dtype", "error", "own", "largest", "too large", "too small")


def _largest_first(row: ComparisonRow) -> tuple[float, float]:
    return -(row.own_error or 0.0), -row.relative_error


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    alone = "" if row.own_error is None else _number(row.own_error)
    shares = (f"{share:.1%}" if share else "0" for share in (row.overflow, row.underflow))
    error, largest = _number(row.relative_error), _number(row.max)
    return (row.layer, row.kind, row.dtype, error, alone, largest, *shares)


def _number(value: float) -> str:
    return f"{value:.2g}"


def compare(
    model: Any, x: Any, *, dtype: LowDtypeLike | None = None, bound: float | None = None
) -> Comparison:
    """Compares float32 with mixed precision, and finds the layers to keep in float32.

    A Keras model runs eagerly, in inference mode, as if it had a mixed policy: layers that
    compute in float16 or bfloat16 already do so in `dtype`; in a float32 model, all do except
    those that a `tfamp.Policy` keeps float32. Weights, policies, moving statistics and seeds
    are restored.

    With a bound, layers are kept in float32 in the order of their own errors until the output
    error is under the bound; then each that is not needed is removed again. The returned list
    was run.

    Args:
        model: A Keras model or layer.
        x: Its input: arrays or tensors in the structure that the model takes.
        dtype: "float16" or "bfloat16", or the mixed policy of one; None is the model's own low
            dtype, or what this machine multiplies natively.
        bound: Largest acceptable relative error of the outputs; None searches no list.

    Returns:
        The comparison. Errors are the largest difference over the largest float32 magnitude.

    Raises:
        TypeError: `model` is not a model or a layer, or the bound is not a number.
        ValueError: The dtype is wrong, the bound is negative, or no output is finite in
            float32.

    Example:
        >>> dense = keras.layers.Dense
        >>> layers = [dense(4, kernel_initializer="ones", name="big"), dense(1, name="small")]
        >>> model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.ReLU()])
        >>> result = compare(model, tf.constant([[3e5]]), dtype="float16", bound=0.01)
        >>> result.worst.layer.rpartition("/")[2], result.worst.own_error
        ('big', inf)
        >>> result.output_error
        inf
        >>> result.proved_error < 0.01
        True
    """
    if not isinstance(model, keras.Layer):
        raise TypeError(
            "compare takes a Keras model or layer; got "
            f"{type(model).__name__}.{advice(model)} Put the parts of a function into "
            "keras.layers.Layer subclasses, and these into a model."
        )
    model_runs.check_batch(x)
    used, name = model_runs.low_dtype_of(model), getattr(dtype, "name", dtype)
    wanted = name.removeprefix("mixed_") if isinstance(name, str) else dtype
    low = used if wanted in (None, "auto") and used else low_dtype(wanted) or "bfloat16"
    if bound is not None:
        checked_number("bound", bound, low=0.0, high=math.inf)
    subject = _Subject(model, x, low)
    finite = (np.isfinite(in_float64(output)).any() for output in subject.outputs)
    if subject.outputs and not any(finite):
        raise ValueError(
            "There is nothing to compare with: no output is finite in float32. Give x with at "
            "least one example, or start with tfamp.diagnostics.find_nonfinite."
        )
    rows, error = subject.rows()
    kept: KeptList = (), None
    if bound is not None:
        kept = search_list(subject.suspects(), subject.output_error, bound)
    return Comparison(
        model.name, low, rows, error, bound, *kept, subject.noise, tuple(subject.notes())
    )


# ---- Runs ----------------------------------------------------------------------------------------


@dataclass
class _Layer:
    """A layer with its outputs in the float32 run, call by call."""

    layer: Layer
    calls: list[_Tensors]
    own_error: float | None = None


class _Subject:
    """A model with its float32 run, which other runs are compared with."""

    def __init__(self, model: Layer, x: Nest, dtype: str) -> None:
        self._model, self._x, self._dtype = model, x, dtype
        if not model.built:
            model(x, training=False)
        self._low = {
            id(layer): (layer, name)
            for layer, name in model_runs.policies_in(model, dtype)
            if policy_with(layer, "float32") is not None
        }
        # By `id`, in the order in which first calls ended.
        self._layers: dict[int, _Layer] = {}
        # The largest whole number that each layer rounds in a mixed run, by path.
        self._inexact: dict[str, float] = {}
        self._hiding: list[str] = []
        self._hidden: list[str] = []
        self._is_alone = False
        with model_runs.computing_in(model, "float32"):
            self.outputs = self._run(self._compare_alone)
            self.noise = largest_error(self._run(), self.outputs)

    def _compare_alone(self, layer: Layer, call: model_runs.Call) -> Nest:
        """Calls a layer, then once more in the low dtype on the same inputs."""
        value = call()
        if self._is_alone or not _has_row(layer):
            return value
        self._check_inputs(layer, call)
        tensors = _arrays(value)
        observed = self._layers.setdefault(id(layer), _Layer(layer, []))
        observed.calls.append(tensors)
        if tensors and (members := self._members(layer)):
            self._is_alone = True
            # Random layers must continue with the same numbers as in the other runs.
            with (
                contextlib.suppress(*_REFUSALS),
                model_runs.unchanged(layer.non_trainable_variables),
                model_runs.with_policies(members),
            ):
                alone = _arrays(call())
                error = largest_error(alone, tensors)
                if hides_error(alone, tensors):
                    self._hiding.append(model_runs.layer_path(layer))
                observed.own_error = max(observed.own_error or 0.0, error)
            self._is_alone = False
        return value

    def _check_inputs(self, layer: Layer, call: model_runs.Call) -> None:
        """Records whole numbers that a layer casts down in a mixed run."""
        if id(layer) in self._low and layer.autocast:
            inputs = _arrays([call.args[1:], call.keywords])
            if largest := largest_inexact(inputs, self._dtype):
                path = model_runs.layer_path(layer)
                self._inexact[path] = max(largest, self._inexact.get(path, 0.0))

    def notes(self) -> Iterator[str]:
        """Yields sentences about errors that the rows do not show; call `rows` before."""
        for path, largest in self._inexact.items():
            yield whole_numbers_note(path, largest, self._dtype)
        yield from self._hidden

    def rows(self) -> tuple[tuple[ComparisonRow, ...], float]:
        """Runs in mixed precision; returns the rows, in the order of the run, and the error."""
        mixed = defaultdict[int, list[_Tensors]](list)

        def record(layer: Layer, call: model_runs.Call) -> Nest:
            value = call()
            mixed[id(layer)].append(_arrays(value))
            return value

        with self._mixed(()):
            outputs = self._run(record)
            rows = [self._row(observed, mixed[key]) for key, observed in self._layers.items()]
        error = largest_error(outputs, self.outputs)
        if not self.noise:
            self._hidden = list(variation_notes(outputs, self.outputs, self._hiding))
        return tuple(row for row in rows if row is not None), error

    def output_error(self, kept: Collection[str]) -> float:
        """Runs in mixed precision with layers of some paths in float32; returns the error."""
        with self._mixed(kept):
            return largest_error(self._run(), self.outputs)

    def suspects(self) -> list[str]:
        """Returns the paths of the low layers in descending order of their own errors.

        A container comes after its sublayers unless its error is much larger than theirs.
        """
        scores: dict[int, float] = {}
        for layer in reversed(layers_of(self._model)):  # Sublayers before their container.
            observed = self._layers.get(id(layer))
            alone = 0.0 if observed is None else observed.own_error or 0.0
            inner = [scores[id(below)] for below in layers_of(layer)[1:] if id(below) in scores]
            explained = bool(inner) and alone <= _OWN_FACTOR * max(inner)
            scores[id(layer)] = -1.0 / (1 + alone) if explained else alone
        called = (observed.layer for observed in self._layers.values() if any(observed.calls))
        units = [layer for layer in called if self._members(layer)]
        units.sort(key=lambda layer: -scores[id(layer)])
        return list(dict.fromkeys(map(model_runs.layer_path, units)))

    def _members(self, layer: Layer) -> list[tuple[Layer, str]]:
        """The layer and its sublayers, if they are low in a mixed run."""
        return [self._low[id(below)] for below in layers_of(layer) if id(below) in self._low]

    @contextlib.contextmanager
    def _mixed(self, kept: Collection[str]) -> Iterator[None]:
        """Mixed precision, but float32 for some layers and their sublayers."""
        layers = filter(_has_row, layers_of(self._model))
        named = [layer for layer in layers if model_runs.layer_path(layer) in kept]
        float32 = {id(below) for layer in named for below in layers_of(layer)}
        low = [policy for key, policy in self._low.items() if key not in float32]
        with model_runs.computing_in(self._model, "float32"), model_runs.with_policies(low):
            yield

    def _run(self, around: model_runs.Around = lambda _, call: call()) -> _Tensors:
        """Runs the model with the policies it has now."""
        with model_runs.unchanged(self._model.variables), model_runs.observing_layers(around):
            return _arrays(self._model(self._x, training=False))

    def _row(self, observed: _Layer, mixed: list[_Tensors]) -> ComparisonRow | None:
        """Returns a layer's row; None if no call returned as many tensors in both runs."""
        calls = zip(mixed, observed.calls, strict=False)
        pairs = [(low, exact) for low, exact in calls if exact and len(low) == len(exact)]
        if not pairs:
            return None
        exact_tensors = [tensor for _, exact in pairs for tensor in exact]
        return ComparisonRow(
            layer=model_runs.layer_path(observed.layer),
            kind=type(observed.layer).__name__,
            dtype=observed.layer.compute_dtype,
            relative_error=max(largest_error(*pair) for pair in pairs),
            own_error=observed.own_error,
            calls=len(pairs),
            plan=described_plan(observed.layer),
            **range_shares(exact_tensors, self._dtype),
        )


def _has_row(layer: Layer) -> bool:
    only_holds = model_roles.is_graph(layer)
    return not only_holds and not isinstance(layer, keras.layers.InputLayer)


def _arrays(value: Nest) -> _Tensors:
    """Returns the float tensors in a structure; none in a trace, where they have no values."""
    leaves = keras.tree.flatten(value)
    known = (leaf for leaf in leaves if hasattr(leaf, "numpy") or isinstance(leaf, np.ndarray))
    arrays = map(np.asarray, map(keras.ops.convert_to_numpy, known))
    return [array for array in arrays if array.dtype.name in FLOAT_DTYPES]


# ---- Ranges --------------------------------------------------------------------------------------


def range_shares(values: Sequence[Tensor], dtype: str) -> dict[str, float]:
    """Returns the fields `max`, `overflow` and `underflow` of a `ComparisonRow`."""
    limits = float_format(dtype)
    sizes = (np.abs(in_float64(value)).ravel() for value in values)
    size = np.concatenate([np.zeros(0), *sizes])
    count = max(size.size, 1)
    finite = size[np.isfinite(size)]
    small = (finite > 0) & (finite < limits.smallest_subnormal)
    return {
        "max": float(np.max(finite, initial=0.0)),
        "overflow": float(np.count_nonzero(finite > limits.max) / count),
        "underflow": float(np.count_nonzero(small) / count),
    }
