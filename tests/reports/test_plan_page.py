"""The plan as a page: what it shows, that it needs no script and no network, and its links."""

import dataclasses
import html.parser
import json
import re
from collections import Counter

import pytest

from helpers import graph_dsl, graph_models
from helpers.browser import open_page
from tfamp.graph.rewrite import rewrite_graph_def
from tfamp.planning.structures import CastSite, NodePlan, Reason, RewritePlan, RewriteSummary

# Attributes whose value a browser would load.
LOADING = {"src", "srcset", "data", "action", "poster", "background"}
HOSTILE = "a</script><script>document.title='taken'</script><!--<img src=x onerror=f()>&lt;@@plan@@"


class Element:
    def __init__(self, tag, attributes):
        self.tag, self.attributes, self.inside = tag, attributes, []

    @property
    def text(self):
        return "".join(each if isinstance(each, str) else each.text for each in self.inside)

    def all(self, *tags):
        """The elements below with one of the tags, or all of them, in order."""
        for each in self.inside:
            if not isinstance(each, str):
                if not tags or each.tag in tags:
                    yield each
                yield from each.all(*tags)

    def cells(self):
        return [cell.text for cell in self.all("td")]

    def links(self):
        return [link.attributes["href"].removeprefix("#") for link in self.all("a")]


class Page(html.parser.HTMLParser):
    """The elements of a document, which must all be closed."""

    def __init__(self, text):
        super().__init__()
        self.document = Element("", {})
        self.open = [self.document]
        self.feed(text)
        self.close()
        assert self.open == [self.document]
        self.elements = list(self.document.all())
        self.by_id = {e.attributes["id"]: e for e in self.elements if "id" in e.attributes}

    def handle_starttag(self, tag, attrs):
        made = Element(tag, dict(attrs))
        self.open[-1].inside.append(made)
        if tag not in {"meta", "wbr"}:
            self.open.append(made)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].inside.append(data)

    def rows(self, section):
        return list(next(self.by_id[section].all("tbody")).all("tr"))

    def groups(self):
        """Title of a function, title of a rule -> the rows of its nodes."""
        return {
            (next(function.all("summary")).text, next(group.all("summary")).text): [
                row for row in group.all("tr") if "id" in row.attributes
            ]
            for function in self.by_id["nodes"].inside
            if isinstance(function, Element) and function.tag == "details"
            for group in function.all("details")
        }


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


def cast(producer, consumer, scope="", size=None, to="float32"):
    name = f"{producer}-0-CastTo-{to}"
    source = "float16" if to == "float32" else "float32"
    ends = ((consumer, 0),)
    return CastSite(scope, producer, source, to, size, name, producer, "", ends)


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
    tags = Counter(element.tag for element in page.elements)
    assert [tags[tag] for tag in ("html", "head", "body", "main", "style")] == [1] * 5


def test_the_page_holds_the_plan(plan, page):
    held = json.loads(page.by_id["plan"].text)
    assert held == json.loads(plan.to_json())
    assert plan.to_html() == plan.to_html()
    assert [node["name"] for node in held["nodes"]] == [node.name for node in plan.nodes]
    assert [tuple(node["inputs"]) for node in held["nodes"]] == [node.inputs for node in plan.nodes]
    assert [each["producer"] for each in held["casts"]] == [each.producer for each in plan.casts]


def test_the_page_loads_nothing_and_runs_nothing(plan, page):
    tags = {element.tag for element in page.elements}
    assert not tags & {"link", "img", "iframe", "object", "base", "form", "button"}
    attributes = {name for element in page.elements for name in element.attributes}
    assert not attributes & LOADING
    assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?://|@import|url\(", plan.to_html())
    (data,) = page.document.all("script")
    assert data.attributes == {"type": "application/json", "id": "plan"}
    (policy,) = (e.attributes["content"] for e in page.elements if "http-equiv" in e.attributes)
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[^ ;]+'", policy)


def test_links_stay_on_the_page_and_ids_are_unique(page):
    links = [link.attributes["href"] for link in page.document.all("a")]
    assert {link[0] for link in links} == {"#"}
    assert {link[1:] for link in links} <= page.by_id.keys()
    assert len(page.by_id) == sum("id" in element.attributes for element in page.elements)


