"""Nsight Compute over the kernels, played by a program that prints what it would."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from onetrip.benchmarks.full_run import EXIT_SKIPPED, counters
from onetrip.benchmarks.measure.cases import LARGE_ELEMENTS
from onetrip.benchmarks.suites import row_norm, softmax

KERNEL = "void onetrip::row_norm_forward_kernel<float, float, (int)16>(onetrip::RowNormForward)"
COUNTED = f'==PROF== Connected to process 42\n"ID","Kernel Name","Grid Size"\n"","",""\n"0","{KERNEL}","(264, 1, 1)"\n'
DENIED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n"


@pytest.mark.parametrize(
    ("printed", "code", "expected"),
    [(COUNTED, 0, 0), (COUNTED, 1, 1), (DENIED, 1, EXIT_SKIPPED), ("==WARNING== No kernels were profiled.\n", 0, 1)],
    ids=["counted", "ended early", "not permitted", "saw no kernel"],
)
def test_what_ncu_prints(
    printed: str, code: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def ncu(command: list[str]) -> SimpleNamespace:
        assert command[0] == "ncu" and "--kernel-name=regex:onetrip" in command
        assert command[-4:] == ["-m", "onetrip.benchmarks.full_run.counters", "drive", "cuda"]
        (log,) = (Path(word.partition("=")[2]) for word in command if word.startswith("--log-file="))
        log.write_text(printed)
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", ncu)
    assert counters.run("cuda", str(tmp_path)) == expected
    table = tmp_path / "counters" / "cuda.csv"
    assert table.read_text() == printed
    assert capsys.readouterr().out == (f"wrote {table}\n" if printed is COUNTED else printed + "\n")


def test_every_large_case_is_launched_in_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with small cases in the place of large ones."""
    names: list[str] = []

    def count(name: str, call: Callable[[], object]) -> None:
        call()
        names.append(name)

    cases = [*row_norm.cases(True)[:2], *softmax.cases(True)[:2]]
    sizes = {case.n_rows * case.n_cols for case in cases}
    assert LARGE_ELEMENTS not in sizes
    monkeypatch.setattr(counters, "_count", count)
    monkeypatch.setattr(row_norm, "cases", lambda quick: cases[:2])
    monkeypatch.setattr(softmax, "cases", lambda quick: cases[2:])
    for size in sizes:
        monkeypatch.setattr(counters, "LARGE_ELEMENTS", size)
        counters.drive("cpu", device="cpu")
    steps = ["AdamW8bit torch.bfloat16", "AdamW8bit torch.float32"]
    assert sorted(names) == sorted([*(case.id for case in cases), *steps * len(sizes)])


def test_a_case_is_warmed_up_before_ncu_looks_and_named_while_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_start", lambda name: done.append(name) or 7)
    monkeypatch.setattr(torch.cuda.nvtx, "range_end", lambda handle: done.append(f"end {handle}"))
    for owner, name in (
        *((torch.cuda, name) for name in ("synchronize", "empty_cache")),
        *((torch.cuda.profiler, name) for name in ("start", "stop")),
    ):
        monkeypatch.setattr(owner, name, lambda name=name: done.append(name))
    counters._count("softmax", lambda: done.append("call"))
    first, second = ["call", "synchronize", "empty_cache"], ["call", "synchronize", "end 7"]
    assert done == [*first, "start", "softmax", *second, "stop"]
