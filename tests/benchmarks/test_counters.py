"""Nsight Compute over the kernels: what ncu prints, played, and a driver on the CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.benchmarks.full_run import counters, everything, small_parts
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.measure.cases import LARGE_ELEMENTS
from onetrip.benchmarks.show import tables
from onetrip.benchmarks.suites import row_norm
from onetrip.benchmarks.suites.optimizers import ONETRIP

IDENTITY = (
    "ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size", "Grid Size",
    "Device", "CC",
)  # fmt: skip
FORWARD = (
    "void onetrip::row_norm_forward_kernel<__nv_bfloat16, float, (int)16, (int)2, (onetrip::Access)0>"
    "(onetrip::RowNormForward)"
)
PARTIALS = "void onetrip::row_norm_partials_kernel<(int)1024>(const float *, long, long, onetrip::PartialSums)"
MARKER = "at::cuda::<unnamed>::spin_kernel(long)"
VALUES = {
    "dram__bytes_read.sum": "67,108,864",
    "dram__bytes_write.sum": "33,554,432",
    "gpu__time_duration.sum": "40,000",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum": "3",
    "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum": "1",
    "launch__registers_per_thread": "64",
    "launch__shared_mem_per_block_dynamic": "2,048",
    "launch__shared_mem_per_block_static": "32",
    "lts__t_sectors.avg.pct_of_peak_sustained_elapsed": "41.5",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "62.25",
    "smsp__inst_executed.sum": "29,360,128",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "n/a",
}


def printed(names: Sequence[str], values: Mapping[str, str] = VALUES) -> str:
    """As ncu --csv --page raw --print-units base writes it."""

    def line(*entries: str) -> str:
        return ",".join(f'"{entry}"' for entry in entries) + "\n"

    units = ("",) * len(IDENTITY) + ("byte",) * len(values)
    rows = (
        (str(i), "4242", "python3.12", "127.0.0.1", name, "1", "7", "(256, 1, 1)", "(32768, 2, 1)", "0", "9.0")
        for i, name in enumerate(names)
    )
    messages = "==PROF== Connected to process 4242 (/usr/bin/python3.12)\n" + "".join(
        f'==PROF== Profiling "{name}" - {i}: 0%....50%....100% - 4 passes\n' for i, name in enumerate(names)
    )
    table = line(*IDENTITY, *values) + line(*units) + "".join(line(*row, *values.values()) for row in rows)
    return f"{messages}==PROF== Disconnected from process 4242\n{table}"


def a_case(name: str = "layer_norm") -> counters.Counted:
    return counters.Counted(name, "forward", "32768 x 1024", "bf16", 1 << 25, 4 << 25, lambda device: lambda: None)


# What ncu prints.


def test_kernels_are_read_from_among_the_messages_and_told_apart_by_the_marker():
    text = printed([MARKER, FORWARD, MARKER, FORWARD, PARTIALS]) + "==WARNING== something at the end\n"
    kernels = counters.parse(text)
    assert [kernel["ID"] for kernel in kernels] == ["0", "1", "2", "3", "4"]
    names = [[kernel["Kernel Name"] for kernel in group] for group in counters.by_launch(kernels)]
    assert names == [[FORWARD], [FORWARD, PARTIALS]]


@pytest.mark.parametrize(
    "text", ["", "==PROF== Connected\n", "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission\n"]
)
def test_messages_alone_hold_no_kernel(text):
    assert counters.parse(text) == [] == counters.by_launch([])


def test_a_launch_is_measured_against_its_floor_and_this_cards_copy():
    rows = counters.parse(printed([FORWARD, FORWARD]))
    record = counters.measured(a_case(), rows, copy_gb_per_s=4000.0)
    assert record["duration_ns"] == 80_000
    assert record["share_of_copy"] == pytest.approx((4 << 25) / 80_000 / 4000)
    kernel = record["kernels"][0]
    assert kernel == {
        "kernel": FORWARD,
        "grid": "(32768, 2, 1)",
        "block": "(256, 1, 1)",
        "duration_ns": 40_000,
        "read_bytes": 2 << 25,
        "written_bytes": 1 << 25,
        "issue_percent": None,  # n/a
        "occupancy_percent": 62.25,
        "l2_percent": 41.5,
        "registers": 64,
        "shared_bytes": 2080,
        "local_bytes": 128,
        "instructions_per_element": 28.0,
        "moved_share_of_copy": pytest.approx((3 << 25) / 40_000 / 4000),
    }


def test_metrics_that_are_missing_or_have_another_name():
    values = {"dram__bytes_op_read.sum": "100", "gpu__time_duration.sum": "40,000"}
    record = counters.measured(a_case(), counters.parse(printed([FORWARD], values)))
    (kernel,) = record["kernels"]
    assert (kernel["read_bytes"], kernel["duration_ns"]) == (100, 40_000)
    absent = {name for name, value in kernel.items() if value is None}
    assert absent >= {"written_bytes", "registers", "shared_bytes", "local_bytes", "instructions_per_element"}
    assert record["share_of_copy"] is None is kernel["moved_share_of_copy"]


# The part, with a text in place of ncu's.


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the part of two launches. texts: of the tables that ncu writes, call by call; ended: whether the driver came
    to its end; asked: the metrics of each call of ncu."""
    monkeypatch.setattr(counters, "cases", lambda: [a_case("a"), a_case("b")])
    monkeypatch.setattr(counters.tables, "print_results", lambda found, width: None)
    (tmp_path / "environment.json").write_text(json.dumps({"ceilings": {"copy_gb_per_s": 4000.0}}))

    def run(*texts: str, ended: bool = True) -> int:
        asked, left = [], list(texts)

        def play(command: list[str], **options: Any) -> Any:
            if command[0] != "ncu":
                return really(command, **options)
            value = dict(pairwise(command))
            assert command[-2:] == ["drive", "cuda"]
            assert value["--profile-from-start"] == "off" and value["--clock-control"] == "none"
            assert value["--kernel-name"] == "regex:spin_kernel|onetrip" and value["--cache-control"] == "all"
            asked.append(value["--metrics"].split(","))
            Path(value["--log-file"]).write_text(left.pop(0))
            options["stdout"].write(b"all 2 launches have ended\n" if ended else b"RuntimeError: CUDA error\n")
            return SimpleNamespace(returncode=0 if ended else 9)

        run.asked, really = asked, subprocess.run
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "run", play)
            return counters.run("cuda", tmp_path, device="cpu")

    return run


