"""The matrix of versions, the dependencies and the page about them say the same."""

import ast
import re
import runpy
from pathlib import Path

import pytest

import tfamp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
NOXFILE = ROOT / "noxfile.py"

pytestmark = pytest.mark.skipif(not NOXFILE.is_file(), reason="noxfile.py is not beside the tests")


def _constant(name):
    """A constant of noxfile.py; nox itself need not be installed."""
    for node in ast.parse(NOXFILE.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    return pytest.fail(f"noxfile.py has no {name}")


def test_the_oldest_row_holds_the_floors_of_the_dependencies():
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    floors = dict(re.findall(r'^  "(keras|tensorflow)>=([\d.]+)"', text, re.MULTILINE))
    python, packages = _constant("ROWS")["oldest"]
    assert re.search(r'requires-python = ">=([\d.]+)"', text)[1] == python
    assert {f"{name}=={floor}.*" for name, floor in floors.items()} < set(packages)


def test_every_row_is_on_the_page_with_its_versions():
    for row, (python, packages) in _constant("ROWS").items():
        (line,) = re.findall(rf"^\| `{row}` .*$", PAGE.read_text("utf-8"), re.MULTILINE)
        versions = dict(re.findall(r"(\w+)==([\d.]+)\.\*", " ".join(packages)))
        cells = [cell.strip() for cell in line.split("|")[2:5]]
        expected = [python, versions["tensorflow"], versions["keras"]]
        assert [cell.startswith(want) for cell, want in zip(cells, expected, strict=True)] == [
            True
        ] * 3, f"{line} is not {expected}"


def test_the_workflow_runs_every_row_on_its_python():
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if not workflow.is_file():
        pytest.skip("the source distribution has no workflows")
    rows = re.findall(r'{row: (\w+), python: "([\d.]+)"}', workflow.read_text("utf-8"))
    assert rows == [(row, python) for row, (python, _) in _constant("ROWS").items()]


def test_the_notes_of_a_release_are_its_section_of_the_changelog():
    notes = runpy.run_path(str(ROOT / ".ci" / "release_notes.py"))["notes"]
    changelog = "# Changes\n\n## [1.1]\n\n- new\n\n## [1.0] - today\n\n- old\n\n[1.0]: https://x\n"
    assert notes("v1.1", "1.1", changelog) == "- new"
    assert notes("v1.0", "1.0", changelog) == "- old"
    with pytest.raises(SystemExit, match=r"tag is v1\.2, and .* is 1\.1: expected v1\.1"):
        notes("v1.2", "1.1", changelog)
    with pytest.raises(SystemExit, match=r"no text below '## \[1\.2\]'"):
        notes("v1.2", "1.2", changelog)


def test_the_citation_and_the_changelog_have_the_release():
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert re.search(r"^version: (.+)$", citation, re.M)[1] == tfamp.__version__
    assert f"## [{tfamp.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_tests_of_the_matrix_exist():
    for path in _constant("TESTS") + _constant("BACKEND_TESTS"):
        assert (ROOT / path).is_file(), path
