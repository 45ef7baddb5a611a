"""compute-sanitizer over the kernels, with what it prints and a driver that plays it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from onetrip.benchmarks.full_run import driver, everything, sanitizer

CPU = torch.device("cpu")
SANITIZER = """\
========= COMPUTE-SANITIZER
FAILED softmax: not finite
========= Invalid __global__ write of size 4 bytes
=========     at void onetrip::softmax_forward_kernel<float, float, (int)32, (bool)1>(onetrip::SoftmaxForward)+0x70
=========     by thread (31,0,0) in block (4,0,0)
=========     Address 0x7f0000000400 is out of bounds
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::vectorized_elementwise_kernel<4, ...>+0x10
=========     by thread (0,0,0) in block (0,0,0)
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: onetrip::softmax_forward(at::Tensor const&) [0x1234] in _native.so
=========
12 of 12 launches
========= ERROR SUMMARY: 2 errors
"""
OURS = SANITIZER.replace("FAILED softmax: not finite\n", "")
RACE = """\
========= Error: Race reported between Write access at sum(float*)+0x550
=========     and Read access at void onetrip::reduce<float>(float*)+0x580 [512 hazards]
12 of 12 launches
"""
NOT_TRACKED = """\
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching k and didn't track the launch. \
Errors might go undetected. (Unable to allocate enough memory to perform the requested operation)
"""
CLEAN = "12 of 12 launches\n========= ERROR SUMMARY: 0 errors\n"


def test_reports_of_the_sanitizer_are_told_apart():
    ours, theirs = sanitizer.reports(SANITIZER)
    assert ours[0].startswith("Invalid __global__ write") and ours[-1].endswith("is out of bounds")
    assert "at::native" in theirs[1]
    assert sanitizer.is_ours(ours, ["onetrip"])
    assert not sanitizer.is_ours(theirs, ["onetrip"])  # our code launched it: a frame of the host


def test_both_sides_of_a_race_are_looked_at():
    (race,) = sanitizer.reports(RACE)
    assert sanitizer.is_ours(race, ["onetrip::reduce"]) and sanitizer.is_ours(race, ["sum"])


@pytest.fixture
def sanitize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the part with a text in place of compute-sanitizer's; the driver's record holds the launches that ended."""

    def run(text: str, code: int | None = 0, ended: tuple[str, ...] = ()) -> int:
        def watch(command: list[str], environment: dict[str, str], log: Path, deadline: float) -> int | None:
            assert command[:2] == ["compute-sanitizer", "--tool=memcheck"]
            assert "--kernel-name=kernel_substring=onetrip" in command
            assert environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
            assert time.time() < float(command[-1]) < deadline < until
            with log.open("a") as file, Path(command[-2]).open("a") as record:
                file.write(text)
                record.writelines(json.dumps({"name": name, "ended": True}) + "\n" for name in ended)
            return code

        until = time.time() + 100.0
        monkeypatch.setattr(driver, "watch", watch)
        return sanitizer.run("memcheck", "cuda", tmp_path, until)

    return run


@pytest.mark.parametrize(
    ("text", "returned", "expected"),
    [
        (OURS, 0, 1),
        (OURS.replace("void onetrip::softmax_forward_kernel", "void at::kernel").replace("(onetrip::", "(at::"), 0, 0),
        (CLEAN, 0, 0),
        (RACE, 0, 1),
        (NOT_TRACKED + CLEAN, 0, 1),
        ("FAILED softmax 33: not finite\n12 of 12 launches\n", 1, 1),
        ("7 of 12 launches\n", everything.EXIT_UNFINISHED, everything.EXIT_UNFINISHED),
        ("", None, everything.EXIT_UNFINISHED),
        ("========= Error: Device not supported. Please refer to the manual\n", 1, everything.EXIT_SKIPPED),
        ("RuntimeError: Unable to find a kernel\n", 1, 1),
        (NOT_TRACKED, 1, 1),
        ("========= Error: process didn't terminate successfully\n", 1, 1),
    ],
    ids=[
        "ours",
        "theirs",
        "clean",
        "race",
        "not tracked",
        "wrong result",
        "out of time",
        "cut",
        "no such device",
        "not the sanitizer's words",
        "not tracked and crashed",
        "crash",
    ],
)
def test_verdict_of_a_sanitizer(sanitize, tmp_path, text, returned, expected):
    assert sanitize(text, returned) == expected
    assert (tmp_path / "sanitizers/memcheck-cuda.txt").read_text() == text


