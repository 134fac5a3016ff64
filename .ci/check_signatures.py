"""Checks that signatures in the built API pages are broken into lines that need no scrolling.

python .ci/check_signatures.py BRANCH:FOLDER, with git's name for the pages' folder. Without a
formatter in the environment mkdocs only logs that, and writes each signature in one line.
"""

import html
import re
import subprocess
import sys

WIDEST = 70

_SIGNATURE = re.compile(r'<div class="[^"]*\bdoc-signature\b[^"]*">.*?<pre>(.*?)</pre>', re.S)


def signatures(page: str) -> list[str]:
    """Returns the signatures of a page, without tags."""
    return [html.unescape(re.sub(r"<[^>]+>", "", found)) for found in _SIGNATURE.findall(page)]


def _git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    folder = sys.argv[1]
    names = _git("ls-tree", "--name-only", folder).splitlines()
    pages = [_git("show", f"{folder}/{name}/index.html") for name in names]
    found = [text for page in pages for text in signatures(page)]
    wide = [text for text in found if max(map(len, text.splitlines()), default=0) > WIDEST]
    if wide or not found:
        sys.exit(f"{len(wide)} of {len(found)} signatures are wider than {WIDEST}: {wide[:3]}")
    print(f"{len(found)} signatures, all of at most {WIDEST} characters a line")
