"""onetrip bench --everything: parts of a second in place of the real ones, and two real ones."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.benchmarks.full_run import EXIT_SKIPPED, everything, gpu_tests, plan
from onetrip.benchmarks.full_run.everything import Limits
from onetrip.benchmarks.full_run.plan import Part, Place
from onetrip.benchmarks.measure.cases import selects
from onetrip.benchmarks.measure.results import SUITES
from onetrip.benchmarks.runner import module

CPU = torch.device("cpu")
COUNT = "open('ran', 'a').write('x')"


def fake(name: str, code: str = "pass", **more: Any) -> Part:
    """A part whose process runs a line of Python."""
    return Part(name, "nothing", ("timeit", "-n1", "-r1", code), **more)


def exits(code: int, words: str = "") -> str:
    return f"import os; print({words!r}, flush=True); os._exit({code})"


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "everything.json").read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def run(*known: Part, **options: Any) -> int:
        monkeypatch.setattr(plan, "parts", lambda place: known)
        return everything.run(tmp_path, CPU, **options)

    return run


def test_what_became_of_each_part_is_written_down(run, tmp_path, capsys):
    status = run(
        fake("good"),
        fake("bad", exits(1, "FAILED kernel [/x]: off by 3")),
        fake("broken", "raise ValueError('no such thing')"),
        fake("absent", missing="no CUDA device"),
        fake("absent after all", exits(EXIT_SKIPPED, "Device not supported")),
        fake("after", COUNT),
    )
    found = state(tmp_path)["parts"]
    assert {name: entry["status"] for name, entry in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "broken": "failed",
        "absent": "skipped",
        "absent after all": "skipped",
        "after": "passed",  # a failure stops nothing
    }
    assert status == 1
    assert found["bad"]["failures"] == ["kernel [/x]: off by 3"]
    assert "ValueError: no such thing" in found["broken"]["reason"]
    assert found["absent"]["reason"] == "no CUDA device"
    assert found["absent after all"]["reason"] == "Device not supported"
    assert "kernel [/x]: off by 3" in (tmp_path / "logs/bad.log").read_text()
    assert "FAILED bad: kernel [/x]: off by 3" in capsys.readouterr().out
    assert {"machine", "versions", "commit", "code", "date"} <= state(tmp_path).keys()


def test_resume_runs_what_is_missing_or_failed(run, tmp_path):
    known = fake("good", COUNT), fake("bad", f"{COUNT}; {exits(1)}"), fake("new", COUNT)
    assert run(*known[:2]) == 1
    assert (tmp_path / "ran").read_text() == "xx"
    assert run(*known, resume=True) == 1
    assert (tmp_path / "ran").read_text() == "xxxx"  # all but the good one
    assert [*state(tmp_path)["parts"]] == ["good", "bad", "new"]


def test_a_part_asked_for_by_name_runs_again_and_alone(run, tmp_path):
    known = fake("tests-a", COUNT), fake("tests-b", COUNT), fake("other", COUNT)
    run(*known)
    run(*known, parts=["tests-*"])
    assert (tmp_path / "ran").read_text() == "x" * 5


def test_when_the_budget_is_spent_no_part_is_started_but_the_report(run, tmp_path, capsys):
    assert run(fake("part", COUNT), fake("report", COUNT, always=True), limits=Limits(budget_s=1.0)) == 0
    assert [*state(tmp_path)["parts"]] == ["report"]
    said = capsys.readouterr().err
    assert "part: not started, the budget is spent" in said
    assert "1 of 2 parts are left: call again with --resume" in said


def allot(monkeypatch: pytest.MonkeyPatch, **limits: Limits) -> None:
    """The limits of the named parts; the others have all the time that a loaded machine takes."""
    run_part = everything._run
    monkeypatch.setattr(
        everything, "_run", lambda part, state, place, _: run_part(part, state, place, limits.get(part.name, Limits()))
    )


def test_a_part_is_stopped_at_its_limit_and_the_next_one_runs(run, tmp_path, monkeypatch):
    allot(monkeypatch, endless=Limits(part_s=1.0))
    assert run(fake("endless", "import time; time.sleep(60)"), fake("after")) == 1
    found = state(tmp_path)["parts"]
    assert found["endless"]["status"] == "failed"
    assert re.fullmatch(
        r"stopped after \d+ s, longer than --part-limit: .*KeyboardInterrupt.*", found["endless"]["reason"]
    )
    assert found["after"]["status"] == "passed"


def test_a_part_that_the_budget_cuts_is_unfinished(run, tmp_path, monkeypatch):
    allot(monkeypatch, endless=Limits(budget_s=1.0))
    assert run(fake("endless", "import time; time.sleep(60)")) == 0
    assert state(tmp_path)["parts"]["endless"]["status"] == "unfinished"


@pytest.mark.parametrize("of_sigint", [signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"])
def test_sigterm_stops_the_running_part_too(run, tmp_path, of_sigint):
    """Told apart from Ctrl-C: a terminal sends that to the part itself. In a script's background Ctrl-C is ignored."""
    code = f"""
import os, signal, time
try:
    os.kill({os.getpid()}, signal.SIGTERM), time.sleep(300)
except KeyboardInterrupt:
    open("kept", "w")"""
    before = signal.signal(signal.SIGINT, of_sigint)
    try:
        assert run(fake("cut", code), fake("after")) == everything.INTERRUPTED
    finally:
        assert signal.signal(signal.SIGINT, before) == of_sigint
    assert {name: entry["status"] for name, entry in state(tmp_path)["parts"].items()} == {"cut": "unfinished"}
    assert (tmp_path / "kept").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_failures_are_what_parts_pytest_and_doctor_print(run, tmp_path):
    printed = "FAILED a.py::one\nERROR b.py - broken\nFAILED kernel two\nERROR    torch:file.py:1 logged\n ERROR quoted"
    run(fake("bad", exits(1, printed)))
    assert state(tmp_path)["parts"]["bad"]["failures"] == ["a.py::one", "b.py - broken", "kernel two"]