def test_what_was_found_before_a_cut_counts_when_the_rest_has_run(sanitize, tmp_path, capsys):
    record = tmp_path / "sanitizers/memcheck-cuda.jsonl"
    assert sanitize(OURS.replace("12 of 12 launches\n", ""), None, ended=("a", "b")) == everything.EXIT_UNFINISHED
    assert "FAILED Invalid __global__ write" in capsys.readouterr().out
    assert record.exists()
    assert sanitize(CLEAN, 0, ended=("c",)) == 1
    assert "FAILED Invalid __global__ write" in capsys.readouterr().out
    assert not record.exists()
    assert sanitize(CLEAN, 0) == 0  # all anew


def test_a_backend_without_kernels_checks_nothing_and_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(driver, "kernels", lambda backend: [])
    assert sanitizer.run("memcheck", "triton", tmp_path, time.time() + 100.0) == 1
    assert "FAILED no kernel of the backend triton was found" in capsys.readouterr().out


def test_what_is_printed_before_a_cut_is_in_the_log(tmp_path, monkeypatch):
    code = "import time; print('found', flush=True); time.sleep(300)"
    log = tmp_path / "log"
    log.write_text("before\n")
    wait = subprocess.Popen.wait

    def wait_once_it_has_printed(process: subprocess.Popen, timeout: float | None = None) -> int:
        while timeout is not None and process.poll() is None and "found" not in log.read_text():
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_once_it_has_printed)
    assert driver.watch([sys.executable, "-c", code], {}, log, time.time()) is None
    assert log.read_text() == "before\nfound\n"


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver on the CPU's backend, since there is no GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitizer.torch, "device", lambda name: CPU)
    monkeypatch.setattr(sanitizer, "_WIDE", 1000)


def test_the_driver_launches_everything_it_plans(on_the_cpu, tmp_path, capsys):
    assert sanitizer.drive("cpu", tmp_path / "record", time.time() + 300.0) == 0
    done, planned = capsys.readouterr().out.split(" launches")[0].split()[-3::2]
    assert done == planned and int(planned) > 50


def test_the_driver_goes_on_with_what_has_not_ended_and_what_broke_comes_last(tmp_path, monkeypatch, capsys):
    ran: list[str] = []

    def launch(name: str) -> list[str]:
        ran.append(name)
        if name == "b" and broken:
            raise RuntimeError("CUDA error")
        return []

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        sanitizer, "launches", lambda backend: [(name, lambda name=name: launch(name)) for name in "abcd"]
    )
    record, broken = tmp_path / "record", True
    with pytest.raises(RuntimeError, match="CUDA error"):
        sanitizer.drive("cpu", record, time.time() + 300.0)
    broken = False
    assert sanitizer.drive("cpu", record, time.time() - 1.0) == everything.EXIT_UNFINISHED
    assert "1 of 4 launches" in capsys.readouterr().out
    assert sanitizer.drive("cpu", record, time.time() + 300.0) == 0
    assert ran == ["a", "b", "c", "d", "b"]
    assert "4 of 4 launches" in capsys.readouterr().out


def test_launches_of_triton_that_no_filter_names_fail(tmp_path, monkeypatch, capsys):
    """Triton's hook played: the names that it gives to what is launched."""

    class Chain(list):
        add = list.append

    class Metadata:
        def get(self) -> dict[str, str]:
            return {"name": name}

    chain = Chain()
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", chain, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(driver, "use_backend", lambda backend: monkeypatch.context())
    monkeypatch.setattr(
        sanitizer, "launches", lambda backend: [("a", lambda: [hook(Metadata()) for hook in chain] and [])]
    )
    name = "_softmax_fwd_kernel"
    assert sanitizer.drive("triton", tmp_path / "first", time.time() + 300.0) == 0
    chain.clear()
    name = "_renamed"
    assert sanitizer.drive("triton", tmp_path / "second", time.time() + 300.0) == 1
    assert "FAILED no kernel was launched that the filter names" in capsys.readouterr().out
