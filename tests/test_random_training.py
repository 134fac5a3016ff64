"""Random training steps in plain TensorFlow: values and gradients as rounding alone leaves them.

Chains of constants too, which compilers merge. `python tests/test_random_training.py --hours 1`
runs as many as it can, counts the faults, of which a program that does not end is one, and fails
where there are any.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))

import tfamp
from helpers import constant_chains, training_programs
from helpers.cases import tiers
from helpers.constant_chains import Chain, Values
from helpers.limited import Child, NotDoneError, time_limit
from helpers.training_programs import Around, Program, noise

DTYPES = ("bfloat16", "float16")
WAYS = ("lists", "min_cut", "autocast")
# What becomes of a product autocast cannot know: see its guide.
_NEEDS_A_FUTURE = (
    *("angles", "branch", "called", "compiled", "fixed point", "indexes"),
    *("looked up", "solved"),
)
# Values are rounded in each iteration.
_HAS_LOOPS = {"decaying", "fixed point"}
# Seeds of programs of every kind that rounding alone does not change: those are compared.
SEEDS = tiers((15, 20), (1, 2, 3, 4, 5, 6, 11, 12, 14, 18, 22, 58, 117))
# Each seed that runs always found a fault, as most of the slow ones did.
CHAIN_SEEDS = tiers(
    [(seed, "float16") for seed in (1, 8, 11, 15)],
    [(seed, "float16") for seed in (0, 2, 4, 5, 6, 9, 27, 31, 34)],
    [(seed, dtype) for seed in range(40, 60) for dtype in DTYPES],
)
# Placements of the rewrite, which TensorFlow's optimizers then compile, XLA, and other ways.
CHAIN_WAYS = ("lists", "min_cut", "compiled", "autocast", "autocast compiled", "frozen")
# Seconds; the slowest programs take a tenth of it.
TIME_LIMIT = 180
# Each way rounds more often than once a step, and independently of the other roundings.
_TIMES, _LEAST_EPS = 4, 8
# Small gradients need a large scale, large ones one below 1.
_FIRST_SCALE, _LAST_SCALE = 2.0**40, 2.0**-40


class Result(NamedTuple):
    """A loss, its gradients as one vector, and the loss scale they were finite with."""

    loss: float
    gradients: np.ndarray
    scale: float

    @property
    def is_finite(self) -> bool:
        return bool(np.isfinite(self.loss) and np.isfinite(self.gradients).all())


def run(program: Program, way: str, dtype: str, rounded=tf.identity) -> Result:
    """Runs a step; with float16 as often as halving the loss scale helps."""
    variables = [tf.Variable(value) for value in program.weights()]
    x, y = map(tf.constant, program.data())
    context = functools.partial(tfamp.autocast, dtype) if way == "autocast" else nullcontext
    around = Around(context, rounded)

    def step(x, y, scale):
        return program.step(x, y, scale, variables, around)

    if way in ("float32", "autocast"):
        called = tf.function(step, autograph=False)
    else:
        called = tfamp.rewrite(step, dtype=dtype, placement=way, profile="builtin")
    scale = _FIRST_SCALE if dtype == "float16" and way != "float32" else 1.0
    while True:
        loss, gradients, finite = called(x, y, tf.constant(scale))
        if finite or scale <= _LAST_SCALE or way == "float32" or dtype == "bfloat16":
            flat = np.concatenate([np.ravel(np.float64(g)) for g in gradients])
            return Result(float(loss), flat, scale)
        scale /= 2


def differences(found: Result, exact: Result) -> tuple[float, float]:
    """The relative errors of the loss and of the gradients."""
    size = np.linalg.norm(exact.gradients) or 1.0
    of_loss = abs(found.loss - exact.loss) / (abs(exact.loss) or 1.0)
    return of_loss, float(np.linalg.norm(found.gradients - exact.gradients) / size)


def rounding_alone(program: Program, exact: Result, eps: float, seeds: range) -> np.ndarray:
    """The largest errors of the loss and of the gradients if each value is rounded at random."""
    runs = (run(program, "float32", "float32", noise(eps, seed)) for seed in seeds)
    return np.max([differences(each, exact) for each in runs], 0)


class Comparison(NamedTuple):
    """Texts of the faults of a program, and how many runs were compared with float32."""

    faults: list[str]
    compared: int


def compare(program: Program, ways=WAYS, dtypes=DTYPES) -> Comparison:
    """Runs a program in each way, but where rounding alone changes all of it."""
    try:
        exact = run(program, "float32", "float32")
    except tf.errors.InvalidArgumentError:  # A CPU has no kernel for some dilations.
        return Comparison([], 0)
    # No loss scale brings larger gradients, and what leads to them, into float16's range.
    if not exact.is_finite or np.abs(exact.gradients).max() > 1e8:
        return Comparison([], 0)
    found, compared = [], 0
    for dtype in dtypes:
        if dtype == "float16" and program.multiplies_large_targets:
            continue
        eps = float(ml_dtypes.finfo(dtype).eps)
        least = _LEAST_EPS * eps * (2 if _HAS_LOOPS & {kind for kind, *_ in program.steps} else 1)
        by_rounding = rounding_alone(program, exact, eps, range(3))
        if not by_rounding.max() < 0.03:
            continue  # Rounding alone changes all of it.
        for way in ways:
            if way == "autocast" and any(kind in _NEEDS_A_FUTURE for kind, *_ in program.steps):
                continue
            result = run(program, way, dtype)
            compared += 1
            if not result.is_finite:
                found.append(f"{way}, {dtype}: not finite down to a loss scale of {result.scale}")
                continue
            errors = differences(result, exact)
            if np.any(errors > _TIMES * by_rounding + least):
                # One value beside a singular place changes it in a third of the roundings.
                by_rounding = rounding_alone(program, exact, eps, range(16))
            for name, error, rounding in zip(
                ("loss", "gradients"), errors, by_rounding, strict=True
            ):
                if error > (allowed := _TIMES * rounding + least):
                    found.append(f"{way}, {dtype}: {name} {error:.3%} off, allowed {allowed:.3%}")
    return Comparison(found, compared)


def program_of(seed: int) -> Program:
    return training_programs.draw(random.Random(seed))


@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_training_steps_are_as_exact_as_rounding_allows(seed):
    program = program_of(seed)
    found = compare(program)
    assert found.compared
    assert not found.faults, program


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@settings(
    max_examples=700,  # about an hour
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(source=st.randoms(use_true_random=False))
def test_random_training_steps_for_an_hour(source):
    program = training_programs.draw(source)
    assert not compare(program).faults, program


# ---- Chains of constants -------------------------------------------------------------------------


def run_chain(chain: Chain, way: str, dtype: str, call: Callable) -> list[np.ndarray]:
    """The results of a method of a chain, compiled in one of `CHAIN_WAYS`."""
    weights = [tf.Variable(weight) for weight in chain.weights()]
    x = tf.constant(chain.data())
    jit = True if way.endswith("compiled") else None

    def written(x):
        results = call(x, weights)
        return {str(number): result for number, result in enumerate(results)}

    def autocast(x):
        with tfamp.autocast(dtype):
            return {key: tf.cast(result, tf.float32) for key, result in written(x).items()}

    if way == "frozen":
        found = _frozen(written, weights, x, dtype)
    elif way.startswith("autocast"):
        found = tf.function(autocast, autograph=False, jit_compile=jit)(x)
    else:
        function = tf.function(written, autograph=False, jit_compile=jit)
        placement = "lists" if jit else way
        found = tfamp.rewrite(function, dtype=dtype, placement=placement, profile="builtin")(x)
    return [np.ravel(np.float64(found[key])) for key in sorted(found)]


def _frozen(written: Callable, weights: list[tf.Variable], x: tf.Tensor, dtype: str) -> dict:
    module = tf.Module()
    module.weights = weights
    module.call = tf.function(written, [tf.TensorSpec(x.shape, name="x")], autograph=False)
    with tempfile.TemporaryDirectory() as folder:
        source, target = f"{folder}/source", f"{folder}/target"
        tf.saved_model.save(module, source, signatures=module.call)
        tfamp.rewrite_saved_model(source, target, dtype=dtype, freeze=True)
        return tf.saved_model.load(target).signatures["serving_default"](x=x)


def _error(found: np.ndarray, exact: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):
        return float(np.linalg.norm(found - exact) / (np.linalg.norm(exact) or 1.0))


def _rounding_of(chain: Chain, dtype: str, exact: Values, seeds) -> Values:
    """The largest errors that rounding op by op makes."""
    runs = [constant_chains.op_by_op(chain, dtype, seed) for seed in seeds]
    return Values(*np.max([list(map(_error, run, exact)) for run in runs], 0))


def compare_chain(chain: Chain, ways=CHAIN_WAYS, dtypes=DTYPES) -> Comparison:
    """Compiles a chain in each way; its gradient only where that is in range op by op."""
    exact = constant_chains.exact(chain)
    found, compared = [], 0
    for dtype in dtypes:
        least = _LEAST_EPS * float(ml_dtypes.finfo(dtype).eps)
        by_op = _rounding_of(chain, dtype, exact, [None])
        if not by_op.output < 0.03:
            continue
        # Values that a gradient needs are not merged, so the output is computed without it too.
        calls = [lambda x, weights: [chain.output(x, weights)]]
        calls += [chain.run] if by_op.slope < 0.03 else []
        for way, call in itertools.product(ways, calls):
            errors = list(map(_error, run_chain(chain, way, dtype, call), exact))
            compared += 1
            if any(error > _TIMES * one + least for error, one in zip(errors, by_op, strict=False)):
                # One value beside a singular place, such as a root of nearly 0, may change it.
                by_op = Values(*map(max, by_op, _rounding_of(chain, dtype, exact, range(16))))
            for name, error, rounding in zip(Values._fields, errors, by_op, strict=False):
                if not error <= (allowed := _TIMES * rounding + least):
                    name += " beside its slope" * (name == "output" and len(errors) == 2)
                    found.append(f"{way}, {dtype}: {name} {error:.3%} off, allowed {allowed:.3%}")
    return Comparison(found, compared)


def chain_of(seed: int) -> Chain:
    return constant_chains.draw(random.Random(seed))


@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@pytest.mark.parametrize("name", constant_chains.KNOWN)
def test_known_chains_are_as_exact_as_op_by_op(name):
    with time_limit(TIME_LIMIT):
        found = compare_chain(constant_chains.KNOWN[name], dtypes=["float16"])
    assert found.compared
    assert not found.faults


@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@pytest.mark.parametrize(("seed", "dtype"), CHAIN_SEEDS)
def test_random_chains_are_as_exact_as_op_by_op(seed, dtype):
    chain = chain_of(seed)
    with time_limit(TIME_LIMIT):
        found = compare_chain(chain, dtypes=[dtype])
    assert found.compared
    assert not found.faults, chain


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::tfamp.TfampWarning")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=st.randoms(use_true_random=False))
def test_random_chains_for_long(source):
    chain = constant_chains.draw(source)
    with time_limit(TIME_LIMIT):
        assert not compare_chain(chain).faults, chain


# ---- For hours -----------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """Texts of the faults of a seed's programs, whether any was compared, and their steps."""

    faults: list[str]
    compared: bool
    kinds: list[str]


