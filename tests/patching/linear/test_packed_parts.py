"""Parts of a packed projection whose dimensions move: taken before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from onetrip.measure.traffic import traffic
from onetrip.patching import calls, patch_model, unpatch_model
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.linear.packed_parts import _Parts, parts, read_packed_parts
from outcomes import (
    assert_compiles,
    assert_equal,
    assert_follows_transforms,
    outcome,
    parameter_gradients,
    patch_and_compare,
)
from patching_cases import WIDTH, randomised, token_ids, written
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

HEADS = 4


class Packed(nn.Module):
    """See FOUND: query, key and value of a projection of 3 * WIDTH columns."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, 3 * WIDTH)
        self.child: nn.Module = nn.Identity()

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.child(q).sin() * k.cos() + v.sigmoid()


_HEADS_LAST = "p = self.dense(x).view(*x.shape[:2], 3, 4, -1);"
FOUND = {
    "unbind": "q, k, v = self.dense(x).view(*x.shape[:2], 3, 4, -1).permute(0, 2, 1, 3, 4).unbind(1)",
    "unbind by name": f"{_HEADS_LAST} p = p.permute((2, 0, 3, 1, 4)); n = 3; q, k, v = p.unbind(dim=0)",
    "unbind of a negative dimension": f"{_HEADS_LAST} q, k, v = p.permute(0, 1, 4, 3, -3).unbind(-1)",
    "dims in a tuple": f"{_HEADS_LAST} q, k, v = p.permute((2, 0, 1, 3, 4)).unbind()",
    "dims of a tensor": f"{_HEADS_LAST} q, k, v = p.permute(*torch.tensor([2, 0, 1, 3, 4])).unbind(0)",
    "chunk": "p = self.dense(x).view(*x.shape[:2], 4, -1).transpose(1, 2); q, k, v = p.chunk(3, dim=-1)",
    "split": "q, k, v = self.dense(x).transpose(-1, -2).split([x.shape[-1]] * 3, 1)",
    "items": f"{_HEADS_LAST} p = p.permute(2, 0, 3, 1, 4); q, k, v = p[0], p[1], p[2]",
    "reshape": f"{_HEADS_LAST} p = p.permute(2, 0, 3, 1, 4); q, k, v = p.reshape(3, -1, x.shape[1]).unbind(0)",
    "reshape at once": f"{_HEADS_LAST} q, k, v = p.permute(2, 0, 3, 1, 4).reshape((3, -1, x.shape[1])).unbind()",
}
LEFT = {
    "read twice": "p = r.permute(2, 0, 1); q, k, v = p.unbind(0); q = q + p.sum()",
    "read by a function": "p = r.permute(2, 0, 1); f = lambda: p.sum(); q, k, v = p.unbind(0); q = q + f()",
    "bound between": "p = r.permute(2, 0, 1); p = p + 1; q, k, v = p.unbind(0)",
    "bound in a branch": "p = r\nif n: p = r.permute(2, 0, 1)\nq, k, v = p.unbind(0)",
    "not moved": "q, k, v = r.unbind(2)",
    "reshaped, another dimension": "q, k, v = r.transpose(0, 2).reshape(3, 27).unbind(-2)",
    "reshaped, the last dimension": "q, k, v = r.permute(2, 0, 1).reshape(9, 3, 5).unbind(dim=1)",
    "items of what is read elsewhere": "p = r.permute(2, 0, 1); q, k, v = p[0], p[1], p[2]; q = q + r.mean()",
    "items of another function's result": "r = r.sigmoid(); p = r.permute(2, 0, 1); q, k, v = p[0], p[1], p[2]",
    "items of another result": "p = r.sin().permute(2, 0, 1); q, k, v = p[0], p[1], p[2]",
    "reshaped and split": "q, k, v = r.permute(2, 0, 1).reshape(3, -1).split(1)",
    "some items": "p = r.permute(2, 0, 1); q, k = p[0], p[2]; v = q",
    "items of two": "p = r.permute(2, 0, 1); q, k = p[0], r[1]; v = q",
    "an item twice": "p = r.permute(2, 0, 1); q, k, v = p[0], p[1], p[1]",
    "items kept": "p = r.permute(2, 0, 1); q, k, v = p[0], p[1], p[2]; q = q + p[0]",
    "one name": "q = r.permute(2, 0, 1).unbind(0); q, k, v = q",
    "a function": "q, k, v = torch.unbind(r.permute(2, 0, 1), 0)",
    "by keywords": "q, k, v = r.transpose(dim0=0, dim1=2).unbind(0)",
    "written to": "q, k, v = r.permute(2, 0, 1).unbind(0); q = q.sin(); q += k",
}
"""Statements after `n = 3; r = self.dense(x)`."""
ALSO_FOUND = "p = r.view(3, -1, 3).permute(2, 0, 1); q, k, v = p[0], p[1], p[2]"


