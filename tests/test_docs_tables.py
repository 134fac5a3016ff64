"""The hook that names the column in each cell of a table of the site."""

import runpy
from pathlib import Path

HOOK = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "table_labels.py"))


def labelled(content):
    return HOOK["on_page_content"](content, page=None, config=None, files=None)


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


def test_a_table_of_another_kind_and_a_page_without_tables_are_left_alone():
    for content in ("<p>text</p>", '<table class="highlighttable"><tr><td>1</td></tr></table>'):
        assert labelled(content) == content
