"""Fills the last column of docs/reliability.md from the tests: python -m tools.promises

A test that holds a line of the page is marked @pytest.mark.promise("N2"), N2 being the line's first cell; a file whose
tests all hold it sets pytestmark. The page's text is written by hand, its lists of tests are not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
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


def _marks(expressions: list[ast.expr]) -> tuple[list[str], bool]:
    """(names of promises, whether one is pytest.mark.gpu)."""
    words = [ast.unparse(expression) for expression in expressions]
    promises = [match[1] for word in words if (match := re.fullmatch(r"pytest\.mark\.promise\('(.+)'\)", word))]
    return promises, "pytest.mark.gpu" in words


def promises(tests: Path) -> dict[str, list[Test]]:
    """name of a promise -> the tests below the folder that hold it."""
    found: dict[str, list[Test]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        file = path.relative_to(tests.parent).as_posix()
        module = ast.parse(path.read_text())
        whole = [
            node.value
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
        expressions = [e for value in whole for e in (value.elts if isinstance(value, ast.List) else [value])]
        names, file_needs_gpu = _marks(expressions)
        for name in names:
            found[name].append(Test(file, "", file_needs_gpu))
        for node in module.body:
            if isinstance(node, ast.FunctionDef):
                names, needs_gpu = _marks(node.decorator_list)
                for name in names:
                    found[name].append(Test(file, node.name, needs_gpu or file_needs_gpu))
    return found


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


def main() -> int:
    PAGE.write_text(render(PAGE.read_text(), promises(ROOT / "tests")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
