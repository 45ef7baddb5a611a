"""Attention weights under autocast: half precision where matrix products alone read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.attention import softmax_regions
from onetrip.patching.attention.region_softmax import region_softmax
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.source import Inliner
from patching_cases import written
from torch import Tensor, nn

PATTERN = "attention_softmax"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.0)
        self.weight = nn.Parameter(torch.ones(5))


ARGUMENTS = "scores, mask, value"
SCORES = torch.randn(2, 2, 3, 5, generator=torch.Generator().manual_seed(0))
MASK = torch.zeros(2, 1, 1, 5).index_fill(3, torch.tensor([4]), -1e4)

FOR_PRODUCTS = {
    "a product": "return torch.matmul(W, value)",
    "an operator": "return (W @ value).transpose(1, 2)",
    "sizes": "return torch.bmm(W.view(-1, W.size(-2), W.shape[-1]), value)",
    "views and casts": "w = W.to(value.dtype); w = w.type(value.dtype).view(2, 2, 3, 5); return torch.matmul(w, value)",
    "returned beside": "y = torch.matmul(W, value); return y, W",
    "in a tuple": "outputs = (value @ value, W) if self.training else (W @ value,); return outputs",
    "appended": "outputs = (torch.matmul(W, value),); outputs = outputs + (W,); return outputs",
    "replaced later": "y = torch.matmul(W, value); W = None; return y, W",
    "nothing": "return value",
    "the output of a tuple": "y = (torch.matmul(W, value), W); return y if value is None else (y[0],)",
}
FOR_OTHERS = {
    "returned": "return W",
    "returned first": "return W, torch.matmul(W, value)",
    "before what it is appended to": "return (W,) + (value,)",
    "a factor": "return torch.matmul(W * 2, value)",
    "a sum": "W += 1; return torch.matmul(W, value)",
    "its dtype": "return torch.matmul(W, value.to(W.dtype))",
    "a cast to a constant": "return torch.matmul(W.to(torch.float64), value.double())",
    "a child": "W = self.dense(W); return torch.matmul(W, value)",
    "a name read elsewhere": "v = W.transpose(1, 2); return torch.matmul(W, value), v.sum()",
    "passed on": "return self.dense((value, W))",
    "a dictionary": "return torch.matmul(W, value), {'weights': W}",
    "of a tuple": "outputs = (torch.matmul(W, value), W); return outputs[0], outputs[1].sum(-1)",
    "the second of two": "v, w = value.contiguous(), W.contiguous(); return torch.matmul(w, v), w.sum(-1)",
    "another name": "y, w = torch.matmul(W, value), W; return y, w.sum(-1)",
    "under another autocast": "with torch.autocast('cpu', enabled=False): return torch.matmul(W, value)",
    "before dropout": "w = torch.matmul(W, value); return w, PROBABILITIES.sum(-1)",
}


@pytest.mark.parametrize(
    ("expected", "bodies"), [(True, FOR_PRODUCTS), (False, FOR_OTHERS)], ids=["products", "others"]
)
def test_who_reads_the_weights(expected: bool, bodies: dict[str, str]) -> None:
    """Under autocast only what products cast anyway may be rounded."""
    found = {}
    for name, body in bodies.items():
        lines = ["W = torch.softmax(scores + mask, dim=-1)", "W = self.dropout(W)", body]
        if "PROBABILITIES" in body:
            lines[:2] = [lines[0].replace("W", "PROBABILITIES"), "W = self.dropout(PROBABILITIES)"]
        forward = read_forward(written(Attention, "\n".join(lines), globals(), ARGUMENTS).forward)
        assert isinstance(forward, Forward)
        regions = softmax_regions._regions(forward, Inliner(forward.globals, {}))
        found[name] = [region.for_products for region in regions]
    assert found == {name: [expected] for name in bodies}


class InAMethod(Attention):
    def attend(self, scores: Tensor, mask: Tensor, value: Tensor) -> Any:
        weights = torch.softmax(scores + mask, dim=-1)
        weights = self.dropout(weights)
        return torch.matmul(weights, value), weights


CALL = "y, weights = self.attend(scores, mask, value)"
CALLERS = {
    f"{CALL}; return y, weights": True,
    f"{CALL}; return y, weights.masked_fill(mask < 0, torch.finfo(torch.float32).min)": False,
    "return self.attend(scores, mask, value)": False,  # passed on
}


@pytest.mark.parametrize("body", CALLERS, ids=["returned", "read", "passed on"])
def test_weights_that_a_method_returns_to_the_forward(body: str) -> None:
    found = softmax_regions.read_softmax_regions(written(InAMethod, body, globals(), ARGUMENTS))
    assert isinstance(found, softmax_regions.SoftmaxRegions) and found.forward.method == "attend"
    assert [region.for_products for region in found.chosen] == [CALLERS[body]]


def test_the_next_statement_on_a_line_reads_the_weights() -> None:
    source = """def forward(self, scores, mask, value):
    W = torch.softmax(scores + mask, dim=-1)
    W = self.dropout(W); z = W.sum(-1)
    return torch.matmul(W, value), z
