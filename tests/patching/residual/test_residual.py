"""Residual sums in forwards of any length: which are rewritten, and what is left as it was written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.ops.common.rng import dropout_scale
from onetrip.patching import patch_model
from outcomes import assert_agree, outcome, patched_pair
from patching_cases import WIDTH, Block, inputs, randomised, renames, twice, written
from torch import Tensor, nn
from torch.nn import functional


def block_of(body: str, arguments: str = "a, b", decorators: Any = ()) -> type[Block]:
    return written(Block, body, globals(), arguments, decorators=decorators)


PRE_NORM = """
    residual = a
    a = self.rms(a)
    a = self.proj(a) * scale
    a = residual + a
    residual = a
    a = self.post(a)
    a = self.second(a)
    a = residual + a
    return (a,)"""
POST_NORM = """
    residual = a
    a, _ = self.proj(a), b
    a = functional.dropout(a, p=self.rate, training=self.training)
    a = residual + a
    a = self.post(a)
    if b is not None:
        residual = a
        a = self.second(b)
        a = functional.dropout(a, p=self.rate, training=self.training)
        a = residual + a
        a = self.rms(a)
    return a"""
IN_ONE_LINE = "a = a + self.proj(self.rms(a)); a = a + self.second(self.post(a)); return a"
IN_THE_SUM = "b = self.proj(self.rms(a)); a = a + self.drop(b); outputs = (a, None); return outputs"


def dropout_add(x: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    """As Bloom's and Falcon's."""
    out = functional.dropout(x, p=prob, training=training)
    out = residual + out
    return out


CLAMPS = """
    h = a + self.proj(b)
    if h.dtype == torch.float16:
        h = torch.clamp(h, -1.0, 1.0)
    return self.post(h)"""
LOOP = """
    for _ in range(3):
        b = self.drop(b)
        a = a + b
        b = self.post(a)
    return b"""
HELPER = "h = self.proj(a); h = dropout_add(h, b, self.rate, training=self.training); return self.second(h)"
RETURNS_EARLY = "if a.shape[0] > 3: return a; return self.post(self.drop(self.proj(a)) + b)"
PreNorm = block_of(PRE_NORM, "a, scale=1.0, **unused")
PostNorm = block_of(POST_NORM, "a, b=None")
CASES: dict[str, tuple[type[Block], int, str]] = {
    "pre-norm (Llama)": (PreNorm, 1, "add_norm"),
    "post-norm (BART)": (PostNorm, 1, "dropout_add_norm"),
    "post-norm-cross": (PostNorm, 2, "dropout_add_norm"),
    "nested (CLIP)": (block_of(IN_ONE_LINE, "a"), 1, "add_norm"),
    "dropout-in-the-sum (T5)": (block_of(IN_THE_SUM, "a, b=None"), 1, "dropout_add"),
    # As a parallel block: the second norm is called.
    "two-norms": (block_of("h = a + b; return self.proj(self.post(h)) + self.second(self.rms(h))"), 2, "add_norm"),
    "clamps": (block_of(CLAMPS), 2, "dropout_add"),
    "loop": (block_of(LOOP), 2, "add_norm"),
    "helper": (block_of(HELPER), 2, "dropout_add"),
    "returns-early": (block_of(RETURNS_EARLY), 2, "dropout_add_norm"),
}


@pytest.mark.parametrize("name", CASES)
def test_sums_are_fused_wherever_they_stand(name: str) -> None:
    make, n_inputs, pattern = CASES[name]
    block, original, report = patched_pair(randomised(make()))
    if name != "clamps":
        assert {site.name: site.pattern for site in report.patched}.get("") == pattern, report
    for _ in range(2):
        assert_agree(outcome(block, *inputs(n_inputs)), outcome(original, *inputs(n_inputs)))
    assert report.calls()[""][1] == 0
    assert name == "nested (CLIP)" or report.calls()[""][0] >= 1


def dropout_twice(x: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    x = functional.dropout(x, p=prob, training=training)
    if training:
        x = functional.dropout(x, p=prob, training=training)
    return residual + x


def dropped_squared(x: Tensor, residual: Tensor, prob: float, training: bool) -> Tensor:
    x = functional.dropout(x, p=prob, training=training)
    return residual + x * x


OTHER_HELPERS = """
    h = dropout_add(self.proj(a), b, self.rate, self.training)
    h = dropout_twice(h, b, self.rate, self.training)
    h = dropped_squared(h, b, self.rate, self.training)
    functional = None
    h = dropout_add(h, b, self.rate, self.training)
    a = self.drop(a)
    a = a + b
    return self.second(a) + h"""
"""Calls that stay as they are written, beside a sum that is fused."""


def test_other_helpers_are_called() -> None:
    block, original, report = patched_pair(randomised(block_of(OTHER_HELPERS)()))
    assert report.calls()[""] == (0, 0)
    assert {"dropout_twice", "dropped_squared", "dropout_add"} <= {*block.forward.__code__.co_names}
    assert_agree(outcome(block, *inputs(2)), outcome(original, *inputs(2)))


def test_the_report_shows_the_rewritten_forward_as_a_diff() -> None:
    report = patch_model(PreNorm())
    text = report.diff("")
    removed = [line for line in text.splitlines() if line.startswith("-") and not line.startswith("---")]
    added = [line for line in text.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert any("a = residual + a" in line for line in removed)
    assert any("self.post" in line for line in added)
    assert not any("self.proj" in line for line in (*removed, *added))
    with pytest.raises(ValueError, match=r"name must be the name of a patched site \(.*\), got 'nothing'"):
        report.diff("nothing")


READS_THE_DROPPED = "h = self.drop(a); z = h + b; return self.second(z) * h"


def test_a_dropped_value_that_is_read_again_is_dropped_once() -> None:
    """The sum and the product must see the same mask."""
    block = randomised(block_of(READS_THE_DROPPED)()).train()
    nn.init.eye_(block.second.weight)
    patch_model(block)
    a = torch.ones(4, 200, 16)
    z = block(a, torch.zeros_like(a))
    torch.testing.assert_close(z[z != 0], torch.full_like(z[z != 0], dropout_scale(0.4) ** 2))


class PrivateName(Block):
    def __init__(self) -> None:
        super().__init__()
        self.__scale = 2.0

    def forward(self, a: Tensor, _: Tensor) -> Tensor:
        b = self.proj(a) * self.__scale
        return self.post(a + self.drop(b))


class DefaultOfTheClass(Block):
    SCALE = 3.0

    def forward(self, a: Tensor, _: Tensor, scale: float = SCALE, *, shift: float = SCALE) -> Tensor:
        return self.post(a + self.drop(self.proj(a) * scale + shift))


class WritesInPlaceBeforeTheNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Threshold(0.0, 1.0, inplace=True)

    def forward(self, a: Tensor, _: Tensor) -> Tensor:
        b = a + self.drop(self.proj(a))
        c = self.act(b)
        return self.post(b) * c


class ReadsOnTheSameLine(Block):
    def forward(self, a: Tensor, _: Tensor) -> Tensor:
        # fmt: off
        b = self.proj(a)
        c = a + b; return self.post(c) * b  # noqa: E702
        # fmt: on


def documented(function: Any) -> Any:
    """As transformers' auto_docstring: returns the function itself."""
    function.__doc__ = "Documented."
    return function


