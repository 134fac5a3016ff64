"""`Graph` and `Body`, the owner of a graph: reads and edits keep each other's tables right."""

from __future__ import annotations

import tensorflow as tf

from tfamp.graph.graph import Graph


def made(function, *specs):
    return Graph(tf.function(function).get_concrete_function(*specs).graph.as_graph_def())


def chain():
    """x -> a -> b -> c, and d that nothing uses."""
    graph = Graph(tf.compat.v1.GraphDef())
    main = graph.main
    tensor = main.add("x", "Placeholder", dtype=tf.float32)
    for name in "abc":
        tensor = main.add(name, "Identity", [tensor], T=tf.float32)
    main.add("d", "Identity", ["x"], T=tf.float32)
    return graph


def test_ancestors_stop_at_what_is_fed_and_leave_out_unknown_names():
    main = chain().main
    assert main.ancestors(["c:0"]) == {"x", "a", "b", "c"}
    assert main.ancestors(["c", "missing:1"], fed=["b:0"]) == {"b", "c"}


def test_what_is_kept_or_dropped_takes_its_place_in_colocations_with_it():
    main = chain().main
    for name in ("a", "c"):
        main.by_name[name].attr["_class"].list.s.extend([b"loc:@d", b"loc:@b"])
    main.keep(main.ancestors(["c"]))
    assert [node.name for node in main.nodes] == ["x", "a", "b", "c"]
    assert {*main.by_name["a"].attr["_class"].list.s} == {b"loc:@b"}
    main.connect("a", [("c", 0)])
    main.drop({"b"})
    assert not any("_class" in node.attr for node in main.nodes)


def test_a_node_is_found_by_its_new_op_once():
    main = chain().main
    node = main.by_name["b"]
    assert len(main.of_types("Identity")) == 4
    main.set_op(node, "Relu")
    main.set_op(node, "Relu")
    assert main.of_types("Relu") == [node]
    assert [each.name for each in main.of_types("Identity")] == ["a", "c", "d"]


def test_consumers_follow_every_edit():
    main = chain().main
    assert main.consumers["a"] == ["b"]
    made_of_a = main.cast("low", "a", (tf.float32, tf.bfloat16))
    main.rewire({"b": made_of_a})
    assert main.consumers["a"] == ["b", "low"]
    assert main.consumers["b"] == []
    assert main.consumers["low"] == ["c"]


def test_a_copy_is_independent_and_keeps_weights_and_kept_names():
    graph = Graph(chain().graph_def, ["c:0"])
    graph.weights.add(("body", "w"))
    copy = graph.copy()
    copy.main.drop({"d"})
    copy.weights.clear()
    assert "d" in graph.main.by_name
    assert graph.weights == {("body", "w")}
    assert copy.main.kept == graph.main.kept == {"c"}


def nested():
    inner = tf.function(lambda x: x + 1.0)
    return made(lambda x: tf.cond(x > 0, lambda: inner(x), lambda: x), tf.TensorSpec(()))


def test_reached_functions_are_those_of_branches_and_calls_in_these():
    graph = nested()
    reached = [body.scope for body in graph.reached(graph.main.calls())]
    assert sorted(reached) == sorted(graph.functions)
    assert len(reached) == 3
    branch = next(name for name in reached if "true" in name)
    assert [body.scope for body in graph.reached([branch, "missing"])][0] == branch
    assert len(graph.reached([branch])) == 2


def test_renamed_functions_keep_their_tables_and_uncalled_ones_are_dropped():
    graph = nested()
    before = list(graph.functions)
    graph.copy_function(before[0])
    assert len(graph.functions) == 4
    graph.rename_functions("_2")
    assert list(graph.functions) == [f"{name}_2" for name in before]
    assert [each.signature.name for each in graph.graph_def.library.function] == [*graph.functions]
    assert {body.scope for body in graph.reached(graph.main.calls())} == {*graph.functions}


def test_a_function_is_added_under_a_free_name_or_put_in_place_of_another():
    graph = nested()
    first, second = list(graph.functions)[:2]
    assert graph.copy_function(first) == f"{first}_1"
    other = type(graph.functions[second].definition)()
    other.CopyFrom(graph.functions[second].definition)
    other.signature.name = first
    graph.put_function(other)
    assert graph.functions[first].definition == other
    assert len(graph.functions) == 4


def test_an_argument_in_the_middle_moves_the_attributes_of_later_ones():
    graph = made(
        lambda x, y: tf.cond(x > 0, lambda: x + y, lambda: x - y), *[tf.TensorSpec(())] * 2
    )
    body = next(iter(graph.functions.values()))
    count = len(body.arguments)
    body.definition.arg_attr[1].attr["mark"].i = 7
    shapes = tf.compat.v1.AttrValue()
    shapes.list.shape.add().dim.add().size = 3
    body.add_argument("new", tf.float32.as_datatype_enum, 1, shapes)
    body.add_result("again", tf.float32.as_datatype_enum, "new")
    assert [each.name for each in body.arguments].index("new") == 1
    assert len(body.arguments) == count + 1
    assert body.argument_attrs(2)["mark"].i == 7
    assert body.shape("new") == [3]
    assert body.returned["again"] == "new"
    assert body.named("new").type == tf.float32.as_datatype_enum
