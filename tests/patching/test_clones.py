"""Patching changes forwards and nothing else: quantised children and children that keep state, which verification must
not run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from onetrip.patching import patch_model, unpatch_model
from patching_cases import Tail
from torch import Tensor, nn

N = 128


def tail(dense: nn.Module) -> Tail:
    made = Tail(N)
    made.dense = dense
    return made.eval()


def bits_and_bytes(n_bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    if n_bits == 4:
        dense = bnb.nn.Linear4bit(N, N, compute_dtype=torch.bfloat16, quant_type="nf4")
    else:
        dense = bnb.nn.Linear8bitLt(N, N, has_fp16_weights=False)
    return dense.to("cpu")  # which quantises


def torchao(config: str) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    holder = nn.Sequential(nn.Linear(N, N))
    quantization.quantize_(holder, getattr(quantization, config)())
    return holder[0]


def torch_dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(N, N)), {nn.Linear}, torch.qint8)[0]


QUANTISED: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes-4-bit": lambda: bits_and_bytes(4),
    "bitsandbytes-8-bit": lambda: bits_and_bytes(8),
    "torchao-int8-weights": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao-int8-activations": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "torch-dynamic-int8": torch_dynamic,
}


def built(make: Callable[[], nn.Module]) -> Tail:
    torch.manual_seed(0)
    return tail(make())


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", QUANTISED)
def test_verification_does_not_run_quantised_children(name: str) -> None:
    """bitsandbytes repacks a 4-bit weight at its first call on a CPU, and marks a state that clones shared."""
    x = torch.randn(2, 3, N)
    expected = built(QUANTISED[name])(x, x)
    model = built(QUANTISED[name])
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == ["dropout_add_norm"], report
    torch.testing.assert_close(model(x, x), expected, rtol=1e-5, atol=1e-5)
    assert report.calls() == {"": (1, 0)}
    assert torch.equal(unpatch_model(model)(x, x), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in QUANTISED if name.startswith("torchao")])
def test_a_weight_quantised_after_patching_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The type of the module stays nn.Linear: what changes is the type of its weight."""
    model, x = built(lambda: nn.Linear(N, N)), torch.randn(2, 3, N)
    report = patch_model(model)
    model.dense = QUANTISED[name]()
    expected = model.norm(model.dense(x) + x)
    called, forward = [], nn.Linear.forward

    def spy(self: nn.Module, x: Tensor) -> Tensor:
        called.append(self)
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", spy)
    torch.testing.assert_close(model(x, x), expected, rtol=1e-5, atol=1e-5)
    assert called == [model.dense] and report.calls() == {"": (1, 0)}


class Counting(nn.Linear):
    """Keeps state where state_dict does not look."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__(n_in, n_out)
        self.calls, self.shapes, self.state = 0, [], {"seen": torch.zeros(1)}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.shapes.append(tuple(x.shape))
        self.state["seen"] += 1
        return super().forward(x)


@pytest.mark.parametrize("holder", [lambda dense: dense, lambda dense: nn.Sequential(dense)], ids=["child", "inside"])
def test_verification_does_not_run_children_that_keep_state(holder: Callable[[nn.Module], nn.Module]) -> None:
    counting = Counting(N, N)
    model, x = tail(holder(counting)), torch.randn(2, 3, N)
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == ["dropout_add_norm"]
    assert (counting.calls, counting.shapes, float(counting.state["seen"])) == (0, [], 0.0)
    model(x, x)
    assert (counting.calls, counting.shapes, float(counting.state["seen"])) == (1, [(2, 3, N)], 1.0)


class RecordingNorm(nn.LayerNorm):
    def __init__(self, value: Any) -> None:
        super().__init__(N)
        self.seen = value

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.seen, list):
            self.seen.append(x.shape)
        elif isinstance(self.seen, dict):
            self.seen["n"] = self.seen.get("n", 0) + 1
        elif isinstance(self.seen, Tensor):
            self.seen += 1
        else:
            self.seen.n += 1
        return super().forward(x)


class Holder:
    n = 0


@pytest.mark.parametrize("value", [[], {}, torch.zeros(2), Holder()], ids=["list", "dict", "tensor", "object"])
def test_a_norm_that_keeps_state_is_not_probed_in_place(value: Any) -> None:
    model = nn.Sequential(RecordingNorm(value), nn.Linear(N, N))
    before = copy.deepcopy(value)
    report = patch_model(model)
    assert [(site.reason, site.detail) for site in report.skipped] == [
        ("unknown_forward", "its forward changes the module")
    ]
    if isinstance(value, Tensor):
        assert torch.equal(value, before)
    else:
        assert vars(value) == vars(before) if isinstance(value, Holder) else value == before


class Seen(NamedTuple):
    shapes: list[torch.Size]
    width: int


class ShapedNorm(nn.Module):
    """As diffusers' RMSNorm: it keeps its shape as a torch.Size."""

    def __init__(self, **state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(N))
        self.dim = torch.Size((N,))
        vars(self).update(state)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.dim, self.weight, 1e-6)


class SeeingNorm(ShapedNorm):
    def forward(self, x: Tensor) -> Tensor:
        self.seen[0].append(x.shape)
        return super().forward(x)


def test_a_norm_with_a_shape_among_its_attributes() -> None:
    (site,) = patch_model(nn.Sequential(ShapedNorm())).patched
    assert site.pattern == "rms_norm"


@pytest.mark.parametrize("seen", [Seen([], N), ([], N)], ids=["named tuple", "tuple"])
def test_a_list_in_a_tuple_is_not_changed_by_probes(seen: Any) -> None:
    (site,) = patch_model(nn.Sequential(SeeingNorm(seen=seen))).skipped
    assert site.detail == "its forward changes the module" and seen[0] == []