def doubled(function: Any) -> Any:
    return lambda self, a: 2.0 * function(self, a)


def marked(function: Any) -> Any:
    function.marked = True
    return function


SUM = "return self.post(a + self.drop(self.proj(a)))"
OPEN_SUM = "return a + self.drop(self.proj(self.post(a)))"
RENAMES = renames(older="old"), renames(old="a"), documented


@pytest.mark.parametrize(
    ("decorators", "body", "is_fused"),
    [
        *(([documented], SUM, True), (RENAMES, SUM, True), ([torch.no_grad()], SUM, True)),
        *(([doubled], SUM, False), ([marked], SUM, False), ([torch.no_grad()], OPEN_SUM, False)),
    ],
)
def test_a_decorated_forward_is_fused_but_for_sums_that_a_decorator_sees(
    decorators: Any, body: str, is_fused: bool
) -> None:
    block, original, report = patched_pair(randomised(block_of(body, "a", decorators)()))
    assert ("" in {site.name for site in report.patched}) is is_fused
    assert block(*inputs()).requires_grad is (decorators[0] in (*RENAMES, doubled, marked))
    torch.testing.assert_close(block(*inputs()), original(*inputs()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("decorator", [twice, torch.no_grad()])
def test_in_other_wrappers_activations_and_sums_are_fused(decorator: Any) -> None:
    body = "return self.post(a + self.drop(self.proj(self.act(self.second(a)))))"
    block: Any = block_of(body, "a", [decorator])()
    block.second, block.act = nn.Linear(WIDTH, WIDTH), nn.GELU()
    block, original, report = patched_pair(randomised(block))
    (site,) = (site for site in report.patched if site.name == "")
    assert (site.pattern, site.detail) == ("dropout_add_norm", "and bias_activation")
    torch.testing.assert_close(block(*inputs()), original(*inputs()), rtol=1e-4, atol=1e-5)
    assert block(*inputs()).requires_grad is (decorator is twice)


class Embeddings(Block):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, WIDTH)


ADDED = "a = a + self.words.weight[0].expand_as(a); return self.post(a + b)"
"""As RoBERTa's and BART's; b broadcasts, as BERT's position embeddings do."""


@pytest.mark.parametrize("rows", [slice(None), slice(1)], ids=["", "broadcasts"])
def test_the_norm_of_a_sum_of_embeddings_is_fused(rows: slice) -> None:
    block, original, report = patched_pair(randomised(written(Embeddings, ADDED, globals(), "a, b")()))
    a, b = inputs(2)
    assert_agree(outcome(block, a, b[rows]), outcome(original, a, b[rows]))
    assert report.calls()[""] == (1, 0) and report.diff("").count("sum_") == 1
    assert block.to("meta")(a.to("meta"), b[rows].to("meta")).shape == a.shape  # torch has no autocast of meta


def test_the_wrapper_of_a_fused_forward_runs() -> None:
    block, (x,) = randomised(block_of(SUM, "a", RENAMES)()).eval(), inputs()
    expected = block(x)
    report = patch_model(block)
    torch.testing.assert_close(block(older=x), expected, rtol=1e-4, atol=1e-5)
    assert report.calls()[""] == (1, 0) and "post(" in report.diff("")


CHANNELS_FIRST = {
    "dropout": "h = h + self.drop(h)",
    "dropout and norm": "h = h + self.drop(h); b = self.post(h); h = h + b.mean()",
    "linked": "h = h + h; b = self.post(h); h = h + b.mean()",
}


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in CHANNELS_FIRST.items()])
def test_a_sum_of_transposed_tensors_is_viewed_as_they_are(body: str) -> None:
    viewed = "; return h.transpose(1, 2).view(a.shape[0], -1)"
    block, original, _ = patched_pair(randomised(block_of(f"h = a.transpose(1, 2) * 1.0; {body}{viewed}")()))
    (x,) = inputs()
    channels_first = x.mT.contiguous()
    for _ in range(3):
        assert_agree(outcome(block, channels_first, x), outcome(original, channels_first, x))
    block.train()(channels_first, x)


