"""The choice among ways whose runs were timed: one wins if it leads by more than the noise.

Timed ways are compared with the one that would be taken without a measurement. The fastest
median of several ways is that of the luckiest one: with 8 % of noise it took 2 to 3 % longer,
on average, than the best of four ways that differ by 3 % each; see the tests.

Pure: times in, a decision out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

# A lead of less is noise even if no run shows it: layouts of memory differ from process to
# process. A choice.
LEAST_NOISE = 0.01
# Noise where it cannot be seen, in a single round: that of medians on a machine that is not idle.
UNKNOWN_NOISE = 0.08
# Standard deviations of the mean that a lead must exceed: a choice. With 1 a way that is not
# faster wins in one case of six, and one whose lead equals the noise of a round still wins.
_DEVIATIONS = 1.0
# A normal distribution's standard deviation over its median absolute deviation.
_NORMAL = 1.4826


def fastest(
    times: Mapping[str, Sequence[float]], incumbent: str, noise: float | None = None
) -> str:
    """Returns the name of the way to use.

    Args:
        times: By name, a time for each round; times of the same round have the same place, and
            ways that were given up have fewer.
        incumbent: The way to use unless another one leads.
        noise: As `noise_of` returns it; None to find it in these times.

    Example:
        >>> fastest({"fused": [1.0, 1.02], "lists": [0.97, 1.03]}, "fused")
        'fused'
        >>> fastest({"fused": [1.0, 1.02], "lists": [0.8, 0.83]}, "fused")
        'lists'
    """
    if noise is None:
        noise = noise_of(times, incumbent)
    base = times[incumbent]
    leading = [name for name, own in times.items() if leads(own, base, noise)]
    return min([incumbent, *leading], key=lambda name: statistics.median(times[name]))


def noise_of(times: Mapping[str, Sequence[float]], incumbent: str) -> float:
    """Relative standard deviation of a round's ratio of two times.

    It is estimated from the changes of the ratio between successive rounds, of all ways
    together: one way has too few rounds. A slow phase of the machine slows both times.
    """
    changes: list[float] = []
    for name, own in times.items():
        if name != incumbent:
            ratios = _log_ratios(own, times[incumbent])
            changes += [abs(b - a) for a, b in zip(ratios, ratios[1:], strict=False)]
    if not changes:
        return UNKNOWN_NOISE
    return max(_NORMAL * statistics.median(changes) / math.sqrt(2), LEAST_NOISE)


def leads(times: Sequence[float], others: Sequence[float], noise: float) -> bool:
    """Whether times are less than others in three quarters of the rounds, and by more than noise.

    `noise` is that of one round; that of the median falls with the number of rounds.
    """
    ratios = _log_ratios(times, others)
    lead = -statistics.median(ratios)
    return _upper_quartile(ratios) < 0.0 and lead > _DEVIATIONS * noise / math.sqrt(len(ratios))


def _log_ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return [math.log(mine / theirs) for mine, theirs in zip(times, others, strict=False)]


def _upper_quartile(values: Sequence[float]) -> float:
    """The 75th percentile, between the two values next to it."""
    ordered, place = sorted(values), 0.75 * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
