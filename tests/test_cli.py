import io
import json
import subprocess
import sys
from dataclasses import replace

import onetrip
import pytest
import torch
from onetrip import cli, selfcheck
from onetrip.cli import app, main
from typer.testing import CliRunner

FAST = ["--batch-size", "1", "--sequence-length", "8", "--steps", "1"]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(selfcheck, "KERNELS", selfcheck.KERNELS[:1])
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(map(str, arguments)))


def assert_bad_usage(result, *words):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr


def test_doctor_json_is_all_of_standard_output(run):
    result = run("doctor", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    read = json.loads(result.stdout)
    assert read["healthy"] is True
    assert read["facts"]["torch"] == torch.__version__
    assert all(check["passed"] for check in read["checks"])


def test_doctor_tables(run):
    result = run("doctor")
    assert result.exit_code == 0
    assert "What auto picks" in result.stdout
    assert "checks passed" in result.stdout


@pytest.mark.parametrize("as_json", [False, True], ids=["tables", "json"])
def test_doctor_exits_1_when_a_check_fails(run, monkeypatch, as_json):
    right = selfcheck.KERNELS[0]
    wrong = replace(right, fused=lambda **inputs: right.fused(**inputs) * float("nan"))
    monkeypatch.setattr(selfcheck, "KERNELS", (wrong,))
    result = run("doctor", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    if as_json:
        read = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert read["healthy"] is False
    else:
        assert "checks failed" in result.stdout


@pytest.mark.slow
def test_anatomy_json_is_all_of_standard_output(run, tmp_path):
    options = ("--columns", "eager,patched", "--json", "--output", tmp_path / "new" / "folder")
    result = run("anatomy", "tiny-bert", *FAST, *options)
    assert result.exit_code == 0
    read = json.loads(result.stdout)
    folder = tmp_path / "new" / "folder"
    assert read == json.loads((folder / "anatomy.json").read_text())
    assert "onetrip anatomy tiny-bert" in (folder / "anatomy.html").read_text()
    steps = {name: column["measured"] for name, column in read["columns"].items()}
    assert steps["eager"]["saved_activations"] > steps["patched"]["saved_activations"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [["--fits", "16GB"], ["--gpu", "A100-40GB", "--autocast", "bfloat16"], ["--predict-only"]]
)
def test_anatomy_without_running(run, asked):
    result = run("anatomy", "tiny-gpt2", *FAST, "--columns", "eager,", *asked)
    assert result.exit_code == 0
    assert ("Does it fit" in result.stdout) == (asked != ["--predict-only"])
    assert "predicted for cuda" in result.stdout and "patched +" not in result.stdout
    assert ("autocast to bfloat16" in result.stdout) == ("--autocast" in asked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "float8"], ["--dtype", "float32, bfloat16, float16", "float8"]),
        (["--autocast", "float32"], ["--autocast must be one of bfloat16, float16", "got float32 with float32"]),
        (["--autocast", "bfloat16", "--dtype", "bfloat16"], ["with --dtype float32, got bfloat16 with bfloat16"]),
        (["--optimizer", "lion"], ["--optimizer must be one of adamw, adam, adamw8bit", "lion"]),
        (["--columns", "eager,quick"], ["--columns", "eager, patched, patched_loss, patched_adamw8bit, ", "got quick"]),
        (["--columns", ","], ["--columns", "got none"]),
        (["--columns", "compiled", "--predict-only"], ["--columns compiled can be measured only"]),
        (["--fits", "plenty"], ["--fits must be a size as 16GB or 24GiB, got plenty", "--gpu"]),
        (["--gpu", "A100"], ["--gpu: unknown GPU 'A100'; choose from", "A100-40GB", "H200"]),
        (["--gpu", "H200", "--fits", "16GB"], ["--fits and --gpu must not both be given"]),
        (["--batch-size", "0"], ["--batch-size must be at least 1, got 0"]),
        (["--sequence-length", "513"], ["--sequence-length must be at most 512 for this model, got 513"]),
        (["--device", "tpu"], ["--device", "cpu, cuda", "tpu"]),
        pytest.param(
            ["--device", "cuda"],
            ["--device cuda", "use --device cpu"],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("--") else "",
)
def test_anatomy_bad_usage(run, arguments, words):
    assert_bad_usage(run("anatomy", "tiny-bert", *arguments), *words)


@pytest.mark.parametrize(("command", "work"), [("anatomy", "compare"), ("methods", "run")])
def test_output_is_checked_before_any_work(run, tmp_path, monkeypatch, command, work):
    monkeypatch.setattr(f"onetrip.{command}.{work}", lambda *_, **__: pytest.fail("it has measured already"))
    occupied = tmp_path / "file"
    occupied.write_text("kept")
    assert_bad_usage(run(command, "tiny-bert", "--output", occupied), "--output", "cannot write there")
    assert_bad_usage(run(command, "tiny-bert", "--output", occupied / "below"), "--output", "cannot write there")
    assert occupied.read_text() == "kept"


@pytest.mark.parametrize("command", ["anatomy", "methods"])
def test_a_bad_name_leaves_no_folder(run, tmp_path, command):
    result = run(command, "no-such-model", "--output", tmp_path / "new" / "folder")
    assert_bad_usage(result, "no-such-model is neither a preset (tiny-bert, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", ["no-such-model", "./no/such/folder", "/no-such-folder", "a/b/c"])
def test_unknown_model_lists_the_presets(run, model):
    assert_bad_usage(run("anatomy", model), f"{model} is neither a preset (tiny-bert, ", "bert-large", "owner/name")


def test_hub_model_that_cannot_be_had(run, monkeypatch):
    import transformers

    def offline(name):
        raise OSError("We couldn't connect to the hub.\nCheck your connection.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", offline)
    told = "owner/name cannot be loaded: We couldn't connect to the hub. With HF_HUB_OFFLINE=1 the cache alone"
    assert_bad_usage(run("anatomy", "owner/name"), told)


@pytest.mark.parametrize("arguments", [["anatomy"], ["no-such-command"], ["doctor", "--no-such-option"]])
def test_usage_errors_of_the_command_line(run, arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_python_m_onetrip_is_the_command():
    done = subprocess.run([sys.executable, "-m", "onetrip", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("doctor", "anatomy", "methods", "bench"))
    assert "__main__" not in done.stdout


def test_an_output_that_lacks_characters(monkeypatch):
    """As with PYTHONIOENCODING=ascii."""
    monkeypatch.setattr(selfcheck, "KERNELS", selfcheck.KERNELS[:1])
    monkeypatch.setattr(sys, "argv", ["onetrip", "doctor"])
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True))
    with pytest.raises(SystemExit, match="0"):
        main()
    printed = sys.stdout.buffer.getvalue().decode("ascii")
    assert "What auto picks" in printed and "?" not in printed


def test_the_progress_before_the_first_step(monkeypatch, capsys):
    """It began with 0/None."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with cli._progress(True):
        pass
    assert "starting" in (shown := capsys.readouterr().err) and "0/?" in shown and "None" not in shown


def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "onetrip", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "onetrip: No space left on device\n")


def test_version(run):
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"onetrip {onetrip.__version__}\n")
