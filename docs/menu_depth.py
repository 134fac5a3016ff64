"""A hook of MkDocs: leaves long headings of a lower level out of a page's menu.

Search finds these headings all the same, and links to them work.
"""

from __future__ import annotations

from typing import Any

# Pages whose headings of the third level are whole messages.
PAGES = ("errors.md",)


def on_page_content(content: str, *, page: Any, **_: Any) -> str:
    """Cuts the page's table of contents to the second level; returns the HTML as it is."""
    if page.file.src_uri in PAGES:
        for title in page.toc:
            for section in title.children:
                section.children.clear()
    return content
