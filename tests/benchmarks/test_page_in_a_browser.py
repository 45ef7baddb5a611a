"""The page of every suite, opened in a headless browser: it is silent, asks for nothing, shows its figures, sorts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from made_up_results import every_suite
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.show import html_page, plots

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(browser.executable() is None, reason=f"no browser is installed: {', '.join(browser.NAMES)}"),
]
ALL = "Every operator, shape, dtype and provider"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    folder = tmp_path_factory.mktemp("page")
    results.write(every_suite(), folder / "results")
    written = html_page.write(folder / "results", folder / "page.html")
    with browser.Browser(Path(written["path"]), folder / "profile") as opened:
        yield opened


@pytest.fixture(autouse=True)
def as_it_was(page: browser.Browser) -> Iterator[None]:
    yield
    page.resize(1400, 900)
    page.prefer("light")


def column(page: browser.Browser, caption: str, name: str) -> list[float | None]:
    """The values of a column, from top to bottom."""
    return page.evaluate(f"""(() => {{
      const table = document.querySelector('[aria-label="{caption}"] table');
      const index = [...table.tHead.rows[0].cells].findIndex(head => head.textContent === "{name}");
      return [...table.tBodies[0].rows].map(row => row.cells[index].dataset.value)
        .map(value => value === undefined ? null : Number(value));
    }})()""")


def head(caption: str, name: str) -> str:
    heads = f"""[...document.querySelectorAll('[aria-label="{caption}"] th button')]"""
    return f"""{heads}.find(each => each.textContent === "{name}")"""


def test_the_console_stays_silent_and_the_network_unasked(page: browser.Browser) -> None:
    assert page.evaluate("document.title") == "onetrip: measurements"
    assert page.complaints == []
    assert [url for url in page.requests if not url.startswith("data:")] == []


def test_the_browser_would_have_noticed_both(page: browser.Browser, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="picture.png"><script>console.error("lost"); throw new Error("thrown")</script>')
    with browser.Browser(bad, tmp_path / "profile") as opened:
        assert any("lost" in line for line in opened.complaints)
        assert any("thrown" in line for line in opened.complaints)
        assert opened.requests == [(tmp_path / "picture.png").as_uri()]


@pytest.mark.parametrize("width", [1400, 420])
def test_every_figure_is_there_with_a_size_and_words(page: browser.Browser, width: int) -> None:
    page.resize(width, 900)
    found = page.evaluate("""[...document.querySelectorAll("figure")].map(figure => {
      const box = figure.querySelector("svg").getBoundingClientRect();
      return [figure.querySelector("figcaption").textContent, box.width, box.height,
              figure.querySelectorAll("svg text").length];
    })""")
    assert sorted(title for title, *_ in found) == sorted(drawing.title for drawing in plots.drawings(every_suite()))
    for title, across, high, words in found:
        assert across > 400 and high > 100 and words > 5, title


@pytest.mark.parametrize("width", [1400, 420])
def test_the_page_itself_never_scrolls_sideways(page: browser.Browser, width: int) -> None:
    page.resize(width, 900)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("name", ["width", "forward ms", "eager / it", "error"])
def test_a_click_on_a_head_sorts_by_number_and_a_second_one_the_other_way(page: browser.Browser, name: str) -> None:
    before = column(page, ALL, name)
    numbers = sorted(value for value in before if value is not None)
    nothing = [None] * before.count(None)
    assert len(set(numbers)) > 1
    page.click(head(ALL, name))
    assert column(page, ALL, name) == numbers + nothing
    page.click(head(ALL, name))
    assert column(page, ALL, name) == numbers[::-1] + nothing
    assert page.evaluate(f"{head(ALL, name)}.parentElement.getAttribute('aria-sort')") == "descending"
    assert page.evaluate(f"""document.querySelectorAll('[aria-label="{ALL}"] [aria-sort]').length""") == 1


def test_sorting_moves_whole_rows_and_words_by_alphabet(page: browser.Browser) -> None:
    script = f"""[...document.querySelectorAll('[aria-label="{ALL}"] tbody tr')].map(row => row.textContent)"""
    before = page.evaluate(script)
    page.click(head(ALL, "provider"))
    assert sorted(page.evaluate(script)) == sorted(before)
    providers = page.evaluate(
        f"""[...document.querySelectorAll('[aria-label="{ALL}"] tbody tr')].map(row => row.cells[4].textContent)"""
    )
    assert providers == sorted(providers)


def luminance(colour: str) -> float:
    """Relative luminance of "rgb(…)", as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_can_be_read_on_the_ground_of_either_scheme(page: browser.Browser, scheme: str) -> None:
    page.prefer(scheme)
    colours = page.evaluate("""[
      getComputedStyle(document.body).backgroundColor,
      ...["p", ".note", "dt", "nav a", ".good", ".bad", "td"].map(
        each => getComputedStyle(document.querySelector(each)).color),
      getComputedStyle([...document.querySelectorAll("figure svg text")].find(
        each => each.textContent === "forward")).fill,
    ]""")
    ground, *inks = map(luminance, colours)
    assert (ground < 0.05) == (scheme == "dark")
    for ink in inks:
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, colours
