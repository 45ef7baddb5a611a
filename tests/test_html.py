"""The page builder: what is shown, how it is sorted and escaped, and that nothing is left half-written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from onetrip import html
from onetrip.html import Cell, Section, Table


def drawing(label: str = "share"):
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(4, 3))
    axes = canvas.add_subplot()
    axes.plot([1, 2, 3], [3, 1, 2], label=label)
    axes.grid(True)
    axes.legend()
    return canvas


def cells(page: str) -> list[tuple[str, str]]:
    """(attributes, text) of every cell of a body."""
    return re.findall(r"<td ([^>]*)>([^<]*)</td>", page)


@pytest.mark.parametrize(
    ("entry", "attributes", "text"),
    [
        (1234567, 'class="number" data-value="1234567"', "1,234,567"),
        (0.123456, 'class="number" data-value="0.123456"', "0.1235"),
        (None, 'class="text"', "–"),
        ("a < b & c", 'class="text" data-value="a &lt; b &amp; c"', "a &lt; b &amp; c"),
        (Cell(2.5, "2.5 ms"), 'class="number" data-value="2.5"', "2.5 ms"),
        (Cell(1.0, "yes", good=True), 'class="number good" data-value="1.0"', "yes"),
        (Cell("no", "no", good=False), 'class="text bad" data-value="no"', "no"),
    ],
    ids=["int", "float", "none", "markup", "cell", "good", "bad"],
)
def test_a_cell_shows_its_text_and_keeps_its_value(entry, attributes, text):
    page = html.page("t", {}, [Section("s", [Table("c", ["x"], [[entry]])])])
    assert cells(page) == [(attributes, text)]


def test_a_column_is_numeric_unless_a_word_stands_in_it():
    rows = [["a", 1, 1, None, None], ["b", 2.5, Cell("x", "x"), None, 3]]
    assert html.numeric_columns(rows) == [False, True, False, False, True]


def test_everything_that_was_given_is_escaped_and_shown():
    table = Table("cap<1>", ["col<2>"], [["v<3>"]], note="note<4>")
    page = html.page("title<5>", {"fact<6>": "found<7>"}, [Section("section<8>", ["text<9>", table])])
    for word in ("cap", "col", "v", "note", "title", "fact", "found", "section", "text"):
        assert re.search(rf"{word}&lt;\d&gt;", page)
    assert not re.search(r"<\d>", page)


def test_a_page_refers_to_nothing_outside_itself():
    page = html.page("t", {"a": "b"}, [Section("s", [html.figure(drawing(), "curve")])])
    without_namespaces = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert not re.search(
        r"https?://|//cdn|@import|<link(?! rel=\"icon\" href=\"data:,\")|<script src", without_namespaces
    )
    assert "default-src 'none'" in page


def test_an_empty_table_is_a_head_without_rows():
    assert cells(html.page("t", {}, [Section("s", [Table("c", ["a", "b"], [])])])) == []


def test_figures_take_the_colours_of_the_page():
    svg = html.figure(drawing(), "curve").svg
    assert svg.startswith("<svg") and svg.endswith("</svg>")
    assert "currentColor" in svg and "var(--ground)" in svg and "var(--line)" in svg
    assert not re.search("#000000|#ffffff|<metadata", svg)
    assert re.search(r"<text [^>]*>share</text>", svg)  # text stays text: searched for, read aloud


def test_figures_of_one_page_share_no_id():
    drawn = html.figure(drawing(), "one"), html.figure(drawing("speed"), "one"), html.figure(drawing(), "two")
    ids = [re.findall(r'\bid="([^"]+)"', each.svg) for each in drawn]
    assert ids[0] and sum(map(len, map(set, ids))) == len(set().union(*ids))
    svg = html.figure(drawing(), "one").svg
    assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', svg)) <= set(ids[0])


def test_a_figure_is_the_same_every_time():
    assert html.figure(drawing(), "curve") == html.figure(drawing(), "curve")


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(html.MissingPackage, match=rf"{package} is missing: pip install 'onetrip\[report\]'"):
        html.require()
    with pytest.raises(html.MissingPackage, match=package):
        html.page("t", {}, []) if package == "jinja2" else html.figure(None, "c")


def test_writing_makes_the_folder_and_replaces_the_file(tmp_path: Path):
    path = tmp_path / "new" / "page.html"
    for content in ("one µ", "two µ"):
        assert html.write(path, content) == path
        assert path.read_text(encoding="utf-8") == content
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path):
    path = html.write(tmp_path / "page.html", "old")
    with pytest.raises(UnicodeEncodeError):
        html.write(path, "x" * 100_000 + "\ud800")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_where_a_file_can_be_written_is_found_out_without_making_anything(tmp_path: Path):
    assert html.unwritable(tmp_path) == html.unwritable(tmp_path / "new" / "folder") == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("kept")
    assert html.unwritable(tmp_path / "file") and html.unwritable(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "kept"
    assert html.unwritable(tmp_path / ("n" * 300) / "below")  # no name is that long
