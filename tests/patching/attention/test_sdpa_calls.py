"""Forwards that call torch's SDPA themselves."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.patching import patch_model
from onetrip.patching.attention import one_mask, sdpa_calls
from onetrip.patching.attention.interface import BY_RULE
from outcomes import Outcome, assert_agree, assert_compiles, assert_equal, outcome, patched_pair
from patching_cases import checkpointed, written
from softmax_cases import N_HEADS, Block, Dropped, calling, keep, x_of
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as attend

PATTERN = "attention_softmax"


class Overriding(Dropped):
    """As BertSdpaSelfAttention of transformers 4."""

    def forward(self, x: Tensor, mask: Tensor | None = None, is_plain: bool = False) -> Tensor:
        if is_plain:
            return super().forward(x, mask)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.p if self.training else 0.0)
        return 2.0 * self.out(y.transpose(1, 2).flatten(2))


FORMS = {
    "of torch.nn": "torch.nn.functional.scaled_dot_product_attention(q, k, v)",
    "of functional": "functional.scaled_dot_product_attention(q, k, v)",
    "of an imported name": "attend(q, k, v)",
    "by name": "attend(query=q, value=v, key=k, attn_mask=keep(), is_causal=False)",
    "by position": "attend(q, k, v, None, 0.0, True)",
    "causal": "attend(q, k, v, is_causal=True)",
    "causal, fewer queries": "attend(q[:, :, :5], k, v, is_causal=True)",
    "causal, one query": "attend(q[:, :, :1], k, v, is_causal=True)",
    "fewer queries": "attend(q[:, :, :5], k, v)",
    "scale": "attend(q, k, v, scale=0.7)",
    "a bool mask": "attend(q, k, v, attn_mask=keep())",
    "a bool mask of two dimensions": "attend(q, k, v, attn_mask=keep()[0, 0])",
    "an added mask": "attend(q, k, v, attn_mask=self.added)",
    "a bias that learns": "attend(q, k, v, self.bias)",
    "groups": "attend(q, k[:, :2], v[:, :2], enable_gqa=True)",
    "one key head": "attend(q, k[:, :1], v[:, :1])",
    "twice": "attend(q, k, v) + attend(k, q, v, scale=0.1)",
    "in a function": "(lambda a: attend(a, k, v))(q)",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_replaced(form: str) -> None:
    model, original, report = patched_pair(calling(FORMS[form])(), attention=True, patterns=[PATTERN])
    assert [site.pattern for site in report.patched] == [PATTERN]
    assert_agree(outcome(model, x_of()), outcome(original, x_of()))
    assert report.calls() == {"": (1 + (form == "twice"), 0)}
    assert "sdpa_(self," in report.diff("")


@pytest.mark.parametrize(
    ("expression", "before"),
    [
        ("attend(*(q, k, v))", ""),
        ("attend(q, k, v, **{'scale': 0.5})", ""),
        ("attend(q, k, v)", "attend = functional.scaled_dot_product_attention"),
        ("self.heads(self.out(self.q(x)))", ""),
    ],
    ids=["starred", "options", "a local name", "none"],
)
def test_what_is_no_site(expression: str, before: str) -> None:
    report = patch_model(calling(expression, before)(), attention=True, patterns=[PATTERN])
    assert not report.patched and not report.skipped


class Tagged(Tensor):
    pass


CALLS_THAT_STAY = {
    "3-D": "attend(*(q[:, 0], k[:, 0], v[:, 0])) + attend(q[:, 0], k[:, 0], v[:, 0])",
    "2-D": "attend(q[0, 0], k[0, 0], v[0, 0])",
    "5-D": "attend(q[None], k[None], v[None])[0]",
    "causal, more queries": "attend(q, k[:, :, :5], v[:, :, :5], is_causal=True)",
    "causal, and a mask": "attend(q, k, v, keep(), is_causal=True)",
    "a batch that broadcasts": "attend(q, k[:1], v[:1])",
    "a subclass": "attend(q.as_subclass(Tagged), k, v).as_subclass(torch.Tensor)",
    "a mask that is a subclass": "attend(q, k, v, keep().as_subclass(Tagged)).as_subclass(torch.Tensor)",
}


@pytest.mark.parametrize("call", CALLS_THAT_STAY)
def test_a_call_that_does_not_fit_is_sdpa(call: str) -> None:
    body = f"""
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        y = {CALLS_THAT_STAY[call]}
        return self.out(y.expand(2, N_HEADS, -1, -1).transpose(1, 2).flatten(2) if y.dim() == 4 else y.repeat(1, 1, 4))
    """
    names = {"attend": attend, "torch": torch, "keep": keep, "Tagged": Tagged, "N_HEADS": N_HEADS}
    model, original, report = patched_pair(written(Block, body, names)(), attention=True, patterns=[PATTERN])
    try:
        expected = outcome(original, x_of())
    except RuntimeError:  # torch 2.14 rejects is_causal beside a mask
        with pytest.raises(RuntimeError):
            outcome(model, x_of())
    else:
        assert_equal(outcome(model, x_of()), expected)
    assert report.calls() == {"": (0, 1)}


REJECTED = {
    "groups": "attend(q, k[:, :2], v[:, :2])",
    "two dtypes": "attend(q.double(), k, v)",
    "a negative p": "attend(q, k, v, None, -0.1)",
    "a p above 1": "attend(q, k, v, None, 1.5)",
    "p as a vector": "attend(q, k, v, None, torch.tensor([0.5]))",
    "is_causal as a string": "attend(q, k, v, is_causal='a')",
    "scale by position": "attend(q, k, v, None, 0.0, False, 0.5)",
}


@pytest.mark.parametrize("call", REJECTED.values(), ids=REJECTED)
def test_what_sdpa_rejects_is_rejected(call: str) -> None:
    model, original, _ = patched_pair(calling(call)(), attention=True, patterns=[PATTERN])
    with pytest.raises((RuntimeError, TypeError)) as expected:
        original(x_of())
    with pytest.raises((RuntimeError, TypeError)) as found:
        model(x_of())
    assert str(found.value) == str(expected.value)


@pytest.mark.usefixtures("bfloat16_products")
def test_nested_tensors_are_sdpas() -> None:
    q = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)])
    q = q.transpose(1, 2).contiguous()
    for is_replaced in (True, None):
        sdpa = sdpa_calls.Sdpa(is_replaced, shares_mask=True)
        for x in (q, q.bfloat16().requires_grad_()):
            assert sdpa(nn.Identity(), attend, x, x, x, dropout_p=0.0).is_nested


def test_another_function_in_its_place_is_called_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, dropout_p: float) -> Tensor:
        return q + 1.0

    model, original, report = patched_pair(Dropped(0.5), patterns=[PATTERN])
    monkeypatch.setattr(functional, "scaled_dot_product_attention", other)
    assert_equal(outcome(model, x_of()), outcome(original, x_of()))
    assert report.calls() == {"": (0, 0)}
    assert not patch_model(Dropped(0.5), patterns=[PATTERN]).patched


def test_dropout_is_replaced_and_evaluation_is_not() -> None:
    model, original, report = patched_pair(Dropped(0.5), patterns=[PATTERN])
    assert [site.detail for site in report.patched] == [BY_RULE]
    for each in (model, original):
        each.eval()
    assert_equal(outcome(model, x_of()), outcome(original, x_of()))
    assert report.calls() == {"": (0, 0)}
    model.train()

    def run() -> Outcome:
        torch.manual_seed(3)
        return outcome(model, x_of())

    first, other = run(), outcome(model, x_of())
    assert_equal(run(), first)
    assert not torch.equal(first["y"], other["y"])
    assert report.calls() == {"": (3, 0)}


def test_dropout_has_one_mask_in_both_passes_and_the_right_mean() -> None:
    """The result is linear in v: its product with a gradient is that of v with v's gradient."""
    sdpa = sdpa_calls.Sdpa(is_replaced=None, shares_mask=False)
    q, k, v = torch.randn(3, 8, 4, 64, 8, dtype=torch.float32, requires_grad=True).unbind()
    y, dy = sdpa(nn.Identity(), attend, q, k, v, dropout_p=0.5), torch.randn(8, 4, 64, 8)
    (dv,) = torch.autograd.grad(y, v, dy)
    torch.testing.assert_close((dv * v).sum(), (y * dy).sum(), rtol=1e-4, atol=1e-3)
    mean = torch.stack([sdpa(nn.Identity(), attend, q, k, v, dropout_p=0.5) for _ in range(200)]).mean(0)
    assert (mean - attend(q, k, v)).abs().mean() < 0.03


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: True)


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("is_masked", [False, True], ids=["whole", "masked"])
def test_training_in_bfloat16_is_replaced_where_it_is_faster(is_masked: bool) -> None:
    model, original, report = patched_pair(Block().bfloat16(), patterns=[PATTERN])
    mask = torch.ones(2, 1, 128, 128, dtype=torch.bool).tril() if is_masked else None
    x = x_of(torch.bfloat16, n_tokens=128)
    exact = outcome(copy.deepcopy(original).float(), x.float(), mask=mask)
    assert_agree(outcome(model, x, mask=mask), outcome(original, x, mask=mask), 0.05)
    for name, truth in exact.items():
        ours, theirs = ((outcome(each, x, mask=mask)[name] - truth).abs().max() for each in (model, original))
        assert ours <= 2 * theirs + 1e-3 * truth.abs().max(), name
    kept = [saved_bytes(lambda each=each: each(x, mask).float().sum()) for each in (model, original)]
    assert kept[0] <= kept[1]
    n_fused = report.calls()[""][0]
    assert n_fused > 0
    with torch.no_grad():
        assert torch.equal(model(x, mask), original(x, mask))
    assert torch.equal(model(x[:, :16]), original(x[:, :16]))
    assert report.calls()[""] == (n_fused, 0)


