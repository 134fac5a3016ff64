"""What a rewrite would convert of a model or of its file, and how to measure what that gains."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import keras
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, SavedModelError
from tfamp.diagnostics.device import read_environment
from tfamp.diagnostics.known_issues import KnownIssue, known_issues
from tfamp.diagnostics.model_runs import computing_in
from tfamp.machine import hardware
from tfamp.planning.cost import FREE_OPS
from tfamp.planning.structures import NodePlan, RewritePlan
from tfamp.policy import low_dtype
from tfamp.reports.text_table import table_lines
from tfamp.rewriting.function import rewrite
from tfamp.rewriting.saved_graph import first_line
from tfamp.rewriting.saved_model import inspect_saved_model

# What Keras raises for an archive or a configuration it cannot make a model of.
_KERAS_ERRORS = (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError, BadZipFile)
_HOW_TO_MEASURE = (
    "tfamp.tune(step, x, y) runs a step in float32 and in low precision by turns; of a compiled "
    'model prepare(model, level="auto", example_batch=(x, y)) does so.'
)


@dataclass(frozen=True, slots=True)
class KeptOps:
    """Ops of one type that stay float32 by one rule.

    Attributes:
        op: Op type.
        nodes: How many there are.
        reason: Why they stay float32; where it names a node, that of the first of them.
    """

    op: str
    nodes: int
    reason: str


@dataclass(frozen=True)
class ModelReport:
    """What a rewrite would convert of a model, and what stays float32.

    Attributes:
        source: The path, or the model's name.
        plan: The plan: of a model that of `tfamp.rewrite`, of a SavedModel that of
            `tfamp.rewrite_saved_model`.
        known_issues: What is known to go wrong, or to cost the speed-up, on this machine.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="wide")])
        >>> report = model_report(model, dtype="bfloat16")
        >>> report.plan.dtype, report.plan.summary.low_nodes <= report.plan.summary.nodes
        ('bfloat16', True)
    """

    source: str
    plan: RewritePlan
    known_issues: tuple[KnownIssue, ...] = ()

    @property
    def float32_ops(self) -> tuple[KeptOps, ...]:
        """What computes and stays float32, what takes the longest by estimate first."""
        found: dict[tuple[str, str], list[NodePlan]] = defaultdict(list)
        for node in self.plan.nodes:
            if node.dtype != self.plan.dtype and node.op not in FREE_OPS:
                found[node.op, node.reason.rule].append(node)
        rows = sorted(found.values(), key=lambda row: -sum(node.cost or 0.0 for node in row))
        return tuple(KeptOps(row[0].op, len(row), row[0].reason.text) for row in rows)

    def to_text(self) -> str:
        """Returns the report as lines for people."""
        return "\n".join(self._lines())

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        facts = {
            "source": self.source,
            "dtype": self.plan.dtype,
            **dataclasses.asdict(self.plan.summary),
            "float32_ops": [dataclasses.asdict(each) for each in self.float32_ops],
            "known_issues": [dataclasses.asdict(each) for each in self.known_issues],
        }
        return json.dumps(facts, indent=2)

    def _lines(self) -> Iterator[str]:
        dtype, totals, kept = self.plan.dtype, self.plan.summary, self.float32_ops
        facts = [
            ("model", self.source),
            ("plan", f"{totals.low_nodes} of {totals.nodes} float nodes in {dtype}"),
            ("casts", str(totals.casts)),
            ("measure", _HOW_TO_MEASURE),
        ]
        for issue in self.known_issues:
            facts += [("known issue", f"{issue.name}: {issue.text}"), ("", issue.advice)]
        yield from table_lines(facts)
        if kept:
            yield "\nstays float32"
            yield from (f"  {row.nodes:4d} {row.op}: {row.reason}" for row in kept)


def model_report(
    path_or_model: Any, *, dtype: Any = None, example_args: Sequence[Any] | None = None
) -> ModelReport:
    """Tells what a rewrite would convert of a model, and what stays float32 and why.

    Nothing of the model is run. A `.keras` file is loaded with Keras's `safe_mode` on: it runs no
    code that the file brings, but builds the layers it names. A SavedModel is read, not loaded.

    Args:
        path_or_model: Directory of a SavedModel, a `.keras` file, a Keras model, of which the call
            is looked at, or a function, such as a train step.
        dtype: "float16" or "bfloat16"; None is what this machine multiplies natively, and bfloat16
            where that is neither.
        example_args: Arguments of a call, for a function or a model that does not tell its inputs.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says what is needed.
        SavedModelError: The file cannot be read.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> report = model_report(lambda x: x @ x, dtype="bfloat16", example_args=[tf.eye(8)])
        >>> [(each.op, each.nodes) for each in report.float32_ops]
        []
    """
    low, source = low_dtype(dtype) or "bfloat16", path_or_model
    is_path = isinstance(source, str | os.PathLike)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)  # The report says it.
        if is_path and Path(source).suffix != ".keras":
            plan = inspect_saved_model(source, dtype=low)
        else:
            plan = _plan(_loaded(Path(source)) if is_path else source, low, example_args)
    name = source if is_path else getattr(source, "name", getattr(source, "__name__", ""))
    return ModelReport(
        source=os.fspath(name) or type(source).__name__,
        plan=plan,
        known_issues=known_issues(read_environment(hardware.detect())),
    )


def _plan(model: Any, dtype: str, example_args: Sequence[Any] | None) -> RewritePlan:
    if not callable(model):
        raise TypeError(
            "model_report takes the path of a SavedModel or a .keras file, a Keras model or a "
            f"function; got {type(model).__name__}."
        )
    args = _inputs(model) if example_args is None else tuple(example_args)
    if not isinstance(model, keras.Model):
        plan: RewritePlan = rewrite(model, dtype=dtype).plan(*args)
        return plan
    with computing_in(model, "float32"):
        return _plan(lambda *given: model(*given), dtype, args)


def _inputs(model: Any) -> tuple[Any, ...]:
    """Specs of what a model is called with."""
    if isinstance(model, keras.Model) and (tensors := getattr(model, "inputs", None)):
        # A Sequential takes one.
        structure = tensors[0] if isinstance(model, keras.Sequential) else model.input
        return (tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), structure),)
    raise ValueError(
        "The model does not tell the shape of its input: give example_args=(x,), the arguments of "
        "a call."
    )


def _loaded(path: Path) -> Any:
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except _KERAS_ERRORS as error:
        raise SavedModelError(
            f"{path} cannot be loaded: {first_line(error)} Load a model with "
            "code of its own in Python and give model_report the model."
        ) from error
