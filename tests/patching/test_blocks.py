"""What is recognised as a block of dense, dropout, addition and norm, and what only looks like one."""

from __future__ import annotations

import ast
import inspect
import linecache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.report import Unsuitable
from onetrip.patching.source import parse
from onetrip.reference.philox import dropout_scale
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import WIDTH, Block, OneExpression, Tail, inputs, randomised, written
from torch import Tensor, nn


class RmsTail(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """With a docstring."""
        a = self.drop(self.proj(a))
        total = a + b
        return self.rms(total)


def block_of(body: str, arguments: str = "a, b") -> type[Block]:
    return written(Block, body, globals(), arguments)


FUNCTION = (
    "a = torch.nn.functional.dropout(self.second(a), p=self.rate, training=self.training); return self.post(a + b)"
)
FEED_FORWARD = "h = self.proj(a); h = self.drop(h); h = self.second(h); h = self.drop(h); return self.post(h + a)"
BLOCKS: dict[str, tuple[type[Block], str]] = {
    "one-expression": (OneExpression, "dropout_add_norm"),
    "rms-tail": (RmsTail, "dropout_add_norm"),
    "without-dense": (block_of("return self.post(a + self.drop(b))"), "dropout_add_norm"),
    "without-dropout": (block_of("a = self.proj(a); return self.post(b + a)"), "add_norm"),
    "without-norm": (block_of("a = self.proj(a); a = self.drop(a); return b + a"), "dropout_add"),
    "functional-dropout": (block_of(FUNCTION), "dropout_add_norm"),
    "feed-forward": (block_of(FEED_FORWARD), "dropout_add_norm"),
    "residual-is-the-dense": (block_of("h = self.proj(a); return self.post(self.drop(h) + h)"), "dropout_add_norm"),
    "uses-the-sum-twice": (block_of("h = self.drop(self.proj(a)) + b; return self.post(h) + h"), "dropout_add_norm"),
    "takes-more": (block_of("return self.post(self.drop(self.proj(a)) + b)", "a, b, scale=1.0"), "dropout_add_norm"),
    "returns-tuple": (block_of("return self.post(self.drop(self.proj(a)) + b), a"), "dropout_add_norm"),
}


def first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_block_is_recognised(name: str) -> None:
    make, pattern = BLOCKS[name]
    block, original, report = patched_pair(randomised(make()))
    assert {site.name: site.pattern for site in report.patched}.get("") == pattern, report
    assert_agree(outcome(block, *inputs(2)), outcome(original, *inputs(2)))
    assert report.calls()[""] == (1, 0)


@pytest.mark.parametrize("name", ["one-expression", "without-norm", "functional-dropout"])
def test_block_drops_in_training(name: str) -> None:
    """With p = 0.4, about 0.6 of x comes through, scaled by 1 / 0.6; the residual comes through whole."""
    block = randomised(BLOCKS[name][0]())
    patch_model(block, patterns=["dropout_add_norm", "dropout_add"])
    block.post = nn.LayerNorm(WIDTH) if name != "without-norm" else block.post
    a, b = torch.zeros(1, 2000, WIDTH), torch.zeros(1, 2000, WIDTH)
    with torch.no_grad():
        block.proj.weight.zero_()
        block.proj.bias.fill_(1.0)
        block.second.weight.fill_(1 / WIDTH)
    z = block.train()(a + 1.0, b)
    if name == "without-norm":
        assert abs(float((z != 0).float().mean()) - 0.6) < 0.02
        torch.testing.assert_close(z[z != 0], torch.full_like(z[z != 0], dropout_scale(0.4)))
    else:
        assert abs(float((z > 0).float().mean()) - 0.6) < 0.02


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_block_keeps_its_dtype_under_autocast(name: str, dtype: torch.dtype) -> None:
    """A bias in float32 beside a product in bfloat16 must not make the sum float32."""
    block = randomised(BLOCKS[name][0]())
    xs = [x.to(dtype) for x in inputs(2)]
    with torch.autocast("cpu", torch.bfloat16):
        expected = first(block(*xs))
        report = patch_model(block)
        actual = first(block(*xs))
    assert actual.dtype == expected.dtype and report.calls()[""] == (1, 0)
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=5e-2)


