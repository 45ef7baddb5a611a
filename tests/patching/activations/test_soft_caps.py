"""Soft caps in one pass, and in that of the loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from onetrip.measure import saved_bytes
from onetrip.measure.traffic import traffic
from onetrip.patching import calls, patch_model, unpatch_model
from onetrip.patching.activations.soft_caps import read_soft_caps
from onetrip.patching.forward import Forward, read_forward
from outcomes import assert_compiles, assert_equal, outcome
from patching_cases import COMMON, WIDTH, randomised, tiny_model, token_ids, written
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CLASSES = 61
IDS = torch.randint(CLASSES, (2, 9), generator=torch.Generator().manual_seed(0))
LABELS = torch.where(torch.arange(9) < 3, -100, IDS.flip(0))
ONLY, BOTH = ("softcap",), ("softcap", "cross_entropy")


class Capped(nn.Module):
    """A layer whose result is capped."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.cap: Any = 0.5


FOUND = {
    "statements": "y = self.dense(x); y = y / self.cap; y = torch.tanh(y); y = y * self.cap; return y",
    "one": "y = torch.tanh(self.dense(x) / self.cap) * self.cap; return y",
    "cap first": "y = self.cap * torch.tanh(self.dense(x) / self.cap); return y",
    "two": "cap = self.cap; y = torch.tanh(self.dense(x) / cap); y = y * cap; return y",
    "in a branch": """
        y = self.dense(x)
        if self.cap:
            y = y / self.cap; y = torch.tanh(y); y = y * self.cap
        return y""",
}
LEFT = {
    "another cap": "y = torch.tanh(self.dense(x) / self.cap) * 2.0; return y",
    "no division": "y = torch.tanh(self.dense(x) * self.cap) * self.cap; return y",
    "a sine": "y = torch.sin(self.dense(x) / self.cap) * self.cap; return y",
    "a cap that a call gives": "y = torch.tanh(self.dense(x) / float(self.cap)) * float(self.cap); return y",
    "a local function": "tanh = torch.sin; y = tanh(self.dense(x) / self.cap) * self.cap; return y",
    "a tensor is written to": "h = self.dense(x); y = torch.tanh(h / self.cap) * self.cap; h.mul_(2.0); return y",
    "read between": "y = self.dense(x) / self.cap; z = y.sum(); y = torch.tanh(y); y = y * self.cap; return y + z",
    "the tanh is read later": "y = torch.tanh(self.dense(x) / self.cap); z = y * self.cap; return y + z",
}


def kind_of(body: str) -> Any:
    return written(Capped, body, globals())


def test_others_are_left() -> None:
    def found(body: str) -> int:
        forward = read_forward(kind_of(body).forward)
        assert isinstance(forward, Forward)
        return len(read_soft_caps(forward))

    assert {name: found(body) for name, body in FOUND.items()} == dict.fromkeys(FOUND, 1)
    assert {name: found(body) for name, body in LEFT.items()} == dict.fromkeys(LEFT, 0)