def test_what_failed_comes_behind_what_has_not_run(run, tmp_path):
    bad = fake("bad", f"{COUNT}; {exits(1)}")
    run(bad)
    run(bad, fake("new", "assert open('ran').read() == 'x'"), resume=True)
    assert state(tmp_path)["parts"]["new"]["status"] == "passed"


def test_a_folder_with_a_run_is_not_overwritten(run, capsys):
    run(fake("good"))
    assert run(fake("good")) == 2
    assert "holds a run already: --resume goes on with it" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["commit", "versions", "code", "measured"])
def test_a_run_of_other_code_is_not_continued(run, tmp_path, capsys, what):
    run(fake("good"))
    named = "choice of --quick" if what == "measured" else what
    content = state(tmp_path) | {what: {"id": "another", "modified": False} if what == "commit" else "another"}
    (tmp_path / "everything.json").write_text(json.dumps(content))
    assert run(fake("good"), resume=True) == 2
    assert f"is of a run with another {named}" in capsys.readouterr().err


def test_a_damaged_state_is_rejected(run, tmp_path, capsys):
    (tmp_path / "everything.json").write_text("{")
    assert run(fake("good"), resume=True) == 2
    assert "is not the state of a run" in capsys.readouterr().err


def test_an_unknown_part_lists_the_parts(run, tmp_path, capsys):
    assert run(fake("doctor"), fake("report"), parts=["dcotor"]) == 2
    assert "--part dcotor: unknown part; choose from:\n  doctor\n  report" in capsys.readouterr().err
    assert not (tmp_path / "everything.json").exists()


def test_an_unwritable_folder_and_a_bad_budget_are_rejected(run, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert everything.run(tmp_path / "file/folder", CPU) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert run(fake("good"), limits=Limits(budget_s=0.0)) == 2
    assert "--budget and --part-limit must be greater than 0" in capsys.readouterr().err


def test_json_prints_the_state(run, tmp_path, capsys):
    run(fake("good"), as_json=True)
    assert json.loads(capsys.readouterr().out) == state(tmp_path)


# The real parts, as data.


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """As on a machine with a GPU, nvcc and compute-sanitizer."""
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.shutil, "which", lambda name: name)
    monkeypatch.setattr(plan, "unavailable_reason", lambda backend, device: "")
    monkeypatch.setattr(gpu_tests, "missing", lambda: "")
    return torch.device("cuda")


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_on_a_gpu_nothing_is_left_out(gpu, tmp_path, quick):
    known = plan.parts(Place(tmp_path, gpu, quick, tests=tmp_path))
    assert {found.name: found.missing for found in known if found.missing} == {}
    names = [found.name for found in known]
    assert len(set(names)) == len(names)
    model = "tiny-bert" if quick else "bert-large"
    assert {"doctor", "environment", "report", f"anatomy-{model}", f"methods-{model}"} <= set(names)
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    assert {f"sanitizer-{tool}-cuda-row_norm" for tool in tools} <= set(names)
    assert {f"sanitizer-{tool}-triton-rotary" for tool in tools} <= set(names)
    assert {"counters-cuda", "counters-triton"} <= set(names)


def test_what_comes_first_says_whether_kernels_are_right_and_how_fast(gpu, tmp_path):
    names = [found.name for found in plan.parts(Place(tmp_path, gpu, tests=tmp_path))]
    assert all(any(fnmatch.fnmatchcase(name, pattern) for name in names) for pattern in plan._FIRST)
    checks = ("doctor", "gpu-tests-row_norm-cuda", "gpu-tests-softmax-cuda", "sanitizer-racecheck-cuda-adam")
    figures = (
        "row_norm-layer_norm-bf16-large",
        "softmax-fp32-large",
        "adam",
        "training-bert_large-24_layers-4x512-bf16",
        "counters-cuda",
    )
    order = [*sorted(map(names.index, checks)), *sorted(map(names.index, figures))]
    assert order == sorted(order) and order[-1] < names.index("row_norm-layer_norm-fp32")


