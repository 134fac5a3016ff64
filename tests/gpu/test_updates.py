"""The one-pass update against Keras's, and rounded weights against the CPU's."""

import pytest
import tensorflow as tf

from helpers.acceptance_updates import ROUNDED, RULES, difference, rounded_bits
from helpers.cases import first_of
from tfamp.training.rounding import joined, nearest, split

pytestmark = pytest.mark.gpu
# Momentum on an H100: 1.3e-6, by a sum of products that rounds once.
LIMIT = 2e-6
OPTIMIZERS = pytest.mark.parametrize("name", first_of(ROUNDED, pytest.mark.long))


@pytest.mark.parametrize("rule", RULES)
def test_update(device, check, rule):
    """Weights and slots after 100 steps are Keras's."""
    steps = device.size(100, 20)
    with tf.device(device.name):
        found = difference(rule, steps=steps, width=device.size(1024, 32))
    check(f"relative difference after {steps} steps", found, at_most=LIMIT)


@pytest.mark.long
def test_update_without_xla(device, check):
    """The same where XLA cannot compile because its files are missing."""
    device.needs_gpu("XLA's compiler for CPUs needs no files that could be missing")
    missing = {"PATH": "/nowhere", "CUDA_HOME": "/nowhere"}
    missing["XLA_FLAGS"] = "--xla_gpu_cuda_data_dir=/nowhere"
    found = device.helper("acceptance_updates", "100", "1024", **missing)
    for rule, each in found["differences"].items():
        check(f"relative difference, {rule}", each, at_most=LIMIT)
    if found["xla"]:
        check.leave_out("XLA is unusable", "XLA found its files elsewhere")
    else:
        check("XLA is unusable", True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("how", ["eager", "graph", "jit"])
def test_nearest(device, check, dtype, how):
    """Rounding to nearest has the bits of a CPU's, op by op, in a graph and compiled."""
    device.needs(dtype)

    def bits(value):
        return tf.bitcast(nearest(value, dtype), tf.uint16)

    functions = {
        "eager": bits,
        "graph": tf.function(bits, autograph=False),
        "jit": tf.function(bits, autograph=False, jit_compile=True),
    }
    with tf.device("CPU:0"):
        value = tf.random.stateless_normal((1024, 1024), (1, 2))
        expected = bits(value).numpy()
    with tf.device(device.name):
        found = functions[how](tf.identity(value)).numpy()
    check("share of other bits", float((found != expected).mean()), equals=0.0)


@pytest.mark.parametrize("how", ["eager", "graph", "jit"])
def test_split(device, check, how):
    """A float32 weight is split into two parts with a CPU's bits, stored in place and joined."""
    device.needs("bfloat16")
    value = tf.random.stateless_normal((1024, 1024), (1, 2))

    def both_bits(value):
        weight, rest = split(value)
        return tf.bitcast(weight, tf.uint16), tf.bitcast(rest, tf.uint16)

    with tf.device("CPU:0"):
        expected = [bits.numpy() for bits in both_bits(tf.identity(value))]
    with tf.device(device.name):
        weight, rest = (tf.Variable(part) for part in split(tf.zeros(value.shape)))

        def add():
            """Updates both parts from both, as an optimizer does."""
            for variable, part in zip(
                (weight, rest), split(joined(weight, rest) + value), strict=True
            ):
                variable.assign(part)

        options = {"autograph": False, "jit_compile": how == "jit"}
        wrap = (lambda f: f) if how == "eager" else (lambda f: tf.function(f, **options))
        found = wrap(both_bits)(tf.identity(value))
        wrap(add)()
        stored = both_bits(joined(weight, rest))
        back = joined(*split(tf.identity(value)))
    for part, bits, wanted in zip(("weight", "rest"), found, expected, strict=True):
        check(f"share of other bits, {part}", float((bits.numpy() != wanted).mean()), equals=0.0)
    for part, bits, wanted in zip(("weight", "rest"), stored, expected, strict=True):
        different = float((bits.numpy() != wanted).mean())
        check(f"share of other bits, stored {part}", different, equals=0.0)
    check("share of other values joined", float((back.numpy() != value.numpy()).mean()), equals=0.0)


@OPTIMIZERS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_stochastic_rounding(device, check, name, dtype):
    """Stochastically rounded weights have the CPU's bits, with and without jit."""
    device.needs(dtype)
    options = {"dtype": dtype, "weight_rounding": "stochastic"}
    expected = rounded_bits("CPU:0", name, jit=False, **options)
    for jit in (False, True):
        found = rounded_bits(device.name, name, jit=jit, **options)
        # SGD's arithmetic is exact here; the last bit of a root or a quotient may differ on a GPU.
        limit = 0 if name == "sgd" else 0.01
        check(f"share of other bits, jit {jit}", (found != expected).mean(), at_most=limit)


@OPTIMIZERS
def test_split_rounding(device, check, name):
    """Weights with weight_rounding="split" have the bits of those with float32 masters."""
    device.needs("bfloat16")
    for jit in (False, True):
        split, masters = (
            rounded_bits(device.name, name, dtype="bfloat16", jit=jit, **options)
            for options in ({"weight_rounding": "split"}, {"master_weights": True})
        )
        check(f"share of other bits, jit {jit}", (split != masters).mean(), equals=0.0)
