"""The minimum cut is the optimum of all placements, and never dearer than the lists."""

import dataclasses
import itertools
import math
import warnings

import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers import graph_dsl, graph_models, loops
from tfamp import NothingConvertedWarning, OpLists
from tfamp.core.profile import KINDS, builtin_profile
from tfamp.graph import MachineProfile, rewrite_graph_def
from tfamp.graph.index import build_indexes
from tfamp.planning import structures
from tfamp.planning.coloring import ColoredScope, find_regions, paint, safe_slots
from tfamp.planning.cost import ScopeCosts, estimate, scope_seconds
from tfamp.planning.options import GraphUse, RewriteOptions, choose_nodes
from tfamp.planning.placement import place

UNIT = 2.0**-20  # of times: sums of these are exact
BUILT_IN = builtin_profile("cpu", bfloat16=True, float16=False)
# Kinds decide what becomes of these graphs.
NATIVE = dataclasses.replace(BUILT_IN, least_gain=0.0, ops={})

# Graphs of integers, without TensorFlow


def make_index(ops, edges):
    """A scope with a node of one slot for each op; a Cast has two slots, its ends."""
    nodes, slots, ins, outs = [], [], [], []
    for position, op in enumerate(ops):
        attrs = ("SrcT", "DstT") if op == "Cast" else ("T",)
        first = len(slots)
        slots += [structures.TypeSlot(position, attr, None, "float32", True) for attr in attrs]
        own = tuple(range(first, len(slots)))
        nodes.append(structures.IndexedNode(f"n{position}", op, "", (), False, own))
        ins.append(own[0])
        outs.append(own[-1])
    made = []
    for source, port, target in edges:
        number = sum(edge.target == ins[target] for edge in made)
        made.append(structures.Edge(outs[source], ins[target], port, number, f"n{source}:{port}"))
    return structures.GraphIndex("", tuple(nodes), tuple(slots), tuple(made))


@st.composite
def problems(draw, most=8):
    """A DAG with Casts, several ports, groups, forced and unsafe slots, and random times."""
    count = draw(st.integers(2, most))
    ops = [draw(st.sampled_from(["Add"] * 5 + ["Cast"])) for _ in range(count)]
    edges = []
    for target in range(1, count):
        for _ in range(1 if ops[target] == "Cast" else draw(st.integers(1, 3))):
            source = draw(st.integers(0, target - 1))
            edges.append((source, draw(st.integers(0, 1)), target))
    index = make_index(ops, edges)
    plain = [slot for slot in range(len(index.slots)) if index.node_of(slot).op != "Cast"]
    safe = [slot for slot in plain if draw(st.integers(0, 5))]
    grouped = draw(st.lists(st.sampled_from(safe), max_size=3, unique=True)) if safe else []
    looped = [slot for slot in safe if slot not in grouped][:2] if draw(st.booleans()) else []
    regions = structures.Regions(
        fixed={},
        lists=(tuple(grouped),) if grouped else (),
        unsafe={},
        loops=(tuple(looped),) if len(looped) == 2 else (),
    )
    forced = {slot for slot in safe if not draw(st.integers(0, 9))}
    for group in (*regions.lists, *regions.loops):
        forced |= set(group) if forced.intersection(group) else set()
    painting = structures.Painting(
        {slot: structures.Reason("force_low", "") for slot in sorted(forced)}, {}
    )
    times = st.integers(0, 12).map(UNIT.__mul__)
    costs = ScopeCosts(
        tuple(draw(st.tuples(times, times)) for _ in index.slots),
        {(i, port): draw(times) for i in range(count) for port in (0, 1)},
        (0.0,) * count,
    )
    return index, regions, painting, frozenset(safe), costs


def seconds(index, costs, low):
    """Seconds of a placement, counted plainly: slots, and one Cast for each mixed tensor."""
    total = math.fsum(pair[slot in low] for slot, pair in enumerate(costs.slots))
    mixed = {
        (index.slots[e.source].node, e.port)
        for e in index.edges
        if (e.source in low) != (e.target in low)
    }
    return total + math.fsum(costs.casts[tensor] for tensor in mixed)


