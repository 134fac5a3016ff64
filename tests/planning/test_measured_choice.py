"""The choice among timed ways: the incumbent, unless another one leads by more than the noise."""

import math
import random
import statistics

import pytest

from tfamp.planning.measured_choice import LEAST_NOISE, UNKNOWN_NOISE, fastest, leads, noise_of

AUTO = "fused"


def rounds_of(seconds, noise, count, generator):
    """Times of some rounds; a slow phase slows all ways of a round."""
    times = {name: [] for name in seconds}
    for _ in range(count):
        phase = generator.gauss(0, noise)
        for name, exact in seconds.items():
            times[name].append(exact * math.exp(phase + generator.gauss(0, noise)))
    return times


def mean_chosen(seconds, noise, count, choose):
    generator = random.Random(0)
    chosen = [choose(rounds_of(seconds, noise, count, generator)) for _ in range(2000)]
    return statistics.mean(seconds[name] for name in chosen)


def fastest_median(times):
    return min(times, key=lambda name: statistics.median(times[name]))


@pytest.mark.parametrize("count", [2, 4, 8])
def test_noise_seldom_replaces_what_auto_takes(count):
    seconds = {"float32": 1.0, "lists": 0.96, "min_cut": 0.94, AUTO: 0.91}
    noisy = mean_chosen(seconds, 0.08, count, fastest_median)
    chosen = mean_chosen(seconds, 0.08, count, lambda times: fastest(times, AUTO))
    assert seconds[AUTO] <= chosen < noisy
    assert chosen < seconds[AUTO] * 1.01


@pytest.mark.parametrize(("noise", "count", "most"), [(0.03, 2, 0.84), (0.08, 4, 0.86)])
def test_a_lead_above_the_noise_replaces_it(noise, count, most):
    seconds = {"float32": 1.0, "lists": 1.0, AUTO: 0.97, "xla": 0.83}
    assert mean_chosen(seconds, noise, count, lambda times: fastest(times, AUTO)) < most
    # Also where float32 is what leads.
    slow = {"float32": 0.83, "lists": 1.0, AUTO: 1.0}
    assert mean_chosen(slow, noise, count, lambda times: fastest(times, AUTO)) < most + 0.02


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([1.0, 1.0, 1.0], AUTO),
        ([0.995, 0.995], AUTO),  # Less than 1 %, which other processes may not see.
        ([0.9, 0.9, 0.9], "lists"),
        ([0.9, 0.9, 3.0, 3.0, 0.9], AUTO),  # Its median is less, in noise.
        ([0.5, 0.5, 3.0, 0.5, 0.5], "lists"),
        ([0.8, 1.1], AUTO),
        ([0.5], "lists"),
        ([0.95], AUTO),
    ],
)
def test_a_lead_counts_in_three_quarters_of_the_rounds(times, chosen):
    assert fastest({AUTO: [1.0] * len(times), "lists": times}, AUTO) == chosen


def test_slow_phases_are_not_noise_and_that_of_a_single_round_is_unknown():
    slow = {AUTO: [1.0, 3.0, 1.0], "lists": [0.9, 2.7, 0.9]}
    assert noise_of(slow, AUTO) == LEAST_NOISE
    assert noise_of({AUTO: [1.0], "lists": [0.5]}, AUTO) == UNKNOWN_NOISE
    assert leads(slow["lists"], slow[AUTO], LEAST_NOISE)
    # Ways that were given up are compared in the rounds that both have.
    assert fastest({AUTO: [1.0, 1.0], "lists": [0.9, 0.9, 0.1]}, AUTO) == "lists"
    generator = random.Random(1)
    found = noise_of(rounds_of({AUTO: 1.0, "lists": 1.0}, 0.05, 400, generator), AUTO)
    assert found == pytest.approx(0.05 * math.sqrt(2), rel=0.2)