def test_names_cannot_leave_the_text():
    def shown(name):
        function = dataclasses.replace(chain([name])[0], scope=f"f{name}", op=name)
        casts = [cast("argument", name, function.scope), cast(name, "b")]
        return Page(made_plan([*chain([name, "b"]), function], casts).to_html())

    found, harmless = shown(HOSTILE), shown(re.sub("[<>&'@]", "x", HOSTILE))
    assert [each.tag for each in found.elements] == [each.tag for each in harmless.elements]
    assert json.loads(found.by_id["plan"].text)["nodes"][0]["name"] == HOSTILE
    assert found.by_id["n0"].cells()[0] == HOSTILE


def test_a_page_grows_with_the_plan_alone():
    scopes = [f"model/block_{i % 50}/layer_{i}/op" for i in range(10_000)]
    big = made_plan(chain(scopes))
    fixed = len(made_plan([]).to_html())
    assert fixed < 10_000
    assert len(big.to_html()) < fixed + 2.2 * len(big.to_json())


# ---- The tables ----------------------------------------------------------------------------------


def test_the_totals_come_first(plan, page):
    cards = [(next(card.all("strong")).text, card.text) for card in page.document.all("li")]
    values = [value for value, _ in cards]
    summary = plan.summary
    assert values[:2] == ["bfloat16", f"{summary.nodes}"]
    assert values[2].startswith(f"{summary.low_nodes} (")
    assert f"{summary.casts}" in values
    assert "estimated speed-up" in cards[-1][1]
    assert values[-1] == "unknown" or float(values[-1]) > 0


def test_totals_tell_nodes_that_were_low_already_and_sizes_that_are_unknown():
    given = [dataclasses.replace(chain(["a"])[0], reason=Reason("as given", "it is low already"))]
    cards = {
        card.text.partition(" (")[0] for card in Page(made_plan(given).to_html()).document.all("li")
    }
    assert "1" in cards
    plan = made_plan(chain(["a", "b"]), [cast("a", "b")])
    texts = [card.text for card in Page(plan.to_html()).document.all("li")]
    assert "0 B read and written by Casts, 1 of unknown size" in texts


def test_every_rule_has_a_row_with_how_many_nodes_it_decided(plan, page):
    rows = [row.cells() for row in page.rows("rules")]
    decided = Counter((node.reason.rule, node.dtype) for node in plan.nodes)
    assert {(rule, dtype): int(nodes) for rule, nodes, dtype, _ in rows} == decided
    assert [int(row[1]) for row in rows] == sorted(decided.values(), reverse=True)
    ops = Counter(node.op for node in plan.nodes if node.reason.rule == "allow")
    (shown,) = (row[3] for row in rows if row[0] == "allow")
    assert shown == ", ".join(
        f"{op}\xa0×{ops[op]}" for op in sorted(ops, key=lambda o: (-ops[o], o))
    )
    # A link to the first node of the rule, in its group.
    for row, (rule, _, dtype, _) in zip(page.rows("rules"), rows, strict=True):
        (table,) = row.links()
        first = next(row for row in page.by_id[table].all("tr") if "id" in row.attributes)
        node = plan.nodes[int(first.attributes["id"][1:])]
        assert (node.reason.rule, node.dtype) == (rule, dtype)


def test_every_node_is_in_the_group_of_its_function_and_rule_with_dtype_cost_and_reason(plan, page):
    found = {}
    for (function, rule), rows in page.groups().items():
        for row in rows:
            found[row.attributes["id"]] = (function, rule, row.attributes["class"], row.cells())
    assert len(found) == len(plan.nodes)
    for i, node in enumerate(plan.nodes):
        function, rule, color, (name, op, dtype, cost, _, *reason) = found[f"n{i}"]
        assert (name, op, dtype) == (node.name, node.op, node.dtype)
        assert function.startswith(f"Function {node.scope}: " if node.scope else "The graph: ")
        assert rule.startswith(f"{node.reason.rule}: ")
        assert node.dtype in rule
        # A reason that the whole group has is in its title.
        assert reason == [node.reason.text] or (not reason and rule.endswith(node.reason.text))
        assert (cost == "unknown") == (node.cost is None)
        assert color == ("low" if node.dtype == "bfloat16" else "float32")


