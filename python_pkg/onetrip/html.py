"""One self-contained HTML page from data: paragraphs, tables that sort, figures. It asks the network for nothing.

Needs jinja2, and matplotlib for figures: pip install 'onetrip[report]'. write and unwritable need neither, and do for
any text.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).with_name("page.html.j2")
ABSENT = "–"
"""What stands for None."""


class MissingPackage(ImportError):
    """The message names the package and the line that installs it."""


@dataclass(frozen=True)
class Cell:
    """Sorted by value, shown as text. good: shown green, or red where False."""

    value: float | str | None
    text: str
    good: bool | None = None


Entry = str | float | int | Cell | None


@dataclass(frozen=True)
class Table:
    """A row has an entry for each column. Columns of numbers are aligned to the right; None sorts last either way.

    grouped: neighbouring rows with the same first entry belong together; the second entry tells them apart.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    note: str = ""
    grouped: bool = False


@dataclass(frozen=True)
class Figure:
    """svg: an <svg> element, as figure() makes it. alt: what it shows, for those who cannot see it."""

    caption: str
    svg: str
    note: str = ""
    alt: str = ""


@dataclass(frozen=True)
class Section:
    """parts: a str is a paragraph."""

    title: str
    parts: Sequence[str | Table | Figure]


def named_section(title: str, name: str, parts: Sequence[str | Table | Figure]) -> Section:
    """A section of one model: its title, and the captions of its tables and figures, end with the name."""
    named = [part if isinstance(part, str) else replace(part, caption=f"{part.caption}, {name}") for part in parts]
    return Section(f"{title}: {name}", named)


def require(*packages: str) -> None:
    """Raises MissingPackage unless all can be imported (default: all that this module needs).

    For a command that measures for an hour before it writes its page.
    """
    for package in packages or ("jinja2", "matplotlib"):
        try:
            __import__(package)
        except ImportError:
            raise MissingPackage(f"{package} is missing: pip install 'onetrip[report]'", name=package) from None


def cell(entry: Entry) -> Cell:
    """An entry of a table with the text it is shown as: four digits of a float, thousands of an int apart."""
    if isinstance(entry, Cell):
        return entry
    if entry is None:
        return Cell(None, ABSENT)
    if isinstance(entry, bool):
        return Cell(int(entry), "yes" if entry else "no")
    if isinstance(entry, str):
        return Cell(entry, entry)
    return Cell(entry, f"{entry:,}" if isinstance(entry, int) else f"{entry:.4g}")


def numeric_columns(rows: Sequence[Sequence[Entry]]) -> list[bool]:
    """Whether each column holds numbers and nothing else but None."""
    columns = [[cell(entry).value for entry in column] for column in zip(*rows, strict=True)]
    return [
        any(value is not None for value in column) and not any(isinstance(value, str) for value in column)
        for column in columns
    ]


def figure(figure: Any, caption: str, note: str = "", alt: str = "") -> Figure:
    """A matplotlib.figure.Figure as SVG that follows the page into dark mode.

    Black becomes the colour of the page's text, white the page's ground, matplotlib's grey of grids that of its lines;
    what must stay black or white whatever the page (text on a coloured cell) is drawn in #111111 or #fefefe.
    """
    require("matplotlib")
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "onetrip"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    prefix = "f" + hashlib.sha256((caption + svg).encode()).hexdigest()[:8]  # ids of one page must differ
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    for colour, variable in (("#000000", "currentColor"), ("#ffffff", "var(--ground)"), ("#b0b0b0", "var(--line)")):
        svg = svg.replace(colour, variable)
    return Figure(caption, svg.strip(), note, alt)


def page(title: str, facts: Mapping[str, str], sections: Sequence[Section]) -> str:
    """The whole page. facts: shown at its head, by subject (environment.describe gives those of a result)."""
    require("jinja2")
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.globals.update(kind=lambda part: type(part).__name__, cell=cell, numeric_columns=numeric_columns)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title, facts=facts, sections=sections
    )


def unwritable(folder: Path) -> str:
    """Why write() could put no file into the folder; "" where it can. Makes nothing: write() makes the folder."""
    there = folder.absolute()
    try:
        while not there.exists() and there != there.parent:
            there = there.parent
        with tempfile.TemporaryFile(dir=there):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def write(path: Path, content: str) -> Path:
    """Writes the file whole or not at all, its folder too if need be; returns the path. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path
