"""The loss-scale state machine against an independent reference written as plain Python."""

import math

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfamp import DynamicLossScale, FixedLossScale
from tfamp.core.loss_scale import LossScaleState, initial_state, next_state

SCALES = st.integers(-32, 32).map(lambda exponent: 2.0**exponent)


@st.composite
def dynamic_rules(draw):
    low, start, high = sorted(draw(st.tuples(SCALES, SCALES, SCALES)))
    return DynamicLossScale(
        initial_scale=start,
        growth_factor=draw(st.sampled_from([1.5, 2.0, 4.0, 1000.0])),
        backoff_factor=draw(st.sampled_from([0.5, 0.25, 0.75, 0.001])),
        growth_steps=draw(st.integers(1, 6)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
    )


class Reference:
    """The rule of the docs, kept apart from the implementation on purpose."""

    def __init__(self, rule):
        self.rule, self.scale = rule, rule.initial_scale
        self.run_of_good = self.run_of_bad = self.bad = 0

    def step(self, finite):
        if finite:
            self.run_of_bad = 0
            self.run_of_good += 1
            if self.run_of_good == self.rule.growth_steps:
                self.run_of_good = 0
                self.scale = min(self.scale * self.rule.growth_factor, self.rule.max_scale)
            return
        self.run_of_good = 0
        self.bad += 1
        self.run_of_bad += 1
        if self.run_of_bad > self.rule.hysteresis - 1:
            self.scale = max(self.scale * self.rule.backoff_factor, self.rule.min_scale)


def advance(rule, history, xp=np):
    state = initial_state(rule)
    for finite in history:
        state = next_state(rule, state, finite, xp)
    return state


@given(dynamic_rules(), st.lists(st.booleans(), max_size=60))
def test_dynamic_rule_equals_the_reference(rule, history):
    reference = Reference(rule)
    state = initial_state(rule)
    for finite in history:
        reference.step(finite)
        state = next_state(rule, state, finite, np)
        assert float(state.scale) == pytest.approx(reference.scale, rel=1e-12)
        assert int(state.good_steps) == reference.run_of_good
        assert int(state.skipped_steps) == reference.bad
        assert int(state.consecutive_skipped_steps) == reference.run_of_bad


def test_ten_thousand_steps_stop_at_the_bounds():
    assert float(advance(DynamicLossScale(growth_steps=1), [True] * 10_000).scale) == 2.0**32
    assert float(advance(DynamicLossScale(), [False] * 10_000).scale) == 2.0**-32


def test_a_scale_restored_from_elsewhere_is_brought_back_into_range():
    rule = DynamicLossScale(max_scale=2.0**20)
    broken = LossScaleState(math.inf, 0, 0, 0)
    assert float(next_state(rule, broken, True, np).scale) == 2.0**20
    beyond = LossScaleState(8.0, 500, 0, 0)  # The interval was longer.
    assert float(next_state(DynamicLossScale(growth_steps=100), beyond, True, np).scale) == 16.0


def test_fixed_scale_counts_skips_if_it_skips_and_never_changes():
    state = advance(FixedLossScale(128.0), [True, False, False])
    assert [float(each) for each in state[:1] + state[2:4]] == [128.0, 2.0, 2.0]
    rule = FixedLossScale(128.0, skip_nonfinite=False)
    assert advance(rule, [False, True, False]) == initial_state(rule)


# Histories of other systems that share the rule where their arguments say so: Keras 3's own tests
# expect 400 -> 25 after four overflows and 2 -> 32 after eight finite steps at an interval of two;
# torch's expects 128 * 2**3 * 0.5 for one skip in four.
@pytest.mark.parametrize(
    ("rule", "history", "scale"),
    [
        (DynamicLossScale(initial_scale=400.0), [False] * 4, 25.0),
        (DynamicLossScale(initial_scale=2.0, growth_steps=2), [True] * 8, 32.0),
        (DynamicLossScale(initial_scale=128.0, growth_steps=1), [True, False, True, True], 512.0),
    ],
)
def test_known_histories(rule, history, scale):
    assert float(advance(rule, history).scale) == scale


# Update rules of other systems, restated from their descriptions; nothing here is their code.


class MindSpore:
    """Backs off at once, never below 1; grows at every `window`-th step since the last overflow."""

    def __init__(self, scale, factor, window):
        self.scale, self.factor, self.window = scale, factor, window
        self.step_number, self.last_overflow = 1, 0

    def step(self, finite):
        if finite:
            if (self.step_number - self.last_overflow) % self.window == 0:
                self.scale *= self.factor
        else:
            self.scale = max(self.scale / self.factor, 1.0)
            self.last_overflow = self.step_number
        self.step_number += 1


class DeepSpeed:
    """Skips without backing off while shifts are left; a finite step brings them back."""

    def __init__(self, scale, factor, window, hysteresis, floor):
        self.scale, self.factor, self.window, self.floor = scale, factor, window, floor
        self.hysteresis, self.shifts_left = hysteresis, hysteresis
        self.step_number, self.last_overflow = 0, -1

    def step(self, finite):
        if finite:
            self.shifts_left = self.hysteresis
            if (self.step_number - self.last_overflow) % self.window == 0:
                self.scale *= self.factor
        else:
            if self.shifts_left == 1:
                self.scale = max(self.scale / self.factor, self.floor)
            else:
                self.shifts_left -= 1
            self.last_overflow = self.step_number
        self.step_number += 1


class Apex:
    """Counts a tracker down at each overflow and backs off from 0 on; a finite step refills it."""

    def __init__(self, scale, interval, hysteresis, ceiling):
        self.scale, self.interval, self.ceiling = scale, interval, ceiling
        self.hysteresis, self.tracker, self.good = hysteresis, hysteresis, 0

    def step(self, finite):
        if finite:
            self.tracker = self.hysteresis
            self.good += 1
            if self.good == self.interval:
                self.good, self.scale = 0, min(self.scale * 2, self.ceiling)
        else:
            self.good = 0
            self.tracker -= 1
            if self.tracker <= 0:
                self.scale /= 2


def assert_same_scales(reference, rule, history):
    state = initial_state(rule)
    for number, finite in enumerate(history):
        reference.step(finite)
        state = next_state(rule, state, finite, np)
        assert float(state.scale) == reference.scale, f"step {number} of {history}"


# 50 growths by 4 stay in float32's range, 50 halvings of 2**22 above the least scale.
HISTORIES = st.lists(st.booleans(), max_size=50)
FACTORS = st.sampled_from([2.0, 4.0])


@given(HISTORIES, st.integers(1, 5), FACTORS)
def test_mindspore_rule(history, window, factor):
    rule = DynamicLossScale(2.0**8, factor, 1 / factor, window, min_scale=1.0, max_scale=2.0**127)
    assert_same_scales(MindSpore(2.0**8, factor, window), rule, history)


@given(HISTORIES, st.integers(1, 5), st.integers(1, 4), FACTORS)
def test_deepspeed_rule(history, window, hysteresis, factor):
    rule = DynamicLossScale(
        2.0**8, factor, 1 / factor, window, hysteresis, min_scale=1.0, max_scale=2.0**127
    )
    assert_same_scales(DeepSpeed(2.0**8, factor, window, hysteresis, 1.0), rule, history)


@given(HISTORIES, st.integers(1, 5), st.integers(1, 4))
def test_apex_rule(history, interval, hysteresis):
    rule = DynamicLossScale(
        initial_scale=2.0**22, growth_steps=interval, hysteresis=hysteresis, max_scale=2.0**24
    )
    assert_same_scales(Apex(2.0**22, interval, hysteresis, 2.0**24), rule, history)


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=12))
def test_tensors_and_numbers_give_the_same(history):
    rule = DynamicLossScale(initial_scale=64.0, growth_steps=3, hysteresis=2)
    plain = advance(rule, history)
    start = initial_state(rule)
    tensors = LossScaleState(*map(keras.ops.convert_to_tensor, start))
    for finite in history:
        tensors = next_state(rule, tensors, keras.ops.convert_to_tensor(finite), keras.ops)
    assert [float(value) for value in tensors] == [float(value) for value in plain]
