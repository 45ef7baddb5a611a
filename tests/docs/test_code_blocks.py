"""Every Python code block of the documentation runs, or says in its title why it cannot, and compiles.

A block without a title runs: those of a page one after the other, in one process. Titles say what else:
"NAME.py" is saved under that name; "NAME.py, by torchrun" also runs in two processes; "needs ..." and "excerpt: ..."
are compiled only.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r'^(?P<indent> *)```python *(?:title="(?P<title>[^"]*)")?(?P<rest>[^\n]*)$')
TORCHRUN = ", by torchrun"
FILE = re.compile(rf"(\w+\.py)(?:{TORCHRUN})?")


class Block(NamedTuple):
    page: Path
    line: int
    """Number of the block's first line of code in the page, from 1."""
    title: str
    code: str

    @property
    def runs(self) -> bool:
        return self.title == ""

    @property
    def file(self) -> str:
        """The name to save it under, "" without one."""
        found = FILE.fullmatch(self.title)
        return found[1] if found else ""

    @property
    def by_torchrun(self) -> bool:
        return self.title.endswith(TORCHRUN)

    @property
    def is_compiled_only(self) -> bool:
        return self.title.startswith(("needs ", "excerpt: "))

    def padded(self) -> str:
        """The code below as many empty lines as the page has above it: errors name the page's lines."""
        return "\n" * (self.line - 1) + self.code


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    start, title = 0, ""
    for number, line in enumerate(lines, 1):
        if not start and (fence := FENCE.match(line)):
            if fence["indent"] or fence["rest"]:
                raise ValueError(f"{page.name}:{number}: a code block must stand at the margin, with a title at most")
            start, title = number, fence["title"] or ""
        elif start and line == "```":
            yield Block(page, start + 1, title, "\n".join(lines[start : number - 1]) + "\n")
            start = 0


def program(page: Path) -> str:
    """All blocks of the page that run, each on the lines where it stands in the page."""
    code = ""
    for block in blocks(page):
        if block.runs:
            code += "\n" * (block.line - 1 - code.count("\n")) + block.code
    return code


ALL = [block for page in pages() for block in blocks(page)]
RUNNING = [page for page in pages() if any(block.runs for block in blocks(page))]
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ONETRIP_BACKEND": "auto"}


def name(value: Path | Block) -> str:
    page = value if isinstance(value, Path) else value.page
    return str(page.relative_to(DOCS)) + (f":{value.line}" if isinstance(value, Block) else "")


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **OFFLINE}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("block", ALL, ids=name)
def test_a_block_compiles_and_its_title_is_known(block: Block) -> None:
    compile(block.padded(), str(block.page), "exec")
    assert block.runs or block.file or block.is_compiled_only, block.title


def test_most_blocks_run() -> None:
    assert len([block for block in ALL if block.is_compiled_only]) <= 3
    assert len(RUNNING) >= 13


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNING, ids=name)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    """In an empty folder, without a network."""
    if page.stem == "trl" and importlib.util.find_spec("trl") is None:
        pytest.skip("TRL, which needs Python 3.11, is not installed")
    for block in blocks(page):
        if block.file and not block.by_torchrun:
            (tmp_path / block.file).write_text(block.code)
    (script := tmp_path / f"page_{page.stem}.py").write_text(program(page))  # accelerate.py would hide the package
    run([sys.executable, script.name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in ALL if block.by_torchrun], ids=name)
def test_a_block_runs_by_torchrun(block: Block, tmp_path: Path) -> None:
    (tmp_path / block.file).write_text(block.code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run([*torchrun, block.file], tmp_path)


@pytest.mark.slow
def test_the_first_block_of_the_readme_runs() -> None:
    """On a model that it does not name."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.BertModel(config)
    found = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), names := {"model": model})
    assert names["report"].patched and isinstance(names["optimizer"], torch.optim.Optimizer)


def test_a_program_has_the_lines_of_its_page(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text(
        '# x\n```python\na = 1\n```\n```python title="needs luck"\nb\n```\n```python\nc = a\n```\n'
    )
    assert program(page).splitlines() == ["", "", "a = 1", "", "", "", "", "", "c = a"]
    assert [(block.line, block.runs) for block in blocks(page)] == [(3, True), (6, False), (9, True)]


def test_a_block_that_would_be_missed_raises(tmp_path: Path) -> None:
    (page := tmp_path / "page.md").write_text("- x\n\n  ```python\n  a = 1\n  ```\n")
    with pytest.raises(ValueError, match="must stand at the margin"):
        list(blocks(page))


IMPLIED = {"torch", "onetrip", "transformers", "tokenizers", "datasets", *sys.stdlib_module_names}
"""By the installation that docs/index.md describes, and by trl."""


@pytest.mark.parametrize("page", [*(DOCS / "how-to").glob("*.md"), DOCS / "integrations.md"], ids=name)
def test_a_page_names_the_packages_that_its_code_imports(page: Path) -> None:
    found = list(blocks(page))
    own = {block.file.removesuffix(".py") for block in found}
    trees = [node for block in found for node in ast.walk(ast.parse(block.code))]
    modules = {alias.name for node in trees if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in trees if isinstance(node, ast.ImportFrom)}
    needed = {module.partition(".")[0] for module in modules} - IMPLIED - own
    if any("Trainer" in [a.name for a in node.names] for node in trees if isinstance(node, ast.ImportFrom)):
        needed.add("accelerate")
    named = {name for line in re.findall(r"`pip install ([^`]*)`", page.read_text()) for name in line.split()}
    assert needed <= named