def test_saves_less_than_sdpa_with_dropout() -> None:
    model, original, _ = patched_pair(Dropped(0.5), patterns=[PATTERN])
    kept = [saved_bytes(lambda each=each: each(x_of(n_tokens=128)).sum()) for each in (model, original)]
    assert kept[0] < kept[1]


def test_what_the_report_says() -> None:
    def reasons(model: nn.Module, patterns: Any = (PATTERN,), **options: Any) -> list[str]:
        report = patch_model(model, patterns=patterns, **options)
        return [*(site.pattern for site in report.patched), *(site.reason for site in report.skipped)]

    assert reasons(Dropped()) == ["sdpa_in_use"]
    assert reasons(Dropped(), [PATTERN, "attention_mask"]) == ["attention_mask", "sdpa_in_use"]
    assert reasons(calling("attend(q, k, v, dropout_p=0.0)")()) == ["sdpa_in_use"]
    assert reasons(calling("attend(q, k, v, None)")()) == ["sdpa_in_use"]
    assert reasons(calling("attend(q, k, v, None, 0.1)")()) == [PATTERN]
    assert reasons(Block()) == [PATTERN]  # p is a local name
    assert reasons(Dropped(0.5)) == [PATTERN]
    assert reasons(calling("attend(q, k, v, attn_mask=None)")(), ["attention_mask"]) == []
    assert reasons(Dropped(0.5), attention=False) == []
    assert reasons(Dropped(), attention=True) == [PATTERN]
    assert reasons(Dropped(), None) == ["shared_input", "sdpa_in_use"]
    assert reasons(Dropped(0.5).double()) == ["unsupported_dtype"]
    replaced = Dropped(0.5)
    replaced.forward = replaced.forward  # type: ignore[method-assign]
    assert reasons(replaced) == ["hf_hook"]


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_forward_that_may_call_the_one_it_overrides(is_plain: bool) -> None:
    model, original, report = patched_pair(Overriding(), attention=True, patterns=[PATTERN])
    assert "+    y = sdpa_(" in report.diff("") and "-        return super()" not in report.diff("")
    assert_agree(outcome(model, x_of(), is_plain=is_plain), outcome(original, x_of(), is_plain=is_plain))
    assert report.calls()[""][0] == (not is_plain)
    assert_agree(outcome(copy.deepcopy(model), x_of(), is_plain=True), outcome(original, x_of(), is_plain=True))
    assert_compiles(Overriding(), x_of(), attention=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_in_which_sdpa_stays_share_a_mask(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.patching.attention.interface.multiplies_bfloat16_in_vectors", lambda: False)
    made: list[Tensor] = []
    monkeypatch.setattr(
        one_mask, "shared_mask", lambda *args, make=one_mask.shared_mask: made.append(make(*args)) or made[-1]
    )

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Dropped(), Dropped()])

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask)
            return x

    model, original, report = patched_pair(Two().to(dtype), patterns=["attention_mask"])
    assert [site.pattern for site in report.patched] == ["attention_mask"] * 2
    made.clear()
    assert_equal(outcome(model, x_of(dtype), mask=keep()), outcome(original, x_of(dtype), mask=keep()))
    assert len(made) == 2 and made[0] is made[1]
    assert list(report.calls().values()) == [(1, 0)] * 2
    made.clear()
    gc.collect()
    assert not one_mask._known