"""
    forward = read_forward(InAMethod.attend, source)
    assert isinstance(forward, Forward)
    regions = softmax_regions._regions(forward, Inliner(forward.globals, {}))
    assert [region.for_products for region in regions] == [False]


WEIGHTS = "weights = nn.functional.softmax(scores + mask, dim=-1"
PRODUCT = "weights = self.dropout(weights); return torch.matmul(weights, value)"
BODIES = {
    "values": f"{WEIGHTS}); {PRODUCT}",
    "widened": f"{WEIGHTS}, dtype=self.weight.dtype); {PRODUCT}",
    "summed": f"{WEIGHTS}); {PRODUCT} + weights.sum()",
    "cast and summed": f"{WEIGHTS}, dtype=torch.float32).to(value.dtype); {PRODUCT} + weights.sum()",
    "cast back and summed": f"""
        scores = scores + mask
        weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        {PRODUCT} + weights.sum()""",
}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("name", "dtypes", "autocast", "is_fused"),
    [
        ("values", (BF16, FP32, FP32), BF16, True),
        ("values", (FP32, FP32, FP32), BF16, True),
        ("values", (BF16, FP32, FP32), FP16, False),
        ("values", (BF16, FP16, FP32), BF16, False),
        ("values", (BF16, FP32, BF16), None, False),
        ("widened", (BF16, BF16, FP32), BF16, True),
        ("summed", (BF16, FP32, FP32), BF16, False),
        ("summed", (FP32, FP32, FP32), BF16, True),
        ("cast and summed", (BF16, FP32, BF16), BF16, True),
        ("cast and summed", (FP16, FP32, BF16), BF16, False),
        ("cast back and summed", (BF16, FP32, FP32), BF16, False),
    ],
)
def test_under_autocast_half_scores_give_half_weights_where_products_alone_read_float32(
    name: str,
    dtypes: tuple[torch.dtype, ...],
    autocast: torch.dtype | None,
    is_fused: bool,
) -> None:
    """dtypes: of scores, mask and value."""
    cls = written(Attention, BODIES[name], globals(), ARGUMENTS)
    module, plain = cls(), cls()
    report = patch_model(module, patterns=[PATTERN])
    scores, mask, value = (
        each.to(to) for each, to in zip((SCORES, MASK, torch.randn(2, 2, 5, 8)), dtypes, strict=True)
    )

    def called(model: nn.Module) -> Any:
        with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
            try:
                return model(scores, mask, value)
            except RuntimeError as error:  # a product of two dtypes, as the statements say
                return str(error)

    ours, theirs = called(module), called(plain)
    assert report.calls() == {"": (1, 0) if is_fused else (0, 1)}
    if isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs)
    else:
        assert ours == theirs


def test_weights_of_half_scores_are_not_widened() -> None:
    assert region_softmax(SCORES.bfloat16(), (MASK,), SCORES).dtype == torch.bfloat16
    assert region_softmax(SCORES, (MASK,), SCORES.bfloat16()).dtype == torch.bfloat16
