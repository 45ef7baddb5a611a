"""The GPU tests, in shards, with a tree of made-up ones."""

from __future__ import annotations

import ast
import json
import re
import subprocess
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
    (output / "gpu-tests/made_up-0.jsonl").write_text(json.dumps(first) + "\n")
    # Long enough to start and too short for a second test.
    assert gpu_tests.run(shard, tree, output, seconds=0.1, workers=1) == gpu_tests.EXIT_UNFINISHED
    assert "1 of 6 tests ran" in capsys.readouterr().out
    assert gpu_tests.run(shard, tree, output, seconds=300.0, workers=1) == 1
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
    record = gpu_tests.read(output / "gpu-tests/made_up-0.jsonl")
    assert len(record["tests"]) == record["total"] == 6


@pytest.mark.slow
def test_gpu_tests_that_cannot_be_collected_are_a_failure(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_made_up.py").write_text("import no_such_module")
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    assert gpu_tests.run(shard, tmp_path, tmp_path, seconds=100.0, workers=1) != 0
    assert "No module named 'no_such_module'" in capsys.readouterr().out


def entries(record: Path) -> dict[str, dict[str, Any]]:
    return gpu_tests.read(record)["tests"]


def test_a_test_that_hangs_is_killed_and_named(tmp_path, monkeypatch, capsys):
    """pytest's process played: what it writes, and that it does not end."""
    record, now = tmp_path / "gpu-tests/made_up-0.jsonl", time.time()
    shard = gpu_tests.Shard("made_up", "nothing", ("test_made_up.py",))
    given: list[float] = []

    def run(command: list[str], timeout: float, **options: Any) -> None:
        given.append(timeout)
        lines = {"total": 2}, {"test": "test_1", "outcome": "started", "at": now - 500.0}
        record.write_text("".join(json.dumps(line) + "\n" for line in lines))
        monkeypatch.setattr(gpu_tests.time, "time", lambda: now + 1000.0)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(gpu_tests.subprocess, "run", run)
    assert gpu_tests.run(shard, tmp_path, tmp_path, seconds=100.0, workers=1) != 0
    assert given[0] == pytest.approx(100.0 + gpu_tests._GRACE_S, abs=5.0)
    printed = capsys.readouterr().out
    assert "FAILED test_1: it hung: killed when the time was up" in printed and "1 of 2 tests ran" in printed
    assert json.loads((tmp_path / "gpu-tests/made_up.json").read_text())["total"] == 2


def test_what_failed_or_was_stopped_runs_again(tmp_path):
    record = tmp_path / "made_up-0.jsonl"
    outcomes = {"a": "passed", "b": "skipped", "c": "failed", "d": "started"}
    record.write_text("".join(json.dumps({"test": name, "outcome": what}) + "\n" for name, what in outcomes.items()))
    gpu_tests._keep_what_passed(record)
    assert entries(record).keys() == {"a", "b"}


def test_a_shard_is_told_when_it_must_have_ended(tmp_path, monkeypatch):
    given: dict[str, float] = {}
    monkeypatch.setattr(gpu_tests, "run", lambda *arguments: given.update(seconds=arguments[3]) or 0)
    assert gpu_tests.main(["large", str(tmp_path), str(tmp_path), str(time.time() + 100.0)]) == 0
    assert 70.0 < given["seconds"] <= 100.0 - gpu_tests._GRACE_S
