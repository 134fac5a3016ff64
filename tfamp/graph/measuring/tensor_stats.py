"""What a tensor's values are like, and a tensor's values over several executions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfamp.core.dtypes import float_format
from tfamp.planning.ranges import TensorKey

_KEPT = 100


@dataclass(frozen=True, slots=True)
class TensorStats:
    """What the values of one tensor are like.

    Attributes:
        dtype: Its dtype's name.
        shape: Its shape.
        min: Smallest finite value; 0 if there is none.
        max: Largest finite value; 0 if there is none.
        max_abs: Largest magnitude of a finite value.
        infs: Number of values that are infinite.
        nans: Number of values that are NaN.
        zeros: Number of values that are zero.
        subnormals: Number of values too small for the dtype's full precision, zeros left out.
    """

    dtype: str
    shape: tuple[int, ...]
    min: float
    max: float
    max_abs: float
    infs: int = 0
    nans: int = 0
    zeros: int = 0
    subnormals: int = 0

    @property
    def size(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nonfinite(self) -> bool:
        """Whether a value is infinite or NaN."""
        return bool(self.infs or self.nans)

    def joined(self, other: TensorStats) -> TensorStats:
        """Returns what this tensor is like over two executions, counts added."""
        if not (self.size - self.infs - self.nans):
            low, high = other.min, other.max
        elif not (other.size - other.infs - other.nans):
            low, high = self.min, self.max
        else:
            low, high = min(self.min, other.min), max(self.max, other.max)
        return TensorStats(
            dtype=self.dtype,
            shape=max(self.shape, other.shape, key=lambda shape: np.prod(shape, dtype=np.int64)),
            min=low,
            max=high,
            max_abs=max(self.max_abs, other.max_abs),
            infs=self.infs + other.infs,
            nans=self.nans + other.nans,
            zeros=self.zeros + other.zeros,
            subnormals=self.subnormals + other.subnormals,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers by name, as JSON takes them."""
        return dataclasses.asdict(self) | {"shape": list(self.shape)}


def stats_of(values: Any) -> TensorStats:
    """Looks at the values of an array.

    Args:
        values: Array of any shape and float dtype, bfloat16 included.

    Example:
        >>> found = stats_of(np.array([1.0, -3.0, np.inf, 0.0], np.float16))
        >>> found.min, found.max, found.infs, found.zeros
        (-3.0, 1.0, 1, 1)
    """
    array = np.asarray(values)
    dtype = array.dtype.name
    wide = array if dtype == "float64" else array.astype(np.float32)
    finite = np.isfinite(wide)
    infs = nans = 0
    if not finite.all():
        nans = int(np.isnan(wide).sum())
        infs = int(wide.size - finite.sum()) - nans
        wide = wide[finite]
    low, high = (float(wide.min()), float(wide.max())) if wide.size else (0.0, 0.0)
    zeros = int(wide.size - np.count_nonzero(wide))
    tiny = float_format(dtype).tiny
    return TensorStats(
        dtype=dtype,
        shape=array.shape,
        min=low,
        max=high,
        max_abs=max(abs(low), abs(high)),
        infs=infs,
        nans=nans,
        zeros=zeros,
        subnormals=int(np.count_nonzero(np.abs(wide) < tiny)) - zeros,
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What was seen of a tensor.

    Attributes:
        executions: How often it was computed.
        good: What it was like over the executions before the first one that was not finite; None
            if there are none.
        bad: What it was like in the first execution that was not finite; None if all were finite.
        bad_at: The number of that execution, from 0.
        first: What it was like in each of the first executions.
    """

    executions: int = 0
    good: TensorStats | None = None
    bad: TensorStats | None = None
    bad_at: int = -1
    first: tuple[TensorStats, ...] = ()

    @property
    def stats(self) -> TensorStats | None:
        """What it was like where it first was not finite, else over all executions."""
        return self.good if self.bad is None else self.bad

    def at(self, execution: int) -> TensorStats | None:
        """Returns what it was like in one execution; of a late one, what it was like up to then."""
        if execution < len(self.first):
            return self.first[execution]
        return self.bad if self.is_bad_by(execution) else self.good

    def is_bad_by(self, execution: int) -> bool:
        """Whether it was not finite in an execution up to this one."""
        return self.bad is not None and self.bad_at <= execution

    def then(self, stats: TensorStats) -> Seen:
        """Returns what was seen after one more execution."""
        number = self.executions
        first = (*self.first, stats) if number < _KEPT else self.first
        if self.bad is not None:
            return dataclasses.replace(self, executions=number + 1, first=first)
        if stats.nonfinite:
            return Seen(number + 1, self.good, stats, number, first)
        joined = stats if self.good is None else self.good.joined(stats)
        return Seen(number + 1, joined, first=first)


@dataclass(frozen=True, slots=True)
class Run:
    """What was seen of a graph in one run.

    Attributes:
        tensors: By scope, node and output port. The scope of the graph itself is "".
    """

    tensors: Mapping[TensorKey, Seen] = field(default_factory=dict)

    def get(self, key: TensorKey) -> Seen:
        """Returns what was seen of a tensor; one that was never computed has no executions."""
        return self.tensors.get(key, Seen())

    @property
    def finite(self) -> bool:
        """Whether every value of every tensor was finite."""
        return all(seen.bad is None for seen in self.tensors.values())
