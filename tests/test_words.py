"""Phrases that plain technical English does without stay out of code and docs.

This lists what is left, from the root of a checkout:

    PYTHONPATH=tests python -c "from test_words import *; print(*findings(*EVERYTHING), sep='\\n')"
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EVERYTHING = ("README.md", "CONTRIBUTING.md", "docs", "examples", "benchmarks", "tfamp", "tests")
CHECKED = ("README.md", "CONTRIBUTING.md", "docs", "examples")
# Phrase -> what to write instead.
INSTEAD = {
    r"\bby turns\b": "alternately",
    r"\banew\b": "again",
    r"(?<!there )\b(?:is|are) no\b(?! longer| more)": "is not a",
}
# Room for quotes: code and quotations of a page, or of a comment.
_QUOTE = re.compile(r"```.*?```|`[^`\n]*`|“[^”]*”|^>.*?$", re.M | re.S)


def findings(*places):
    """Yields "file: ... phrase ...: write ..." for every phrase in the files below `places`."""
    roots = [ROOT / place for place in places]
    files = [file for root in roots for file in (root, *root.rglob("*.py"), *root.rglob("*.md"))]
    for path in sorted({file for file in files if file.is_file()} - {Path(__file__)}):
        text = path.read_text(encoding="utf-8")
        # A sentence goes on in the next line, of a comment too.
        prose = re.sub(r"\s+(?:#\s+)?", " ", _QUOTE.sub("``", text))
        for phrase, better in INSTEAD.items():
            for found in re.finditer(phrase, prose, re.I):
                around = prose[max(0, found.start() - 30) : found.end() + 20]
                yield f"{path.relative_to(ROOT)}: {around}: write {better!r}"
        for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and (ast.get_docstring(node) or "").startswith("What "):
                line = getattr(node, "lineno", 1)
                yield f"{path.relative_to(ROOT)}:{line}: What ...: open with a verb or a noun"


@pytest.mark.parametrize("place", CHECKED)
def test_sentences_do_without_these_phrases(place):
    assert not list(findings(place))
