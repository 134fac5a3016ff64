"""Prints the changelog's section of a tag such as v1.0.0; fails if the version is another."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """Returns the section below the heading of `version`, without the heading."""
    if tag != f"v{version}":
        raise SystemExit(f"The tag is {tag}, and __version__ is {version}: expected v{version}.")
    heading = re.escape(f"## [{version}]")
    found = re.search(rf"^{heading}.*?\n(.*?)(?=^## |^\[[^]]+\]: |\Z)", changelog, re.M | re.S)
    if found is None or not found[1].strip():
        raise SystemExit(f"CHANGELOG.md has no text below '## [{version}]'.")
    return found[1].strip()


if __name__ == "__main__":
    source = (ROOT / "tfamp" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', source, re.M)
    print(notes(sys.argv[1], found[1] if found else "", (ROOT / "CHANGELOG.md").read_text("utf-8")))