def test_on_a_cpu_only_what_needs_a_gpu_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("onetrip.benchmarks.suites.attention.multiplies_bfloat16_in_vectors", lambda: False)
    suites = [found for found in plan.parts(Place(tmp_path, CPU)) if found.command[0] == "onetrip.benchmarks"]
    assert {found.missing for found in suites} == {"", "full size: for a GPU", "for a GPU; elsewhere with --dtype bf16"}


@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("attention", ["attention-fp32", "attention-bf16"]),
        (
            "softmax",
            [f"softmax-scale_mask_softmax_dropout-{dtype}-large" for dtype in ("fp32", "bf16")]
            + ["softmax-fp32", "softmax-bf16", "softmax-bf16-large", "softmax-bf16-rows"]
            + ["softmax-fp32-large", "softmax-fp32-rows", "softmax-warm_softmax-fp32", "softmax-warm_softmax-bf16"],
        ),
        ("adam", ["adam"]),
        ("adam_streams", ["adam_streams"]),
    ],
)
def test_a_process_holds_an_operator_in_a_dtype_and_of_one_kind_of_size(gpu, tmp_path, suite, names):
    known = plan.parts(Place(tmp_path, gpu))
    assert sorted(found.name for found in known if f"--op={suite}" in found.command) == sorted(names)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_of_a_suite_hold_each_of_its_cases_once(gpu, tmp_path, device):
    assert selects("[a]b,c-*", "ab") and selects("[a]b,c-*", "c-d") and not selects("[a]b,c-*", "aba")

    known = plan.parts(Place(tmp_path, torch.device(device)))
    for suite in SUITES:
        patterns = []
        for command in (found.command for found in known if f"--op={suite}" in found.command):
            patterns += [word.removeprefix("--only=") for word in command if word.startswith("--only=")]
        for case in module(suite).cases():
            assert sum(selects(pattern, case.id) for pattern in patterns) == 1, case.id


def test_without_a_gpu_or_a_source_tree_parts_say_why_they_are_skipped(gpu, tmp_path, monkeypatch):
    tests = [part_.missing for part_ in plan.parts(Place(tmp_path, gpu)) if part_.name.startswith("gpu-tests")]
    assert all("call from the root of a source tree" in missing for missing in tests)
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: False)
    known = plan.parts(Place(tmp_path, CPU, tests=tmp_path))
    for part_ in known:
        if part_.name.startswith(("gpu-tests", "sanitizer", "counters")):
            assert part_.missing == "torch sees no CUDA device"
    (gpu_only,) = [part_ for part_ in known if part_.name == "training-bert_large-24_layers-4x512"]
    assert gpu_only.missing == "full size: for a GPU"


# The command itself.


@pytest.mark.slow
def test_real_parts_and_the_report(tmp_path):
    command = [sys.executable, "-m", "onetrip.benchmarks", "--everything", "--quick", "--device=cpu"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    names = ("environment", "adam_streams", "gpu-tests-large", "anatomy-tiny-bert")
    words = [*(f"--part={name}" for name in names), f"--output={tmp_path}"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    found = state(tmp_path)
    statuses = {name: entry["status"] for name, entry in found["parts"].items()}
    assert statuses == {
        "environment": "passed",
        "gpu-tests-large": "skipped",
        "adam_streams": "passed",
        "anatomy-tiny-bert": "passed",
        "report": "passed",
    }
    machine = found["machine"]["id"]
    cases = json.loads((tmp_path / "results" / machine / "adam_streams.json").read_text())["cases"]
    assert [case["stream"] for case in cases] == ["gaussian", "six_decades", "sparse_rows", "outlier"]
    verified = json.loads((tmp_path / "results" / machine / "everything.json").read_text())["cases"]
    assert {"adam_streams", "gpu-tests-large"} <= {entry["case"] for entry in verified}
    assert "outlier" in (tmp_path / "report.md").read_text()
    assert "tiny-bert" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "results" / machine / "anatomy.json").is_file()
    assert "torch" in json.loads((tmp_path / "environment.json").read_text())["packages"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--everything"], "--output must name a folder"),
        (["--everything", "--op=softmax", "--only=x"], "--everything takes no --op=softmax"),
        (["--everything", "--dtype=fp32", "--shape=1x1"], "--everything takes no --shape=1x1"),
        (["--everything", "--pass=both", "--against=eager"], "--everything takes no --against=eager"),
        (["--part=doctor"], "--part, --budget and --part-limit belong to --everything"),
        (["--part-limit=3"], "--part, --budget and --part-limit belong to --everything"),
    ],
)
def test_bad_usage_exits_2(words, message):
    from onetrip.benchmarks.command import app
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and message in done.output
