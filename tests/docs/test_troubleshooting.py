"""The messages that docs/troubleshooting.md explains are those of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "setup.py",
    *("python_pkg/onetrip/" + name for name in ("doctor.py", "selfcheck.py", "ops/common/backends.py")),
)
SOURCES = [*(ROOT / name for name in FILES), *(ROOT / "csrc").rglob("*.[ch]*"), ROOT / "kernels/triton/__init__.py"]
ROW = re.compile(r"^\| (?P<messages>`.+?) \|", re.MULTILINE)


def fragments() -> list[str]:
    """What of the messages stands in a source as it is: the parts between dots and colons."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [each for row in ROW.finditer(page) for each in re.findall(r"`([^`]+)`", row["messages"])]
    parts = [part.strip() for message in quoted for part in re.split(r"\.\.\.|: ", message)]
    return [part for part in parts if len(part) > 8]


@pytest.fixture(scope="module")
def sources() -> str:
    text = "\n".join(path.read_text() for path in SOURCES if path.is_file())
    return re.sub(r'"\s*\n\s*f?"', "", text)  # literals that go on in the next line


@pytest.mark.parametrize("fragment", fragments())
def test_a_message_of_the_page_is_one_of_the_program(fragment: str, sources: str) -> None:
    """Numbers stand for any placeholder."""
    pattern = re.sub(r"\d+", lambda _: r"\S{1,20}", re.escape(fragment).replace(r"\ ", " "))
    assert re.search(pattern, sources), fragment


def test_the_page_has_messages() -> None:
    assert len(fragments()) > 15
