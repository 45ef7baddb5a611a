"""A hook of MkDocs: links from docs/ to files outside of it lead nowhere on the site, so their text stays alone.

The same pages are read in a checkout, where such a link (../tools/gpusim) is one.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\[]+)\]\((?P<target>\.\./[^)\s]+)\)")


def within_the_site(markdown: str, page: str) -> str:
    """The page's text less links that leave docs/. page: its path below docs/."""

    def kept(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link["target"].split("#")[0]))
        return link["text"] if target.startswith("..") else link[0]

    return LINK.sub(kept, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return within_the_site(markdown, page.file.src_uri)