@pytest.mark.parametrize("patterns", [(PATTERN,), (PATTERN, "attention_mask")])
def test_where_sdpa_may_be_replaced_a_mask_is_shared_if_that_is_asked_for(
    patterns: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Dropped(0.5).eval()
    report = patch_model(model, patterns=patterns)
    made: list[Tensor] = []
    monkeypatch.setattr(one_mask, "shared_mask", lambda mask, query: made.append(mask) or mask)
    model(x_of(), keep())
    assert len(made) == len(patterns) - 1 and report.calls() == {"": (0, 0)}


class Llama(nn.Module):
    """A user's: packed by nobody, rotated, with SDPA."""

    def __init__(self, p: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(512, 512, bias=False) for _ in range(4))
        self.p = p
        angles = torch.outer(torch.arange(128.0), 10000.0 ** -torch.arange(0.0, 1.0, 1 / 32))
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos()[None])
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin()[None])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (each.view(*x.shape[:2], 8, 64).transpose(1, 2) for each in (q, k, v))
        q, k = rotate(q, k, self.cos, self.sin)
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(x.shape))


def half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.mark.parametrize("autocasts", [False, True], ids=["float32", "autocast"])
def test_with_a_rotation_and_an_input_that_layers_share(autocasts: bool) -> None:
    model, original, report = patched_pair(Llama(0.0).train(), attention=True)
    (site,) = report.patched
    assert site.pattern == PATTERN and all(name in report.diff("") for name in ("rotated_0_(", "shared_", "sdpa_("))
    x = torch.randn(4, 128, 512)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        assert_agree(outcome(model, x), outcome(original, x), 0.05 if autocasts else 1e-5)
    assert report.calls()[""][0] >= 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_draw_the_same_mask(use_reentrant: bool) -> None:
    model = Dropped(0.5)
    patch_model(model, patterns=[PATTERN])
    torch.manual_seed(0)
    expected = outcome(model, x_of())
    torch.manual_seed(0)
    assert_agree(outcome(checkpointed(model, use_reentrant), x_of(), is_leaf=True), expected)