def allowed(index, regions, painting, low):
    groups = [*regions.lists, *regions.loops]
    for slot in low:
        if index.node_of(slot).op == "Cast":
            made = index.slots[slot].attr == "DstT"
            joined = (index.fanout if made else index.fanin)[slot]
            casts = {other for other in joined if index.node_of(other).op == "Cast"}
            if not joined or casts or not low.issuperset(joined):
                return False
    return low.issuperset(painting.low) and all(
        len(low.intersection(group)) in (0, len(group)) for group in groups
    )


def all_placements(problem):
    index, regions, painting, safe, _ = problem
    casts = [s for s in range(len(index.slots)) if index.node_of(s).op == "Cast"]
    free = [*sorted(safe), *casts]
    for count in range(len(free) + 1):
        for chosen in itertools.combinations(free, count):
            if allowed(index, regions, painting, low := frozenset(chosen)):
                yield low


def assert_optimal(problem):
    index, regions, painting, _, costs = problem
    low = frozenset(place(*problem).low)
    assert allowed(index, regions, painting, low)
    assert scope_seconds(index, costs, low) == pytest.approx(seconds(index, costs, low))
    ranked = [(seconds(index, costs, each), len(each)) for each in all_placements(problem)]
    assert (seconds(index, costs, low), len(low)) == min(ranked)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_it_is_the_best_of_all_placements(problem):
    assert_optimal(problem)


def test_consumers_share_one_cast():
    # n0 is float32; each of the three behind it gains 2, which one Cast of 5 is worth.
    index = make_index(["Placeholder", "Add", "Add", "Add"], [(0, 0, 1), (0, 0, 2), (0, 0, 3)])
    regions = structures.Regions({}, (), {}, ())
    slots = ((0.0, 0.0), *[(4 * UNIT, 2 * UNIT)] * 3)
    casts = {(0, 0): 5 * UNIT}
    costs = ScopeCosts(slots, casts, (0.0,) * 4)
    safe = frozenset({1, 2, 3})
    assert set(place(index, regions, structures.Painting({}, {}), safe, costs).low) == {1, 2, 3}
    dearer = ScopeCosts(slots, {(0, 0): 7 * UNIT}, (0.0,) * 4)
    found = place(index, regions, structures.Painting({}, {}), safe, dearer)
    assert not found.low
    assert {reason.text for reason in found.left.values()} == {
        "cheaper in float32: its Casts cost more than it gains"
    }


# GraphDefs


def shaped(graph_def, size=graph_dsl.SIZE):
    """A graph of the DSL with the shapes of all tensors."""
    graph_def = tf.compat.v1.GraphDef.FromString(graph_def.SerializeToString())
    for node in graph_def.node:
        if node.op == "Placeholder":
            node.attr["shape"].shape.CopyFrom(tf.TensorShape((size, size)).as_proto())
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph.as_graph_def(add_shapes=True)


def rewritten(graph_def, fetches, feeds, dtype="bfloat16", **choices):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingConvertedWarning)
        return rewrite_graph_def(
            graph_def,
            fetches,
            feeds=feeds,
            dtype=dtype,
            device="cpu",
            **{"profile": NATIVE, **choices},
        )


def of_dsl(text, size=1024, **choices):
    made = graph_dsl.graph(text)
    result = rewritten(shaped(made.graph_def, size), made.fetches, made.feeds, **choices)
    return graph_dsl.low_nodes(result.graph_def, choices.get("dtype", "bfloat16")), result.plan


@st.composite
def profiles(draw):
    speeds = st.floats(0.5, 50)
    peaks = {
        kind: {dtype: 1e9 * draw(speeds) for dtype in ("float32", "bfloat16", "float16")}
        for kind in KINDS
    }
    return MachineProfile("drawn", peaks, 1e9 * draw(speeds), 1e9 * draw(speeds), 1e-9)


