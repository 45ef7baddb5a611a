"""States of other optimizers and libraries: taken, or an error that names the function which reads them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit
from optim_cases import make_params, rejected, train, trained

STATES: dict[str, tuple[Any, str]] = {
    "path": ("optimizer.safetensors", "got str; load_safetensors reads"),
    "pathlib": (Path("optimizer.pt"), "got PosixPath; .* torch.load"),
    "model": (torch.nn.Linear(2, 2).state_dict(), r"got \['bias', 'weight'\]; it looks like a model's state_dict"),
    "nested": ({"model": {}, "optimizer": {}}, r"got \['model', 'optimizer'\]"),
}


@pytest.mark.parametrize("name", STATES)
def test_load_state_dict_names_the_right_function(name):
    state, message = STATES[name]
    optimizer = trained()
    with rejected(optimizer, ValueError, r"AdamW8bit\.load_state_dict: state_dict must .*" + message):
        optimizer.load_state_dict(state)


def test_load_bitsandbytes_state_dict_names_the_right_function():
    theirs = torch.optim.AdamW(make_params())
    train(theirs, range(1))
    for state in (trained().state_dict(), theirs.state_dict()):
        with pytest.raises(ValueError, match=r"load_bitsandbytes_state_dict: .* another optimizer's; call load_state"):
            trained().load_bitsandbytes_state_dict(state)


def test_load_safetensors_names_the_right_function(tmp_path):
    optimizer = trained()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"load_safetensors: .* of torch\.save; call load_state_dict\(torch\.load"):
        optimizer.load_safetensors(tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"load_safetensors: .* folder .*; torch\.distributed\.checkpoint"):
        optimizer.load_safetensors(tmp_path)
    safetensors = pytest.importorskip("safetensors.torch")
    for metadata in (None, {"format": "pt"}):
        safetensors.save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors", metadata=metadata)
        with pytest.raises(ValueError, match=r"a model's weights, perhaps: safetensors\.torch\.load_file"):
            optimizer.load_safetensors(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "name", ["fused", "foreach", "amsgrad", "differentiable", "percentile_clipping", "is_paged", "min_8bit_size"]
)
def test_arguments_of_other_optimizers_get_a_hint(name):
    with pytest.raises(TypeError, match=rf"Adam8bit: {name} (must not be given: |is called min_8bit_numel)"):
        Adam8bit(make_params(), **{name: True})


def test_an_unknown_argument_is_named():
    with pytest.raises(TypeError, match="AdamW8bit: unknown argument 'momentum'"):
        AdamW8bit(make_params(), momentum=0.9)


@pytest.mark.parametrize("bits", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_the_real_torchao(bits):
    """Its tensor subclasses dequantise themselves: load_state_dict takes its state."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao = pytest.importorskip("torchao.optim")
    shapes = [(64, 128), (8192,), (300,)]
    theirs = getattr(torchao, bits)(make_params(shapes), lr=1e-2)
    for p in theirs.param_groups[0]["params"]:  # its states at the first step, without torch.compile's minute
        state = theirs.state.setdefault(p, {})
        state["step"] = torch.tensor(3.0)
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[key] = theirs._new_buffer(p, signed)
            values = torch.randn(p.shape)
            state[key].copy_(values if signed else values.square())
    ours = AdamW8bit(make_params(shapes))
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["weight_decay"] == theirs.param_groups[0]["weight_decay"]
    for p, entry in zip(ours.param_groups[0]["params"], theirs.state.values(), strict=True):
        for value, key in zip(ours.dequantized_state(p), ("exp_avg", "exp_avg_sq"), strict=True):
            moment = entry[key].dequantize() if p.numel() >= 4096 else entry[key]
            assert torch.allclose(value, moment, rtol=0.06, atol=0.02 * float(moment.abs().max()))
    train(ours, range(1))
