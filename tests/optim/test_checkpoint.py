"""state_dict and load_state_dict, imports from torch.optim and bitsandbytes, and the safetensors file."""

from __future__ import annotations

import copy
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit
from optim_cases import make_params, same, snapshot, train

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def trained(steps: int = 3, **arguments: Any) -> AdamW8bit:
    optimizer = AdamW8bit(make_params(), **arguments)
    train(optimizer, range(steps))
    return optimizer


@DTYPES
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit], ids=["AdamW8bit", "Adam8bit"])
def test_resuming_is_training_on(cls, dtype):
    """C1: 20 steps are 10, save, load and 10, bit for bit; half precision casts no code."""
    whole = cls(make_params(dtype=dtype), lr=1e-2)
    train(whole, range(10))
    params, state = snapshot(whole)
    state = through_torch_save(state)
    resumed = cls([torch.nn.Parameter(p.clone()) for p in params], lr=0.5)
    resumed.load_state_dict(state)
    train(whole, range(10, 20))
    train(resumed, range(10, 20))
    assert same(snapshot(resumed), snapshot(whole))


def test_what_is_saved_is_plain():
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, (str, int)) and plain(inner) for key, inner in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return type(value) in (torch.Tensor, int, float, bool)

    assert plain(trained().state_dict()) and same(through_torch_save(trained().state_dict()), trained().state_dict())


def test_loading_copies():
    """The dictionary that was loaded, or the optimizer it came from, is not written to afterwards."""
    source = trained()
    state = source.state_dict()
    before = copy.deepcopy(state)
    target = AdamW8bit(make_params())
    target.load_state_dict(state)
    train(target, range(3, 5))
    assert same(state, before)


def test_loading_into_an_optimizer_that_has_stepped_replaces_its_state():
    source, target = trained(), trained(steps=7)
    for p, q in zip(target.param_groups[0]["params"], source.param_groups[0]["params"], strict=True):
        p.data = q.detach().clone()
    target.load_state_dict(source.state_dict())
    train(source, range(3, 6))
    train(target, range(3, 6))
    assert same(snapshot(target), snapshot(source))


def test_precision_of_a_checkpoint_is_kept():
    for saved, chosen in ((8, 32), (32, 8)):
        source, target = trained(optim_bits=saved), AdamW8bit(make_params(), optim_bits=chosen)
        state = source.state_dict()
        target.load_state_dict(state)
        assert same(target.state_dict()["state"], state["state"])


def test_parameters_without_state_and_names_and_initial_lr():
    params = [(f"layer.{i}", p) for i, p in enumerate(make_params())]
    source, target = AdamW8bit(params), AdamW8bit([(f"layer.{i}", p) for i, p in enumerate(make_params())], lr=0.3)
    torch.optim.lr_scheduler.ConstantLR(source)
    params[0][1].grad = torch.ones(64, 100)
    source.step()
    target.load_state_dict(through_torch_save(source.state_dict()))
    assert same(target.state_dict(), source.state_dict()) and list(target.state_dict()["state"]) == [0]
    assert target.param_groups[0]["initial_lr"] == 1e-3 and target.param_groups[0]["param_names"][1] == "layer.1"


