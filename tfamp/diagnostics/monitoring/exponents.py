"""Histograms of binary exponents and what float16 makes of them; framework-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Exponents of float16's smallest subnormal, smallest normal and largest number.
SUBNORMAL, NORMAL, LARGEST = -24, -14, 15
FLOAT16_MAX = 65504.0
UNDER_SUBNORMAL, UNDER_NORMAL, OVER = "under_2**-24", "under_2**-14", "over_65504"


@dataclass(frozen=True, slots=True)
class ExponentHistogram:
    """How many values of a tensor have which binary exponent.

    Attributes:
        counts: Exponent e -> number of finite values with 2**e <= |value| < 2**(e + 1).
        zeros: Number of zeros.
        infs: Number of infs of either sign.
        nans: Number of NaNs.
        over: Number of values over 65504, infs included.
        largest: Largest finite absolute value; 0 if there is none.

    Example:
        >>> histogram = ExponentHistogram({-20: 3, 0: 1}, zeros=4, largest=1.5)
        >>> histogram.shares()
        {'under_2**-24': 0.0, 'under_2**-14': 0.75, 'over_65504': 0.0}
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    over: int = 0
    largest: float = 0.0

    @property
    def nonfinite(self) -> int:
        """Number of infs and NaNs."""
        return self.infs + self.nans

    @property
    def values(self) -> int:
        """Number of all values."""
        return sum(self.counts.values()) + self.zeros + self.nonfinite

    def under(self, exponent: int) -> int:
        """Returns how many values are under 2**exponent, zeros left out."""
        return sum(number for e, number in self.counts.items() if e < exponent)

    def shares(self) -> dict[str, float]:
        """Returns the shares of values under 2**-24, under 2**-14 and over 65504.

        Returns:
            Shares of the values that are neither zero nor NaN; all 0.0 where there is none.
        """
        total = sum(self.counts.values()) + self.infs
        parts = (self.under(SUBNORMAL), self.under(NORMAL), self.over)
        names = (UNDER_SUBNORMAL, UNDER_NORMAL, OVER)
        return {
            name: part / total if total else 0.0 for name, part in zip(names, parts, strict=True)
        }

    def shifted(self, exponent: int, over: int | None = None) -> ExponentHistogram:
        """Returns the histogram of the values times 2**exponent.

        Args:
            exponent: The factor's exponent.
            over: How many values are over 65504 then, if that is known. Else it follows from the
                exponents, and those between 65504 and 65536 count as under.
        """
        counts = {e + exponent: number for e, number in self.counts.items()}
        if over is None:
            over = sum(n for e, n in counts.items() if e > LARGEST) + self.infs
        largest = self.largest * 2.0**exponent
        return ExponentHistogram(counts, self.zeros, self.infs, self.nans, over, largest)

    def to_dict(self) -> dict[str, Any]:
        """Returns the part of a monitor's record that tells of one tensor, but for the shares."""
        values = self.values
        return {
            "values": values,
            "zeros": self.zeros / values if values else 0.0,
            "nonfinite": self.nonfinite,
            "largest": self.largest,
            "exponents": dict(sorted(self.counts.items())),
        }


def total(histograms: Iterable[ExponentHistogram]) -> ExponentHistogram:
    """Returns the histogram of all values of several tensors together."""
    counts: dict[int, int] = {}
    zeros = infs = nans = over = 0
    largest = 0.0
    for each in histograms:
        for exponent, number in each.counts.items():
            counts[exponent] = counts.get(exponent, 0) + number
        zeros, infs, nans = zeros + each.zeros, infs + each.infs, nans + each.nans
        over, largest = over + each.over, max(largest, each.largest)
    return ExponentHistogram(counts, zeros, infs, nans, over, largest)


def suggested_scale(unscaled: ExponentHistogram) -> float | None:
    """The loss scale that puts the most gradient values in float16's normal range.

    Args:
        unscaled: Histogram of the gradients without loss scale.

    Returns:
        Of the powers of two that take no value over 65504, the one with the most values from 2**-14
        on; of several that have as many the one in the middle, with as much room above as below.
        None without a finite value other than zero.
    """
    if not unscaled.counts or not unscaled.largest:
        return None
    top = LARGEST - max(unscaled.counts)
    if unscaled.largest * 2.0**top > FLOAT16_MAX:
        top -= 1
    # Below this nothing is in the normal range any more.
    bottom = NORMAL - max(unscaled.counts)
    scales = range(min(bottom, top), top + 1)
    in_range = {k: sum(n for e, n in unscaled.counts.items() if e + k >= NORMAL) for k in scales}
    most = max(in_range.values())
    best = [k for k in scales if in_range[k] == most]
    return 2.0 ** best[len(best) // 2]