def recorded(folder: Path) -> dict:
    (machine,) = results.read(folder / "parts/counters-cuda").values()
    return machine["counters-cuda"]


def test_everything_counted(profile, tmp_path):
    assert profile(printed([MARKER, FORWARD, MARKER, FORWARD, PARTIALS])) == 0
    found = recorded(tmp_path)
    assert found["complete"] and {"schema", "date", "commit", "versions", "machine", "code"} <= found.keys()
    assert [(case["operator"], len(case["kernels"])) for case in found["cases"]] == [("a", 1), ("b", 2)]
    assert found["cases"][0]["share_of_copy"] == pytest.approx((4 << 25) / 40_000 / 4000, rel=1e-4)


@pytest.mark.parametrize("content", [{}, {"ceilings": None}, {"ceilings": {"copy_gb_per_s": None}}], ids=str)
def test_without_a_copy_s_speed_launches_are_counted_all_the_same(profile, tmp_path, content):
    """A null in environment.json ended the part with a TypeError, after ncu had counted."""
    (tmp_path / "environment.json").write_text(json.dumps(content))
    assert profile(printed([MARKER, FORWARD, MARKER, FORWARD])) == 0
    for case in recorded(tmp_path)["cases"]:
        assert case["share_of_copy"] is None and case["duration_ns"] == 40_000


@pytest.mark.parametrize(
    "message",
    [
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
        "Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver library is loaded.",
        "==ERROR== Profiling failed because a driver resource was unavailable.",
    ],
)
def test_a_machine_whose_counters_cannot_be_read_is_skipped_with_the_reason(profile, capsys, message):
    assert profile(message + "\n", ended=False) == everything.EXIT_SKIPPED
    assert capsys.readouterr().out.splitlines()[-1] == f"ncu cannot count here: {message}"


def test_a_launch_without_a_kernel_of_ours_fails(profile, capsys):
    assert profile(printed([MARKER, MARKER, FORWARD])) == 1
    assert "FAILED a-forward-32768 x 1024-bf16: ncu saw no kernel of ours" in capsys.readouterr().out


