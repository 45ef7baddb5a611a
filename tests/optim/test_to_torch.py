"""From Adam8bit and AdamW8bit to torch.optim: torch raises for 8-bit states, and loads state_dict_for_torch()."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit
from optim_cases import make_params, same, set_grads, train, trained

WAYS = pytest.mark.parametrize(
    "way", [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
CLASSES = pytest.mark.parametrize(
    ("cls", "torch_cls"),
    [(AdamW8bit, torch.optim.AdamW), (Adam8bit, torch.optim.Adam)],
    ids=["AdamW8bit", "Adam8bit"],
)


def copies(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]]


@WAYS
@pytest.mark.parametrize("torch_cls", [torch.optim.AdamW, torch.optim.Adam])
def test_torch_does_not_read_codes_as_moments(torch_cls: Any, way: dict[str, bool]) -> None:
    """It took codes from 0 to 255 as moments without a word, and the loss exploded."""
    ours = trained()
    theirs = torch_cls(copies(ours), **way)
    with pytest.raises(KeyError, match="step"):
        theirs.load_state_dict(ours.state_dict())
    before = [p.detach().clone() for p in theirs.param_groups[0]["params"]]
    with pytest.raises(KeyError):  # whoever goes on after the error
        train(theirs, range(3, 4))
    assert same([p.detach() for p in theirs.param_groups[0]["params"]], before)


def test_torch_does_not_read_codes_of_a_distributed_checkpoint(tmp_path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def build(cls: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(100, 64)
        optimizer = cls(model.parameters())
        train(optimizer, range(2))
        return model, optimizer

    ours = get_optimizer_state_dict(*build(AdamW8bit))
    alone = {"no_dist": True} if "no_dist" in inspect.signature(dcp.save).parameters else {}  # torch 2.6 sees it
    dcp.save({"optim": ours}, checkpoint_id=tmp_path, **alone)
    model, theirs = build(torch.optim.AdamW)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key .*: optim\.state\.weight\.step"):
        dcp.load({"optim": get_optimizer_state_dict(model, theirs)}, checkpoint_id=tmp_path, **alone)
    with pytest.raises((KeyError, RuntimeError), match="step"):
        set_optimizer_state_dict(model, theirs, ours)


@WAYS
@CLASSES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_torch_continues_from_state_dict_for_torch(cls, torch_cls, dtype, way) -> None:
    """Its next step is the one from our moments: exact for 32-bit states, and for 8-bit ones as they dequantise."""
    ours = cls(make_params(dtype=dtype), lr=0.0625, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.125)
    train(ours, range(4))
    state = copy.deepcopy(ours.state_dict_for_torch())
    assert all(value.dtype == torch.float32 for entry in state["state"].values() for value in entry.values())
    state["param_groups"][0] |= way
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    theirs = torch_cls(copies(ours), **way)
    theirs.load_state_dict(torch.load(file, weights_only=True))
    group = theirs.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.0625, (0.7, 0.9), 1e-4, 0.125)
    assert group["decoupled_weight_decay"] is (cls is AdamW8bit) and not {"optim_bits", "min_8bit_numel"} & set(group)
    for p, q in zip(ours.param_groups[0]["params"], group["params"], strict=True):
        entry = theirs.state[q]
        assert float(entry["step"]) == 4.0 and set(entry) == {"step", "exp_avg", "exp_avg_sq"}
        for value, key in zip(ours.dequantized_state(p), ("exp_avg", "exp_avg_sq"), strict=True):
            assert same(entry[key], value.to(dtype))
    if dtype is torch.float32:
        train(ours, range(4, 5))
        train(theirs, range(4, 5))
        for p, q in zip(ours.param_groups[0]["params"], group["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_moments_for_torch_are_copies_laid_out_as_their_parameter() -> None:
    """torch's fused kernels on the CPU walk parameter and moments by address."""
    p = torch.nn.Parameter(torch.randn(16, 16, 8, 8).contiguous(memory_format=torch.channels_last))
    ours = AdamW8bit([p], lr=1e-2)
    p.grad = torch.randn_like(p)
    ours.step()
    before = copy.deepcopy(ours.state_dict())
    entry = ours.state_dict_for_torch()["state"][0]
    assert entry["exp_avg"].stride() == p.stride() and entry["exp_avg_sq"].stride() == p.stride()
    assert torch.equal(entry["exp_avg"], ours.dequantized_state(p)[0])
    for value in entry.values():
        value.zero_()
    assert same(ours.state_dict(), before)


def test_32_bit_states_are_torchs_own() -> None:
    """The same keys with the same meaning: torch loads state_dict() itself, and continues as ours."""
    ours = trained(optim_bits=32)
    theirs = torch.optim.AdamW(copies(ours))
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))  # torch shares what it loads
    train(ours, range(3, 6))
    train(theirs, range(3, 6))
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_state_has_none_for_torch() -> None:
    ours = AdamW8bit(make_params())
    set_grads(ours.param_groups[0]["params"][:1], 0)
    ours.step()
    state = ours.state_dict_for_torch()
    assert list(state["state"]) == [0]
    theirs = torch.optim.AdamW(copies(ours))
    theirs.load_state_dict(state)
    train(theirs, range(1, 3))
