"""Tables on a terminal."""

import io
import re

import pytest
from onetrip.html import Table
from onetrip.terminal import render_table
from rich.console import Console

TABLE = Table(
    "Memory",
    ("", "", "bytes"),
    [("weights", "eager", 8), ("weights", "patched", 1), ("peak", "eager", None), ("peak", "patched", 4)],
    grouped=True,
)


@pytest.mark.parametrize(
    ("width", "bars"),
    [(160, ["█" * 32, "████", "", "█" * 16]), (80, ["█" * 7, "▉", "", "███▌"]), (40, ["████", "▌", "", "██"])],
)
def test_a_bar_as_long_as_the_width_allows_stands_on_the_line_of_the_figure_that_it_draws(width, bars):
    """Bars of all columns once stood below each other, beside lines of other figures or of none; and they stayed short
    on wide consoles."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render_table(TABLE))
    drawn = re.findall(r"(?:eager|patched) +(\S+) *(\S*)", capture.get())
    assert drawn == list(zip("81-4", bars, strict=True))


def test_an_encoding_without_blocks_has_bars_of_number_signs():
    """They were printed as question marks."""
    console = Console(width=80, file=io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    with console.capture() as capture:
        console.print(render_table(TABLE))
    assert capture.get().isascii()
    assert re.findall(r"#+", capture.get()) == ["#" * 7, "#" * 3]


def test_columns_of_none_alone_are_left_out(printed):
    text = printed(render_table(Table("Times", ("name", "empty", "ms"), [("first", None, None), ("second", None, 2)])))
    assert [line.split() for line in text.splitlines()[2:3] + text.splitlines()[4:6]] == [
        ["name", "ms"],
        ["first", "-"],
        ["second", "2"],
    ]