def test_hooks_of_torch_run():
    source, target, calls = trained(), AdamW8bit(make_params()), []
    source.register_state_dict_pre_hook(lambda _: calls.append("save-pre"))
    source.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    target.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["extra"]))
    target.register_load_state_dict_post_hook(lambda _: calls.append("load-post"))
    target.load_state_dict(source.state_dict())
    assert calls == ["save-pre", 1, "load-post"]


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """What sets state_dict[path] to a value, to a function of the old value, or removes it (...)."""

    def apply(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        if to is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to(inner[path[-1]]) if callable(to) else to

    return apply


DAMAGED = {
    "no-state": (change("state", to=...), "must have state and param_groups"),
    "no-groups": (change("param_groups", to=...), "must have state and param_groups"),
    "state-not-a-dict": (change("state", to=[]), "state must be a dict"),
    "another-model": (change("param_groups", 0, "params", to=[0, 1]), r"must have \[6\] parameters, got \[2\]"),
    "more-groups": (change("param_groups", to=lambda groups: groups * 2), r"must have \[6\] parameters, got \[6, 6\]"),
    "state-of-nobody": (change("state", 17, to={"step": 1}), r"got also \[17\]"),
    "lr": (change("param_groups", 0, "lr", to=-1.0), "lr must be >= 0"),
    "amsgrad": (change("param_groups", 0, "amsgrad", to=True), "without amsgrad"),
    "l2": (change("param_groups", 0, "decoupled_weight_decay", to=False), "weight decay must be decoupled"),
    "missing-key": (change("state", 0, "exp_avg_scale", to=...), "state of parameter 0 must have"),
    "unknown-key": (change("state", 1, "momentum", to=1), "state of parameter 1 must have"),
    "entry-not-a-dict": (change("state", 0, to=3), "state of parameter 0 must be a dict"),
    "swapped": (change("state", 0, "exp_avg", to=lambda codes: codes.t()), r"shaped like its parameter, \(64, 100\)"),
    "truncated-codes": (change("state", 0, "exp_avg", to=lambda codes: codes[:-1]), "shaped like its parameter"),
    "float-codes": (change("state", 0, "exp_avg_sq", to=lambda codes: codes.float()), "exp_avg_sq must be uint8 codes"),
    "int-codes": (change("state", 0, "exp_avg", to=lambda codes: codes.int()), "must have"),
    "codes-no-tensor": (change("state", 0, "exp_avg_sq", to=1), "exp_avg_sq must be uint8 codes"),
    "short-scale": (change("state", 0, "exp_avg_scale", to=lambda scale: scale[:-1]), "must be 50 float32 scales"),
    "half-scale": (change("state", 0, "exp_avg_scale", to=lambda scale: scale.half()), "must be 50 float32 scales"),
    "negative-scale": (
        change("state", 0, "exp_avg_sq_scale", to=lambda scale: -scale),
        "exp_avg_sq_scale must be >= 0",
    ),
    "negative-square": (change("state", 2, "exp_avg_sq", to=lambda v: -v), "exp_avg_sq must be >= 0"),
    "negative-step": (change("state", 3, "step", to=torch.tensor(-1.0)), "step must be one number >= 0, got -1.0"),
    "nan-step": (change("state", 3, "step", to=torch.tensor(math.nan)), "step must be one number >= 0, got nan"),
    "two-steps": (change("state", 3, "step", to=torch.ones(2)), "step must be one number >= 0"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_checkpoints_change_nothing(damage, message):
    state = copy.deepcopy(trained(steps=4).state_dict())
    damage(state)
    optimizer = trained()
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(state)
    assert "AdamW8bit" in str(caught.value) and same(snapshot(optimizer), before)


@DTYPES
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam], ids=["AdamW", "Adam"])
def test_state_of_torchs_adam_is_taken(cls, dtype):
    """C6: quantised where this optimizer's precision is 8 bits, float32 elsewhere; the checkpoint's numbers count."""
    theirs = cls(make_params(dtype=dtype), lr=0.0625, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.125)
    train(theirs, range(5))
    ours = {torch.optim.AdamW: AdamW8bit, torch.optim.Adam: Adam8bit}[cls](make_params(dtype=dtype))
    ours.load_state_dict(through_torch_save(theirs.state_dict()))
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["optim_bits"]) == (0.0625, (0.7, 0.9), 0.125, 8)
    assert "foreach" not in group
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        state, expected = ours.state[p], theirs.state[q]
        is_8bit = p.numel() >= 4096
        assert state["exp_avg"].dtype == (torch.uint8 if is_8bit else torch.float32) and float(state["step"]) == 5.0
        for value, key in zip(ours.dequantized_state(p), ("exp_avg", "exp_avg_sq"), strict=True):
            wanted = expected[key].float()
            atol = 0.02 * float(wanted.abs().max()) if wanted.numel() else 0.0
            assert torch.allclose(value, wanted, rtol=0.06, atol=atol) if is_8bit else torch.equal(value, wanted)
    train(ours, range(5, 6))


