"""Calibration data, and the range of every tensor of a float32 graph on it."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfamp.core.errors import TfampWarning
from tfamp.core.kinds import Tensor
from tfamp.core.options import checked_number
from tfamp.graph.graph import Graph
from tfamp.graph.observe import Observer, input_specs, observed_scopes, used_part
from tfamp.interop.patching import level_of_user
from tfamp.planning.ranges import Limits, Ranges, TensorRange


@dataclass(frozen=True, eq=False)
class Calibration:
    """Data for finding values that are too large for low precision, before a rewrite.

    The function runs in float32 on each element of the data; a few batches that are typical,
    and some that are extreme, are enough. What exceeds a limit stays float32, and the plan
    gives the number. A loss scale makes gradients large on purpose: for a train step with one,
    give a larger `data_max`, such as 2**15, or calibrate with a scale of 1.

    Args:
        data: One element for each call: a tuple of its arguments, a dict of its keyword
            arguments, or its only argument, such as an array. A `tf.data.Dataset` will do. An
            iterator is read when the calibration is made, as data may be iterated more than
            once.
        data_max: Largest magnitude that may be in low precision; None is 512 for float16 and no
            limit for bfloat16. `math.inf` switches it off.
        reduction_depth: Largest number of values that may be added up for a result in low
            precision, in matmuls and convolutions as well. None is 2 / eps, 2048 for float16
            and 256 for bfloat16, in ops that add up in the dtype of their tensors, and no limit
            in matmuls and convolutions, whose kernels add up in float32.

    A warning names the first input that holds NaN: what is computed from it stays float32.

    Raises:
        TypeError: The data is a single array or dict, or not an iterable; or a limit is not a
            number.
        ValueError: The data is endless, or a limit is not positive; empty data is an error when
            it is read.

    Example:
        >>> calibration = Calibration([([1.0, 2.0],), {"x": [3.0]}], data_max=1000.0)
        >>> list(calibration.calls())
        [(([1.0, 2.0],), {}), ((), {'x': [3.0]})]
    """

    data: Any
    data_max: float | None = field(default=None, kw_only=True)
    reduction_depth: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        _check_data(self.data)
        if isinstance(self.data, Iterator):
            # The dataclass is frozen for its users; this is where its values are made.
            object.__setattr__(self, "data", tuple(self.data))
        for name in ("data_max", "reduction_depth"):
            if (value := getattr(self, name)) is not None:
                checked_number(name, value, low=0.0, high=math.inf, bounds="(]")

    @staticmethod
    def of(value: Any) -> Calibration:
        """Returns a calibration as it is, and one of plain data with the default limits.

        Args:
            value: A `Calibration`, or data as it takes it.

        Raises:
            TypeError, ValueError: As for `Calibration`.

        Example:
            >>> Calibration.of([1.0, 2.0]).data_max is None
            True
        """
        return value if isinstance(value, Calibration) else Calibration(value)

    @staticmethod
    def from_npz(
        path: str | os.PathLike[str],
        *,
        data_max: float | None = None,
        reduction_depth: int | None = None,
    ) -> Calibration:
        """Reads a file of `numpy.savez`: one call, with its arrays as keyword arguments.

        Args:
            path: The file. Its arrays have the names of the function's inputs; their first axis
                is the batch.
            data_max: As for `Calibration`.
            reduction_depth: As for `Calibration`.

        Raises:
            OSError: The file cannot be read.
            ValueError: It does not hold named arrays of numbers.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     np.savez(f"{folder}/batch.npz", x=np.ones((8, 4)))
            ...     calibration = Calibration.from_npz(f"{folder}/batch.npz")
            >>> [(name, array.shape) for name, array in calibration.data[0].items()]
            [('x', (8, 4))]
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        except (zipfile.BadZipFile, EOFError, TypeError, ValueError):
            arrays = {}
        if not arrays:
            raise ValueError(
                f"{os.fspath(path)} does not hold named arrays of numbers; "
                "numpy.savez(path, x=array) writes such a file."
            )
        return Calibration([arrays], data_max=data_max, reduction_depth=reduction_depth)

    def calls(self) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Gives the arguments and keyword arguments of each call.

        Raises:
            ValueError: The data is empty.
        """
        is_empty = True
        for element in self.data:
            is_empty = False
            if isinstance(element, Mapping):
                yield (), {str(name): value for name, value in element.items()}
            else:
                yield (tuple(element) if isinstance(element, tuple) else (element,)), {}
        if is_empty:
            raise ValueError("Calibration needs at least one call's data; got none.")

    def limits(self, dtype: str) -> Limits:
        """Returns the limits for a dtype, the defaults where none were given.

        Args:
            dtype: "float16" or "bfloat16".
        """
        limits = Limits.default(dtype)
        if self.data_max is not None:
            limits = dataclasses.replace(limits, data_max=float(self.data_max))
        if self.reduction_depth is not None:
            depth = float(self.reduction_depth)
            limits = dataclasses.replace(limits, sum_depth=depth, matmul_depth=depth)
        return limits


def _check_data(data: Any) -> None:
    is_dataset = isinstance(data, tf.data.Dataset)
    if is_dataset and int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise ValueError("data must end; this dataset repeats for ever. Use dataset.take(n).")
    # The elements of an array would be single examples, where a batch is meant.
    is_one = isinstance(data, Mapping | str | bytes) or hasattr(data, "shape")
    if is_one or not isinstance(data, Iterable):
        raise TypeError(
            "data must be an iterable with one element for each call: a tuple of arguments, "
            "a dict of keyword arguments, or the only argument; got "
            f"{type(data).__name__}. For one call put it into a list: [x]."
        )


# ---- Measuring -----------------------------------------------------------------------------------

# Name and spec of an input.
_Input: TypeAlias = tuple[str, tf.TensorSpec]


def measure(
    graph: Graph,
    inputs: Sequence[str],
    batches: Iterable[Sequence[Any]],
    captures: Sequence[Tensor],
    outputs: Sequence[str],
) -> Ranges:
    """Runs a graph on data and returns the range of each float tensor that the outputs need.

    The inputs get the values of one batch after another, then the captures. Variables are as
    before afterwards; the state of random number generators, tables and iterators is not
    restored.
    """
    used = used_part(graph, inputs, outputs)
    observer = Observer(used, observed_scopes(used), inputs, outputs, _range_after)
    named_specs = list(zip(inputs, input_specs(graph, inputs), strict=True))
    named_specs = named_specs[: len(inputs) - len(captures)]
    return observer.run([*values, *captures] for values in _fitting(batches, named_specs))


def _fitting(
    batches: Iterable[Sequence[Any]],
    inputs: Sequence[_Input],
) -> Iterator[list[Tensor]]:
    """The batches as tensors; a warning names the first input with a NaN.

    An infinity may be a mask: only the reasons in the plan name it.
    """
    is_finite = True
    for number, batch in enumerate(batches):
        values = list(batch_tensors(f"Calibration batch {number}", batch, inputs))
        pairs = zip(values, inputs, strict=True)
        with_nan = [name for value, (name, _) in pairs if _has_nan(value)]
        if with_nan and is_finite:
            is_finite = False
            text = (
                f"Calibration batch {number}: the input {with_nan[0]} holds NaN. Values "
                "computed from it cannot be measured and stay float32. Give data without NaN, "
                "unless the model is made for it."
            )
            warnings.warn(text, TfampWarning, stacklevel=level_of_user())
        yield values


def _has_nan(value: Tensor) -> bool:
    return value.dtype.is_floating and bool(np.isnan(value.numpy()).any())


def batch_tensors(where: str, batch: Any, inputs: Sequence[_Input]) -> Iterator[Tensor]:
    """Yields the values of a batch as tensors of the dtypes that the inputs have.

    Raises:
        ValueError: They do not fit the inputs; the message begins with `where`.
    """
    values = list(batch) if isinstance(batch, list | tuple) else [batch]
    if len(values) != len(inputs):
        raise ValueError(
            f"{where} has {len(values)} values; the graph takes "
            f"{len(inputs)}: {', '.join(name for name, _ in inputs)}."
        )
    for value, (name, spec) in zip(values, inputs, strict=True):
        try:
            tensor = tf.convert_to_tensor(value, spec.dtype)
            fits = spec.shape.is_compatible_with(tensor.shape)
        except (TypeError, ValueError):
            fits = False
        if not fits or (spec.dtype.is_integer and np.asarray(value).dtype.kind == "f"):
            dtype = getattr(value, "dtype", type(value).__name__)
            raise ValueError(
                f"{where}: the input {name} takes {spec.dtype.name} of "
                f"shape {spec.shape}; got {getattr(dtype, 'name', dtype)} of shape "
                f"{np.shape(value)}."
            )
        yield tensor


def _range_after(before: TensorRange | None, value: np.ndarray) -> TensorRange:
    """Adds one execution to the range of a tensor, as an `Observer` needs it."""
    low, high = (float(value.min()), float(value.max())) if value.size else (0.0, 0.0)
    largest = max(abs(low), abs(high))
    # A NaN hides how large the other values are.
    size = 0.0 if math.isnan(low) else largest
    observed = TensorRange(size, not math.isfinite(largest), value.shape)
    return observed if before is None else before.joined(observed)
