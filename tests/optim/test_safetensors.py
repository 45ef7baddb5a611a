"""The safetensors file: what it holds, and that it is whole or not there."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from onetrip.optim import AdamW8bit
from optim_cases import make_params, same, snapshot, train, trained


def test_safetensors_file(tmp_path):
    """As state_dict, bit for bit; and any reader of safetensors reads it."""
    optimizer = trained(lr=torch.tensor(0.125), betas=(0.5, 1 - 1e-9))
    optimizer.save_safetensors(tmp_path / "optimizer.safetensors")
    twin = AdamW8bit(make_params())
    twin.load_safetensors(tmp_path / "optimizer.safetensors")
    assert same(twin.state_dict(), optimizer.state_dict())
    assert os.listdir(tmp_path) == ["optimizer.safetensors"]
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(tmp_path / "optimizer.safetensors", framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert same(tensors["state.0.exp_avg_codes"], optimizer.state_dict()["state"][0]["exp_avg_codes"])
    assert json.loads(metadata["param_groups"])[0]["betas"] == [0.5, 1 - 1e-9]
    assert len(tensors) == 1 + sum(map(len, optimizer.state_dict()["state"].values()))


@pytest.mark.promise("C4")
def test_any_flipped_byte_or_cut_is_found(tmp_path):
    """C4: each byte of the header, and some of each tensor; every length of the start, and some later ones."""
    path, damaged = tmp_path / "whole", tmp_path / "damaged"
    small = AdamW8bit(make_params([(130,), (3,)]), min_8bit_numel=100)
    train(small, range(2))
    small.save_safetensors(path)
    whole = path.read_bytes()
    optimizer = AdamW8bit(make_params([(130,), (3,)]))
    train(optimizer, range(1))
    before = snapshot(optimizer)
    variants = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in range(len(whole))]
    variants += [whole[:at] for at in range(len(whole))] + [whole + b"\0"]
    for data in variants:
        damaged.write_bytes(data)
        with pytest.raises(ValueError, match=r"load_safetensors: .* must be a whole file of save_safetensors"):
            optimizer.load_safetensors(damaged)
    assert same(snapshot(optimizer), before)
    optimizer.load_safetensors(path)


KILLED = """
import os, random, signal, sys
import torch
from pathlib import Path
from onetrip.optim import checkpoint

def state_dict(step):
    return {"state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.full((5000,), float(step))}},
            "param_groups": [{"lr": 0.5, "params": [0]}]}

def lines_of_a_save(path, die_at):
    count = 0
    def trace(frame, event, _):
        nonlocal count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    checkpoint.save(state_dict(2), path)
    sys.settrace(None)
    return count

path = Path(sys.argv[1]) / "optimizer.safetensors"
total = lines_of_a_save(path, 0)
old = new = 0
generator = random.Random(0)
for _ in range(200):
    checkpoint.save(state_dict(1), path)
    die_at = generator.randint(1, total)
    child = os.fork()
    if child == 0:
        lines_of_a_save(path, die_at)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    loaded = checkpoint.load(path)["state"][0]
    step = float(loaded["step"])
    assert step in (1.0, 2.0) and torch.equal(loaded["exp_avg"], torch.full((5000,), step))
    old, new = old + (step == 1.0), new + (step == 2.0)
print(old, new)
"""


@pytest.mark.promise("C2")
@pytest.mark.slow
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new(tmp_path):
    """C2: SIGKILL at 200 random lines of a save."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    old, new = map(int, done.stdout.split())
    assert old > 20 and new > 5


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    optimizer, path = trained(), tmp_path / "optimizer.safetensors"
    optimizer.save_safetensors(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        optimizer.save_safetensors(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


def test_other_files_are_refused(tmp_path):
    optimizer = trained()
    for data in (b"", b"12345678", (2**63).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]", b"\xff" * 64):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(ValueError, match="must be a whole file of save_safetensors"):
            optimizer.load_safetensors(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        optimizer.load_safetensors(Path(tmp_path) / "nothing")


@pytest.mark.parametrize(
    "value",
    [torch.arange(3), torch.tensor(True), torch.ones(2, dtype=torch.int8), {"a": [1, None, "x"]}, math.inf],
    ids=["int64", "bool", "int8", "nested", "inf"],
)
@pytest.mark.parametrize("key", ["layer.0.weight", "", "state.0.exp_avg", "clé"])
def test_keys_of_ones_own_come_back(tmp_path, key, value):
    optimizer = AdamW8bit([{"params": make_params(), key: value}])
    train(optimizer, range(1))
    optimizer.save_safetensors(tmp_path / "file")
    twin = AdamW8bit(make_params())
    twin.load_safetensors(tmp_path / "file")
    assert same(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (3, 1, r"keys of param_groups\[0\] must be strings, got 3"),
        ("k", {1: 2}, r"param_groups\[0\]\['k'\] must be .*, got a dict whose keys are no strings"),
        ("k", [1, {2}], r"param_groups\[0\]\['k'\]\[1\] must be .*, got set"),
        ("k", {"inner": torch.ones(1)}, r"\['k'\]\['inner'\] must be .*, got Tensor"),
        ("k", torch.ones(1, dtype=torch.complex64), r"\['k'\] must be a dense tensor of .*, got complex64"),
        ("k", torch.ones(1).to_sparse(), r"\['k'\] must be a dense tensor of .*, got torch.sparse_coo"),
    ],
    ids=["key", "dict-key", "set", "nested-tensor", "complex", "sparse"],
)
def test_what_the_file_cannot_hold_is_refused_by_name(tmp_path, key, value, message):
    optimizer = AdamW8bit([{"params": make_params(), key: value}])
    with pytest.raises(TypeError, match=message):
        optimizer.save_safetensors(tmp_path / "file")
    assert not os.listdir(tmp_path)
