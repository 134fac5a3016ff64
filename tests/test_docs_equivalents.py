"""Every test that the table of equivalents names exists, and every row names one."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "equivalents.md"
if not PAGE.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)
ROWS = [
    line
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|") and not re.match(r"\|[-| ]+\||\| Theirs ", line)
]
_TEST = re.compile(r"\| `(tests/[\w/]+\.py)::(\w+)` \|$")


def test_the_test_of_each_row_exists():
    wrong = []
    for row in ROWS:
        file, name = _TEST.search(row).groups()
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        if name not in {getattr(node, "name", None) for node in tree.body}:
            wrong.append(f"{file} has no {name}")
    assert ROWS
    assert not wrong