FLOATS = st.sampled_from(["float16", "bfloat16"])
RARELY = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@RARELY
@given(made=graph_dsl.random_graphs(), profile=profiles(), dtype=FLOATS, default=st.booleans())
def test_it_is_never_dearer_than_the_lists_and_as_safe(made, profile, dtype, default):
    lists = OpLists.default(dtype, "cpu") if default else OpLists.grappler(dtype)
    options = RewriteOptions(dtype, lists)
    colors = options.colors
    (index,) = build_indexes(shaped(made.graph_def), dtype=dtype, device="cpu")
    chosen = choose_nodes([index], options, GraphUse(made.fetches, made.feeds))
    regions = find_regions(index, chosen.kept)
    scope = ColoredScope(index, regions, colors, updates="low")
    painting = paint(scope)
    safe = safe_slots(scope, painting)
    assert safe >= painting.low.keys()
    assert not safe & painting.denied.keys()
    assert {colors.get(index.node_of(slot).op) for slot in safe} <= {"allow", "infer", "clear"}
    costs = estimate(index, profile, dtype)
    low = place(index, regions, painting, safe, costs).low
    assert low.keys() <= safe
    assert seconds(index, costs, low) <= seconds(index, costs, painting.low)


@settings(max_examples=75, suppress_health_check=[HealthCheck.too_slow])
@given(
    made=graph_dsl.random_graphs(),
    profile=profiles(),
    dtype=FLOATS,
    shapes=st.booleans(),
    placement=st.sampled_from(["grappler", "lists", "min_cut"]),
)
def test_random_graphs_stay_valid_and_as_they_are(made, profile, dtype, shapes, placement):
    graph_def = shaped(made.graph_def) if shapes else made.graph_def
    given_graph = graph_def.SerializeToString(deterministic=True)
    # The graphs' denied op is Pow.
    lists = OpLists.default(dtype).with_changes(deny_add=["Pow"])
    if placement == "grappler":
        placement, lists = "lists", OpLists.grappler(dtype)
    choices = {"dtype": dtype, "op_lists": lists, "profile": profile, "placement": placement}
    result = rewritten(graph_def, made.fetches, made.feeds, **choices)
    assert graph_def.SerializeToString(deterministic=True) == given_graph
    with tf.Graph().as_default() as graph:  # TensorFlow compares the dtypes of every edge's ends.
        tf.graph_util.import_graph_def(result.graph_def, name="")
    ends = (*made.fetches, *made.feeds)
    assert {graph.get_tensor_by_name(name).dtype for name in ends} == {tf.float32}
    low = graph_dsl.low_nodes(result.graph_def, dtype)
    assert not {name for name in low if name[0] in "dn"}
    if placement == "lists":
        assert {name for name in made.nodes if name[0] == "a"} <= low
    casts = [node for node in result.graph_def.node if node.op == "Cast"]
    assert len({(node.input[0], node.attr["DstT"].type) for node in casts}) == len(casts)
    again = rewritten(result.graph_def, made.fetches, made.feeds, **choices)
    assert again.graph_def == result.graph_def


def test_small_layers_stay_float32_and_the_result_says_so():
    assert of_dsl("x>A1>I>A2")[0] == {"a1", "i", "a2"}
    made = graph_dsl.graph("x>a1>i>a2")
    with pytest.warns(NothingConvertedWarning, match="no op that is worth converting to bfloat16"):
        result = rewrite_graph_def(
            shaped(made.graph_def), made.fetches, dtype="bfloat16", device="cpu", profile=NATIVE
        )
    assert {node.reason.rule for node in result.plan.nodes if node.name in made.nodes} == {"cut"}
    assert result.plan.summary.estimated_speed_up == 1


def test_without_shapes_the_lists_decide():
    made = graph_dsl.graph("x>A1>I>A2>d")
    plan = rewritten(made.graph_def, made.fetches, made.feeds, "float16").plan
    assert {node.name for node in plan.nodes if node.dtype == "float16"} == {"a1", "i", "a2"}
    assert plan.summary.estimated_speed_up is None
    made = graph_dsl.graph("x>a1>i>a2")
    low, _ = of_dsl("x>a1>i>a2", dtype="float16")
    assert low == set(), "with shapes the cut decides"