def test_groups_are_in_order_of_functions_then_of_size_and_nodes_in_that_of_the_graph(plan, page):
    groups = page.groups()
    functions = list(dict.fromkeys(function for function, _ in groups))
    scopes = list(dict.fromkeys(node.scope for node in plan.nodes))
    assert [function.partition(": ")[0] for function in functions] == [
        f"Function {scope}" if scope else "The graph" for scope in scopes
    ]
    for function in functions:
        sizes = [len(rows) for (of, _), rows in groups.items() if of == function]
        assert sizes == sorted(sizes, reverse=True)
        count = int(re.search(r": ([\d,]+) nodes$", function)[1].replace(",", ""))
        assert count == sum(sizes)
    for rows in groups.values():
        numbers = [int(row.attributes["id"][1:]) for row in rows]
        assert numbers == sorted(numbers)


def test_costs_have_units_that_suit_them():
    nodes = [
        dataclasses.replace(node, cost=cost)
        for node, cost in zip(chain("abcde"), (1234, 2.5, 4e-3, 7.25e-5, None), strict=True)
    ]
    page = Page(made_plan(nodes).to_html())
    costs = [page.by_id[f"n{i}"].cells()[3] for i in range(5)]
    assert costs == ["1,234 s", "2.5 s", "4 ms", "72.5 µs", "unknown"]


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (3 << 41, "6 TiB")]
)
def test_the_bytes_that_casts_move_have_a_unit_that_suits_them(size, shown):
    plan = made_plan(chain("ab"), [cast("a", "b", size=size)])
    summary = dataclasses.replace(plan.summary, cast_bytes=size, casts_of_unknown_size=0)
    page = Page(dataclasses.replace(plan, summary=summary).to_html())
    texts = [card.text for card in page.document.all("li")]
    assert f"{shown} read and written by Casts" in texts


def test_casts_come_by_size_and_link_their_producers_and_consumers(plan, page):
    rows = page.rows("casts")
    assert len(rows) == len(plan.casts) > 1
    for row in rows:
        each = plan.casts[int(row.attributes["id"][1:])]
        tensor, source, to, size, used = row.cells()
        assert (source, to) == (each.from_, each.to)
        assert tensor == (f"{each.scope}: {each.tensor}" if each.scope else each.tensor)
        assert size == ("unknown" if each.bytes is None else f"{each.bytes:,}")
        assert used == ", ".join(dict.fromkeys(name for name, _ in each.consumers))
        assert row.attributes["class"] == ("low" if each.to == "bfloat16" else "float32")
        nodes = {f"n{i}": node for i, node in enumerate(plan.nodes) if node.scope == each.scope}
        assert {nodes[link].name for link in row.links()} <= {
            each.producer, *(name for name, _ in each.consumers)
        }  # fmt: skip
    sizes = [plan.casts[int(row.attributes["id"][1:])].bytes for row in rows]
    known = [size for size in sizes if size is not None]
    assert sizes == sorted(known, reverse=True) + [None] * (len(sizes) - len(known))


def test_casts_of_unknown_size_come_last_and_equal_ones_in_the_order_of_the_plan():
    sizes = {"a": None, "b": 8, "c": 1024, "d": 8, "e": 0}
    casts = [cast(name, "f", size=size) for name, size in sizes.items()]
    rows = Page(made_plan(chain("abcdef"), casts).to_html()).rows("casts")
    shown = [(cells[0], cells[3]) for cells in (row.cells() for row in rows)]
    assert shown == [("c", "1,024"), ("b", "8"), ("d", "8"), ("e", "0"), ("a", "unknown")]
    assert [row.attributes["id"] for row in rows] == ["c2", "c1", "c3", "c4", "c0"]


def test_a_plan_without_casts_says_so():
    page = Page(made_plan(chain("ab")).to_html())
    assert "None." in page.by_id["casts"].text


def test_nodes_link_what_they_take_from_and_the_casts_between():
    names = ["net/a", "net/b", "last"]
    nodes = chain(names)
    nodes[2] = dataclasses.replace(nodes[2], inputs=("net/b", "net/shape"), dtype="float32")
    page = Page(made_plan(nodes, [cast("net/b", "last")]).to_html())
    # Without the name scopes that both have; what has no row has no link.
    assert (page.by_id["n1"].cells()[4], page.by_id["n1"].links()) == ("a", ["n0"])
    assert page.by_id["n2"].cells()[4] == "Cast of net/b, net/shape"
    assert page.by_id["n2"].links() == ["c0"]