def kind_of(statements: str) -> Any:
    return written(Packed, f"{statements}; return self.mixed(q, k, v)", globals())


def test_others_are_left() -> None:
    def found(statements: str) -> int:
        forward = read_forward(written(Packed, f"n = 3; r = self.dense(x)\n{statements}\nreturn q", globals()).forward)
        assert isinstance(forward, Forward)
        return len(read_packed_parts(forward))

    assert found(ALSO_FOUND) == 1
    assert [name for name, statements in LEFT.items() if found(statements)] == []


def patched(model: nn.Module) -> Any:
    report = patch_model(model, patterns=("packed_slices",))
    assert [site.pattern for site in report.patched] == ["packed_slices"]
    return report


@pytest.mark.parametrize("form", FOUND)
def test_the_same_bits_with_one_gradient(form: str, x: Tensor) -> None:
    model = randomised(kind_of(FOUND[form])())
    expected, before = outcome(model, x), traffic(lambda: outcome(model, x)).by_operator()
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    after = traffic(lambda: outcome(model, x)).by_operator()
    packed = 3 * x.numel() * 4
    written = [name for name in ("aten::cat", "aten::stack") if name in after]
    assert sum(after[name] for name in written) == 2 * packed
    if form == "items":  # three whole gradients and their sums
        assert before["aten::select_backward"] > 3 * packed and "aten::select_backward" not in after
        assert before["aten::add"] - after["aten::add"] == 2 * 3 * packed
    else:
        assert before["aten::clone"] - after.get("aten::clone", 0) == 2 * packed
    assert report.calls() == {"": (2, 0)}
    unpatch_model(model)
    assert traffic(lambda: outcome(model, x)).by_operator() == before


@pytest.mark.parametrize("form", FOUND)
def test_parts_are_the_same_views(form: str, x: Tensor) -> None:
    """Attention reads their strides."""
    kind, seen = kind_of(FOUND[form]), []

    class Seeing(kind):  # type: ignore[misc]
        def mixed(self, *parts: Tensor) -> Tensor:
            seen.append([(each.shape, each.stride(), each.storage_offset()) for each in parts])
            return super().mixed(*parts)  # type: ignore[no-any-return]

    model = randomised(Seeing())
    model(x)
    patched(model)
    model(x)
    unpatched, now = ([each[: 2 if "reshape" in form else 3] for each in parts] for parts in seen)  # which copies
    assert now == unpatched


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2.0)


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


@pytest.mark.parametrize("form", FOUND)
@pytest.mark.parametrize("child", [Doubling, Constant], ids=["write to it", "not read it"])
def test_a_child_may_do_with_a_part_what_it_may_unpatched(form: str, child: Any, x: Tensor) -> None:
    model = randomised(kind_of(FOUND[form])())
    model.child = child()
    if child is Doubling and form != "items":
        for patches in (False, "reshape" not in form):  # a reshape may copy: then each part is its own
            if patches:
                patched(model)
            with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
                outcome(model, x)
        return
    expected = outcome(model, x)
    patched(model)
    assert_equal(outcome(model, x), expected)


