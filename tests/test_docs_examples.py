"""Runs every Python block of README.md and docs/, so that no page shows code that does not work."""

import json
import re
import runpy
import textwrap
from pathlib import Path

import pytest

from helpers.cases import first_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
# A fence may be indented (in a list or a content tab); it ends with the same indentation.
_BLOCK = re.compile(
    r"(?P<no_run>^[ ]*<!--\s*no-run:\s*(?P<reason>[^\n]*?)\s*-->\s*\n)?"
    r"^(?P<indent>[ ]*)(?P<fence>`{3,})[ ]*\{?\.?(?:python|py)\b[^\n]*\n"
    r"(?P<code>.*?)"
    r"^(?P=indent)(?P=fence)[ ]*$",
    re.MULTILINE | re.DOTALL,
)


def python_blocks(text):
    """Returns the code of each Python block of a Markdown text, and whether it runs."""
    blocks = []
    for match in _BLOCK.finditer(text):
        assert match["no_run"] is None or match["reason"], "no-run needs a reason"
        # Leading newlines make tracebacks and SyntaxErrors show the page's own line numbers.
        lines_before = text.count("\n", 0, match.start("code")) * "\n"
        blocks.append((lines_before + textwrap.dedent(match["code"]), match["no_run"] is None))
    return blocks


def page_text(path):
    """Returns a page as Markdown; each code cell of a notebook is a block."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    blocks = [f"```python\n{cell}\n```" if kind == "code" else cell for cell, kind in cells]
    return "\n\n".join(blocks) + "\n"


def run_page(path):
    """Runs a page's blocks in order, in one namespace; returns how many it ran or compiled."""
    namespace = {"__name__": "__main__"}
    blocks = python_blocks(page_text(path))
    for block, runs in blocks:
        code = compile(block, str(path), "exec")
        if runs:
            exec(code, namespace)
    return len(blocks)


# One page always, the others in CI, where building the documentation runs the notebooks.
@pytest.mark.parametrize(
    "path",
    [*first_of(PAGES), *(pytest.param(path, marks=pytest.mark.nightly) for path in NOTEBOOKS)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_python_blocks_of_the_page_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not run_page(path):
        pytest.skip("no Python block")


def test_a_notebook_is_kept_without_what_its_cells_printed():
    # That would be of one machine, and a difference at every change.
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert cells
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]


def test_blocks_keep_their_line_numbers_and_no_run_ones_are_compiled_for_a_reason(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- no-run: needs a GPU -->\n```python\n1 / 0\n```\n")
    assert run_page(page) == 1
    page.write_text("```python\nx = 1\n```\n\n    ```python\n    y = x / 0\n    ```\n")
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page)
    assert error.traceback[-1].lineno + 1 == 6
    page.write_text("<!-- no-run: needs a GPU -->\n```python\n1 /\n```\n")
    with pytest.raises(SyntaxError):
        run_page(page)
    with pytest.raises(AssertionError, match="no-run needs a reason"):
        python_blocks("<!-- no-run: -->\n```python\n1\n```\n")


def test_readme_starts_with_two_commands_that_ci_runs():
    shell_commands = runpy.run_path(str(ROOT / ".ci" / "readme_command.py"))["shell_commands"]
    main_example, tests = shell_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert "examples/" in main_example
    assert "pytest" in tests
