"""Children that end in a dropout or a linear layer: their parent's sum adds the bias and applies the dropout."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import links, patch_model
from outcomes import assert_agree, assert_compiles, assert_obeys, outcome, patched_pair
from patching_cases import WIDTH, Block, inputs, randomised, renames, twice, written
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """As GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.4)

    def forward(self, h: Tensor) -> Tensor:
        h = self.up(h).tanh()
        h = self.down(h)
        h = self.drop(h)
        return h


class Attention(Mlp):
    """Returns a tuple; of one element where there is no second input."""

    def forward(self, h: Tensor, other: Tensor | None = None, **unused: Any) -> tuple[Tensor, ...]:
        weights = self.up(h)
        if other is None:
            return (functional.dropout(self.down(weights), p=0.4, training=self.training),)
        out = functional.dropout(self.down(weights), p=0.4, training=self.training)
        return out, weights


class Linear(Mlp):
    """Ends in a linear layer: its parent has the dropout."""

    def forward(self, h: Tensor) -> tuple[Tensor, None]:
        h = self.down(self.up(h).tanh())
        return h, None


class Calls(Block):
    """A call in the sum."""

    def __init__(self, child: type[nn.Module] = Mlp) -> None:
        super().__init__()
        self.child = child()

    def forward(self, a: Tensor) -> Tensor:
        return a + self.child(self.rms(a))


def calls(body: str, child: type[nn.Module] = Mlp) -> Any:
    return functools.partial(written(Calls, body, globals(), "a"), child=child)


Assigns = calls("residual = a; branch = self.child(self.post(a)); a = branch + residual; return a")
Unpacks = calls(
    "residual = a; out, _ = self.child(self.rms(a), other=a); a = residual + out; return self.post(a)", Attention
)
"""As a GPT-2 block, with a norm after the sum."""
FORWARDS = {
    "calls": Calls,
    "assigns": Assigns,
    "unpacks": Unpacks,
    "indexes": calls("a = self.post(a + self.child(a)[0]); return a", Attention),
    "drops itself (BART)": calls(
        """
        residual = a
        a, _ = self.child(a)
        a = functional.dropout(a, p=self.rate, training=self.training)
        a = residual + a
        return self.post(a)""",
        Linear,
    ),
    "drops in a module": calls(
        "residual = a; a, _ = self.child(a); a = self.drop(a); a = a + residual; return a", Linear
    ),
    # As a GPT-J block: the first addition of two is fused.
    "three terms": calls(
        """
        residual = a
        a = self.rms(a)
        out, _ = self.child(a, other=a)
        return out + self.second(a) + residual""",
        Attention,
    ),
}


class RenamingMlp(Mlp):
    forward = renames(old="h")(Mlp.forward)


class DoubledMlp(Mlp):
    forward = twice(Mlp.forward)


class FrozenMlp(Mlp):
    forward = torch.no_grad()(Mlp.forward)


CallsByAnOldName = calls("return a + self.child(old=self.rms(a))", RenamingMlp)
"""The child's forward stands in a wrapper that changes the names of arguments."""


class InAMethod(Calls):
    """As torch's own encoder layer."""

    def __init__(self) -> None:
        super().__init__(nn.Identity)
        self.down = nn.Linear(WIDTH, WIDTH)

    def branch(self, a: Tensor) -> Tensor:
        a = self.down(a)
        return self.drop(a)

    def forward(self, a: Tensor) -> Tensor:
        return self.post(a + self.branch(a))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, float]]:
    """(whether there was a bias, p) of each fused call."""
    seen: list[tuple[bool, float]] = []
    for module, name in ((links.ops, "bias_dropout_residual"), (links, "norm_of_sum")):
        real = getattr(module, name)

        def spy(x: Tensor, residual: Tensor | None, *args: Any, real: Any = real, **options: Any) -> Any:
            if residual is not None:
                bias = args[0] if args else options["bias"]
                seen.append((bias is not None, options["dropout_p"]))
            return real(x, residual, *args, **options)

        monkeypatch.setattr(module, name, spy)
    return seen