def test_what_saves_nothing_is_as_it_was(x: Tensor) -> None:
    """Without gradients, of subclasses, of a layer whose result is a view, and of items that are not all of them."""
    model = randomised(kind_of(FOUND["items"])())
    expected = outcome(model, x)
    report = patched(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected["y"])
    assert_equal(outcome(model, x.as_subclass(Subclass)), expected)
    assert report.calls() == {"": (0, 0)}
    moved = x.transpose(0, 1).requires_grad_()
    assert parts(model, moved, 0) is moved
    items = parts(model, torch.randn(2, 5, requires_grad=True), 3, model.dense).permute(1, 0)
    assert "Select" in items[1].grad_fn.name() and items[4].shape == (2,)
    model.dense.register_forward_hook(lambda *_: None)  # may keep its result
    assert type(parts(model, torch.randn(2, 5, requires_grad=True), 3, model.dense)) is Tensor
    shape = parts(model, torch.randn(4, 6, requires_grad=True), 0).permute(1, 0).reshape(3, 8)
    assert type(shape) is Tensor and shape.shape == (3, 8)


class Subclass(Tensor):
    pass


def test_small_tensors_are_as_they_were(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(kind_of(FOUND["unbind"])())
    report = patched(model)
    for smallest, n_fused in ((3 * x.numel() + 1, 0), (3 * x.numel(), 1)):
        monkeypatch.setattr(calls, "SMALLEST", smallest)
        model(x)
        assert report.calls() == {"": (n_fused, 0)}


def test_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Parts, "_without", lambda self, dim, taken: [*taken])
    report = patch_model(kind_of(FOUND["items"])(), patterns=("packed_slices",))
    assert [site.reason for site in report.skipped] == ["verify_failed"]


def test_fake_tensors_are_split() -> None:
    """onetrip anatomy counts with them."""
    with FakeTensorMode(), torch.device("cpu"):
        q, k = parts(Packed(), torch.empty(5, 2, 3, requires_grad=True), 0).permute(1, 0, 2).unbind(0)
    assert "Unbind" in q.grad_fn.name() and q.shape == k.shape == (5, 3)


@pytest.mark.parametrize("form", ["items", "chunk", "reshape"])
def test_compiled(form: str, x: Tensor) -> None:
    assert_compiles(randomised(kind_of(FOUND[form])()), x, patterns=("packed_slices",))


@pytest.mark.parametrize("form", ["items", "unbind"])
def test_transforms_and_traces(form: str, x: Tensor) -> None:
    assert_follows_transforms(randomised(kind_of(FOUND[form])()), x, patterns=("packed_slices",))


_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_IMAGES = {"image_size": 32, "patch_size": 8}
MODELS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "GPTNeoXModel": ({**_SMALL, "vocab_size": 64}, {}),
    "BlipVisionModel": ({**_SMALL, **_IMAGES, "intermediate_size": 64}, {"pixel_values": (2, 3, 32, 32)}),
    "SamVisionModel": (
        {**_SMALL, **_IMAGES, "window_size": 2, "mlp_dim": 64, "global_attn_indexes": [0], "output_channels": 8},
        {"pixel_values": (2, 3, 32, 32)},
    ),
    "Qwen2_5_VisionTransformerPretrainedModel": (
        {"hidden_size": 32, "num_heads": 4, "depth": 1, "intermediate_size": 64, "out_hidden_size": 32},
        {"hidden_states": (64, 3 * 2 * 14 * 14)},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    """Beside the other patterns, with fewer bytes."""
    arguments, shapes = MODELS[name]
    kind = getattr(transformers, name, None) or getattr(modeling_qwen2_5_vl, name)
    model = randomised(kind(kind.config_class(**arguments)))
    inputs: dict[str, Any] = {
        each: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for each, shape in shapes.items()
    }
    if not shapes:
        inputs["input_ids"] = token_ids(2, 9)
    if "hidden_states" in shapes:
        inputs["grid_thw"] = torch.tensor([[1, 8, 8]])

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        y = model(**inputs)[0]
        y.sin().sum().backward()
        return {"y": y.detach(), **parameter_gradients(model)}

    before = traffic(run).outside()
    report = patch_and_compare(model, run, relative=0.0, patterns=("packed_slices",))
    assert {site.pattern for site in report.patched} == {"packed_slices"}
    assert all(fused > 0 == back for fused, back in report.calls().values())
    assert traffic(run).outside() < before
    unpatch_model(model)
    assert any("packed_slices" in f"{site.pattern}, {site.detail}" for site in patch_model(model, verify=False).patched)
