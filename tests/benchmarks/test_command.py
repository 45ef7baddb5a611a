"""onetrip bench: what it rejects before measuring, real runs, Ctrl-C and --resume."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from onetrip.benchmarks import runner
from onetrip.benchmarks.command import app
from onetrip.benchmarks.measure.cases import Session, Skip
from onetrip.benchmarks.runner import Options
from onetrip.environment import header
from typer.testing import CliRunner, Result

CASE = "rms_norm-M65536-N64-fp32"
SMALL = ["--quick", "--op", "rms_norm", "--against", "eager"]
Run = Callable[..., Result]

# In 80 columns the headers of a table wrap where every peer is installed.
ENVIRONMENT = os.environ | {"COLUMNS": "200"}


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from onetrip.cli import main; main()", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT, cwd=cwd)


def records(path: Path) -> list[str]:
    return [case["case"] for case in json.loads(path.read_text())["cases"]]


@pytest.fixture
def rejected(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs the command, and returns the line with which it rejects."""

    def run(*arguments: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(runner, "run", run)

    def invoke(*arguments: str) -> str:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("onetrip bench: ")
        return result.stderr

    return invoke


def test_an_unknown_pattern_lists_the_cases(rejected: Callable[..., str]) -> None:
    message = rejected("--only", "sofmax")
    assert "--only sofmax: unknown case" in message
    for known in (CASE, "overhead-layer_norm-grad", "default_patch-BERT-fp32-train"):
        assert f"  {known}\n" in message


def test_a_case_that_quick_leaves_out_is_unknown_to_it(rejected: Callable[..., str]) -> None:
    message = rejected("--quick", "--only", "rms_norm-M4096-N1024-bf16")
    assert "bf16\n" not in message.partition("choose from:")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--op", "sofmax"], "--op sofmax: unknown value; choose from row_norm"),
        (["--device", "tpu"], "--device tpu: unknown value; choose from auto, cpu, cuda"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--quick", "--resume"], "--resume: --output must name the folder"),
        (["--render", "--op", "adam"], "--render takes no cases and no folder"),
        (["--render", "--output", "out"], "--render takes no cases and no folder"),
        (["--op", "softmax", "--shape", "1000000000x4096"], "does not fit: needs at least"),
    ],
)
def test_bad_usage_is_one_line(
    rejected: Callable[..., str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    said = rejected(*arguments)
    assert message in said
    assert len(said.splitlines()) == 1


def test_an_unwritable_output_is_rejected_before_measuring(rejected: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    message = rejected("--quick", "--output", str(tmp_path / "file/folder"))
    assert f"--output: cannot write to {tmp_path / 'file/folder'}: Not a directory" in message
    place = tmp_path / header(torch.device("cpu"))["machine"]["id"]
    place.touch()
    assert f"cannot write to {place}: Not a directory" in rejected("--quick", "--device=cpu", f"--output={tmp_path}")


@pytest.mark.parametrize("as_json", [False, True], ids=["tables", "json"])
def test_the_list_names_operators_and_providers_with_reasons(as_json: bool) -> None:
    result = CliRunner().invoke(app, ["--list", *(["--json"] if as_json else []), "--device", "cpu"])
    assert result.exit_code == 0
    if as_json:
        found = json.loads(result.stdout)
        assert CASE in found["suites"]["row_norm"]["cases"]
        assert found["providers"]["torch eager"]["unavailable"] == ""
        assert "only interpreted" in found["providers"]["onetrip triton"]["unavailable"]
    else:
        for word in ("scale_mask_softmax_dropout-p0.1", "--shape", "Liger-Kernel", "only interpreted"):
            assert word in result.stdout


def test_the_list_cuts_no_name_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = runner.listing(torch.device("cpu"))
    result = CliRunner().invoke(app, ["--list", "--device", "cpu"])
    for name in found["suites"]["softmax"]["operators"] + found["suites"]["row_norm"]["operators"]:
        assert re.search(rf"(^|\s){re.escape(name)}(,|\s)", result.stdout, re.MULTILINE), name


ONLY_WHAT_MEASURES = """
import sys
absent = ("pytest", "_pytest", "jinja2", "matplotlib")
sys.modules.update(dict.fromkeys(absent))
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in absent else found(name, *rest)
from onetrip.benchmarks.command import app
app(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--op=rms_norm", "--shape=8x8", "--against=eager"], 0, ""),
        (["--render"], 2, "not installed: jinja2, matplotlib; pip install 'onetrip[bench]'"),
        (["--everything", "--output=out"], 2, "not installed: pytest, jinja2, matplotlib"),
    ],
)
def test_only_pages_and_the_full_run_need_more_than_onetrip(
    tmp_path: Path, arguments: list[str], status: int, message: str
) -> None:
    command = [sys.executable, "-c", ONLY_WHAT_MEASURES, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert message in done.stderr


class Suite:
    """One whose cases break, cannot run, and print."""

    @staticmethod
    def measure(case: SimpleNamespace, session: Session) -> dict[str, object]:
        print("a library's words")
        if case.id == "breaks":
            raise ValueError("off by one\nand more")
        if case.id == "cannot":
            raise Skip("no such model")
        rounds = session.rounds(lambda: gc.isenabled(), 3)
        return {"case": case.id, "providers": [], "collects": rounds}


def test_what_breaks_a_case_stops_no_other_and_standard_output_is_for_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "module", lambda suite: Suite)
    monkeypatch.setattr(runner, "runnable", lambda selected, device, options: (selected, []))
    cases = [SimpleNamespace(id=name) for name in ("breaks", "cannot", "ends")]
    found = runner.run({"made_up": cases}, torch.device("cpu"), Options.parse())
    assert found.failures == ["breaks: ValueError: off by one"] and not found.interrupted
    (record,) = found.results["made_up"]["cases"]
    assert record["case"] == "ends" and record["collects"] is False and gc.isenabled()
    assert record["cpu_slowdown"] is None or record["cpu_slowdown"] >= 1.0
    printed = capsys.readouterr()
    assert printed.out == "" and "skipped cannot: no such model" in printed.err
    assert "cannot (1/3)\n" in printed.err  # off a terminal each case is a line
    runner.run({"made_up": cases[1:]}, torch.device("cpu"), Options.parse(), silent=True)
    assert capsys.readouterr().err == "a library's words\n" * 2


@pytest.mark.slow
def test_one_case_is_measured_printed_and_written(tmp_path: Path) -> None:
    done = bench("--quick", "--only", CASE, "--output", "found", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("found/*/row_norm.json")
    content = json.loads(path.read_text())
    assert f"wrote {path.relative_to(tmp_path)}" in done.stderr
    assert "torch eager" in done.stdout and "rms_norm" in done.stdout  # a case by itself has a table too
    assert content["machine"]["id"] == path.parent.name
    assert content["quick"] is content["complete"] is True
    assert {"python", "torch", "onetrip", "transformers"} <= set(content["versions"])
    assert "commit" in content
    assert content["date"]
    assert content["asked_for"] == ["--quick", f"--only={CASE}"]
    (case,) = content["cases"]
    assert case["case"] == CASE
    for provider in case["providers"]:
        assert provider["check"]["passed"]
        for name in ("forward", "backward"):
            assert 0 < provider[name]["p20_ms"] <= provider[name]["median_ms"] <= provider[name]["p80_ms"]
    assert content["cases"][0]["cpu_slowdown"] >= 1.0
    # A partial run leaves the record of the repository alone.
    assert "rendered" not in done.stderr


@pytest.mark.slow
def test_shape_dtype_pass_and_against_reach_the_measurement_and_json_is_all_of_standard_output(tmp_path: Path) -> None:
    words = ["--shape", "64x96", "--dtype", "fp16", "--pass", "forward", "--against", "eager", "--json"]
    done = bench("--quick", "--op", "softmax", "--only", "softmax-M*", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (case,) = json.loads(done.stdout)["results"]["softmax"]["cases"]
    assert case["case"] == "softmax-M64-N96-fp16"
    assert [entry["name"] for entry in case["providers"]] == ["torch eager", "onetrip cpu"]
    for entry in case["providers"]:
        assert "forward" in entry
        assert not {"backward", "forward_backward"} & set(entry)
        assert entry["saved_bytes"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_resume_does_the_rest(tmp_path: Path) -> None:
    shapes = [f"--shape={n}x64" for n in (8, 16, 32, 48, 56)]
    arguments = [*SMALL, *shapes, "--output", str(tmp_path)]
    command = [sys.executable, "-m", "onetrip.benchmarks", *arguments]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    ) as run:
        for line in run.stderr:
            if line.startswith("rms_norm-M16"):  # the first case has ended
                run.send_signal(signal.SIGINT)
                break
        rest = run.stderr.read()
        run.wait(timeout=600)
    assert run.returncode == 130, rest
    assert "--resume continues" in rest
    (path,) = tmp_path.glob("*/*.json")
    assert path.name == "row_norm.partial.json" and f"wrote {path}" in rest
    done = records(path)
    assert 1 <= len(done) < 5

    resumed = bench(*arguments, "--resume", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert not [case for case in done if f"\n{case} (" in resumed.stderr]
    (path,) = tmp_path.glob("*/*.json")
    assert path.name == "row_norm.json"
    assert records(path) == [f"rms_norm-M{n}-N64-fp32" for n in (8, 16, 32, 48, 56)]
    assert json.loads(path.read_text())["complete"] is True

    unfinished = path.rename(path.with_name("row_norm.partial.json"))
    again = bench(*arguments, cwd=tmp_path)
    assert f"{unfinished} is replaced; --resume would go on with it" in again.stderr and not unfinished.exists()

    rejected = bench(*arguments, "--pass=forward", "--resume", cwd=tmp_path)
    assert rejected.returncode == 2 and "was measured with another choice of" in rejected.stderr
    assert "Traceback" not in rejected.stderr and len(records(path)) == 5