def assert_same(block: nn.Module, original: nn.Module) -> None:
    assert_agree(outcome(block, *inputs()), outcome(original, *inputs()))


@pytest.mark.parametrize(
    "make", [*FORWARDS.values(), CallsByAnOldName, InAMethod], ids=[*FORWARDS, "old name", "method"]
)
def test_the_sum_adds_the_bias_and_applies_the_dropout(make: type[Block], fused: list[tuple[bool, float]]) -> None:
    block, original, report = patched_pair(randomised(make()))
    fused.clear()
    assert torch.equal(block.child(*inputs())[0], original.child(*inputs())[0])  # alone it is as ever
    assert_same(block, original)
    assert fused == [(True, 0.0)] and report.calls()[""] == (1, 0)
    assert_same(copy.deepcopy(block), original)
    block.train()(*inputs())
    assert fused[1:] == [(True, 0.0), (True, 0.4)]


@pytest.mark.parametrize("name", ["calls", "assigns", "unpacks", "drops in a module"])
def test_every_element_is_dropped_once_and_its_gradient_with_it(name: str) -> None:
    block = randomised(FORWARDS[name]()).train()
    block.post = nn.Identity()
    block, full, _ = patched_pair(block)
    full.eval()
    x = torch.ones(4, 200, WIDTH)
    torch.manual_seed(0)
    y = block(x)
    torch.manual_seed(0)
    assert torch.equal(block(x), y)
    branch, kept = full(x) - x, (y - x).abs() > 1e-6
    torch.testing.assert_close(y, x + kept * branch / 0.6, rtol=1e-4, atol=1e-4)
    assert 0.57 < kept.float().mean() < 0.63
    (grad,) = torch.autograd.grad(y.sum(), block.child.down.bias)
    torch.testing.assert_close(grad, kept.sum((0, 1)) / 0.6, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("norm_first", [False, True])
def test_torchs_encoder_keeps_its_fast_path(norm_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In eval it computes a nested tensor by one function of torch; the last norm receives that."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, norm_first=norm_first, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=not norm_first).eval()
    model, original, _ = patched_pair(encoder)
    seen: list[bool] = []
    fast = torch._transformer_encoder_layer_fwd
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda x, *a: seen.append(x.is_nested) or fast(x, *a))
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    with torch.no_grad():
        ours, theirs = (each(*inputs(), src_key_padding_mask=padding) for each in (model, original))
    assert seen == [not norm_first] * 4
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_hooks_on_the_child_see_what_it_returns(fused: list[tuple[bool, float]]) -> None:
    block, original, _ = patched_pair(randomised(Unpacks()))
    for each in (block, original):
        each.child.register_forward_hook(lambda module, args, output: (output[0] * 2.0, None))
    assert_same(block, original)
    assert fused[-1] == (False, 0.0)


class Scaled(Mlp):
    """As an adapter that takes the child's place."""

    def forward(self, h: Tensor) -> Tensor:
        return 3.0 * super().forward(h)


def overridden(block: Any) -> None:
    forward = block.child.forward
    block.child.forward = lambda h: 2.0 * forward(h)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "another class": lambda block: setattr(block.child, "__class__", Scaled),
    "a forward": overridden,
    "another dropout": lambda block: setattr(block.child, "drop", nn.Sequential(nn.Dropout(0.0), nn.Tanh())),
    "a hook": lambda block: block.child.down.register_forward_hook(lambda module, args, output: output.tanh()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_child_that_changes_after_patching_is_called(name: str) -> None:
    assert_obeys(CHANGES[name], randomised(Assigns()), *inputs())


OTHER_USES = {
    "reads twice": "branch = self.child(a); z = a + branch; return self.post(z) * branch",
    "reads in between": "branch = self.child(a); branch = branch.clamp(-1.0, 1.0); a = branch + a; return a",
    "returns": "return self.child(a)",
    "broadcasts": "return self.child(a[:, :1]) + a",
    "in a loop": """
        branch = torch.zeros_like(a)
        for _ in range(2):
            a = a + branch.detach()
            branch = self.child(a)
            a = a + branch
        return a""",
}


class StaticMethod(InAMethod):
    @staticmethod
    def branch(a: Tensor) -> Tensor:
        return functional.dropout(a, p=0.5, training=False)


class OfTheInstance(InAMethod):
    def __init__(self) -> None:
        super().__init__()
        self.branch = self.second


class OverriddenMethod(InAMethod):
    def branch(self, a: Tensor) -> Tensor:
        return 2.0 * super().branch(a)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(calls(body), id=name) for name, body in OTHER_USES.items()),
        *(StaticMethod, OfTheInstance, OverriddenMethod),
    ],
)
def test_other_uses_of_children_and_methods_compute_what_they_computed(make: type[Block]) -> None:
    block, original, _ = patched_pair(randomised(make()))
    assert_same(block, original)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_own_layers(kind: Any, norm_first: bool, fused: list[tuple[bool, float]]) -> None:
    torch.manual_seed(0)
    layer, original, _ = patched_pair(kind(WIDTH, 2, 24, dropout=0.4, norm_first=norm_first, batch_first=True))
    fused.clear()
    arguments = inputs(1) if kind is nn.TransformerEncoderLayer else inputs(2)
    layer(*arguments)
    n_sums = 1 + len(arguments)
    assert [p for _, p in fused] == [0.4] * n_sums and fused[-1] == (True, 0.4)
    for each in (*layer.modules(), *original.modules()):
        if isinstance(each, (nn.Dropout, nn.MultiheadAttention)):
            setattr(each, "p" if isinstance(each, nn.Dropout) else "dropout", 0.0)
    assert_agree(outcome(layer, *arguments), outcome(original, *arguments))


