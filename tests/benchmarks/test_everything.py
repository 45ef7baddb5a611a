"""onetrip bench --everything: parts of a second in place of the real ones, and two real ones."""

from __future__ import annotations

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
from onetrip.benchmarks.full_run import everything, gpu_tests, plan, small_parts
from onetrip.benchmarks.full_run.plan import LIMIT_S, Part, Place
from onetrip.benchmarks.measure.results import SUITES, bench_file
from onetrip.benchmarks.suites import attention

CPU = torch.device("cpu")
COUNT = "open('ran', 'a').write('x')"


def fake(name: str, code: str = "pass", **more: Any) -> Part:
    """A part whose process runs a line of Python."""
    more.setdefault("seconds", 1.0)
    return Part(name, "nothing", ("timeit", "-n1", "-r1", code), **more)


def exits(code: int, words: str = "") -> str:
    return f"import os; print({words!r}, flush=True); os._exit({code})"


def state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "everything.json").read_text())


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.chdir(tmp_path)

    def run(*known: Part, **options: Any) -> int:
        return everything.run(tmp_path, CPU, known=known, **options)

    return run


def test_what_became_of_each_part_is_written_down(run, tmp_path, capsys):
    status = run(
        fake("good"),
        fake("bad", exits(1, "FAILED kernel x: off by 3")),
        fake("broken", "raise ValueError('no such thing')"),
        fake("slow", exits(everything.EXIT_UNFINISHED, "3 of 9 tests ran")),
        fake("absent", missing="no CUDA device"),
        fake("absent after all", exits(everything.EXIT_SKIPPED, "Device not supported")),
        fake("after", COUNT),
    )
    found = state(tmp_path)["parts"]
    assert {name: entry["status"] for name, entry in found.items()} == {
        "good": "passed",
        "bad": "failed",
        "broken": "failed",
        "slow": "unfinished",
        "absent": "skipped",
        "absent after all": "skipped",
        "after": "passed",  # a failure stops nothing
    }
    assert status == 1
    assert found["bad"]["failures"] == ["kernel x: off by 3"]
    assert "ValueError: no such thing" in found["broken"]["reason"]
    assert found["slow"]["reason"] == "3 of 9 tests ran"
    assert found["absent"]["reason"] == "no CUDA device"
    assert found["absent after all"]["reason"] == "Device not supported"
    assert "kernel x: off by 3" in (tmp_path / "logs/bad.log").read_text()
    assert "FAILED bad: kernel x: off by 3" in capsys.readouterr().out
    assert {"machine", "versions", "commit", "code", "date"} <= state(tmp_path).keys()


def test_nothing_failed_exits_0(run):
    assert run(fake("good"), fake("absent", missing="no CUDA device")) == 0


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


def test_the_budget_stops_before_a_part_that_does_not_fit(run, tmp_path, capsys):
    known = fake("long", COUNT, seconds=1000.0), fake("short", COUNT), fake("report", COUNT, always=True)
    assert run(*known, budget_s=100.0) == 0
    assert [*state(tmp_path)["parts"]] == ["short", "report"]
    said = capsys.readouterr().err
    assert "long needs about 470 s, 9" in said
    assert "1 of 3 parts are left: call again with --resume" in said