def test_a_sum_of_slices_is_fused() -> None:
    """Neither is contiguous, and their sum is."""
    block, original, report = patched_pair(randomised(block_of("return self.post(a[:, 1:] + self.drop(b[:, 1:]))")()))
    assert_agree(outcome(block, *inputs(2)), outcome(original, *inputs(2)))
    block.train()(*inputs(2))
    assert report.calls()[""] == (2, 0)


OTHERS = {
    "reads the dropped": READS_THE_DROPPED,
    "adds no tensors": """
        n = a.shape[0] + a.dim()
        name = str(n) + str(a.dtype)
        return self.second(a) * len(name)""",
    "broadcasts": "return self.post(a + self.drop(b[:1]))",
    "deletes the branch": "h = self.proj(a); c = a + h; del h; return self.post(c)",
    "adds to the branch later": "h = self.proj(a); c = a + h; h += c; return self.post(c)",
    "reads in a nested function": """
        def branch():
            return h

        h = self.proj(a)
        c = a + h
        return self.post(c) * branch()""",
    "reads names by locals": """
        h = self.drop(self.proj(a))
        c = a + h
        return self.post(c) * locals()["h"]""",
    "reads names by eval": "h = self.proj(a); c = a + h; return self.post(c) * eval('h * 2')",
    "writes before the branch is read": """
        a = a * 1.0
        h = self.proj(a)
        h = functional.hardtanh_(a.detach(), 0.0, 0.5) + h
        return self.post(h)""",
    "acts in place before the norm": """
        h = a + self.drop(self.proj(a))
        c = functional.relu(h, inplace=True)
        return self.post(h) * c""",
}


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_added_and_normed_by_torch(layout: torch.layout) -> None:
    block, original, report = patched_pair(randomised(block_of("return self.post(a + self.proj(a))")()))
    assert report.patched[0].name == ""
    nested = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=layout)
    found, expected = (torch.cat(each(nested, nested).unbind()) for each in (block, original))
    torch.testing.assert_close(found, expected)
    assert report.calls()[""] == (0, 1)


@pytest.mark.parametrize(
    "make",
    [
        *(pytest.param(block_of(body), id=name) for name, body in OTHERS.items()),
        *(PrivateName, DefaultOfTheClass, WritesInPlaceBeforeTheNorm, ReadsOnTheSameLine),
    ],
)
def test_other_additions_and_uses_of_python_compute_what_they_computed(make: type[Block]) -> None:
    block, original, _ = patched_pair(randomised(make()))
    with torch.no_grad():
        torch.testing.assert_close(block(*inputs(2)), original(*inputs(2)), rtol=1e-4, atol=1e-5)
