"""What is not finite before a step is run: data, variables, the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfamp.core.dtypes import FLOAT_DTYPES
from tfamp.diagnostics.model_runs import layer_path
from tfamp.diagnostics.searching import causes
from tfamp.diagnostics.searching.fixes import Fault, fix_for
from tfamp.diagnostics.searching.nonfinite_report import NonFiniteReport, ValueRange
from tfamp.graph.measuring.tensor_stats import TensorStats, stats_of


def bad_data(x: Any, y: Any) -> NonFiniteReport | None:
    """Reports the first input that is not finite.

    Args:
        x: The batch, in any structure.
        y: Its targets.
    """
    for name, value in (("x", x), ("y", y)):
        for number, leaf in enumerate(tf.nest.flatten(value, expand_composites=True)):
            stats = _bad_stats(leaf)
            if stats is None:
                continue
            whole = name if leaf is value else f"{name}, part {number}"
            fault = Fault("input", causes.ALSO_IN_FLOAT32, dtype=stats.dtype)
            return NonFiniteReport(
                stage="input",
                layer=None,
                op="Placeholder",
                variable=None,
                kind=causes.ALSO_IN_FLOAT32,
                ranges={"inputs": (), "outputs": (ValueRange.of(whole, stats),)},
                fix=fix_for(fault),
                dtype=stats.dtype,
                details=[f"{whole}: {_where_bad(leaf)}."],
            )
    return None


def _bad_stats(value: Any) -> TensorStats | None:
    """What an array is like that has values that are not finite; None for any other value."""
    if value is None or isinstance(value, str | bytes):
        return None
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "is_floating", None) is False or dtype == tf.variant:
        return None
    array = np.asarray(value)
    if array.dtype.name not in FLOAT_DTYPES or np.isfinite(array.astype(np.float64)).all():
        return None
    return stats_of(array)


def _where_bad(value: Any) -> str:
    bad = np.argwhere(~np.isfinite(np.asarray(value).astype(np.float64)))
    rows = len(np.unique(bad[:, 0])) if bad.shape[1] else 1
    return f"the first such value is at index {bad[0].tolist()}, {rows} rows have one"


def bad_variable(
    variables: Iterable[Any],
    owner: Callable[[Any], Any] | None = None,
    names: Mapping[int, str] | None = None,
) -> NonFiniteReport | None:
    """Reports the first variable that is not finite.

    Args:
        variables: Variables of Keras or TensorFlow.
        owner: Returns the layer that holds one, or None.
        names: Names of TensorFlow's, by `id`.
    """
    for variable in variables:
        stats = _bad_stats(_value(variable))
        if stats is None:
            continue
        own = getattr(variable, "path", None) or variable.name.partition(":")[0]
        name = str((names or {}).get(id(variable), own))
        layer = None if owner is None else owner(variable)
        fault = Fault("weights", causes.ALSO_IN_FLOAT32, dtype=stats.dtype, variable=name)
        return NonFiniteReport(
            stage="weights",
            layer=name.rpartition("/")[0] or None if layer is None else layer_path(layer),
            op="ReadVariableOp",
            variable=name,
            kind=causes.ALSO_IN_FLOAT32,
            ranges={"inputs": (), "outputs": (ValueRange.of(name, stats),)},
            fix=fix_for(fault),
            dtype=stats.dtype,
        )
    return None


def bad_scale(scale: float, holder: str | None) -> NonFiniteReport:
    """Reports a loss scale that is no positive number.

    Args:
        scale: The scale.
        holder: Name of the variable that holds it, or None.
    """
    fault = Fault("loss_scale", causes.ALSO_IN_FLOAT32, scale=scale)
    stats = stats_of(np.array(scale, np.float32))
    return NonFiniteReport(
        stage="loss_scale",
        layer=None,
        op="ReadVariableOp",
        variable=holder,
        kind=causes.ALSO_IN_FLOAT32,
        ranges={"inputs": (), "outputs": (ValueRange.of("loss scale", stats),)},
        fix=fix_for(fault),
        dtype="float32",
        details=[f"The loss scale is {scale:g}."],
    )


def _value(variable: Any) -> Any:
    floats = keras.backend.standardize_dtype(variable.dtype) in FLOAT_DTYPES
    value = variable.value if isinstance(variable, keras.Variable) else variable
    return tf.convert_to_tensor(value) if floats else None
