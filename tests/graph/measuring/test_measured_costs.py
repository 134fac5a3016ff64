"""Measured times in the place of estimates, and what is learnt from them; without TensorFlow."""

import pytest

from tfamp.core.profile import builtin_profile
from tfamp.planning.cost import ScopeCosts, estimate, scope_seconds
from tfamp.planning.measured_costs import LEAST_GAIN, NOISE, NOTHING, PART, MeasuredTimes
from tfamp.planning.structures import (
    Edge,
    GraphIndex,
    IndexedNode,
    Painting,
    Reason,
    Regions,
    TypeSlot,
)

PROFILE = builtin_profile("cpu")
# x -> Relu -> Tanh -> Tanh -> Exp; the last of these cannot be low.
OPS = ("Placeholder", "Relu", "Tanh", "Tanh", "Exp")


def made(elements=(10_000,) * 5):
    slots = tuple(TypeSlot(n, "T", None, "float32", 0 < n < 4) for n in range(len(OPS)))
    nodes = tuple(IndexedNode(f"n{n}", op, "", (), False, (n,)) for n, op in enumerate(OPS))
    edges = tuple(Edge(n, n + 1, 0, 0, f"n{n}:0") for n in range(len(OPS) - 1))
    shapes = {(n, 0): (count,) for n, count in enumerate(elements)}
    return GraphIndex("", nodes, slots, edges, shapes)


def costs_of(times, index=None):
    index = index or made()
    estimates = estimate(index, PROFILE, "bfloat16")
    (costs,) = times.costs([index], [estimates])
    return costs, estimates


def test_what_was_measured_counts_and_overheads_are_part_of_it():
    costs, estimates = costs_of(MeasuredTimes({(0, 2): (4e-5, 1e-5), (0, 4): (7e-5, 7e-5)}))
    assert costs.measured == {2, 4}
    assert costs.slots[2] == (4e-5, 1e-5)
    assert costs.slots[4] == (7e-5, 7e-5)
    assert [costs.overheads[n] for n in (2, 4)] == [0.0, 0.0]
    assert costs.overheads[3] == estimates.overheads[3] > 0


def test_what_was_not_is_scaled_as_its_op_type_was_off_else_its_kind():
    index = made((10_000, 10_000, 10_000, 20_000, 20_000))
    costs, estimates = costs_of(MeasuredTimes({(0, 2): (4e-5, 1e-5)}), index)
    whole = [estimates.overheads[2] + each for each in estimates.slots[2]]
    factors = [4e-5 / whole[0], 1e-5 / whole[1]]
    for other in (3, 1):  # of the same op type; of the same kind, elementwise
        expected = [
            each * factor for each, factor in zip(estimates.slots[other], factors, strict=True)
        ]
        assert costs.slots[other] == pytest.approx(expected)
    # Another measured op of its kind changes what is learnt of the kind, not of the op type.
    more, _ = costs_of(MeasuredTimes({(0, 2): (4e-5, 1e-5), (0, 4): (1.0, 1.0)}), index)
    assert more.slots[3] == costs.slots[3]
    assert more.slots[1] != costs.slots[1]


def test_what_is_part_of_a_product_takes_next_to_nothing():
    costs, _ = costs_of(MeasuredTimes({(0, 2): (4e-5, 1e-5)}, fused={(0, 3)}))
    assert costs.slots[3] == (PART, PART)
    assert costs.overheads[3] == 0.0
    assert costs.measured == {2}
    apart, _ = MeasuredTimes().told_apart(made(), costs, {3})
    assert apart.slots[3][0] > apart.slots[3][1] == PART


def test_casts_are_told_by_their_elements_and_others_scaled_by_them():
    index = made((1000, 2000, 2000, 3000, 3000))
    costs, estimates = costs_of(MeasuredTimes(casts={2000: 5e-5}), index)
    assert costs.casts[1, 0] == costs.casts[2, 0] == 5e-5
    factor = 5e-5 / estimates.casts[1, 0]
    assert costs.casts[3, 0] == pytest.approx(factor * estimates.casts[3, 0])
    free = estimates.casts | {(3, 0): 0.0}
    (costs,) = MeasuredTimes(casts={3000: 5e-5}).costs(
        [index], [type(estimates)(estimates.slots, free, estimates.overheads)]
    )
    assert costs.casts[3, 0] == 0.0  # what is kept in low precision takes no Cast


def test_gains_that_may_be_noise_count_for_what_is_low_otherwise():
    index = made()
    costs, _ = costs_of(MeasuredTimes({(0, n): (1.0, 1.0) for n in range(1, 5)}))
    low = {1, 2}
    apart, least_gain = MeasuredTimes().told_apart(index, costs, low)
    whole = scope_seconds(index, costs, low)
    margin = NOISE + NOTHING * whole
    assert apart.slots[1] == pytest.approx((1.0 + margin, 1.0))
    assert apart.slots[3] == pytest.approx((1.0, 1.0 + margin))
    assert apart.slots[0] == costs.slots[0] == (0.0, 0.0)
    assert apart.casts == costs.casts
    assert least_gain == pytest.approx(LEAST_GAIN * whole)


FAST, SLOW = (4e-3, 1e-3), (4e-3, 9e-3)  # in low precision


def placed(*measured, estimated=FAST, lists=()):
    """What is low of the second and the third node if they take so long in either dtype."""
    index, regions = made(), Regions({}, (), {}, (), (), frozenset())
    casts = dict.fromkeys(((n, 0) for n in range(4)), 1e-4)
    costs = [
        ScopeCosts([(0.0, 0.0), *each, (0.0, 0.0), (0.01, 0.01)], casts, [0.0] * 5)
        for each in ([estimated] * 2, measured)
    ]
    painting = Painting(dict.fromkeys(lists, Reason("allow", "")), {})
    return {*MeasuredTimes().place(index, regions, painting, frozenset({1, 2}), *costs).low}


def test_noise_leaves_what_the_estimates_decide_and_clear_gains_change_it():
    assert placed(FAST, (4.0e-3, 4.3e-3)) == {1, 2}
    assert placed(FAST, SLOW) == {1}
    assert placed(FAST, (4.3e-3, 4.0e-3), estimated=SLOW) == {1}
    assert placed(FAST, FAST, estimated=SLOW) == {1, 2}


def test_what_saves_next_to_nothing_over_the_lists_is_theirs():
    even = 4.1e-3, 4.0e-3
    assert placed(even, even) == set()
    assert placed(even, even, estimated=SLOW, lists={1, 2}) == {1, 2}
    assert placed(SLOW, SLOW, lists={1, 2}) == set()