CHILDREN = {
    "under no_grad": """
        with torch.no_grad():
            h = self.up(h)
            h = self.down(h)
            return self.drop(h)""",
    "drops in place": """
        h = self.up(h)
        functional.dropout(h, 0.4, self.training, True)
        return functional.dropout(h, 0.4, self.training, True)""",
    "keeps its output": "h = self.down(self.up(h)); out = self.drop(h); self.kept = (out, h); return out",
}


class CallsDifferently(Mlp):
    def __call__(self, h: Tensor) -> Any:
        return 2.0 * super().__call__(h)


@pytest.mark.parametrize(
    "child",
    [
        *(pytest.param(written(Mlp, body, globals(), "h"), id=name) for name, body in CHILDREN.items()),
        *(DoubledMlp, FrozenMlp, CallsDifferently),
    ],
)
def test_other_children_are_called(child: type[nn.Module], fused: list[tuple[bool, float]]) -> None:
    block, original, _ = patched_pair(randomised(Assigns(child=child)))
    fused.clear()
    assert_same(block, original)
    block.train()(*inputs())
    assert fused == []  # a sum alone is torch's


def test_an_excluded_child_is_called(fused: list[tuple[bool, float]]) -> None:
    block = randomised(Unpacks())
    patch_model(block, exclude=["child"])
    fused.clear()
    block.train()(*inputs())
    assert fused == [(False, 0.0)]


def test_a_compiled_block_has_no_graph_break() -> None:
    assert_compiles(randomised(nn.Sequential(Unpacks(), Assigns())), *inputs())


def test_a_checkpointed_child_is_called(fused: list[tuple[bool, float]]) -> None:
    """Its second forward would run outside the checkpoint."""
    layers = pytest.importorskip("transformers.modeling_layers")

    class Checkpointed(Mlp, layers.GradientCheckpointingLayer):
        def forward(self, h: Tensor) -> Tensor:
            h = self.down(self.up(h))
            return self.drop(h)

    block, _, _ = patched_pair(randomised(Assigns(child=Checkpointed)))
    fused.clear()
    block.train()(*inputs())
    assert fused == []
