"""`model_report`: the ops of a model that a rewrite converts, and why others stay float32."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import keras
import tensorflow as tf

from tfamp.core.errors import NothingConvertedWarning, SavedModelError
from tfamp.core.kinds import Model, Nest
from tfamp.core.names import LowDtypeLike
from tfamp.diagnostics.model_runs import computing_in
from tfamp.planning.cost import FREE_OPS
from tfamp.planning.structures import NodePlan, RewritePlan
from tfamp.policy import low_dtype
from tfamp.reports.tables import table_lines
from tfamp.rewriting.function import rewrite
from tfamp.rewriting.saved_model import inspect_saved_model

# Keras raises these for a damaged archive or an unusable configuration.
_KERAS_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    OSError,
    TypeError,
    ValueError,
    BadZipFile,
)
_HOW_TO_MEASURE = (
    "tfamp.tune(step, x, y) compares a step's times in float32 and low precision; for a "
    "compiled "
    'model prepare(model, level="auto", example_batch=(x, y)) does so.'
)


# Ops that hold or pass on values, which take no time of their own in a model that runs.
_STORING = FREE_OPS | {"AssignVariableOp", "VarHandleOp"}


class KeptOps(NamedTuple):
    """Ops of one type that stay float32 by one rule, with the first op's reason."""

    op: str
    nodes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class ModelReport:
    """The ops of a model that a rewrite converts, and those that stay float32.

    Attributes:
        source: The path, or the model's name.
        plan: The plan of `tfamp.rewrite`, or of `tfamp.rewrite_saved_model` for a SavedModel.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="wide")])
        >>> report = model_report(model, dtype="bfloat16")
        >>> report.plan.dtype, report.plan.summary.low_nodes <= report.plan.summary.nodes
        ('bfloat16', True)
    """

    source: str
    plan: RewritePlan

    @property
    def float32_ops(self) -> tuple[KeptOps, ...]:
        """Ops that take time and stay float32, in order of falling estimated time."""
        groups: dict[tuple[str, str], list[NodePlan]] = defaultdict(list)
        for node in self.plan.nodes:
            if node.dtype != self.plan.dtype and node.op not in _STORING:
                groups[node.op, node.reason.rule].append(node)
        groups_by_time = sorted(groups.values(), key=_time_of, reverse=True)
        return tuple(
            KeptOps(group[0].op, len(group), group[0].reason.text) for group in groups_by_time
        )

    def to_text(self) -> str:
        """Returns the report as lines for people."""
        totals = self.plan.summary
        computing = [node for node in self.plan.nodes if node.op not in _STORING]
        low = sum(node.dtype == self.plan.dtype for node in computing)
        plan = (
            f"{low} of {len(computing)} float ops that compute are in {self.plan.dtype}; "
            f"{totals.low_nodes} of {totals.nodes} float nodes in all, {totals.casts} Casts"
        )
        facts = [("model", self.source), ("plan", plan)]
        kept = [f"  {row.nodes:4d} {row.op}: {row.reason}" for row in self.float32_ops]
        heading = ["", "stays float32"] if kept else []
        lines = table_lines([*facts, ("measure", _HOW_TO_MEASURE)])
        return "\n".join([*lines, *heading, *kept])

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        summary = dataclasses.asdict(self.plan.summary)
        kept = [row._asdict() for row in self.float32_ops]
        facts = {"source": self.source, "dtype": self.plan.dtype, **summary}
        facts["float32_ops"] = kept
        return json.dumps(facts, indent=2)


def _time_of(nodes: Sequence[NodePlan]) -> float:
    return sum(node.cost or 0.0 for node in nodes)


def model_report(
    path_or_model: Any,
    *,
    dtype: LowDtypeLike | None = None,
    example_args: Sequence[Any] | None = None,
) -> ModelReport:
    """Reports which ops of a model a rewrite converts, and which stay float32 and why.

    The model is not run. A `.keras` file is loaded with Keras's `safe_mode` on: no code in the
    file runs, but its layers are built. A SavedModel is read, not loaded.

    Args:
        path_or_model: Directory of a SavedModel, a `.keras` file, a Keras model, or a function,
            such as a train step.
        dtype: "float16" or "bfloat16"; None is the dtype that this machine multiplies natively,
            and bfloat16 where it has neither.
        example_args: Arguments of a call, for a function or a model of unknown input shapes.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says what is needed.
        SavedModelError: The file cannot be read.
        RewriteError: The graph cannot be rewritten.

    Example:
        >>> report = model_report(lambda x: x @ x, dtype="bfloat16", example_args=[tf.eye(8)])
        >>> [(row.op, row.nodes) for row in report.float32_ops]
        []
    """
    low, model = low_dtype(dtype) or "bfloat16", path_or_model
    is_path = isinstance(model, str | os.PathLike)
    name = model if is_path else getattr(model, "name", type(model).__name__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)  # The report has the counts.
        if is_path and Path(model).suffix != ".keras":
            return ModelReport(os.fspath(name), inspect_saved_model(model, dtype=low))
        if is_path:
            model = _loaded(Path(model))
        if not callable(model):
            raise TypeError(
                "model_report takes the path of a SavedModel or a .keras file, a Keras model "
                f"or a function; got {type(model).__name__}."
            )
        args = _inputs(model) if example_args is None else tuple(example_args)
        if not isinstance(model, keras.Model):
            return ModelReport(os.fspath(name), rewrite(model, dtype=low).plan(*args))
        with computing_in(model, "float32"):
            plan = rewrite(lambda *given: model(*given), dtype=low).plan(*args)
    return ModelReport(os.fspath(name), plan)


def _inputs(model: Model) -> tuple[Nest, ...]:
    """Specs of the arguments of a Keras model."""
    if isinstance(model, keras.Model) and (tensors := getattr(model, "inputs", None)):
        # A Sequential takes one.
        structure = tensors[0] if isinstance(model, keras.Sequential) else model.input
        return (tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), structure),)
    raise ValueError(
        f"The shapes of the inputs of {model!r} are unknown. In Python give example_args=(x,), "
        "the arguments of a call, to tfamp.diagnostics.model_report."
    )


def _loaded(path: Path) -> Model:
    if not path.exists():
        raise SavedModelError(f"{path} cannot be loaded: there is no such file.")
    try:
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except _KERAS_ERRORS as error:
        raise SavedModelError(
            f"{path} cannot be loaded: {str(error).rstrip('.')}. Load a model with code of "
            "its own in Python and give it to tfamp.diagnostics.model_report(model)."
        ) from error
