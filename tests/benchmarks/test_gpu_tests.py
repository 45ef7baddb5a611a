"""The GPU tests, in shards, with a tree of made-up ones."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onetrip.benchmarks.full_run import EXIT_SKIPPED, gpu_tests


def gpu_test_files(tests: Path) -> set[str]:
    """Those that mark tests gpu, or have one that takes a fixture which does."""
    found = set()
    for path in set(tests.rglob("test_*.py")) - {Path(__file__)}:  # this one holds made-up tests as text
        source = path.read_text()
        functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
        taken = {a.arg for f in functions if f.name.startswith("test_") for a in f.args.args if not own(f, a.arg)}
        if re.search(r"^(pytestmark = \[?|@)pytest\.mark\.gpu", source, re.MULTILINE) or taken & {"target", "backend"}:
            found.add(str(path.relative_to(tests)))
    return found


def own(function: ast.FunctionDef, argument: str) -> bool:
    """Whether the test's own parametrize gives the argument."""
    return any(re.search(rf"parametrize\(.*\b{argument}\b", ast.unparse(d)) for d in function.decorator_list)


def test_every_gpu_test_is_in_one_shard():
    """By file; and of files in several by name: what one shard's -k leaves another takes."""
    by_path: dict[str, list[str]] = {}
    for shard in gpu_tests.SHARDS:
        for path in shard.paths:
            by_path.setdefault(path, []).append(shard.keywords)
    assert gpu_test_files(Path(__file__).parents[1]) == by_path.keys()
    for path, keywords in by_path.items():
        positive = [words for words in keywords if words and not words.startswith("not ")]
        negative = [words.removeprefix("not ").strip("()") for words in keywords if words.startswith("not ")]
        assert positive == negative, path


TREE = """
import os, pytest, conftest
pytestmark = pytest.mark.gpu
def test_1_passes(): pass
def test_2_fails(): assert 1 + 1 == 3
def test_3_breaks_the_context():
    conftest.broken = True
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_3_has_a_new_process(): assert not conftest.broken
def test_4_kills_its_process(): os.kill(os.getpid(), 9)
def test_5_is_skipped(): pytest.skip("needs 60 GB")
def test_6_passes(): pass
"""
CONFTEST = """
import torch
broken = False
def synchronize():
    if broken: raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, synchronize
"""


def run(tree: Path, source: str) -> subprocess.CompletedProcess[str]:
    (tree / "tests").mkdir()
    (tree / "tests/conftest.py").write_text(CONFTEST)
    (tree / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tree / "tests/test_made_up.py").write_text(source)
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    command = [sys.executable, "-m", *gpu_tests.command(shard, tree, tree)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"COLUMNS": "300"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tree)


@pytest.mark.slow
def test_gpu_tests_outlive_what_breaks(tmp_path: Path) -> None:
    done = run(tmp_path, TREE)
    assert done.returncode == 1, done.stdout
    failed = re.findall(r"^FAILED .*::(\w+)(.*)$", done.stdout, re.MULTILINE)
    assert {name for name, _ in failed} == {"test_2_fails", "test_3_breaks_the_context", "test_4_kills_its_process"}
    assert any("assert (1 + 1) == 3" in words for _, words in failed)
    assert any("illegal memory access" in words for _, words in failed)
    assert "SKIPPED [1] tests/test_made_up.py:11: needs 60 GB" in done.stdout and "3 passed, 1 skipped" in done.stdout
    assert "needs 60 GB" in (tmp_path / "gpu-tests/made_up.xml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "said"),
    [
        pytest.param("def test_passes(): pass", "no tests ran", id="no GPU tests"),
        pytest.param("import no_such_module", "ERROR tests/test_made_up.py", id="not collected"),
    ],
)
def test_a_shard_without_tests_is_a_failure(tmp_path: Path, source: str, said: str) -> None:
    done = run(tmp_path, source)
    assert done.returncode not in (0, EXIT_SKIPPED)
    assert said in done.stdout
