"""Slices that together are a packed projection: one split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from outcomes import assert_equal, parameter_gradients
from patching_cases import WIDTH, randomised
from torch import Tensor, nn

N, M = WIDTH, WIDTH + 4


class Packed(nn.Module):
    """See the subclasses: slices of a projection of 2 * WIDTH columns."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n: Any = N
        self.m: Any = M
        self.child: nn.Module = nn.Identity()


class Three(Packed):
    """As Phi-3's."""

    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        n = self.n
        q = packed[..., :n]
        k = packed[..., n : self.m]
        v = packed[..., self.m :]
        return self.out(self.child(q).sin()) + torch.cat((k, v), dim=-1).cos()


class OneStatement(Packed):
    """As Phi's, which binds the name anew."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.dense(x)
        rotated, passed = (q[..., : self.n], q[..., self.n :])
        q = torch.cat((self.child(rotated).cos(), passed.sin()), dim=-1)
        return q


class LastFirst(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        v = packed[..., self.n + 4 :]
        if v is not None:
            x = x + 1
        q, k = packed[..., : self.n], packed[..., self.n : self.n + 4]
        return self.child(q).sin() * x + torch.cat((k, v), dim=-1).cos()


FOUND = (Three, OneStatement, LastFirst)


class ReadLater(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q, k = packed[..., : self.n], packed[..., self.n :]
        return q.sin() + k.cos() + packed.sum()


class ReadBetween(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q = packed[..., : self.n]
        total = packed.sum()
        return q.sin() + packed[..., self.n :].cos() + total


class Overlapping(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return torch.cat((packed[..., : self.m], packed[..., self.n :]), dim=-1)


class Incomplete(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., : self.n] + packed[..., self.n : self.n + self.n]


class Twice(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., : self.n] * packed[..., : self.n] + packed[..., self.n :]


class Alone(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., : self.n]


class Whole(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., :]


class OfOneRow(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x[0])
        return torch.cat((packed[0, : self.n], packed[0, self.n :]))


class Strided(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., : self.n : 2] + packed[..., self.n :: 2]


class OtherDimension(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return torch.cat((packed[:, 2:], packed[:, :2]), dim=1)


class BoundChanges(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        n = self.n
        q = packed[..., :n]
        n = self.m
        return torch.cat((q.sin(), packed[..., n:]), dim=-1)


class BoundCalls(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        return packed[..., : int(self.n)].sin() + packed[..., int(self.n) :]


class NameChanges(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q = packed[..., : self.n]
        packed = 2 * packed.flip(-1)
        return q + packed[..., self.n :]


class NameIsAnother(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q = packed[..., : self.n]
        packed = self.dense(2 * x)
        return q + packed[..., self.n :]


class InABranch(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q = packed[..., : self.n]
        k = q if x.dim() > 3 else packed[..., self.n :]
        return q.sin() + k


class InALoop(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed, y = self.dense(x), x
        for _ in range(2):
            q, k = packed[..., : self.n], packed[..., self.n :]
            y = y + q.sin() * k
        return y


class WrittenTo(Packed):
    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense(x)
        q, k = packed[..., : self.n], packed[..., self.n :]
        q.mul_(2.0)
        return q + k


LEFT = (
    *(ReadLater, ReadBetween, Overlapping, Incomplete, Twice, Alone, Whole, OfOneRow, Strided, OtherDimension),
    *(BoundChanges, BoundCalls, NameChanges, NameIsAnother, InABranch, InALoop, WrittenTo),
)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


def outcome(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad, **parameter_gradients(model)}


def patched(model: nn.Module) -> Any:
    report = patch_model(model, patterns=("packed_slices",))
    assert [site.pattern for site in report.patched] == ["packed_slices"]
    return report


@pytest.mark.parametrize("kind", FOUND)
def test_the_same_bits_with_one_gradient(kind: Any, x: Tensor) -> None:
    model = randomised(kind())
    expected, before = outcome(model, x), traffic(lambda: outcome(model, x)).by_operator()
    report = patched(model)
    assert "packed_0_" in report.diff("") and "packed_1_" not in report.diff("")
    assert_equal(outcome(model, x), expected)
    after = traffic(lambda: outcome(model, x)).by_operator()
    assert before["aten::slice_backward"] > 0 and "aten::slice_backward" not in after
    # One gradient read and written in place of whole ones for each slice, and their sums.
    packed = x.numel() // WIDTH * 2 * WIDTH * 4
    n_sums = 1 if kind is OneStatement else 2
    assert before.get("aten::add", 0) - after.get("aten::add", 0) == 3 * packed * n_sums
    assert after["aten::cat"] - before["aten::cat"] == 2 * packed
    assert report.calls() == {"": (2, 0)}
    unpatch_model(model)
    assert type(model) is kind


@pytest.mark.parametrize("kind", LEFT)
def test_others_are_left(kind: Any) -> None:
    assert not patch_model(kind(), patterns=("packed_slices",)).patched


@pytest.mark.parametrize(
    "bound", [0, -4, 2 * WIDTH, 100, True, torch.tensor(N), None], ids=lambda b: f"{type(b).__name__}-{b}"
)
def test_bounds_that_no_split_has(bound: Any, x: Tensor) -> None:
    """Slices that are empty, counted from the end, or bound by a tensor."""
    model = randomised(OneStatement())
    model.n = bound
    expected = outcome(model, x)
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (0, 0)}


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


@pytest.mark.parametrize("kind", FOUND)
def test_a_child_may_write_to_a_slice(kind: Any, x: Tensor) -> None:
    model = randomised(kind())
    model.child = Doubling()
    expected = outcome(model, x)
    patched(model)
    assert_equal(outcome(model, x), expected)


def test_without_gradients_and_of_subclasses_slices_are_taken(x: Tensor) -> None:
    model = randomised(Three())
    expected = outcome(model, x)
    report = patched(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected["y"])
    assert_equal(outcome(model, x.as_subclass(Subclass)), expected)
    assert report.calls() == {"": (0, 0)}


class Subclass(Tensor):
    pass


def test_compiled(x: Tensor) -> None:
    model = randomised(Three())
    expected = outcome(model, x)
    patched(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_equal(outcome(compiled, x), expected)


def test_a_slice_that_nothing_reads(x: Tensor) -> None:
    model = randomised(Three())
    model.out.requires_grad_(False)
    nn.init.zeros_(model.out.weight)
    model.child = Constant()
    expected = outcome(model, x)
    patched(model)
    assert_equal(outcome(model, x), expected)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@pytest.mark.parametrize("model_type", ["phi3", "phi"])
def test_models(model_type: str) -> None:
    """Beside the other patterns; generation, too."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    ids = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(model_type, **sizes, **ids)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return {"loss": loss.detach(), "ids": model.generate(tokens, max_new_tokens=4), **parameter_gradients(model)}

    expected = run()
    report = patched_layers(model)
    assert_equal(run(), expected)
    assert all(fused > 0 == back for fused, back in report.calls().values())
    unpatch_model(model)
    found = {site.name: f"{site.pattern}, {site.detail}" for site in patch_model(model).patched}
    assert all("packed_slices" in each for name, each in found.items() if name.endswith("self_attn"))


def patched_layers(model: nn.Module) -> Any:
    report = patch_model(model, patterns=("packed_slices",))
    assert [site.pattern for site in report.patched] == ["packed_slices"] * 2
    return report