@pytest.mark.parametrize("form", FOUND)
def test_one_pass(form: str, x: Tensor) -> None:
    model = randomised(kind_of(FOUND[form])())
    expected, before = outcome(model, x), traffic(lambda: outcome(model, x)).by_operator()
    report = patch_model(model, patterns=ONLY)
    assert [site.pattern for site in report.patched] == ["softcap"]
    found = outcome(model, x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    after = traffic(lambda: outcome(model, x)).by_operator()
    n_bytes = x.numel() * 4
    assert before["aten::tanh"] == 2 * n_bytes and not {"aten::tanh", "aten::div", "aten::tanh_backward"} & after.keys()
    assert (after["onetrip::glu"], after["onetrip::glu_backward"]) == (2 * n_bytes, 3 * n_bytes)
    assert report.calls() == {"": (2, 0)}
    unpatch_model(model)
    assert_equal(outcome(model, x), expected)


@pytest.mark.parametrize(
    "cap", [None, 0.0, -1.0, 1e-46, float("inf"), float("nan"), True, torch.tensor(0.5), 2], ids=str
)
def test_caps_of_other_kinds(cap: Any, x: Tensor) -> None:
    model = randomised(kind_of(FOUND["in a branch" if cap is None else "statements"])())
    report = patch_model(model, patterns=ONLY)
    original = copy.deepcopy(model)
    unpatch_model(original)
    model.cap = original.cap = cap
    torch.testing.assert_close(model(x), original(x), equal_nan=True)
    assert report.calls() == {"": (int(type(cap) is int), 0)}


def test_what_no_kernel_takes(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomised(kind_of(FOUND["one"])())
    expected = model(x)
    report = patch_model(model, patterns=ONLY)
    assert torch.equal(model(x.as_subclass(Subclass)), expected)
    nested = torch.nested.as_nested_tensor(list(x))
    assert torch.equal(model(nested).to_padded_tensor(0.0), expected)
    monkeypatch.setattr(calls, "SMALLEST", x.numel() + 1)
    assert torch.equal(model(x), expected)
    assert report.calls() == {"": (0, 0)}
    assert torch.equal(model.double()(x.double()[0, 0]), torch.tanh(model.dense(x.double()[0, 0]) / 0.5) * 0.5)


class Subclass(Tensor):
    pass


def test_compilers_and_transforms(x: Tensor) -> None:
    model = randomised(kind_of(FOUND["statements"])())
    expected = torch.func.vmap(lambda each: torch.func.jacrev(model)(each))(x[0])
    assert_compiles(model, x, patterns=ONLY)
    assert torch.equal(torch.func.vmap(lambda each: torch.func.jacrev(model)(each))(x[0]), expected)
    traced: Any = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(2 * x), model(2 * x))


class Logits(nn.Module):
    """As Gemma 2: computes a loss of capped logits, and returns them."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, CLASSES, bias=False)
        self.loss, self.cap = loss, 2.0

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.embeddings(input_ids))
        logits = logits / self.cap
        logits = torch.tanh(logits)
        logits = logits * self.cap
        return self.loss(logits, labels), logits


class WithoutGraph(Logits):
    """Its head has no gradient of the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        h = self.head(self.embeddings(input_ids))
        with torch.no_grad():
            y = torch.tanh(h / self.cap) * self.cap
        return self.loss(y.float(), labels) + h.float().mean(), h


def test_a_cap_without_a_graph_has_none() -> None:
    model = WithoutGraph(flat)
    expected = step(model)
    patch_model(model, patterns=BOTH)
    for ours, theirs in zip(step(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Overwriting(Logits):
    """Its child writes to the logits that were capped."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.act = nn.ReLU(inplace=True)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        h = self.head(self.embeddings(input_ids))
        y = torch.tanh(h / self.cap) * self.cap
        return self.loss(y, self.act(h), labels)


def test_logits_that_change_after_their_cap() -> None:
    """The loss reads the capped values; the cap's backward finds out."""
    model = Overwriting(lambda y, h, labels: flat(y, labels))
    expected = model(IDS, labels=LABELS)
    patch_model(model, patterns=BOTH)
    loss = model(IDS, labels=LABELS)
    torch.testing.assert_close(loss, expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_beside_scaled_logits() -> None:
    model = Logits(flat)
    report = patch_model(model)
    assert "softcap_(" in report.diff("") and "scaled_logits_(" not in report.diff("")


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.float().square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (2.0 * ctx.saved_tensors[0].float() / ctx.saved_tensors[0].numel() * grads[0]).to(ctx.saved_tensors[0])


def flat(y: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(y.view(-1, CLASSES), labels.view(-1))


def _hooked(y: Tensor, labels: Tensor) -> Tensor:
    y.register_hook(lambda gradient: 2.0 * gradient)
    return flat(y.float(), labels)


def _changed(y: Tensor, labels: Tensor, of: Any = lambda y: y) -> Tensor:
    of(y)[..., :7] = -1.0
    return flat(y.float(), labels)


def _changed_later(y: Tensor, labels: Tensor) -> Tensor:
    loss = flat(y.float(), labels)
    return loss + y.mul_(0.5).float().square().mean()


LOSSES: dict[str, tuple[Any, bool]] = {
    "rows": (flat, True),
    "float32": (lambda y, labels: flat(y.float(), labels), True),
    "shifted": (lambda y, labels: flat(y[:, :-1].contiguous().float(), labels[:, 1:].contiguous()), True),
    "a slice in float32": (lambda y, labels: flat(y[:, 1:].float().contiguous(), labels[:, 1:].contiguous()), True),
    "a function of autograd": (lambda y, labels: Squares.apply(y), False),
    "a function of autograd in float32": (lambda y, labels: Squares.apply(y.float()), False),
    "a checkpoint": (lambda y, labels: checkpoint(torch.square, y, use_reentrant=True).mean(), False),
    "without the subclass": (lambda y, labels: y.as_subclass(Tensor).float().square().mean(), False),
    "vmap": (lambda y, labels: torch.vmap(lambda each: each.float().square().sum())(y).sum(), False),
    "two losses": (lambda y, labels: flat(y.float(), labels) + y.float().square().mean(), True),
    "read first": (lambda y, labels: y.float().square().mean() + flat(y.float(), labels), True),
    "a hook": (_hooked, True),
    "changed": (_changed, True),
    "a view changes": (lambda y, labels: _changed(y, labels, lambda y: y.view(-1, CLASSES)), True),
    "changed after the loss": (_changed_later, True),
}


def step(model: Logits) -> list[Tensor]:
    """Loss, logits, and gradients of a loss that reads both."""
    model.zero_grad()
    loss, logits = model(IDS, labels=LABELS)
    (loss + logits.float().square().mean()).backward()
    assert type(logits) is Tensor
    return [loss.detach(), logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_capped_logits(name: str, dtype: torch.dtype) -> None:
    loss, is_fused = LOSSES[name]
    model = Logits(loss).to(dtype)
    fused, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    report = patch_model(fused, patterns=BOTH)
    for actual, expected, truth in zip(step(fused), step(model), step(exact), strict=True):
        bound = 2.0 * (expected - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (actual - truth).abs().max() <= bound and actual.dtype == expected.dtype
    assert report.calls()[""] == (1 + is_fused, 1 - is_fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_one_pass_beside_the_loss(dtype: torch.dtype) -> None:
    """Nothing in backward: the loss reads the logits before the cap."""
    model = Logits(lambda y, labels: flat(y.float(), labels)).to(dtype)
    fused, logits = copy.deepcopy(model), IDS.numel() * CLASSES * dtype.itemsize
    patch_model(fused, patterns=BOTH)

    def run(each: Logits) -> Tensor:
        loss: Tensor = each(IDS, labels=LABELS)[0]
        return loss

    unpatched, ours = (traffic(lambda each=each: run(each).backward()).by_operator() for each in (model, fused))
    assert "aten::tanh" in unpatched and not {"aten::tanh", "aten::div", "onetrip::glu_backward"} & ours.keys()
    assert ours["onetrip::glu"] == 2 * logits
    kept = [
        saved_bytes(lambda each=each: run(each), excluded=list(each.parameters()))  # type: ignore[misc]
        for each in (model, fused)
    ]
    assert kept[1] < kept[0] - logits // 2


def test_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onetrip.ops.softcap", lambda x, cap: torch.tanh(x))
    report = patch_model(kind_of(FOUND["one"])(), patterns=ONLY)
    assert [site.reason for site in report.skipped] == ["verify_failed"]


@pytest.mark.parametrize("patterns", [BOTH, ("softcap", "linear_cross_entropy"), None], ids=["both", "linear", "all"])
def test_gemma_2(patterns: Any) -> None:
    """Its attention's scores, too; generation."""
    options = {**COMMON, "head_dim": 8, "query_pre_attn_scalar": 8, "pad_token_id": 0}
    model = tiny_model("Gemma2ForCausalLM", options).train()
    tokens = token_ids(2, 9)

    def run() -> list[Tensor]:
        model.zero_grad()
        output = model(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return [output.loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected, ids = run(), model.eval().generate(tokens, max_new_tokens=4)
    model.train()
    report = patch_model(model, patterns=patterns)
    for ours, theirs in zip(run(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.eval().generate(tokens, max_new_tokens=4), ids)
    assert "softcap_(" in report.diff("")
