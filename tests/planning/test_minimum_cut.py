"""Minimum cuts: the least one, the smallest of these, and numbers that do not fit 32 bits."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfamp.planning.placement import minimum_cut

VERTICES = 7
CAPACITIES = st.one_of(st.integers(0, 9).map(float), st.just(math.inf))


@st.composite
def networks(draw):
    pairs = st.tuples(st.integers(0, VERTICES - 1), st.integers(0, VERTICES - 1))
    return [(*pair, draw(CAPACITIES)) for pair in draw(st.lists(pairs, max_size=16))]


def capacity(edges, side):
    return sum(value for tail, head, value in edges if tail in side and head not in side)


def least_sides(edges):
    """All source sides of least capacity, by trying every one."""
    others = range(2, VERTICES)
    sides = [
        frozenset((0, *chosen))
        for count in range(VERTICES - 1)
        for chosen in itertools.combinations(others, count)
    ]
    least = min(capacity(edges, side) for side in sides)
    return least, [side for side in sides if capacity(edges, side) == least]


@settings(max_examples=150)
@given(networks())
def test_it_is_the_smallest_of_the_least_cuts(edges):
    least, sides = least_sides(edges)
    if math.isinf(least):
        with pytest.raises(ValueError, match="Every cut"):
            minimum_cut(edges, 0, 1)
        return
    assert minimum_cut(edges, 0, 1) == frozenset.intersection(*sides)


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**45])
def test_capacities_of_any_size_keep_their_ratios(scale):
    edges = [(0, 2, 3 * scale), (2, 3, 2 * scale), (3, 1, 2.5 * scale), (2, 1, 0.25 * scale)]
    assert minimum_cut(edges, 0, 1) == {0, 2}
    many = [*edges, *((0, vertex, 1e6 * scale) for vertex in range(4, 2000))]
    assert {0, 2} < minimum_cut(many, 0, 1)
    assert 3 not in minimum_cut(many, 0, 1)


def test_infinite_edges_both_ways_keep_two_vertices_together():
    edges = [(2, 3, math.inf), (3, 2, math.inf), (0, 2, 5.0), (3, 1, 4.0)]
    assert minimum_cut(edges, 0, 1) == {0, 2, 3}
    assert minimum_cut([*edges, (2, 1, 2.0)], 0, 1) == {0}
