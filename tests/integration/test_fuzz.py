"""Damaged graphs and files, and random ops under autocast: a clear error or a valid result.

A short slice each; `-m nightly` goes on for half an hour in all.
"""

import contextlib
import functools
import random
import time
import traceback
import warnings
from pathlib import Path

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfamp
from helpers import mutations, random_programs
from tfamp.graph import rewrite_graph_def
from tfamp.interop import tf_private

PACKAGE = str(Path(tfamp.__file__).parent)
# Seconds one damaged input may take; sound ones take a hundredth of it.
BOUND = 60
CLEAR = (tfamp.RewriteError, tfamp.SavedModelError, ValueError, TypeError)
RANDOMS = st.randoms(use_true_random=False)


def short_and_long(short, long):
    """Runs a property of a source of random numbers a few times, and many under `-m nightly`."""

    def decorate(function):
        @pytest.mark.parametrize("examples", [short, pytest.param(long, marks=pytest.mark.nightly)])
        @functools.wraps(function, assigned=("__doc__", "__name__", "__module__"), updated=())
        def test(examples, tmp_path_factory):
            unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large]
            options = {"suppress_health_check": unhurried, "derandomize": examples == short}
            run = functools.partial(function, tmp_path_factory)
            settings(max_examples=examples, **options)(given(RANDOMS)(lambda source: run(source)))()

        del test.__wrapped__
        return test

    return decorate


def result_or_clear_error(call):
    """Returns the result of a call, or None after an error that tfamp raised on purpose."""
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tfamp.TfampWarning)
            return call()
    except CLEAR as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        assert where.filename.startswith(PACKAGE), "not an error of somebody else's"
        assert where.line.startswith("raise"), where
        return None
    finally:
        assert time.monotonic() - began < BOUND


@functools.cache
def programs():
    found = []
    for seed in range(8):
        program = random_programs.Program(random_programs.draw(random.Random(seed)))
        traced = program.concrete()
        outputs = [each.name for each in traced.outputs]
        found.append((traced.graph.as_graph_def(add_shapes=True), outputs))
    return found


def damaged_graph(source):
    graph, outputs = source.choice(programs())
    damaged = tf.compat.v1.GraphDef()
    if source.randrange(3):
        damaged.CopyFrom(graph)
        mutations.damage_graph(source, damaged)
    else:
        with contextlib.suppress(tf_private.message_error()):
            damaged.ParseFromString(mutations.damage_bytes(source, graph.SerializeToString()))
    return damaged, outputs


@short_and_long(150, 30_000)
def test_damaged_graphs(folders, source):
    graph, outputs = damaged_graph(source)
    before = graph.SerializeToString(deterministic=True)
    dtype, placement = source.choice(["float16", "bfloat16"]), source.choice(["lists", "min_cut"])
    result = result_or_clear_error(
        lambda: rewrite_graph_def(graph, outputs, dtype=dtype, device="cpu", placement=placement)
    )
    assert graph.SerializeToString(deterministic=True) == before
    if result is not None:
        # The rewrite reads its own output, so that every edge of it agrees.
        again = result_or_clear_error(
            lambda: rewrite_graph_def(result.graph_def, outputs, dtype=dtype, device="cpu")
        )
        assert again is not None


# ---- Autocast ------------------------------------------------------------------------------------

# Op -> what it does, the dtype it must have inside autocast: low, float32, or the inputs' widest.
OPS = {
    "matmul": (lambda a, b: tf.matmul(a, b), "low"),
    "einsum": (lambda a, b: tf.einsum("ij,jk->ik", a, b), "low"),
    "tensordot": (lambda a, b: tf.tensordot(a, b, 1), "low"),
    "exp": (lambda a, _: tf.exp(tf.clip_by_value(a, -1.0, 1.0)), "float32"),
    "softmax": (lambda a, _: tf.nn.softmax(a), "float32"),
    "log1p": (lambda a, _: tf.math.log1p(tf.abs(a)), "float32"),
    "cumsum": (lambda a, _: tf.cumsum(a) * 0.25, "float32"),
    "add": (lambda a, b: (a + b) * 0.5, "widest"),
    "concat": (lambda a, b: tf.concat([a[:2], b[2:]], 0), "widest"),
    "where": (lambda a, b: tf.where(a > 0, a, b), "widest"),
    "relu": (lambda a, _: tf.nn.relu(a), "given"),
    "tanh": (lambda a, _: tf.tanh(a), "given"),
    "reshape": (lambda a, _: tf.reshape(a, (4, 4)), "given"),
}


def expected_dtype(rule, a, b, low):
    if rule == "low":
        return low
    if rule == "widest":
        return "float32" if "float32" in (a.dtype.name, b.dtype.name) else low
    return "float32" if rule == "float32" else a.dtype.name


@short_and_long(8, 3_000)
def test_random_ops_under_autocast_follow_the_lists(folders, source):
    low = source.choice(["float16", "bfloat16"])
    steps = [
        (source.choice(sorted(OPS)), source.randrange(n + 2), source.randrange(n + 2))
        for n in range(source.randint(1, 10))
    ]
    x, weight = tf.constant([[0.3, -0.2, 0.1, 0.4]] * 4), tf.Variable(tf.eye(4) * 0.5)

    def run():
        values = [x, tf.identity(weight)]
        with tfamp.autocast(low):
            for name, i, j in steps:
                operation, rule = OPS[name]
                wanted = expected_dtype(rule, values[i], values[j], low)
                values.append(operation(values[i], values[j]))
                assert values[-1].dtype.name == wanted, (name, values[-1].dtype)
        return tf.add_n([tf.reduce_sum(tf.cast(each, tf.float32)) for each in values])

    for function in (run, tf.function(run)):
        with tf.GradientTape() as tape:
            total = function()
        gradient = tape.gradient(total, weight)
        assert gradient is not None
        assert gradient.dtype == tf.float32
        assert bool(tf.reduce_all(tf.math.is_finite(gradient)))
        assert tf.matmul(x, x).dtype == tf.float32, "autocast leaked"