@pytest.mark.parametrize(
    "reason",
    [
        "it is computed from {}, which needs float32",
        "it is next to {}, which is converted",
        "it is part of the normalization that gives {}",
        "its TensorList goes through {} (While)",
        "its TensorList is used by {}, which is fixed",
        "a value beyond the range of bfloat16 gets here from {}",
        "a value of 7e4 in its input {} exceeds data_max 512",
        "a value of 7e4 in the constant {} exceeds constant_max 65504",
    ],
)
def test_a_reason_links_the_node_that_it_names(reason):
    nodes = chain(["net/first", "it", "value", "converted"])
    nodes[1] = dataclasses.replace(nodes[1], reason=Reason("rule", reason.format("net/first")))
    page = Page(made_plan(nodes).to_html())
    (group,) = (group for (_, rule), group in page.groups().items() if rule.startswith("rule: "))
    assert group == [page.by_id["n1"]]
    (title,) = (e for e in page.document.all("summary") if e.text.startswith("rule: "))
    assert title.text.endswith(reason.format("net/first"))
    assert title.links() == ["n0"]
    # The same where the reasons of a group differ, and only in the function of the node.
    nodes += [dataclasses.replace(nodes[1], scope="f")]
    nodes += [dataclasses.replace(nodes[0], name="other", reason=Reason("rule", "it is so"))]
    page = Page(made_plan(nodes).to_html())
    assert page.by_id["n1"].cells()[5] == reason.format("net/first")
    assert page.by_id["n1"].links() == ["n0", "n0"]  # It takes from that node too.
    (title,) = (e for e in page.document.all("summary") if e.text.startswith("rule: 1"))
    assert title.links() == []


def test_short_plans_are_open_and_long_ones_open_by_group():
    def opened(count):
        page = Page(made_plan(chain([f"x{i}" for i in range(count)])).to_html())
        return ["open" in details.attributes for details in page.by_id["nodes"].all("details")]

    assert opened(3) == [True, True]
    assert opened(501) == [True, False]


# ---- In a browser --------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path):
    """Opens a page in a browser and returns the document that this made of it."""

    def show(plan, address=""):
        path = tmp_path / "plan.html"
        path.write_text(plan.to_html(), encoding="utf-8")
        document, messages = open_page(path, tmp_path / "profile", address)
        # Such as of the content security policy.
        assert not messages
        return document

    return show


def texts(document, element):
    return [
        re.sub("<[^>]*>", "", inside)
        for inside in re.findall(rf"<{element}\b[^>]*>(.*?)</{element}>", document)
    ]


def test_a_browser_shows_totals_tables_and_the_reason(plan, browser):
    wanted = next(node for node in plan.nodes if node.op == "MatMul" and not node.scope)
    document = browser(plan)
    assert plan.nodes[0].name in texts(document, "td")
    assert wanted.reason.text in texts(document, "td") + texts(document, "small")
    assert f"{plan.summary.casts}" in texts(document, "strong")
    assert len(re.findall(r'<tr id="n\d+"', document)) == len(plan.nodes)


@pytest.mark.slow
def test_a_link_to_one_of_thousands_of_nodes_opens_its_group_and_no_node_shows_none(browser):
    nodes = chain([f"{'abcdef'[i % 6]}{i // 6}x" for i in range(10_000)])
    nodes += chain(["a", "b"], dtype="float32")
    document = browser(made_plan(nodes), "#n10001")
    assert len(re.findall(r'<tr id="n\d+"', document)) == 10_002
    assert re.findall(r"<details( open)?", document)[-3:] == [" open", "", " open"]
    assert "None." in browser(made_plan([]))


def test_a_browser_shows_hostile_names_as_text(browser):
    function = dataclasses.replace(chain([HOSTILE])[0], scope=f"f{HOSTILE}")
    casts = [cast("argument", HOSTILE, function.scope), cast(HOSTILE, "b")]
    document = browser(made_plan([*chain([HOSTILE, "b"]), function], casts), "#n1")
    assert texts(document, "title") == ["Rewrite plan"]
    assert "<img" not in document.split('id="plan"')[0]
    assert texts(document, "td").count("unknown") == 2 + 3


# ---- Model Explorer ------------------------------------------------------------------------------


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