def allot(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Stops the named parts after so many seconds; the others have all the time that a loaded machine takes."""
    run_part = everything._run
    monkeypatch.setattr(
        everything, "_run", lambda part, state, place, _: run_part(part, state, place, seconds.get(part.name, 600.0))
    )


def test_a_part_is_stopped_at_its_limit_and_the_next_one_runs(run, tmp_path, monkeypatch):
    monkeypatch.setattr(everything, "LIMIT_S", 1.0)
    allot(monkeypatch, endless=1.0)
    assert run(fake("endless", "import time; time.sleep(60)"), fake("after")) == 1
    found = state(tmp_path)["parts"]
    assert found["endless"]["status"] == "failed"
    assert re.fullmatch(r"stopped after \d+ s; without a limit: python -m timeit .*", found["endless"]["reason"])
    assert found["after"]["status"] == "passed"


def test_a_part_that_the_budget_cuts_is_unfinished_and_its_next_estimate_longer(run, tmp_path, monkeypatch):
    known = fake("endless", "import time; time.sleep(60)", seconds=1.0)
    allot(monkeypatch, endless=1.0)
    assert run(known, budget_s=300.0) == 0
    assert state(tmp_path)["parts"]["endless"]["status"] == "unfinished"
    seconds = state(tmp_path)["parts"]["endless"]["seconds"]
    assert run(known, budget_s=seconds, resume=True) == 0
    assert state(tmp_path)["parts"]["endless"]["seconds"] == seconds  # not started: it would not have ended


def test_ctrl_c_keeps_what_is_done(run, tmp_path, monkeypatch):
    ran = everything._run

    def interrupted(part: Part, *arguments: Any) -> None:
        if part.name == "second":
            raise KeyboardInterrupt
        ran(part, *arguments)

    monkeypatch.setattr(everything, "_run", interrupted)
    assert run(fake("first"), fake("second"), fake("third")) == everything.INTERRUPTED
    assert [*state(tmp_path)["parts"]] == ["first"]


def test_sigterm_stops_the_running_part_too(run, tmp_path):
    """Told apart from Ctrl-C: a terminal sends that to the part itself."""
    code = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGTERM); time.sleep(300)"
    assert run(fake("cut", code), fake("after")) == everything.INTERRUPTED
    assert {name: entry["status"] for name, entry in state(tmp_path)["parts"].items()} == {"cut": "unfinished"}
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_did_not_end_or_failed_comes_behind_what_has_not_run(run, tmp_path):
    slow, bad = fake("slow", f"{COUNT}; {exits(everything.EXIT_UNFINISHED)}"), fake("bad", f"{COUNT}; {exits(1)}")
    new = fake("new", "assert open('ran').read() == 'xx'")
    run(slow, bad)
    run(bad, slow, new, resume=True)
    assert state(tmp_path)["parts"]["new"]["status"] == "passed"


def test_a_part_is_told_when_it_must_have_ended(run, tmp_path):
    code = "import time; assert 60 < {deadline} - time.time() < 100"
    assert run(fake("told", code), budget_s=100.0) == 0


def test_a_reason_that_looks_like_markup_is_printed_as_it_is(run, capsys):
    run(fake("odd", exits(1, "no [/path] of [red]")))
    assert "no [/path] of [red]" in capsys.readouterr().out


def test_a_folder_with_a_run_is_not_overwritten(run, capsys):
    run(fake("good"))
    assert run(fake("good")) == 2
    assert "holds a run already: --resume goes on with it" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["commit", "versions", "code", "quick"])
def test_a_run_of_other_code_is_not_continued(run, tmp_path, capsys, what):
    run(fake("good"))
    content = state(tmp_path) | {what: {"id": "another", "modified": False} if what == "commit" else "another"}
    (tmp_path / "everything.json").write_text(json.dumps(content))
    assert run(fake("good"), resume=True) == 2
    assert f"{what} was another" in capsys.readouterr().err


def test_a_damaged_state_is_refused(run, tmp_path, capsys):
    (tmp_path / "everything.json").write_text("{")
    assert run(fake("good"), resume=True) == 2
    assert "is not the state of a run" in capsys.readouterr().err


def test_an_unknown_part_lists_the_parts(run, tmp_path, capsys):
    assert run(fake("doctor"), fake("report"), parts=["dcotor"]) == 2
    assert "--part dcotor: no such part. There are:\n  doctor\n  report" in capsys.readouterr().err
    assert not (tmp_path / "everything.json").exists()


def test_an_unwritable_folder_and_a_bad_budget_are_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert everything.run(tmp_path / "file/folder", CPU, known=[fake("good")]) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert everything.run(tmp_path, CPU, known=[fake("good")], budget_s=0.0) == 2
    assert "--budget must be greater than 0" in capsys.readouterr().err


def test_json_prints_the_state(run, tmp_path, capsys):
    run(fake("good"), as_json=True)
    assert json.loads(capsys.readouterr().out) == state(tmp_path)


# The real parts, as data.


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """As on a machine with a card, nvcc, compute-sanitizer and ncu."""
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(plan.shutil, "which", lambda name: name)
    monkeypatch.setattr(plan, "unavailable_reason", lambda backend, device: "")
    monkeypatch.setattr(gpu_tests, "missing", lambda: "")
    return torch.device("cuda")


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_on_a_card_nothing_is_left_out_and_every_part_ends_in_time(card, tmp_path, quick):
    known = plan.parts(Place(tmp_path, card, quick, tests=tmp_path))
    assert {found.name: found.missing for found in known if found.missing} == {}
    assert max(found.seconds for found in known) <= LIMIT_S < 480
    names = [found.name for found in known]
    assert len(set(names)) == len(names)
    model = "tiny-bert" if quick else "bert-large"
    assert {"doctor", "environment", "peers", "report", f"anatomy-{model}", f"methods-{model}"} <= set(names)
    tools = ("memcheck", "racecheck", "initcheck", "synccheck")
    assert {f"sanitizer-{tool}-{backend}" for tool in tools for backend in ("cuda", "triton")} <= set(names)
    assert {"counters-cuda", "counters-triton"} <= set(names)


def test_half_an_hour_says_whether_kernels_are_right_how_fast_and_why(card, tmp_path):
    known = plan.parts(Place(tmp_path, card, tests=tmp_path))
    names = [found.name for found in known]
    counted = names.index("counters-cuda")
    assert sum(found.seconds for found in known[: counted + 1]) < 1500.0
    checks = ("doctor", "gpu-tests-row_norm-cuda", "gpu-tests-softmax-cuda", "sanitizer-racecheck-cuda")
    figures = (
        "row_norm-layer_norm-bf16-large",
        "softmax-fp32-large",
        "adam",
        "training-bert_large-24_layers-4x512-bf16",
    )
    order = [*sorted(map(names.index, checks)), *sorted(map(names.index, figures)), counted]
    assert order == sorted(order)
    assert names.index("counters-triton") > names.index("adam_training-seed4")


def test_without_nsight_compute_nothing_is_counted(card, tmp_path, monkeypatch):
    monkeypatch.setattr(plan.shutil, "which", lambda name: None if name == "ncu" else name)
    found = {part_.name: part_.missing for part_ in plan.parts(Place(tmp_path, card)) if "counters" in part_.name}
    assert found.keys() == {"counters-cuda", "counters-triton"}
    assert set(found.values()) == {"ncu is not on PATH: it comes with the CUDA toolkit, as Nsight Compute"}


def test_on_two_cores_every_case_of_the_cpu_has_a_part_that_ends_in_time(tmp_path):
    """Attention over 16,384 tokens and the language model were left out as too long, or cut and never whole."""
    suites = [found for found in plan.parts(Place(tmp_path, CPU)) if found.command[0] == "onetrip.benchmarks"]
    for_a_card = {"full size: for a card", "for a card; elsewhere with --dtype bf16"}
    assert {found.missing for found in suites} <= {"", *for_a_card}
    assert max(found.seconds for found in suites) < LIMIT_S


@pytest.mark.parametrize(
    ("suite", "quick", "names"),
    [
        ("attention", True, ["attention"]),
        (
            "attention",
            False,
            [
                f"attention-L{length}-p{p}-{dtype}"
                for dtype in ("fp32", "bf16")
                for length in attention.HEADS
                for p in (0, 0.1)
            ],
        ),
        ("softmax", True, ["softmax"]),
        (
            "softmax",
            False,
            [
                *(f"softmax-scale_mask_softmax_dropout-p{p}-{dtype}" for dtype in ("fp32", "bf16") for p in (0.1, 0)),
                "softmax-fp32",
                "softmax-bf16",
            ],
        ),
        ("adam", True, ["adam"]),
        ("adam", False, ["adam-bert_base-fp32", "adam-10000_tensors_of_100-fp32", "adam-bert_base-bf16"]),
        ("adam_streams", False, ["adam_streams"]),
    ],
    ids=lambda value: {True: "quick", False: "full"}.get(value) if isinstance(value, bool) else None,
)
def test_a_suite_that_is_too_long_is_split_by_operator_and_dtype_then_by_case(tmp_path, suite, quick, names):
    known = plan.parts(Place(tmp_path, CPU, quick))
    assert [found.name for found in known if f"--op={suite}" in found.command] == names


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_parts_of_a_suite_hold_each_of_its_cases_once(card, tmp_path, device):
    import importlib

    from onetrip.benchmarks.measure.cases import selects

    assert selects("[a]b,c-*", "ab") and selects("[a]b,c-*", "c-d") and not selects("[a]b,c-*", "aba")

    known = plan.parts(Place(tmp_path, torch.device(device)))
    for suite in SUITES:
        patterns = []
        for command in (found.command for found in known if f"--op={suite}" in found.command):
            patterns += [word.removeprefix("--only=") for word in command if word.startswith("--only=")]
        for case in importlib.import_module(f"onetrip.benchmarks.suites.{bench_file(suite).stem}").cases():
            assert sum(selects(pattern, case.id) for pattern in patterns) == 1, case.id


def test_without_a_card_its_parts_say_why_they_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(plan.torch.cuda, "is_available", lambda: False)
    known = plan.parts(Place(tmp_path, CPU, tests=tmp_path))
    for part_ in known:
        if part_.name.startswith(("gpu-tests", "sanitizer", "counters")):
            assert part_.missing == "torch sees no CUDA device"
    (card_only,) = [part_ for part_ in known if part_.name == "training-bert_large-24_layers-4x512"]
    assert card_only.missing == "full size: for a card"


def test_without_a_source_tree_the_gpu_tests_say_what_is_missing(card, tmp_path):
    known = plan.parts(Place(tmp_path, card, tests=None))
    (why,) = {part_.missing for part_ in known if part_.name.startswith("gpu-tests")}
    assert "call from the root of a source tree" in why


# Results of the parts of a suite, put together; and the command itself.


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


def test_results_of_parts_are_put_together_in_the_order_of_the_suite(tmp_path):
    head = {
        "schema": 1,
        "date": "d",
        "commit": None,
        "versions": {},
        "machine": {"id": "m", "device": "cpu"},
        "code": "c",
    }
    (tmp_path / "everything.json").write_text(
        json.dumps({**head, "quick": False, "parts": {"doctor": {"status": "passed"}}})
    )
    ids = ["adam_streams-gaussian", "adam_streams-six_decades", "adam_streams-outlier"]
    for name, case, code in (("b", ids[2], "c"), ("a", ids[0], "c"), ("old", ids[1], "another")):
        content = {**head, "code": code, "suite": "adam_streams", "complete": True, "load_average_before": 1.0}
        path = tmp_path / "parts" / name / "m" / "adam_streams.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**content, "cases": [{"case": case}]}))
    found = small_parts.merged(tmp_path)
    assert [case["case"] for case in found["adam_streams"]["cases"]] == [ids[0], ids[2]]
    assert not found["adam_streams"]["complete"]  # each part is, but two cases have not run
    content = {**head, "suite": "adam_streams", "complete": True, "load_average_before": 1.0}
    cases = [{"case": case} for case in (ids[1], "adam_streams-sparse_rows")]
    path.write_text(json.dumps({**content, "cases": cases}))
    assert small_parts.merged(tmp_path)["adam_streams"]["complete"]
    assert found["everything"]["cases"] == [{"case": "doctor", "status": "passed"}]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--everything"], "--output must name a folder"),
        (["--everything", "--op=softmax", "--only=x"], "--op, --only: not of --everything"),
        (["--everything", "--dtype=fp32", "--shape=1x1"], "--dtype, --shape: not of --everything"),
        (["--everything", "--pass=both", "--against=eager"], "--pass, --against: not of --everything"),
        (["--part=doctor"], "--part and --budget belong to --everything"),
        (["--budget=3"], "--part and --budget belong to --everything"),
    ],
)
def test_bad_usage_exits_2(words, message):
    from onetrip.benchmarks.command import app
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and message in done.output