class OtherDropout(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class HasOtherDropout(OneExpression):
    def __init__(self) -> None:
        super().__init__()
        self.drop = OtherDropout(0.4)


LOOK_ALIKES = {
    "adds before the dropout": "return self.post(self.drop(self.proj(a) + b))",
    "scales": "return self.post(self.drop(self.proj(a)) * 0.5 + b)",
    "adds the dropped to itself": "h = self.drop(self.proj(a)); return self.post(h + h)",
    "norms before": "return self.drop(self.proj(self.post(a))) - b",
    "in place": "a = self.drop(a); a += b; return self.post(a)",
}


def look_alike(name: str) -> type[Block]:
    return block_of(LOOK_ALIKES[name]) if name in LOOK_ALIKES else HasOtherDropout


@pytest.mark.parametrize("name", [*LOOK_ALIKES, "another dropout"])
def test_what_only_looks_like_a_block_is_left_alone(name: str) -> None:
    block = (make := look_alike(name))()
    report = patch_model(block, patterns=["dropout_add_norm", "dropout_add"])
    assert type(block) is make and report.patched == ()


def test_a_block_whose_source_is_not_its_code_is_left_alone() -> None:
    """As after an edit on disk."""

    class Block_(OneExpression):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.post(b + self.drop(self.proj(a)))

    Block_.forward.__code__ = look_alike("scales").forward.__code__
    source = OneExpression.forward.__code__
    Block_.forward.__code__ = Block_.forward.__code__.replace(
        co_filename=source.co_filename, co_firstlineno=source.co_firstlineno, co_name=source.co_name
    )
    block = Block_()
    report = patch_model(block, patterns=["dropout_add_norm"])
    assert type(block) is Block_ and report.patched == ()
    assert [(site.reason, site.detail) for site in report.skipped] == [
        ("unknown_forward", "its source is not the code that runs")
    ]


def test_a_source_is_read_once_and_each_reader_may_change_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first = parse(OneExpression.forward)
    monkeypatch.setattr(inspect, "getsource", lambda function: pytest.fail("read again"))
    assert isinstance(first, ast.FunctionDef)
    source = ast.unparse(first)
    first.body.clear()
    assert ast.unparse(parse(OneExpression.forward)) == source


def test_a_source_that_could_not_be_read_and_another_version_of_it_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(source: str) -> Any:
        (file := tmp_path / "changing.py").write_text(source)
        linecache.checkcache()
        return compile(source, str(file), "exec")

    def function_of(code: Any) -> Any:
        exec(code, names := {})
        return names["f"]

    code = written("def f(x, y=1):\n    return x + y\n")
    before = function_of(code)
    written("# edited\n\n\n\n")
    assert isinstance(parse(before), Unsuitable)
    written("def f(x, y=1):\n    return x + y\n")
    tree = parse(before)
    assert isinstance(tree, ast.FunctionDef)
    after = function_of(written("def f(x, y=2):\n    return x + y\n"))  # equal code
    assert after.__code__ == before.__code__
    assert ast.unparse(parse(before)) == ast.unparse(tree) != ast.unparse(parse(after))
    before.__code__ = function_of(written("def f(x, y=3):\n    return x - y\n")).__code__
    assert "x - y" in ast.unparse(parse(before))


def test_an_in_place_dropout_is_called_not_fused():
    model = nn.ModuleDict({"block": Tail()})
    model["block"].dropout.inplace = True
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == ["add_norm"]


def test_a_dropout_made_in_place_later_is_called():
    model = nn.ModuleDict({"block": Tail()}).train()
    report = patch_model(model)
    model["block"].dropout.inplace = True
    seen = []
    model["block"].dropout.register_forward_hook(lambda *_: seen.append(1))
    model["block"](*inputs(2))
    assert seen == [1] and report.calls() == {"block": (1, 0)}  # sum and norm are fused still


class Opened(nn.Module):
    """Ends in a dropout, which the sum of its parent would apply."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        dropped_ = self.proj(x)
        return self.drop(dropped_ * 2)


class CallsOpened(Block):
    def __init__(self) -> None:
        super().__init__()
        self.child = Opened()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return b + self.child(a)


DROPPED = "h = torch.nn.functional.dropout(h, p=self.rate, training=self.training)"
SOFTMAX = f"h = a @ b.mT; h = h * 0.5; h = torch.softmax(h, dim=-1); {DROPPED}"
OWN_NAMES: dict[str, type[Block]] = {
    "a-function's": block_of("dropped_linear_ = b; return self.post(self.drop(self.proj(a)) + dropped_linear_)"),
    "a-sum's": block_of("sum_0_ = b; return self.post(self.drop(self.proj(a)) + sum_0_)"),
    "a-norm's": block_of("normed_0_ = a; h = self.drop(a) + b; return self.post(h) * h + normed_0_"),
    "a-parameter": block_of("return self.post(self.drop(a) + b) * dropped_", "a, b, dropped_=2.0"),
    "a-lambda's": block_of("h = self.drop(self.proj(a)) + b; return (lambda sum_0_: self.post(h) + sum_0_)(h)"),
    "a-softmax's": block_of(f"scale_ = a; {SOFTMAX}; return h @ scale_"),
    "a-number's": block_of(f"float_ = b; h = self.proj(a); {DROPPED}; return float_ + h"),
    "a-linear-layer's": block_of("shared_ = b; q = self.proj(a); k = self.second(a); return q * k * shared_"),
    "a-child's": CallsOpened,
}


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_forward_keeps_names_of_its_own_that_a_rewrite_adds(name: str) -> None:
    block, original, report = patched_pair(randomised(OWN_NAMES[name]()))
    assert_agree(outcome(block, *inputs(2)), outcome(original, *inputs(2)))
    if name != "a-child's":
        assert next(site.detail for site in report.skipped if site.name == "").endswith("is its own"), report


NUMBERS: dict[str, Any] = {"tensor": torch.linspace(0.4, 1.0, 3)[0], "numpy": np.float32(0.4)}
PROBABILITIES: dict[str, str] = {
    "sum": "return b + self.drop(self.proj(a))",
    "function": f"h = self.proj(a); {DROPPED}; return b + h",
    "activation": "h = torch.nn.functional.gelu(self.proj(a)); return self.second(self.drop(h))",
    "function-of-activation": f"h = torch.nn.functional.gelu(self.proj(a)); {DROPPED}; return self.second(h)",
    "softmax": f"{SOFTMAX}; return h @ b",
}


@pytest.mark.parametrize("name", PROBABILITIES)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_probability_may_be_any_number_that_torch_takes(name: str, number: str) -> None:
    """As in `nn.Dropout(torch.linspace(0, 0.1, depth)[i])`."""
    block = randomised(block_of(PROBABILITIES[name])()).train()
    block.drop, block.rate = nn.Dropout(NUMBERS[number]), NUMBERS[number]
    report = patch_model(block)
    assert "" in {site.name for site in report.patched}, report
    dropped = block(*inputs(2))
    assert report.calls()[""] == (1, 0)
    unpatch_model(block)
    assert not torch.equal(dropped, block.eval()(*inputs(2)))
