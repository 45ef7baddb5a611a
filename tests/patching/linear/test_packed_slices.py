"""Slices that together are a packed projection: one split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.linear.packed_slices import packed_slices, read_packed_slices
from outcomes import (
    assert_compiles,
    assert_equal,
    assert_follows_transforms,
    outcome,
    parameter_gradients,
    patch_and_compare,
)
from patching_cases import COMMON, WIDTH, randomised, tiny_model, token_ids, written
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


IN_A_BRANCH = """
    if x is not None:
        packed = self.dense(x)
        x = x + 1
        q = packed[..., : self.n]
        k = packed[..., self.n : self.n + 4]
        v = packed[..., self.n + 4 :]
    return self.child(q).sin() * x + torch.cat((k, v), dim=-1).cos()"""
InABranch = written(Packed, IN_A_BRANCH, globals())
"""After other statements."""
IN_A_LOOP = """
    y = x
    for _ in range(2):
        packed = self.dense(y)
        q = packed[..., : self.n]
        k = packed[..., self.n :]
        y = self.child(q).sin() + k.cos()
    return y"""
InALoop = written(Packed, IN_A_LOOP, globals())
TWO = """
    packed = self.dense(x)
    q = packed[..., : self.n]
    k = packed[..., self.n :]
    return torch.cat((q.sin(), k.cos()), dim=-1)"""
FOUND = (Three, InABranch, InALoop)

LEFT = {
    "read before": "t = p.sum(); q = p[..., :n]; k = p[..., n:]; y = q + k + t",
    "read by a function": "f = lambda: p.sum(); q = p[..., :n]; k = p[..., n:]; y = q + k + f()",
    "two names": "o = p = self.dense(x); q = p[..., :n]; k = p[..., n:]; y = q + k + o.sum()",
    "bound later": "q = p[..., :n]; k = p[..., n:]; p = q + k; y = p",
    "something between": "q = p[..., :n]; x = x + 1; k = p[..., n:]; y = q + k + x",
    "a call between": "q = p[..., :n[0]]; n.reverse(); k = p[..., n[0]:]; y = torch.cat((q, k), -1)",
    "overlapping": "q = p[..., :m]; k = p[..., n:]; y = torch.cat((q, k), -1)",
    "in another order": "k = p[..., n:]; q = p[..., :n]; y = q + k",
    "incomplete": "q = p[..., :n]; k = p[..., n:m]; y = torch.cat((q, k), -1)",
    "the same twice": "q = p[..., :n]; q = p[..., :n]; k = p[..., n:]; y = q + k",
    "begun again": "q = p[..., :n]; k = p[..., n:]; t = p[..., :m]; r = p[..., m:]; y = torch.cat((q, k, t, r), -1)",
    "whole": "q = p[..., :]; y = q",
    "strided": "q = p[..., :n:2]; k = p[..., n::2]; y = q + k",
    "another dimension": "q = p[:, :n]; k = p[:, n:]; y = torch.cat((k, q), 1)",
    "one statement": "q, k = p[..., :n], p[..., n:]; y = q + k",
    "into an attribute": "self.q = p[..., :n]; k = p[..., n:]; y = self.q + k",
    "into its own name": "q = p[..., :n]; p = p[..., n:]; y = q + p",
    "a bound is bound": "n = p[..., :n]; k = p[..., n:]; y = k",
    "a bound is called": "q = p[..., :int(n)]; k = p[..., int(n):]; y = q + k",
    "a bound binds": "q = p[..., :(n := n)]; k = p[..., (n := n):]; y = q + k",
    "written to": "q = p[..., :n]; k = p[..., n:]; q.mul_(2.0); y = q + k",
    "no child's result": "r = p.sin(); q = r[..., :n]; k = r[..., n:]; y = q + k",
    "a condition": "q = p[..., :n]; k = q if x.dim() > 3 else p[..., n:]; y = q + k",
}
"""Statements after `p = self.dense(x); n, m = self.n, self.m`."""
ALSO_FOUND = "q = p[..., :n]; k = p[..., n:]; y = q + k"


def test_others_are_left() -> None:
    def found(statements: str) -> int:
        body = f"p = self.dense(x); n, m = self.n, self.m; {statements}; return y"
        forward = read_forward(written(Packed, body, globals()).forward)
        assert isinstance(forward, Forward)
        return len(read_packed_slices(forward))

    assert found(ALSO_FOUND) == 1
    assert [name for name, statements in LEFT.items() if found(statements)] == []


def test_of_a_parameter_or_another_layer_they_are_left() -> None:
    of_a_parameter = "q = p[..., : self.n]; k = p[..., self.n :]; return self.child(q) + k"

    in_a_match = """
        p = self.dense(x)
        match self.n:
            case 0:
                y = p[..., : self.n]
            case _:
                y = p[..., self.n :]
        return y"""

    for kind in (written(Packed, of_a_parameter, globals(), "p"), written(Packed, in_a_match, globals())):
        assert not patch_model(kind(), patterns=("packed_slices",)).patched
    assert not patch_model(Three(), patterns=("packed_slices",), exclude=("dense",)).patched
    model = Three()
    model.dense = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh())
    assert not patch_model(model, patterns=("packed_slices",)).patched


def patched(model: nn.Module) -> Any:
    report = patch_model(model, patterns=("packed_slices",))
    assert [site.pattern for site in report.patched] == ["packed_slices"]
    return report


@pytest.mark.parametrize("kind", FOUND)
def test_the_same_bits_with_one_gradient(kind: Any, x: Tensor) -> None:
    model = randomised(kind())
    expected, before = outcome(model, x), traffic(lambda: outcome(model, x)).by_operator()
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    after = traffic(lambda: outcome(model, x)).by_operator()
    assert before["aten::slice_backward"] > 0 and "aten::slice_backward" not in after
    # One gradient read and written in place of a whole one for each slice, and their sums: two, or one in two turns.
    packed = x.numel() // WIDTH * 2 * WIDTH * 4
    assert before["aten::add"] - after["aten::add"] == 3 * packed * 2
    assert after["aten::cat"] - before.get("aten::cat", 0) == 2 * packed * (2 if kind is InALoop else 1)
    assert report.calls() == {"": (4 if kind is InALoop else 2, 0)}
    unpatch_model(model)
    assert type(model) is kind


@pytest.mark.parametrize(
    "bound", [0, -4, 2 * WIDTH, 100, True, torch.tensor(N), None], ids=lambda b: f"{type(b).__name__}-{b}"
)
def test_bounds_that_no_split_has(bound: Any, x: Tensor) -> None:
    """Slices that are empty, counted from the end, or bound by a tensor."""
    model = randomised(written(Packed, TWO, globals())())
    model.n = bound
    expected = outcome(model, x)
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (0, 0)}


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@pytest.mark.parametrize("child", [Doubling, Constant], ids=["write to it", "not read it"])
@pytest.mark.parametrize("kind", FOUND)
def test_a_child_may_do_anything_with_a_slice(kind: Any, child: Any, x: Tensor) -> None:
    model = randomised(kind())
    model.child = child()
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


def own_forward(dense: Any) -> None:
    dense.forward = dense.forward


@pytest.mark.parametrize("change", [own_forward, lambda dense: dense.register_forward_hook(lambda *_: None)])
def test_what_a_hook_may_have_kept_is_sliced(change: Any, x: Tensor) -> None:
    model = randomised(Three())
    report = patched(model)
    change(model.dense)
    outcome(model, x)
    assert report.calls() == {"": (0, 0)}


def test_fake_tensors_are_split(x: Tensor) -> None:
    """onetrip anatomy counts with them."""
    with FakeTensorMode(), torch.device("cpu"):
        q, k = packed_slices(Packed(), nn.Linear(1, 1), torch.empty(2, 3 * N, requires_grad=True), N)
    assert "Split" in q.grad_fn.name() and (q.shape, k.shape) == ((2, N), (2, 2 * N))


class Subclass(Tensor):
    pass


def test_compiled(x: Tensor) -> None:
    assert_compiles(randomised(Three()), x, patterns=("packed_slices",))


def test_transforms_and_traces(x: Tensor) -> None:
    assert_follows_transforms(randomised(Three()), x, patterns=("packed_slices",))


def test_phi3() -> None:
    """Beside the other patterns; generation, too."""
    model = tiny_model("Phi3ForCausalLM", COMMON).eval()
    tokens = token_ids(2, 9)

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return {"loss": loss.detach(), "ids": model.generate(tokens, max_new_tokens=4), **parameter_gradients(model)}

    report = patch_and_compare(model, run, relative=0.0, patterns=("packed_slices",))
    assert [site.pattern for site in report.patched] == ["packed_slices"] * 2
    assert all(fused > 0 == back for fused, back in report.calls().values())
    unpatch_model(model)
    found = {site.name: f"{site.pattern}, {site.detail}" for site in patch_model(model).patched}
    assert all("packed_slices" in each for name, each in found.items() if name.endswith("self_attn"))
