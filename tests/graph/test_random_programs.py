"""Random programs: loops, conditionals, calls, TensorLists, variables and casts, rewritten."""

import functools
import hashlib
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfamp
from helpers import graph_models, random_programs
from helpers.graph_asserts import graph_op_dtypes
from helpers.tolerances import tolerance
from tfamp import OpLists
from tfamp.graph import rewrite_graph_def
from tfamp.graph.graph import Graph

DTYPES = st.sampled_from(["float16", "bfloat16"])
# Each value is a sum of few products and goes through few steps; see `random_programs`.
DEPTH = 16
# A gradient goes back through all of that once more.
GRADIENT_DEPTH = 64


@st.composite
def programs(draw):
    # A source of random numbers that hypothesis shrinks.
    source = draw(st.randoms(use_true_random=False))
    return random_programs.Program(random_programs.draw(source))


def few_and_many(few, many):
    """Runs a property a few times, and many times under `-m nightly`."""

    def decorate(function):
        def run(count):
            unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large]
            wrapped = settings(
                max_examples=count, suppress_health_check=unhurried, derandomize=count == few
            )
            return wrapped(given(program=programs(), dtype=DTYPES)(function))

        cases = [few, pytest.param(many, marks=pytest.mark.nightly)]

        @pytest.mark.parametrize("examples", cases)
        @functools.wraps(function, assigned=("__doc__", "__name__", "__module__"), updated=())
        def test(examples):
            run(examples)()

        del test.__wrapped__
        return test

    return decorate


def rewritten(function, dtype, graph_def=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfamp.NothingConvertedWarning)
        return rewrite_graph_def(
            function.graph.as_graph_def() if graph_def is None else graph_def,
            [each.name for each in function.outputs],
            feeds=[each.name for each in function.inputs],
            dtype=dtype,
            device="cpu",
        )


def all_nodes(graph_def):
    nodes = {("", node.name): node for node in graph_def.node}
    for function in graph_def.library.function:
        nodes |= {(function.signature.name, node.name): node for node in function.node_def}
    return nodes


def signatures(graph_def):
    """Arguments and results by name; what a loop carries may change its dtype."""
    return {
        function.signature.name: tuple(
            [each.name for each in arguments]
            for arguments in (function.signature.input_arg, function.signature.output_arg)
        )
        for function in graph_def.library.function
    }


@few_and_many(12, 1000)
def test_random_programs_stay_valid_run_and_keep_what_they_must(program, dtype):
    function = program.concrete()
    before = function.graph.as_graph_def()
    result = rewritten(function, dtype)

    # Names, signatures and control inputs stay, except of inlined calls.
    inlined = Graph(before, [each.name for each in function.outputs]).inline_calls().graph_def
    old, new = all_nodes(inlined), all_nodes(result.graph_def)
    assert old.keys() <= new.keys()
    assert {new[key].op for key in new.keys() - old.keys()} <= {"Cast"}
    calls = {"PartitionedCall", "StatefulPartitionedCall", "NoOp"}
    assert all(
        name in {n.name for n in result.graph_def.node}
        for name in (node.name for node in before.node if node.op not in calls)
    )
    for key, node in old.items():
        assert [n for n in new[key].input if n[0] == "^"] == [n for n in node.input if n[0] == "^"]
    assert signatures(result.graph_def) == signatures(inlined)

    # The lists are obeyed, in functions also.
    lists, found = OpLists.default(dtype, "cpu"), graph_op_dtypes(result.graph_def)
    for op in lists.deny & found.keys():
        assert dtype not in found[op], op
    # But for products that a rule about values keeps: of angles, of activations before results.
    products = [node for node in result.plan.nodes if node.op == "MatMul"]
    rules = {node.reason.rule for node in products if node.dtype != dtype}
    assert rules <= {"angle", "result"}
    assert graph_op_dtypes(before).get("MatMul", {"float32"}) == {"float32"}

    again = rewritten(function, dtype, result.graph_def)
    assert again.graph_def == result.graph_def
    assert again.plan.casts == ()

    # TensorFlow compares both ends of every edge, those in functions when it runs them.
    runnable = graph_models.runnable(function, result.graph_def)
    program.reset()
    actual = [*runnable(program.example), *(v.numpy() for v in program.variables)]
    program.reset()
    expected = [*function(program.example), *(v.numpy() for v in program.variables)]
    for value, wanted in zip(actual, expected, strict=True):
        assert value.dtype == wanted.dtype
        np.testing.assert_allclose(value, wanted, rtol=0, atol=tolerance(dtype, depth=DEPTH))


