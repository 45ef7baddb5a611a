"""python -m onetrip.benchmarks: what it refuses before measuring, and one real run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from onetrip.benchmarks import runner
from onetrip.benchmarks.__main__ import main

CASE = "rms_norm-M65536-N64-fp32"


@pytest.fixture
def never_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(runner, "run", run)


@pytest.mark.usefixtures("never_measures")
def test_an_unknown_pattern_lists_the_cases_and_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "sofmax"]) == 2
    message = capsys.readouterr().err
    assert "--only sofmax: no such case" in message
    for known in (CASE, "overhead-layer_norm-grad", "saved_bytes-bert_large_output_blocks"):
        assert f"  {known}\n" in message


@pytest.mark.usefixtures("never_measures")
def test_a_case_that_quick_leaves_out_is_unknown_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "rms_norm-M4096-N1024-bf16"]) == 2
    assert "bf16\n" not in capsys.readouterr().err.partition("There are:")[2]


@pytest.mark.usefixtures("never_measures")
def test_an_unwritable_output_exits_2_before_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["--quick", "--output", str(tmp_path / "file/folder")]) == 2
    assert f"cannot write to {tmp_path / 'file/folder'}: Not a directory" in capsys.readouterr().err


@pytest.mark.usefixtures("never_measures")
def test_cuda_without_a_card_exits_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_one_case_is_measured_printed_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "onetrip.benchmarks", "--quick", "--only", CASE, "--output", str(tmp_path)]
    # pytest-benchmark measures nothing where it finds itself in a worker of xdist; this process may be one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*/row_norm.json")
    content = json.loads(path.read_text())
    assert f"wrote {path}" in done.stdout
    assert content["machine"]["id"] == path.parent.name
    assert content["quick"] is True
    assert {"python", "torch", "onetrip", "transformers"} <= set(content["versions"])
    assert "commit" in content
    assert content["date"]
    (case,) = content["cases"]
    assert case["case"] == CASE
    for provider in case["providers"]:
        assert provider["check"]["passed"]
        for name in ("forward", "backward"):
            assert 0 < provider[name]["p20_ms"] <= provider[name]["median_ms"] <= provider[name]["p80_ms"]
    # A partial run leaves the record of the repository alone.
    assert "rendered" not in done.stdout
