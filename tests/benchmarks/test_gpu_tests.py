"""The GPU tests, in shards, with a tree of made-up ones."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from onetrip.benchmarks.full_run import gpu_tests


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
def test_4_kills_its_process(): os.kill(os.getpid(), 9)
def test_5_is_skipped(): pytest.skip("needs 60 GB")
def test_6_passes(): pass
"""
CONFTEST = """
from onetrip.benchmarks.full_run import gpu_tests
broken = False
gpu_tests._context_is_broken = lambda: broken
"""


def run(tree: Path, output: Path) -> subprocess.CompletedProcess[str]:
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    command = [sys.executable, "-m", *gpu_tests.command(shard, tree, output)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tree)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return tmp_path


@pytest.mark.slow
def test_gpu_tests_outlive_what_breaks_and_leave_out_what_has_run(tree: Path) -> None:
    (tree / "tests/test_made_up.py").write_text(TREE)
    (record := tree / "gpu-tests/made_up.txt").parent.mkdir()
    record.write_text("tests/test_made_up.py::test_1_passes\n")
    done = run(tree, tree)
    assert done.returncode == 1, done.stdout
    failed = dict(re.findall(r"^FAILED .*::(\w+): (.+)$", done.stdout, re.MULTILINE))
    assert sorted(failed) == ["test_2_fails", "test_3_breaks_the_context", "test_4_kills_its_process"]
    assert "assert (1 + 1) == 3" in failed["test_2_fails"]
    assert "illegal memory access" in failed["test_3_breaks_the_context"]
    assert "crashed while running" in failed["test_4_kills_its_process"]
    assert "SKIPPED [1] tests/test_made_up.py:10: needs 60 GB" in done.stdout
    names = [line.rpartition("::")[2] for line in record.read_text().splitlines()]
    assert names[0] == "test_1_passes" and sorted(names[1:]) == ["test_5_is_skipped", "test_6_passes"]
    assert "needs 60 GB" in (tree / "gpu-tests/made_up.xml").read_text()


@pytest.mark.slow
def test_when_all_has_run_nothing_fails(tree: Path) -> None:
    (tree / "tests/test_made_up.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_passes(): pass")
    for _ in range(2):
        done = run(tree, tree)
        assert done.returncode == 0, done.stdout
    assert (tree / "gpu-tests/made_up.txt").read_text() == "tests/test_made_up.py::test_passes\n"


@pytest.mark.slow
def test_a_shard_that_finds_no_tests_is_a_failure(tree: Path) -> None:
    (tree / "tests/test_made_up.py").write_text("def test_passes(): pass")
    assert run(tree, tree).returncode != 0


@pytest.mark.slow
def test_gpu_tests_that_cannot_be_collected_are_a_failure(tree: Path) -> None:
    (tree / "tests/test_made_up.py").write_text("import no_such_module")
    done = run(tree, tree)
    assert done.returncode != 0
    assert "No module named 'no_such_module'" in done.stdout


def test_a_shard_that_is_stopped_says_in_which_test_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    controller = gpu_tests._Controller(tmp_path / "record.txt")
    for test in ("a", "b"):
        controller.pytest_runtest_logstart(test)
    controller.pytest_runtest_logfinish("a")
    controller.pytest_keyboard_interrupt()
    controller.pytest_terminal_summary()
    assert capsys.readouterr().out == "FAILED b: stopped after 0 s\n"