def test_state_of_torchs_other_adams_is_refused():
    for cls, arguments, message in (
        (torch.optim.AdamW, {"amsgrad": True}, "without amsgrad"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight decay must be decoupled"),
        (torch.optim.SGD, {"momentum": 0.9}, "betas|must have"),
    ):
        theirs = cls(make_params(), **arguments)
        train(theirs, range(1))
        ours = trained()
        before = snapshot(ours)
        with pytest.raises(ValueError, match=message):
            ours.load_state_dict(theirs.state_dict())
        assert same(snapshot(ours), before)


def bitsandbytes_state(block: int, wrapped: bool) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """A state_dict laid out as bitsandbytes 0.50 does, with codes drawn at random, and its moments by its formulas."""
    entries, moments = {}, []
    maps = [torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)]
    for i, p in enumerate(make_params()):
        entry: dict[str, Any] = {"step": 7}
        quantized: dict[str, Any] = {}
        values = []
        for number, qmap in ((1, maps[0]), (2, maps[1])):
            if p.numel() < 4096:
                entry[f"state{number}"] = torch.rand(p.shape)
                values.append(entry[f"state{number}"])
                continue
            codes = torch.randint(0, 256, p.shape, dtype=torch.uint8)
            absmax = torch.rand(math.ceil(p.numel() / block)) + 0.1
            quantized |= {f"state{number}": codes, f"qmap{number}": qmap, f"absmax{number}": absmax}
            flat = [float(qmap[code] * absmax[e // block]) for e, code in enumerate(codes.view(-1).tolist())]
            values.append(torch.tensor(flat).view(p.shape))
        entries[i] = {**entry, "__bnb_optimizer_quant_state__": quantized} if wrapped else {**entry, **quantized}
        moments.append((values[0], values[1]))
    group = {"lr": 0.25, "betas": (0.7, 0.9), "eps": 1e-6, "weight_decay": 0.125, "alpha": 0.0, "t_alpha": None}
    return {"state": entries, "param_groups": [{**group, "params": list(range(6))}]}, moments


@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "wrapped"])
@pytest.mark.parametrize("block", [256, 2048])
def test_bitsandbytes_state_is_taken(block, wrapped):
    """C6: dequantised by its own map and blocks, then quantised; small tensors are float32 in both."""
    state, moments = bitsandbytes_state(block, wrapped)
    optimizer = AdamW8bit(make_params())
    optimizer.load_bitsandbytes_state_dict(through_torch_save(state))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.25, (0.7, 0.9), 1e-6, 0.125)
    assert "alpha" not in group and group["optim_bits"] == 8
    for p, wanted in zip(group["params"], moments, strict=True):
        assert float(optimizer.state[p]["step"]) == 7.0
        for value, moment in zip(optimizer.dequantized_state(p), wanted, strict=True):
            if p.numel() < 4096:
                assert torch.equal(value, moment)
            else:
                assert torch.allclose(value, moment, rtol=0.04, atol=0.01)
    train(optimizer, range(1))


def test_the_real_bitsandbytes():
    """Its own optimizer, trained on the CPU, then this one from its checkpoint: the next steps go the same way."""
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    params = make_params([(64, 100), (8192,), (300,)])
    theirs = bitsandbytes.optim.AdamW8bit(params, lr=1e-2)
    try:
        train(theirs, range(5))
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this bitsandbytes has no 8-bit step on the CPU: {error}")
    ours = AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in params])
    ours.load_bitsandbytes_state_dict(through_torch_save(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    before = [p.detach().clone() for p in params]
    train(theirs, range(5, 7))
    train(ours, range(5, 7))
    for p, q, old in zip(params, ours.param_groups[0]["params"], before, strict=True):
        moved, theirs_moved = (q.detach() - old).view(-1), (p.detach() - old).view(-1)
        assert float(torch.nn.functional.cosine_similarity(moved, theirs_moved, dim=0)) > 0.98


def test_damaged_bitsandbytes_state_changes_nothing():
    for damage, message in (
        (change("state", 0, "state1", to=lambda codes: codes[:-1]), "state1 must have the parameter's 6400 elements"),
        (change("state", 0, "absmax2", to=lambda absmax: absmax[:-1]), "absmax2 must have one scale for each 256 or"),
        (change("state", 0, "qmap1", to=...), "qmap1 of 256 values"),
        (change("state", 0, "step", to=-1), "step must be one number >= 0"),
        (change("param_groups", 0, "params", to=[0]), "6 whole parameters, got 1 parameters"),
        (change("state", to=...), "must have state and param_groups"),
    ):
        state, _ = bitsandbytes_state(256, wrapped=False)
        damage(state)
        optimizer = trained()
        before = snapshot(optimizer)
        with pytest.raises(ValueError, match=message):
            optimizer.load_bitsandbytes_state_dict(state)
        assert same(snapshot(optimizer), before)


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
    assert same(tensors["state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    assert json.loads(metadata["param_groups"])[0]["betas"] == [0.5, 1 - 1e-9]
    assert len(tensors) == 1 + sum(map(len, optimizer.state_dict()["state"].values()))


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


def test_a_save_that_is_killed_leaves_the_old_file_or_the_new(tmp_path):
    """C2: SIGKILL at 200 random lines of a save."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    old, new = map(int, done.stdout.split())
    assert old > 20 and new > 5


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "optimizer.safetensors"
    optimizer = trained()
    optimizer.save_safetensors(path)
    before = path.read_bytes()
    optimizer.param_groups[0]["note"] = object()
    with pytest.raises(TypeError):
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
