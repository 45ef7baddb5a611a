"""The GPU tests, in shards, with a tree of made-up ones."""

from __future__ import annotations

import ast
import json
import re
import time
from pathlib import Path
from typing import Any

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


@pytest.mark.slow
def test_gpu_tests_outlive_what_breaks_and_go_on_where_they_stopped(tmp_path, capsys):
    tree, output = tmp_path / "tree", tmp_path / "output"
    (tree / "tests").mkdir(parents=True)
    (tree / "tests/test_made_up.py").write_text(TREE)
    (tree / "tests/conftest.py").write_text(CONFTEST)
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    (output / "gpu-tests").mkdir(parents=True)
    first = {"test": "tests/test_made_up.py::test_2_fails", "outcome": "failed", "reason": "by chance", "seconds": 1.0}
    passed = {"test": "tests/test_made_up.py::test_1_passes", "outcome": "passed", "seconds": 123.0}
    (output / "gpu-tests/made_up-0.jsonl").write_text(json.dumps(first) + "\n" + json.dumps(passed) + "\n")
    assert gpu_tests.run(shard, tree, output, workers=1) == 1
    printed = capsys.readouterr().out
    assert "6 of 6 tests ran: 3 failed, 2 passed, 1 skipped" in printed
    failed = dict(re.findall(r"^FAILED .*::(\w+): (.+)$", printed, re.MULTILINE))
    assert [*failed] == ["test_2_fails", "test_3_breaks_the_context", "test_4_kills_its_process"]
    assert "assert (1 + 1) == 3" in failed["test_2_fails"]
    assert "illegal memory access" in failed["test_3_breaks_the_context"]
    assert "[and the CUDA context is broken]" in failed["test_3_breaks_the_context"]
    assert failed["test_4_kills_its_process"] == "its process died"
    summary = json.loads((output / "gpu-tests/made_up.json").read_text())
    assert summary["reasons"] == {"needs 60 GB": 1}
    assert summary["slowest"][0] == {"test": passed["test"], "seconds": 123.0}  # it did not run again
    record = gpu_tests.read(output / "gpu-tests/made_up-0.jsonl")
    assert len(record["tests"]) == record["total"] == 6


@pytest.mark.slow
def test_gpu_tests_that_cannot_be_collected_are_a_failure(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_made_up.py").write_text("import no_such_module")
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    assert gpu_tests.run(shard, tmp_path, tmp_path, workers=1) != 0
    assert "No module named 'no_such_module'" in capsys.readouterr().out


def entries(record: Path) -> dict[str, dict[str, Any]]:
    return gpu_tests.read(record)["tests"]


def test_a_shard_that_is_stopped_says_what_ran_and_in_which_test_it_was(tmp_path, monkeypatch, capsys):
    """pytest's process played: what it writes, and Ctrl-C."""
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))

    def stopped(shard: gpu_tests.Shard, tree: Path, record: Path, worker: int, workers: int) -> str:
        lines = {"total": 2}, {"test": "test_1", "outcome": "started", "at": time.time() - 500.0}
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_tests, "_work", stopped)
    assert gpu_tests.run(shard, tmp_path, tmp_path, workers=1) == 130
    assert capsys.readouterr().out == "1 of 2 tests ran: 1 started\nstopped in test_1, after 500 s\n"
    assert json.loads((tmp_path / "gpu-tests/made_up.json").read_text())["total"] == 2


def test_what_failed_or_was_stopped_runs_again(tmp_path):
    record = tmp_path / "made_up-0.jsonl"
    outcomes = {"a": "passed", "b": "skipped", "c": "failed", "d": "started"}
    record.write_text("".join(json.dumps({"test": name, "outcome": what}) + "\n" for name, what in outcomes.items()))
    gpu_tests._keep_what_passed(record)
    assert entries(record).keys() == {"a", "b"}