def gradients(function, program):
    program.reset()
    sources = [program.example, *program.variables]
    with tf.GradientTape() as tape:
        tape.watch(program.example)
        result, mean = function(program.example)
        # Large enough for float16's gradients, as a loss scale makes them.
        weights = tf.reshape(tf.range(-32.0, 32.0, 4.0), (4, 4))
        loss = tf.reduce_sum(result * weights) + tf.cast(64 * mean, tf.float32)
    return tape.gradient(loss, sources)


@pytest.mark.slow
@few_and_many(6, 200)
def test_gradients_of_random_programs_are_close_to_float32s(program, dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tfamp.NothingConvertedWarning)
        fast = tfamp.rewrite(program.__call__, dtype=dtype)
        actual = gradients(fast, program)
    expected = gradients(tf.function(program.__call__, autograph=False), program)
    if "matmul" in program.ops:
        products = [node for node in fast.plan(program.example).nodes if node.op == "MatMul"]
        rules = {node.reason.rule for node in products if node.dtype != dtype}
        assert rules <= {"angle", "result"}
    for gradient, wanted in zip(actual, expected, strict=True):
        assert (gradient is None) == (wanted is None)
        if wanted is not None:
            assert gradient.dtype == tf.float32
            allowed = tolerance(dtype, depth=GRADIENT_DEPTH) * np.abs(wanted).max()
            np.testing.assert_allclose(gradient, wanted, rtol=0, atol=max(allowed, 1e-6))


_HASHED = """
import hashlib, random, warnings
from helpers import loops, random_programs
from tfamp import NothingConvertedWarning
from tfamp.graph import rewrite_graph_def
from tfamp.core.profile import builtin_profile
warnings.simplefilter("ignore", NothingConvertedWarning)
digest = hashlib.sha256()

def add(result):
    digest.update(result.graph_def.SerializeToString(deterministic=True))
    digest.update(result.plan.to_json().encode())

for placement in ("lists", "min_cut"):
    result = rewrite_graph_def(
        loops.nested_functions().graph.as_graph_def(),
        ["Identity:0"],
        placement=placement,
        device="cpu",
        profile=builtin_profile("cpu", float16=True),
    )
    assert result.plan.summary.low_nodes
    add(result)
for seed in range(5):
    program = random_programs.Program(random_programs.draw(random.Random(seed)))
    function = program.concrete()
    for dtype in ("float16", "bfloat16"):
        add(
            rewrite_graph_def(
                function.graph.as_graph_def(),
                [each.name for each in function.outputs],
                dtype=dtype,
                device="cpu",
            )
        )
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_loops_and_random_programs_have_the_same_plan_under_any_hash_seed():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # Functions' names count up within a process: each of the two starts at 1.
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _HASHED],
            env={**environment, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    digests = {output[-1] for output in outputs}
    assert len(digests) == 1
    assert len(digests.pop()) == hashlib.sha256().digest_size * 2


def test_an_inlined_calls_side_effects_are_waited_for_in_a_fixed_order():
    variables = [tf.Variable(0.0) for _ in range(8)]
    inner = tf.function(lambda x: [variable.assign(x) for variable in variables][0])
    outer = tf.function(lambda x: inner(x) + inner(x))
    graph_def = outer.get_concrete_function(tf.TensorSpec(())).graph.as_graph_def()
    waits = [
        [name for name in node.input if name.startswith("^")]
        for node in Graph(graph_def).inline_calls().main.nodes
        if node.name == "StatefulPartitionedCall"
    ]
    assert waits == [sorted(waits[0])]
    assert len(waits[0]) > len(variables)  # And the last one that is read.