def test_what_gains_next_to_nothing_is_left_to_the_lists():
    assert of_dsl("x>a1>i>a2", size=4)[0] == set()
    assert of_dsl("x>A1>I>A2", size=4, profile=BUILT_IN)[0] == {"a1", "i", "a2"}


@pytest.mark.parametrize("profile", [NATIVE, BUILT_IN])
def test_casts_of_constants_cost_nothing_as_files_and_grappler_fold_them(profile):
    weights = tf.fill((512, 512), 0.1).numpy()
    dense = tf.function(lambda x: x @ weights)
    graph = dense.get_concrete_function(tf.TensorSpec((None, 512))).graph
    plan = rewritten(graph.as_graph_def(add_shapes=True), ["Identity:0"], (), profile=profile).plan
    assert [node.dtype for node in plan.nodes if node.op == "MatMul"] == ["bfloat16"]
    assert plan.summary.estimated_speed_up > 1.3


def test_what_no_allow_node_leads_to_is_never_converted():
    low, _ = of_dsl("x>i1>i2>c>i3>i4 x>a", keep_float32=["^a$"])
    assert low == set()
    low, _ = of_dsl("x>A1>d>i1>i2>A2 A1>C>I>A2")
    assert "i1" not in low
    assert "i2" not in low


def test_force_low_and_keep_float32_hold_at_any_price():
    low, plan = of_dsl("x>i1>D>i2 x>a>C", size=4, force_low=["^d$"], keep_float32=["^a$"])
    assert low == {"d"}
    reasons = {node.name: node.reason.rule for node in plan.nodes}
    assert (reasons["d"], reasons["a"]) == ("force_low", "keep_float32")


@pytest.mark.usefixtures("exact_kernels")
def test_float16_convolution_gradients_stay_float32_on_a_cpu_that_emulates_them():
    function = graph_models.concrete("cnn", train=True)
    graph_def = function.graph.as_graph_def(add_shapes=True)
    names = [[each.name for each in ends] for ends in (function.outputs, function.inputs)]

    def dtypes(dtype, of="Input", **choices):
        plan = rewritten(graph_def, *names, dtype, **choices).plan
        return {node.dtype for node in plan.nodes if node.op == f"Conv2DBackprop{of}"}

    free = {"bandwidth": 1e15, "cast_bandwidth": 1e15, "op_overhead": 0.0}
    native = MachineProfile("", NATIVE.peaks, **free)
    assert dtypes("float16", profile=native) == {"float32"}
    assert dtypes("bfloat16", profile=native) == {"bfloat16"}
    assert dtypes("float16", placement="lists") == {"float16"}
    # oneDNN's kernel for all dtypes takes hundreds of times as long.
    assert dtypes("float16", of="Filter", placement="lists") == {"float32"}
    assert dtypes("bfloat16", of="Filter", placement="lists") == {"bfloat16"}


def test_users_casts_follow_their_neighbours_as_with_the_lists():
    function = loops.casts()
    names = [[each.name for each in ends] for ends in (function.outputs, function.inputs)]
    found = [
        rewritten(function.graph.as_graph_def(), *names, placement=placement)
        for placement in ("lists", "min_cut")
    ]
    assert found[0].graph_def == found[1].graph_def


def test_integers_that_go_through_float32_keep_their_values():
    def function(x, labels):
        labels = tf.cast(tf.cast(labels, tf.float32), tf.int64)
        return tf.gather(x @ x, labels)

    graph = (
        tf.function(function, autograph=False)
        .get_concrete_function(tf.TensorSpec((1024, 1024)), tf.TensorSpec((9,), tf.int32))
        .graph
    )
    result = rewritten(graph.as_graph_def(add_shapes=True), ["Identity:0"], [])
    dtypes = {node.op: node.dtype for node in result.plan.nodes}
    assert dtypes["MatMul"] == "bfloat16"
    assert dtypes["Cast"] == "float32"