def test_autocast_and_hooks() -> None:
    model, original, _ = patched_pair(Dropped(), attention=True)
    seen: list[int] = []
    for each in (model, original):
        each.q.register_forward_hook(lambda *args: seen.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (each(x_of(), keep()) for each in (model, original))
    assert ours.dtype == theirs.dtype and len(seen) == 2
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_compiled_traced_and_transformed_calls_are_sdpas() -> None:
    for p in (0.0, 0.5):
        assert_compiles(Dropped(p).eval(), x_of(), attention=True)
    model, original, report = patched_pair(Dropped(), attention=True, patterns=[PATTERN])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x_of()), original(x_of()))

    def loss(x: Tensor) -> Tensor:
        return model(x[None]).square().sum()

    assert torch.func.vmap(torch.func.grad(loss))(x_of()).shape == x_of().shape
    assert torch.equal(torch.jit.trace(model, x_of(), check_trace=False)(2.0 * x_of()), original(2.0 * x_of()))
    assert report.calls() == {"": (0, 0)}


def test_a_function_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_calls, "fused_sdpa", lambda attention, q, *args: 2.0 * q)
    report = patch_model(Dropped(0.5), patterns=[PATTERN])
    assert not report.patched and [site.reason for site in report.skipped] == ["verify_failed"]


def test_a_module_of_nothing_but_sdpa() -> None:
    class Bare(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0.0)

    model = nn.Sequential(Bare())
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == [PATTERN]
    model[0](*torch.randn(3, 2, 4, 8, 8))
    assert report.calls() == {"0": (1, 0)}


def test_falcon_of_transformers_calls_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconConfig(
        vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, attention_dropout=0.1
    )
    config._attn_implementation = "sdpa"
    model = transformers.FalconModel(config).eval()
    original = copy.deepcopy(model)
    report = patch_model(model, attention=True)
    assert {site.pattern for site in report.patched if "Attention" in site.module_class} == {PATTERN}
    ids = torch.arange(3, 35).view(2, 16)
    ours, theirs = (each(ids).last_hidden_state for each in (model, original))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
