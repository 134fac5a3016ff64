"""The plan as a page: what is in it, that it loads nothing, and that a browser can show it."""

import dataclasses
import html.parser
import json
import re

import pytest

from helpers import graph_dsl, graph_models
from helpers.browser import open_page
from tfamp.graph.rewrite import rewrite_graph_def
from tfamp.planning.structures import CastSite, NodePlan, Reason, RewritePlan, RewriteSummary

# Attributes whose value a browser would load.
LOADING = {"src", "href", "srcset", "data", "action", "poster", "background"}
HOSTILE = "a</script><script>document.title='taken'</script><!--<img src=x onerror=f()>&lt;@@plan@@"


class Page(html.parser.HTMLParser):
    """Elements of a document in order, and the text in each script by its type."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.scripts = [], [], {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "input", "link", "img"}:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            kind = self.open[-1][1].get("type", "")
            self.scripts[kind] = self.scripts.get(kind, "") + data

    def plan(self):
        return json.loads(self.scripts["application/json"])


def lstm_plan(dtype="bfloat16"):
    function = graph_models.concrete("lstm", train=True)
    return rewrite_graph_def(
        function.graph.as_graph_def(add_shapes=True),
        [each.name for each in function.outputs],
        feeds=[each.name for each in function.inputs],
        dtype=dtype,
        device="cpu",
    ).plan


def made_plan(nodes, casts=()):
    low = sum(node.dtype == "float16" for node in nodes)
    summary = RewriteSummary(len(nodes), low, low, len(casts), 0, len(casts))
    return RewritePlan("float16", tuple(nodes), tuple(casts), (), summary)


def chain(names, dtype="float16"):
    return [
        NodePlan("", name, "Relu", dtype, Reason("allow", f"reason of {name}"), None, before)
        for name, before in zip(names, [(), *((name,) for name in names)], strict=False)
    ]


def cast(producer, consumer, scope=""):
    name = f"{producer}-0-CastTo-float32"
    ends = ((consumer, 0),)
    return CastSite(scope, producer, "float16", "float32", None, name, producer, "", ends)


@pytest.fixture(scope="module")
def plan():
    return lstm_plan()


@pytest.fixture(scope="module")
def page(plan):
    return Page(plan.to_html())


def test_a_plan_names_the_producers_of_every_node_in_order():
    made = graph_dsl.graph("x>A1>A2>I A1>I")
    plan = rewrite_graph_def(
        made.graph_def, made.fetches, feeds=made.feeds, dtype="bfloat16", device="cpu"
    ).plan
    inputs = {node.name: node.inputs for node in plan.nodes}
    assert inputs["x"] == ()
    assert inputs["i"] == ("a2", "a1")
    # A node that takes a tensor twice names its producer once.
    assert [name for name in inputs["a1"] if name == "x"] == ["x"]
    assert {len(names) - len(set(names)) for names in inputs.values()} == {0}


def test_the_page_is_one_document_with_nothing_left_open(page):
    tags = [tag for tag, _ in page.elements]
    assert page.open == []
    assert [tags.count(tag) for tag in ("html", "head", "body", "main", "style")] == [1] * 5


def test_the_page_holds_the_plan(plan, page):
    assert page.plan() == json.loads(plan.to_json())
    assert plan.to_html() == plan.to_html()
    nodes = page.plan()["nodes"]
    assert [node["name"] for node in nodes] == [node.name for node in plan.nodes]
    assert [tuple(node["inputs"]) for node in nodes] == [node.inputs for node in plan.nodes]
    producers = [each["producer"] for each in page.plan()["casts"]]
    assert producers == [each.producer for each in plan.casts]


def test_the_page_loads_nothing(plan, page):
    assert not [(tag, a) for tag, a in page.elements if LOADING & set(a)]
    assert not {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?://|@import|url\((?!#)", plan.to_html())
    (policy,) = (a["content"] for _, a in page.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


def test_names_cannot_leave_the_data(page):
    hostile = made_plan(chain([HOSTILE, "b"]), [cast(HOSTILE, "b")])
    found = Page(hostile.to_html())
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in page.elements]
    assert found.plan()["nodes"][0]["name"] == HOSTILE
    assert found.scripts[""] == page.scripts[""]


def test_a_page_grows_with_the_plan_alone():
    scopes = [f"model/block_{i % 50}/layer_{i}/op" for i in range(10_000)]
    big = made_plan(chain(scopes))
    fixed = len(made_plan([]).to_html())
    assert fixed < 100_000
    assert len(big.to_html()) < fixed + 1.1 * len(big.to_json())


@pytest.fixture
def browser(tmp_path):
    """Opens a page in a browser and returns the document that its script made."""

    def show(plan, address=""):
        path = tmp_path / "plan.html"
        path.write_text(plan.to_html(), encoding="utf-8")
        document, _ = open_page(path, tmp_path / "profile", address)
        return document

    return show


def texts(document, element):
    return re.findall(rf"<{element}[^>]*>([^<]*)<", document)


def root_of(document):
    return re.search(r"<html[^>]*>", document)[0]


def test_a_browser_shows_totals_tables_and_the_reason(plan, browser):
    wanted = next(node for node in plan.nodes if node.op == "MatMul" and not node.scope)
    document = browser(plan, f"#select={wanted.name}")
    assert 'data-ready="true"' in root_of(document)
    assert "data-error" not in root_of(document)
    assert f"{len(plan.nodes)} of {len(plan.nodes)}" in texts(document, "span")
    assert plan.nodes[0].name in texts(document, "td")
    assert wanted.reason.text in texts(document, "dd")
    assert f"{plan.summary.casts}" in texts(document, "strong")


@pytest.mark.slow
def test_thousands_of_nodes_show_the_rows_in_sight_and_no_node_shows_none(browser):
    document = browser(made_plan(chain([f"{'abcdef'[i % 6]}{i // 6}x" for i in range(8_400)])))
    assert 'data-ready="true"' in root_of(document)
    assert len(texts(document, "tr")) < 300
    assert "8,400 of 8,400" in texts(document, "span")
    assert 'data-ready="true"' in root_of(browser(made_plan([])))


def test_a_browser_shows_hostile_names_as_text(browser):
    function = dataclasses.replace(chain([HOSTILE])[0], scope=f"f{HOSTILE}")
    casts = [cast("argument", HOSTILE, function.scope), cast(HOSTILE, "b")]
    document = browser(made_plan([*chain([HOSTILE, "b"]), function], casts), "#select=b")
    assert 'data-ready="true"' in root_of(document)
    assert texts(document, "title")[0] == "Rewrite plan"
    assert "<img" not in document.split('id="plan"')[0]
    assert "size unknown" in document


def test_model_explorer_gets_every_node_with_its_dtype_and_the_casts_between(plan, tmp_path):
    plan.to_model_explorer(tmp_path / "plan.json")
    graphs = json.loads((tmp_path / "plan.json").read_text())["graphs"]
    assert len(graphs) == len({node.scope for node in plan.nodes}) > 1
    shown = {node["id"]: node for node in graphs[0]["nodes"]}
    dtypes = {node.name: node.dtype for node in plan.nodes if not node.scope}
    attributes = {
        name: {each["key"]: each["value"] for each in node["attrs"]} for name, node in shown.items()
    }
    assert {name: attributes[name]["dtype"] for name in dtypes} == dtypes
    casts = [each for each in plan.casts if not each.scope]
    assert casts
    for each in casts:
        assert shown[each.name]["label"] == f"Cast to {each.to}"
        for consumer, _ in each.consumers:
            if consumer in shown:
                sources = [edge["sourceNodeId"] for edge in shown[consumer]["incomingEdges"]]
                assert each.name in sources
    colors = {shown[name]["style"]["backgroundColor"]: dtype for name, dtype in dtypes.items()}
    assert sorted(colors.values()) == ["bfloat16", "float32"]
    for node in shown.values():
        assert {edge["sourceNodeId"] for edge in node["incomingEdges"]} <= shown.keys()


def test_model_explorer_folds_nodes_that_differ_in_a_number(tmp_path):
    made_plan(chain([f"mul_{i}" for i in range(9)] + ["net/a", "last"])).to_model_explorer(
        tmp_path / "plan.json"
    )
    (graph,) = json.loads((tmp_path / "plan.json").read_text())["graphs"]
    namespaces = [node["namespace"] for node in graph["nodes"]]
    assert namespaces == ["mul"] * 9 + ["net", ""]
