"""Node by node, the painting is that of TensorFlow's own pass with its lists."""

import functools
import random

import pytest

from helpers import graph_dsl, graph_models, grappler
from tfamp.graph import rewrite
from tfamp.graph.op_lists import OpLists

# These tests are about what the lists decide.
rewrite_graph_def = functools.partial(rewrite.rewrite_graph_def, placement="lists")

MODEL_CASES = [f"{name} {kind}" for name in graph_models.MODELS for kind in ("forward", "step")]
RANDOM_CASES = [f"random {seed}" for seed in range(60)]
CASES = [*graph_dsl.TABLE, *MODEL_CASES, *RANDOM_CASES]


def model_case(case):
    name, kind = case.split()
    function = graph_models.concrete(name, train=kind == "step")
    graph_def = function.graph.as_graph_def()
    fetches = [each.name for each in function.outputs]
    fetches += [node.name for node in graph_def.node if node.op == "AssignSubVariableOp"]
    feeds = [each.name for each in function.inputs]
    # Functions inlined and loops in the form of TensorFlow 1, as mixed precision finds them.
    return grappler.optimized(graph_def, fetches, feeds, "function"), fetches, feeds


def dsl_case(case):
    made = random_graph(case) if case in RANDOM_CASES else graph_dsl.graph(case)
    return made.graph_def, made.fetches, made.feeds


def random_graph(case):
    """A DAG of up to 25 nodes of all colours, at least one of them allowed."""
    choose = random.Random(case)
    inputs = {"x": [], "a": ["x"]}
    for position in range(choose.randint(1, 24)):
        names = list(inputs)
        sources = [choose.choice(names) for _ in range(choose.randint(1, 2))]
        inputs[f"{choose.choice('aaiiiddcccn')}{position}"] = sources
    return graph_dsl.from_inputs(inputs)


@pytest.fixture(scope="module")
def cases():
    return {case: (model_case if case in MODEL_CASES else dsl_case)(case) for case in CASES}


@pytest.fixture(scope="module")
def references(cases):
    return {
        dtype: dict(
            zip(cases, grappler.painted_by_grappler(list(cases.values()), dtype), strict=True)
        )
        for dtype in grappler.PASSES
    }


def dtypes(graph_def):
    """Type attributes of every node but Casts, in plain values."""
    return {
        node.name: {
            name: value.type or tuple(value.list.type)
            for name, value in node.attr.items()
            if not name.startswith("_") and (value.type or value.list.type)
        }
        for node in graph_def.node
        if node.op != "Cast"
    }


@pytest.mark.parametrize("dtype", grappler.PASSES)
@pytest.mark.parametrize("case", CASES)
def test_same_dtypes_and_no_more_casts(case, dtype, cases, references):
    graph_def, fetches, feeds = cases[case]
    result = rewrite_graph_def(
        graph_def, fetches, feeds=feeds, dtype=dtype, op_lists=OpLists.grappler(dtype), device="cpu"
    )
    expected = references[dtype][case]
    assert result.plan.summary.low_nodes
    assert dtypes(result.graph_def) == dtypes(expected)
    assert graph_dsl.casts(result.graph_def) <= graph_dsl.casts(expected)