def outcome(seed: int) -> Outcome:
    """Compares a training step and a chain of constants."""
    texts, compared, program, chain = [], 0, program_of(seed), chain_of(seed)
    for made, compared_by in ((program, compare), (chain, compare_chain)):
        try:
            found = compared_by(made)
            compared += found.compared
            texts += [f"{text}; {made}" for text in found.faults]
        except Exception as error:  # noqa: BLE001 - one that fails is a fault like others
            texts.append(f"{type(error).__name__}: {error!s:.300}; {made}")
    tf.keras.backend.clear_session()
    steps = [*program.steps, *(step for part in chain.parts for step in part)]
    return Outcome(texts, bool(compared), [kind for kind, *_ in steps])


def search(seconds: float, first: int) -> list[str]:
    """Runs programs of increasing seeds for some time; prints faults and statistics."""
    end, kinds, found, compared = time.monotonic() + seconds, Counter(), [], 0
    seed = first
    with Child(outcome, TIME_LIMIT) as child:
        while time.monotonic() < end:
            try:
                result = child.ask(seed)
            except NotDoneError as error:
                result = Outcome([f"{error}; {program_of(seed)}; {chain_of(seed)}"], False, [])
            for text in result.faults:
                print(f"seed {seed}: {text}", flush=True)
            found += result.faults
            compared += result.compared
            kinds.update(result.kinds)
            seed += 1
    counts = f"{seed - first} seeds, {compared} of them compared, {len(found)} faults"
    print(f"{counts}; steps: {dict(kinds)}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    options = parser.parse_args()
    sys.exit(bool(search(3600 * options.hours, options.first)))
