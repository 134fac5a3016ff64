"""Finds the name scopes of a SavedModel that float32 has to keep for an accuracy, by runs on data.

Each candidate is written as the SavedModel that it would be, loaded and called by its signatures,
so that the proved error is that of the file, with its stored constants and TensorFlow's loader.
"""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.core.errors import NothingConvertedWarning, SavedModelError
from tfamp.core.kinds import MetaGraphDef, SavedModel, Tensor
from tfamp.graph.calibration import Calibration, batch_tensors
from tfamp.graph.relative_errors import largest_error
from tfamp.planning.float32_search import search_list
from tfamp.planning.structures import Accuracy, NodePlan, RewritePlan
from tfamp.rewriting.saved_graph import first_line, matching_signature, signatures_of

# Writes a candidate that keeps the nodes of some patterns in float32; returns its plan.
Candidate: TypeAlias = Callable[[Sequence[str], Path], RewritePlan]

# Each unit of the search is run alone, so this bounds the time of the ranking. A choice, as many
# as the layers of a deep model.
_MOST_UNITS = 100
# TensorFlow's names of the calls that inlining puts before the names of a function's nodes.
_CALLS = r"(?:(?:Stateful)?PartitionedCall(?:_\d+)?/)*"
_LEADING_CALLS = re.compile(_CALLS)


def search_scopes(
    model: SavedModel, src: Path, data: Calibration, bound: float, candidate: Candidate
) -> tuple[Accuracy, list[str]]:
    """Searches for a short list of name scopes to keep in float32.

    Scopes are ranked by the error of the outputs with that scope alone in low precision, and
    kept until the error is at most the bound; then each that is not needed is removed again.

    Args:
        model: The SavedModel's message; it is not modified.
        src: Its directory.
        data: Calls of its signatures.
        bound: Largest acceptable error of an output.
        candidate: Writes a candidate.

    Returns:
        What was measured, and the patterns of the nodes to keep in float32.

    Raises:
        SavedModelError: No signature takes the data, it has nothing to measure, or no list
            brings the error under the bound.
    """
    runs = _Runs(model, src, data, candidate)
    plan, everything_low = runs.plan_and_error(())
    if everything_low <= bound:
        return Accuracy(bound, everything_low, everything_low), []
    units = _units([node for node in plan.nodes if node.dtype == plan.dtype])

    def error_of(kept: Collection[str]) -> float:
        return runs.plan_and_error([units[name] for name in units if name in kept])[1]

    own = {name: error_of(units.keys() - {name}) for name in units}
    scopes, error = search_list(sorted(own, key=lambda name: -own[name]), error_of, bound)
    if scopes is None or error is None:
        raise SavedModelError(
            f"No nodes in float32 bring the error of {src} on the data to {bound:g}: it is "
            f"{everything_low:.2g} with all that can be in {plan.dtype}, and two runs in float32 "
            f"differ by {runs.noise():.2g}. Give a larger bound, or other data."
        )
    return Accuracy(bound, error, everything_low, scopes), [units[name] for name in scopes]


class _Runs:
    """The outputs of a SavedModel's signatures on data, in float32 and of candidates."""

    def __init__(
        self, model: SavedModel, src: Path, data: Calibration, candidate: Candidate
    ) -> None:
        self._src, self._candidate = src, candidate
        # Files of TensorFlow 1 may hold a graph for training too; what is served is measured.
        meta_graphs = sorted(model.meta_graphs, key=lambda each: "serve" not in _tags(each))
        self._tags = _tags(meta_graphs[0])
        self._calls = list(_calls(meta_graphs[0], data, src))
        self._outputs = self._run(src)
        if not any(np.isfinite(output).any() for output in self._outputs):
            raise SavedModelError(
                f"There is nothing to measure: on the data no signature of {src} has an output of "
                "floats that is finite in float32. Give other data."
            )

    def noise(self) -> float:
        """Returns the error of a second run in float32: 0 unless the model is random."""
        return largest_error(self._run(self._src), self._outputs)

    def plan_and_error(self, patterns: Sequence[str]) -> tuple[RewritePlan, float]:
        """Writes and runs a candidate; returns its plan and its error."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            # Of the result only: a candidate may well be float32 as a whole.
            warnings.simplefilter("ignore", NothingConvertedWarning)
            path = Path(folder, "candidate")
            plan = self._candidate(patterns, path)
            return plan, largest_error(self._run(path), self._outputs)

    def _run(self, path: Path) -> list[np.ndarray]:
        loaded = tf.saved_model.load(str(path), tags=self._tags)
        outputs: list[Tensor] = []
        for name, inputs in self._calls:
            try:
                results = loaded.signatures[name](**inputs)
            except tf.errors.OpError as error:
                raise SavedModelError(
                    f"The signature {name!r} of {self._src} cannot be run on the data: "
                    f"{first_line(error)}"
                ) from error
            outputs += (results[key] for key in sorted(results))
        return [output.numpy() for output in outputs if output.dtype.name in FLOAT_DTYPES]


def _tags(meta_graph: MetaGraphDef) -> list[str]:
    return list(meta_graph.meta_info_def.tags)


def _calls(
    meta_graph: MetaGraphDef, data: Calibration, src: Path
) -> Iterable[tuple[str, Mapping[str, Tensor]]]:
    """Yields the signature of each call of the data, and its inputs as tensors."""
    signatures = signatures_of(meta_graph)
    for number, (args, kwargs) in enumerate(data.calls()):
        name, batch = matching_signature(signatures, args, kwargs, src)
        infos = sorted(signatures[name].inputs.items())
        specs = [
            (key, tf.TensorSpec(tf.TensorShape(info.tensor_shape), tf.as_dtype(info.dtype)))
            for key, info in infos
        ]
        tensors = batch_tensors(f"Data batch {number}", [batch[key] for key, _ in infos], specs)
        yield name, dict(zip((key for key, _ in infos), tensors, strict=True))


def _units(nodes: Sequence[NodePlan]) -> dict[str, str]:
    """Returns the name scopes of some nodes, each with a pattern of its nodes and no others.

    They are as deep as possible without being too many. A node outside of all scopes is a unit
    of its own. Copies of a scope that several signatures have are one unit.
    """
    names = dict.fromkeys(_LEADING_CALLS.sub("", node.name, count=1) for node in nodes)
    parts = [tuple(name.split("/")) for name in names]
    depth = max((len(each) - 1 for each in parts), default=1)
    while depth > 1 and len({_scope(each, depth) for each in parts}) > _MOST_UNITS:
        depth -= 1
    return {"/".join(_scope(each, depth)): _pattern(each, depth) for each in parts}


def _scope(parts: tuple[str, ...], depth: int) -> tuple[str, ...]:
    return parts[:-1][:depth] or parts


def _pattern(parts: tuple[str, ...], depth: int) -> str:
    """A pattern of the nodes of a scope; those of inner scopes only if it was cut there."""
    scope = _scope(parts, depth)
    rest = "$" if scope == parts else "/" if len(scope) == depth else "/[^/]+$"
    return f"^{_CALLS}{re.escape('/'.join(scope))}{rest}"