def test_a_driver_that_breaks_fails_and_keeps_what_was_counted(profile, tmp_path, capsys):
    assert profile(printed([MARKER, FORWARD, MARKER, FORWARD]), ended=False) == 1
    assert "the driver did not end: exit code 9" in capsys.readouterr().out
    assert [case["operator"] for case in recorded(tmp_path)["cases"]] == ["a"]


def test_a_metric_that_ncu_does_not_know_is_asked_for_by_its_other_name_or_left_out(profile, tmp_path):
    unknown = (
        "==ERROR== Failed to find metric regex:^dram__bytes_read\\.sum$\n"
        "==ERROR== Failed to find metric lts__t_sectors.avg.pct_of_peak_sustained_elapsed\n"
    )
    assert profile(unknown, printed([MARKER, FORWARD, MARKER, FORWARD])) == 0
    first, second = profile.asked
    assert {"dram__bytes_read.sum", "lts__t_sectors.avg.pct_of_peak_sustained_elapsed"} == set(first) - set(second)
    assert set(second) - set(first) == {"dram__bytes_op_read.sum"}


# What is launched.


def test_the_launches_are_those_that_the_targets_judge():
    found = list(counters.cases())
    ids = [case.id for case in found]
    assert len(set(ids)) == len(ids)
    for width in (1024, 4096, 8192, 16384, 65536):
        for operator in ("layer_norm", "bias_dropout_residual_layer_norm-p0.1"):
            for direction in ("forward", "backward"):
                for dtype in ("bf16", "fp32"):
                    assert f"{operator}-{direction}-{LARGE_ELEMENTS // width} x {width}-{dtype}" in ids
    norm = next(case for case in found if case.id == "layer_norm-backward-8192 x 4096-bf16")
    assert norm.floor_bytes == row_norm.LAYER_NORM.least_bytes(8192, 4096, 2).backward
    bert, llama = (case for case in found if case.operator == "AdamW8bit" and case.dtype == "bf16")
    assert bert.n_elements == 334_092_288
    assert llama.floor_bytes == ONETRIP.least_bytes(llama.n_elements, 2, 2)


def test_the_driver_launches_everything_once_more_between_start_and_stop(monkeypatch, capsys):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("marker"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    monkeypatch.setattr(counters, "ELEMENTS", 1 << 14)
    monkeypatch.setattr(counters, "MODELS", {"a": [(64, 64), (3,)], "b": [(8,)]})
    planned = len(list(counters.cases()))
    assert counters.drive("cpu", device="cpu") == 0
    assert capsys.readouterr().out == f"all {planned} launches have ended\n"
    assert calls == ["start", "marker", "stop"] * planned


def test_a_launch_is_warmed_up_before_ncu_looks(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append("start"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: calls.append("marker"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append("stop"))
    case = replace(a_case(), prepare=lambda device: lambda: calls.append("call"))
    counters._count(case, torch.device("cpu"))
    assert calls == ["call", "wait", "start", "marker", "call", "wait", "stop"]


# Where it goes.


def test_the_results_travel_with_the_others_and_are_shown_worst_first(profile, tmp_path):
    assert profile(printed([MARKER, FORWARD, MARKER, FORWARD, PARTIALS])) == 0
    head = {key: value for key, value in recorded(tmp_path).items() if key not in ("suite", "cases", "complete")}
    (tmp_path / "everything.json").write_text(json.dumps({**head, "parts": {}}))
    assert small_parts.collect(tmp_path, torch.device("cpu")) == 0
    (machine,) = results.read(tmp_path / "results").values()
    assert len(machine["counters-cuda"]["cases"]) == 2
    (table,) = [found for found in tables.every(machine) if found.caption.startswith("What the kernels do on the")]
    assert table.caption == "What the kernels do on the GPU: cuda"
    assert [row[0][0] for row in table.rows] == ["b", "b", "a"]
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert (
        "| b-forward-32768 x 1024-bf16 | 42% | row_norm_partials_kernel | 40.0 | 64.0 | 32.0 | 128.0 | 63% | 28.0 "
        "| – | 62% | 42% | 64 | 2.0 | 0.0 | 32768, 2 x 256 |"
    ) in lines
    assert "What the kernels do on the GPU" in (tmp_path / "report.html").read_text()
