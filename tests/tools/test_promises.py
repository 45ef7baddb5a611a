"""docs/reliability.md lists the tests that are marked with its promises."""

from __future__ import annotations

import pytest

from tools import promises


def test_page_lists_the_marked_tests():
    page = promises.PAGE.read_text()
    assert promises.render(page, promises.promises(promises.ROOT / "tests")) == page, "run python -m tools.promises"


TESTS = """
import pytest; pytestmark = [pytest.mark.gpu, pytest.mark.promise("S1")]
@pytest.mark.slow
@pytest.mark.promise("N2")
def test_widths(): pass
"""
PAGE = "|  | property | test |\n| --- | --- | --- |\n| N2 | any width |  |\n| S1 | any size | gone |\n"


def test_marks_of_functions_and_files_are_found(tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(TESTS)
    found = promises.promises(tmp_path / "tests")
    link = "[tests/test_x.py](../tests/test_x.py) (GPU)"
    page = promises.render(PAGE, found)
    assert page.splitlines()[2:] == [f"| N2 | any width | {link}: `test_widths` |", f"| S1 | any size | {link} |"]
    assert promises.render(page, found) == page


@pytest.mark.parametrize(("old", "new"), [("| S1 |", "| S2 |"), ("| N2 | any width |  |\n", "")])
def test_a_line_without_a_test_and_a_mark_without_a_line_are_errors(old, new, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text(TESTS)
    with pytest.raises(ValueError, match="lines without a test"):
        promises.render(PAGE.replace(old, new), promises.promises(tmp_path / "tests"))
