"""Each output of a plan shows each of its fields, or is known not to: none is forgotten."""

import dataclasses
import html
import json
import re

import pytest

from tfamp.planning.structures import (
    Accuracy,
    CastSite,
    NodePlan,
    Reason,
    RewritePlan,
    RewriteSummary,
)
from tfamp.reports.plan_rows import CAST_HEAD, NODE_HEAD, plan_rows

NODE = NodePlan(
    "inner", "aa/MatMul", "MatMul", "float16", Reason("allow", "the list"), 3e-3, ("bb",)
)
CAST = CastSite(
    scope="inner",
    tensor="bb:0",
    from_="float32",
    to="float16",
    bytes=7777,
    name="bb-0-CastTo",
    producer="bb",
    device="/cpu:0",
    consumers=(("aa/MatMul", 0),),
)
PRODUCER = NodePlan("inner", "bb", "Relu", "float32", Reason("cut", "cheaper"), None, ())
SUMMARY = RewriteSummary(2, 1, 1, 1, 7777, 5, 1.25)

OUTPUTS = ("text", "page", "notebook", "explorer")
# Field -> what each output shows of it, as a pattern; "" where it does not show it.
NODE_FIELDS = {
    "scope": ("inner: aa/MatMul", "Function inner", "inner: aa/MatMul", '"id": "inner"'),
    "name": ("aa/MatMul", "aa/<wbr>MatMul", "aa/MatMul", '"id": "aa/MatMul"'),
    "op": ("MatMul  ", "MatMul</td>", "MatMul</td>", '"label": "MatMul"'),
    "dtype": (" float16 ", ">float16<", "float16</td>", '"dtype", "value": "float16"'),
    "reason": ("the list", "the list", "the list", '"reason", "value": "the list"'),
    "rule": ("", ">allow<", "", '"rule", "value": "allow"'),
    "cost": ("3e\\+03 us", "3 ms", "3e\\+03 us", "3e\\+03 us"),
    "inputs": ("", 'href="#c0">Cast of bb', "", '"sourceNodeId": "bb-0-CastTo"'),
}
CAST_FIELDS = {
    "scope": ("inner: bb:0", "inner: bb:0", "inner: bb:0", ""),
    "tensor": ("bb:0", "bb:0", "bb:0", '"tensor", "value": "bb:0"'),
    "from": (
        "float32  float16",
        "float32</td><td>float16",
        "float32",
        '"from", "value": "float32"',
    ),
    "to": ("float32  float16", "float32</td><td>float16", "float16", "Cast to float16"),
    "bytes": ("7777", "7,777", "7777", "7,777"),
    "name": ("", "", "", "bb-0-CastTo"),
    "producer": ("", 'href="#n1">inner: bb', "", '"sourceNodeId": "bb"'),
    "consumers": ("", 'href="#n0">aa/', "", '"sourceNodeId": "bb-0-CastTo"'),
}
SUMMARY_FIELDS = {
    "nodes": ("1 of 2 float nodes", ">2</strong>", "1 of 2 float nodes", ""),
    "low_nodes": ("1 of 2 float nodes", "1 \\(50.0%\\)", "1 of 2 float nodes", ""),
    "retyped_nodes": ("", "", "", ""),
    "casts": ("1 Casts", ">1</strong>", "1 Casts", ""),
    "cast_bytes": ("7777 bytes", "7.59 KiB", "7777 bytes", ""),
    "casts_of_unknown_size": ("5 of unknown", "5 of unknown", "5 of unknown", ""),
    "estimated_speed_up": ("", "1.25", "1.25", ""),
    # Of a whole model, for the command line's summary.
    "products": ("", "", "", ""),
    "low_products": ("", "", "", ""),
}


@pytest.fixture(scope="module")
def plan():
    return RewritePlan("float16", (NODE, PRODUCER), (CAST,), (), SUMMARY)


@pytest.fixture(scope="module")
def shown(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "plan.json"
    plan.to_model_explorer(path)
    # The JSON inside of the page is not what a reader sees.
    page = plan.to_html().partition('<script type="application/json"')[0]
    return {
        "text": plan.to_text(),
        "page": page,
        "notebook": plan._repr_html_(),
        "explorer": path.read_text("utf-8"),
    }


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("nodes", NODE_FIELDS), ("casts", CAST_FIELDS), ("summary", SUMMARY_FIELDS)],
)
def test_each_field_is_shown_where_this_table_says(plan, shown, kind, fields):
    data = json.loads(plan.to_json())[kind]
    named = data if kind == "summary" else data[0]
    assert set(fields) == set(named), (
        f"the plan has fields {sorted(set(fields) ^ set(named))} and this table does not, or the "
        "other way round: say in the table of this file where each of the outputs shows it"
    )
    for field, patterns in fields.items():
        for output, pattern in zip(OUTPUTS, patterns, strict=True):
            assert re.search(pattern, shown[output]), (kind, field, output, pattern)


def test_the_json_has_each_field_of_a_node_and_each_row_a_cell_for_each_column(plan):
    held = {field.name for field in dataclasses.fields(NodePlan)}
    assert held | {"rule"} == set(json.loads(plan.to_json())["nodes"][0])
    rows = plan_rows(json.loads(plan.to_json()))
    assert {len(row) for row in rows.nodes} == {len(NODE_HEAD)}
    assert {len(row) for row in rows.casts} == {len(CAST_HEAD)}
    assert rows.ops == (("MatMul", "1", "0"), ("Relu", "0", "1"))
    assert rows.speed_up == "1.25"


@pytest.mark.parametrize(
    ("accuracy", "expected"),
    [
        (Accuracy(0.01, 0.005, 0.002), "error on the data 0.005; bound 0.01"),
        (
            Accuracy(0.01, 0.0042, float("inf"), ("net/<b>", "net/a")),
            "error on the data 0.0042 with net/<b>, net/a in float32, inf without; bound 0.01",
        ),
    ],
)
def test_the_accuracy_of_a_bounded_rewrite_is_one_line_of_the_page_and_of_the_text(
    plan, accuracy, expected
):
    assert "bound" not in plan.to_text() + plan.to_html()
    bounded = dataclasses.replace(plan, accuracy=accuracy)
    assert f"; {expected}" in bounded.to_text()
    page = bounded.to_html().partition("<script")[0]
    ((line, text),) = re.findall('(<p id="accuracy">(.*?)</p>)', page)
    assert line in page.partition("</header>")[0]
    assert html.unescape(text) == expected
    assert "<b>" not in page
