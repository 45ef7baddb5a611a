"""The documentation site builds without a warning, and its pages ask no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import browser
import pytest

from tools import class_table, site_links

ROOT = Path(__file__).resolve().parents[2]
LOADING = re.compile(r"<(?:script|img|iframe|source|video|link)\b[^>]*>")
FOREIGN = re.compile(r'\s(?:src|href)="?((?!data:)[^">\s]*//[^">\s]*)')
STYLE = re.compile(r'<style\b[^>]*>(.*?)</style>|\sstyle="([^"]*)"', re.DOTALL)


def foreign(html: str) -> list[str]:
    """What the page loads from another host: scripts, styles, images and frames, and what styles name."""
    tags = [tag for tag in LOADING.findall(html) if "canonical" not in tag]
    addresses = [address for tag in tags for address in FOREIGN.findall(tag)]
    return addresses + [text for each in STYLE.findall(html) for text in each if "//" in text]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 25
    assert not {str(page.relative_to(site)): found for page in pages if (found := foreign(page.read_text()))}
    for style in site.rglob("*.css"):
        assert "url(http" not in style.read_text() and "@import" not in style.read_text(), style.name


@pytest.mark.slow
@pytest.mark.skipif(browser.executable() is None, reason=f"no browser is installed: {', '.join(browser.NAMES)}")
def test_search_works_without_a_server(site: Path, tmp_path: Path) -> None:
    """From the file system, where a browser starts no worker and loads no JSON."""
    with browser.Browser(site / "index.html", tmp_path) as page:
        found = page.evaluate("""new Promise(async (resolve) => {
          const results = () => [...document.querySelectorAll(".md-search-result__item a")].map((each) => each.href);
          const field = document.querySelector(".md-search__input");
          field.focus();
          field.value = "unpatch_model";
          for (let tries = 0; tries < 100 && !results().length; tries++) {
            field.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
            await new Promise((wait) => setTimeout(wait, 100));
          }
          resolve(results());
        })""")
        assert any(address.endswith("#onetrip.patching.unpatch_model") for address in found), found
        assert not [url for url in page.requests if not url.startswith(("file:", "data:"))]


@pytest.mark.slow
def test_the_api_page_has_every_name_that_its_source_lists(site: Path) -> None:
    """tests/docs/test_api_page.py holds that these are all public names."""
    html = (site / "api.html").read_text()
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert len(names) > 30 and not [name for name in names if f'id="{name}"' not in html]
    assert "doc-module" not in html  # a module of a function's name hides it
    assert "Draws (seed, offset)" in html or "draws (seed, offset)" in html  # the docstrings are there


def test_what_would_be_loaded_is_seen() -> None:
    assert foreign('<script src="https://x/y.js"></script>') == ["https://x/y.js"]
    assert foreign('<link rel="stylesheet" href="//x/y.css">') == ["//x/y.css"]
    assert foreign("<style>@font-face { src: url(https://x/f) }</style>") != []
    assert foreign('<a href="https://x">x</a><img src="figures/x.png"><script src="../a.js"></script>') == []


def test_links_that_leave_the_pages_are_text_on_the_site() -> None:
    change = site_links.within_the_site
    assert change("[the tool](../tools/gpusim) [page](gpu.md)", "reliability.md") == "the tool [page](gpu.md)"
    assert change("[page](../gpu.md#x) [file](../../LICENSE)", "how-to/trainer.md") == "[page](../gpu.md#x) file"
    assert change("![figure](../x.png)", "gpu.md") == "![figure](../x.png)"


def test_the_parameters_of_a_docstring_become_a_list() -> None:
    pytest.importorskip("griffe")
    from tools.site_docstrings import listed

    text = "One line.\n\nFirst: words.\nx, y: (*, n)\ncontinued: not a name.\np: of dropping.\n\nReturns x * y."
    names = {"x", "y", "p"}
    assert listed(text, names).split("\n") == [
        *("One line.", "", "First: words.", "", "- `x, y`: (\\*, n)", "continued: not a name."),
        *("- `p`: of dropping.", "", "Returns x \\* y."),
    ]


def test_the_tables_of_classes_are_those_of_the_record() -> None:
    text = class_table.PAGE.read_text()
    assert "| contractions |" in text
    assert class_table.page(text) == text, "python -m tools.class_table writes them"
