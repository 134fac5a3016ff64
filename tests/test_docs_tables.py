"""The hooks that prepare tables and menus of the site for screens without room for them."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[1] / "docs"
HOOK = runpy.run_path(str(DOCS / "table_labels.py"))
MENU = runpy.run_path(str(DOCS / "menu_depth.py"))


def labelled(content):
    return HOOK["on_page_content"](content, page=None, config=None, files=None)


def table_of(*rows):
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr><th>a</th><th>b</th></tr></thead><tbody>{body}</tbody></table>"


def test_each_cell_of_a_table_has_the_name_of_its_column():
    names = '<th>model</th><th style="text-align: right;">with <code>a</code> &amp; "b"</th>'
    rows = "<tr><td>mlp</td><td>1.5</td></tr><tr><td>lstm</td><td>2</td></tr>"
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{rows}</tbody></table>"
    found = labelled(f"<p>before</p>{table}<p>after</p>")
    for cell in ("mlp", "lstm"):
        assert f'<td data-label="model">{cell}</td>' in found
    for cell in ("1.5", "2"):
        assert f'<td data-label="with a &amp; &quot;b&quot;">{cell}</td>' in found
    assert found.startswith("<p>before</p>")
    assert found.endswith("<p>after</p>")


def test_rows_with_a_class_as_those_of_the_reference_are_labelled_too():
    table = table_of(("level", "of a model")).replace("<tbody><tr>", '<tr class="doc">')
    row = '<tr class="doc"><td data-label="a">level</td><td data-label="b">of a model</td>'
    assert row in labelled(table)


@pytest.mark.parametrize(
    ("cells", "marked"),
    [
        (("1.93", "-0.50 points", "98.83%", "-"), True),
        (("1", "none", "", "<code>0.3</code>"), True),
        (("<strong>1</strong>", "many words, not a number"), False),
        (("float16", "words", "none", "a word"), False),
        (("-", ""), False),
    ],
)
def test_a_table_of_numbers_is_marked(cells, marked):
    table = labelled(table_of(*(("words in the first column", cell) for cell in cells)))
    assert table.startswith("<table data-numbers>" if marked else "<table>")
    assert table.count("<table") == 1


def test_a_table_of_another_kind_and_a_page_without_tables_are_left_alone():
    for content in ("<p>text</p>", '<table class="highlighttable"><tr><td>1</td></tr></table>'):
        assert labelled(content) == content


@pytest.mark.parametrize(("name", "kept"), [("errors.md", 0), ("gpu.md", 1)])
def test_the_menu_of_a_page_of_messages_ends_at_the_second_level(name, kept):
    section = SimpleNamespace(children=[SimpleNamespace(children=[])])
    page = SimpleNamespace(
        file=SimpleNamespace(src_uri=name), toc=[SimpleNamespace(children=[section])]
    )
    assert MENU["on_page_content"]("text", page=page, config=None, files=None) == "text"
    assert len(section.children) == kept


@pytest.mark.parametrize("name", MENU["PAGES"])
def test_the_pages_with_a_short_menu_exist(name):
    assert (DOCS / name).exists()
