"""Fills the last column of docs/reliability.md from the tests: python -m tools.promises

A test that holds a line of the page is marked @pytest.mark.promise("N2"), N2 being the line's first cell; a file whose
tests all hold it sets pytestmark. The page's text is written by hand, its lists of tests are not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
LINE = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<property>.+) \| [^|]* \|$", re.MULTILINE)
HEADINGS = ("", "---")


class Test(NamedTuple):
    file: str
    name: str
    """Name of the function; "" for all of the file."""
    needs_gpu: bool


def promises(tests: Path) -> dict[str, list[Test]]:
    """name of a promise -> the tests below the folder that hold it."""
    found: dict[str, list[Test]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        file = path.relative_to(tests.parent).as_posix()
        file_needs_gpu = False
        for name, marks in _marked(ast.parse(path.read_text())):
            needs_gpu = file_needs_gpu or "pytest.mark.gpu" in marks
            file_needs_gpu = file_needs_gpu or (needs_gpu and not name)
            for mark in marks:
                if held := re.fullmatch(r"pytest\.mark\.promise\('(.+)'\)", mark):
                    found[held[1]].append(Test(file, name, needs_gpu))
    return found


def _marked(module: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """(name, marks) of each function of a file, after those of the file itself, whose name is ""."""
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield "", [ast.unparse(each) for each in getattr(node.value, "elts", [node.value])]
    for node in module.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, [ast.unparse(each) for each in node.decorator_list]


def cell(tests: list[Test]) -> str:
    by_file: dict[str, list[Test]] = defaultdict(list)
    for test in tests:
        by_file[test.file].append(test)
    words = []
    for file, held in by_file.items():
        names = ", ".join(f"`{test.name}`" for test in held if test.name)
        gpu = " (GPU)" if all(test.needs_gpu for test in held) else ""
        words.append(f"[{file}](../{file}){gpu}{': ' + names if names else ''}")
    return "; ".join(words)


def render(page: str, found: dict[str, list[Test]]) -> str:
    """The page with its lists of tests. Raises ValueError where a line has no test, or a mark no line."""
    lines = {match["name"] for match in LINE.finditer(page) if match["name"] not in HEADINGS}
    if lines != found.keys():
        untested, unknown = sorted(lines - found.keys()), sorted(found.keys() - lines)
        raise ValueError(f"docs/reliability.md: lines without a test: {untested}; marks without a line: {unknown}")

    def filled(match: re.Match[str]) -> str:
        if match["name"] in HEADINGS:
            return match[0]
        return f"| {match['name']} | {match['property']} | {cell(found[match['name']])} |"

    return LINE.sub(filled, page)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(), promises(ROOT / "tests")))
