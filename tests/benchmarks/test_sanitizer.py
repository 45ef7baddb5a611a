"""compute-sanitizer over the kernels, with what it prints and a driver that plays it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import onetrip.kernels
import pytest
import torch
from onetrip import selfcheck
from onetrip.benchmarks.full_run import EXIT_SKIPPED, sanitizer
from onetrip.ops.common.backends import FAMILIES

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
all 12 launches have ended
========= ERROR SUMMARY: 2 errors
"""
OURS = SANITIZER.replace("FAILED softmax: not finite\n", "")
RACE = """\
========= Error: Race reported between Write access at sum(float*)+0x550
=========     and Read access at void onetrip::reduce<float>(float*)+0x580 [512 hazards]
all 12 launches have ended
"""
NOT_TRACKED = """\
========= Internal Sanitizer Error: The Sanitizer encountered an error while launching k and didn't track the launch. \
Errors might go undetected. (Unable to allocate enough memory to perform the requested operation)
"""
CLEAN = "all 12 launches have ended\n========= ERROR SUMMARY: 0 errors\n"


def test_reports_of_the_sanitizer_are_told_apart():
    ours, theirs = sanitizer.reports(SANITIZER.splitlines())
    assert ours[0].startswith("Invalid __global__ write") and ours[-1].endswith("is out of bounds")
    assert "at::native" in theirs[1]
    assert sanitizer.is_ours(ours, ["onetrip"])
    assert not sanitizer.is_ours(theirs, ["onetrip"])  # our code launched it: a frame of the host


def test_both_sides_of_a_race_are_looked_at():
    (race,) = sanitizer.reports(RACE.splitlines())
    assert sanitizer.is_ours(race, ["onetrip::reduce"]) and sanitizer.is_ours(race, ["sum"])


@pytest.fixture
def sanitize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the part with a text in place of compute-sanitizer's."""

    def run(text: str, code: int) -> int:
        def play(command: list[str], env: dict[str, str], stdout: IO[bytes], **rest: Any) -> SimpleNamespace:
            assert command[:2] == ["compute-sanitizer", "--tool=memcheck"]
            assert command[-3:] == ["drive", "cuda", "softmax"]
            assert "--kernel-name=kernel_substring=onetrip" in command
            assert env["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
            stdout.write(text.encode())
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(subprocess, "run", play)
        return sanitizer.run("memcheck", "cuda", "softmax", str(tmp_path))

    return run


THEIRS = OURS.replace("void onetrip::softmax_forward_kernel", "void at::kernel").replace("(onetrip::", "(at::")
WRONG = "FAILED softmax 33: not finite\nall 12 launches have ended\n"
NO_DEVICE = "========= Error: Device not supported. Please refer to the manual\n"
CRASH = "========= Error: process didn't terminate successfully\n"


@pytest.mark.parametrize(
    ("text", "returned", "expected"),
    [
        pytest.param(OURS, 0, 1, id="ours"),
        pytest.param(THEIRS, 0, 0, id="theirs"),
        pytest.param(CLEAN, 0, 0, id="clean"),
        pytest.param(RACE, 0, 1, id="race"),
        pytest.param(NOT_TRACKED + CLEAN, 0, 1, id="not tracked"),
        pytest.param(WRONG, 1, 1, id="wrong result"),
        pytest.param(NO_DEVICE, 1, EXIT_SKIPPED, id="no such device"),
        pytest.param("RuntimeError: Unable to find a kernel\n", 1, 1, id="not the sanitizer's words"),
        pytest.param(CRASH, 1, 1, id="crash"),
    ],
)
def test_verdict_of_a_sanitizer(sanitize, tmp_path, text, returned, expected):
    assert sanitize(text, returned) == expected
    assert (tmp_path / "sanitizers/memcheck-cuda-softmax.txt").read_text() == text


def test_the_filters_name_every_kernel_that_triton_launches():
    sources = [path.read_text() for path in Path(onetrip.kernels.__file__).parent.glob("*.py")]
    # launch.kernel marks the functions that are launched; other jitted ones are called by them.
    launched = {name for source in sources for name in re.findall(r"@kernel\ndef (\w+)\(", source)}
    assert launched == set(sanitizer.kernels("triton"))


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver on the CPU's backend, since there is no GPU."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sanitizer.torch, "device", lambda name: CPU)
    monkeypatch.setattr(sanitizer, "_WIDE", 1000)


def test_the_driver_launches_everything_of_a_family(on_the_cpu, capsys):
    launches = {family: list(sanitizer.launches("cpu", family)) for family in FAMILIES["cpu"]}
    assert sum(map(len, launches.values())) == 30 + len(list(selfcheck.cases("cpu")))
    assert sanitizer.drive("cpu", "softmax") == 0
    assert capsys.readouterr().out == f"all {len(launches['softmax'])} launches have ended\n"


def test_wrong_results_are_named_and_fail(on_the_cpu, monkeypatch, capsys):
    made_up = [("a", list), ("b", lambda: ["not finite"])]
    monkeypatch.setattr(sanitizer, "launches", lambda backend, family: made_up)
    assert sanitizer.drive("cpu", "softmax") == 1
    assert capsys.readouterr().out == "FAILED b: not finite\nall 2 launches have ended\n"
