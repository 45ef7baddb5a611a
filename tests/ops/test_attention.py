"""ops.attention against eager attention in float64: outputs, weights and every gradient, and what is kept for them."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from onetrip.measure import saved_tensors
from onetrip.measure.traffic import TrafficMode
from onetrip.ops import dropout_keep_mask
from onetrip.ops.attention import attention
from onetrip.ops.common.tracing import watched
from onetrip.reference.philox import dropout_scale
from pairwise import pairwise
from tolerances import assert_bitwise, assert_like_torch, max_error
from torch import Tensor

BATCH, HEADS, QUERIES, KEYS, WIDTH, VALUE_WIDTH = 2, 4, 5, 7, 10, 6
RNG = (3, 0)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Case:
    """Options of the call, and what is given beside query, key and value."""

    key_heads: int = HEADS
    mask: bool = False
    bias: bool = False
    sinks: bool = False
    softcap: float | None = None
    causal: bool = False
    dropout_p: float = 0.0
    need_weights: bool = True


CASES = {
    "plain": Case(),
    "mask": Case(mask=True),
    "grouped-mask": Case(key_heads=2, mask=True),
    "grouped-mask-dropout": Case(key_heads=2, mask=True, dropout_p=0.3),
    "one-key-head": Case(key_heads=1, mask=True),
    "bias": Case(bias=True),
    "bias-mask-dropout": Case(bias=True, mask=True, dropout_p=0.3),
    "sinks": Case(sinks=True),
    "sinks-mask-dropout": Case(key_heads=2, sinks=True, mask=True, dropout_p=0.3),
    "sinks-causal": Case(sinks=True, causal=True),
    "sinks-bias-mask": Case(sinks=True, bias=True, mask=True),
    "softcap-mask": Case(softcap=2.0, mask=True),
    "softcap-dropout": Case(key_heads=2, softcap=2.0, dropout_p=0.3),
    "causal": Case(causal=True),
    "all-dropped": Case(dropout_p=1.0),
}


def eager(tensors: dict[str, Tensor], mask: Tensor | None, case: Case, scale: float) -> tuple[Tensor, Tensor]:
    key, value = (tensors[name].repeat_interleave(HEADS // case.key_heads, dim=1) for name in ("key", "value"))
    scores = torch.matmul(tensors["query"], key.transpose(2, 3)) * scale
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    if case.bias:
        scores = scores + tensors["bias"]
    if mask is not None:
        scores = scores + mask
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(KEYS - QUERIES + 1).bool(), -torch.inf)
    if case.sinks:
        scores = torch.cat([tensors["sinks"].expand(*scores.shape[:-1], 1), scores], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if case.dropout_p > 0.0:
        keep = dropout_keep_mask(tuple(weights.shape), case.dropout_p, RNG)
        weights = torch.where(keep, weights * dropout_scale(case.dropout_p), 0.0)
    weights = weights[..., 1:] if case.sinks else weights
    return torch.matmul(weights, value), weights


def ours(tensors: dict[str, Tensor], mask: Tensor | None, case: Case, scale: float) -> Any:
    query, key, value = (tensors[name] for name in ("query", "key", "value"))
    return attention(
        query, key, value, mask, scale=scale, softcap=case.softcap, position_bias=tensors.get("bias"),
        sinks=tensors.get("sinks"), causal=case.causal, dropout_p=case.dropout_p, rng=RNG,
        need_weights=case.need_weights,
    )  # fmt: skip


def drawn(case: Case) -> dict[str, Tensor]:
    """Strided as projections leave them: heads beside their width."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (BATCH, QUERIES, HEADS, WIDTH),
        "key": (BATCH, KEYS, case.key_heads, WIDTH),
        "value": (BATCH, KEYS, case.key_heads, VALUE_WIDTH),
    }
    tensors = {name: torch.randn(shape, generator=generator).transpose(1, 2) for name, shape in shapes.items()}
    if case.bias:
        tensors["bias"] = torch.randn(1, HEADS, QUERIES, KEYS, generator=generator)
    if case.sinks:
        tensors["sinks"] = torch.randn(1, HEADS, 1, 1, generator=generator)
    return tensors


def padding(dtype: torch.dtype) -> Tensor:
    """A padded sequence, and a query without any key, as padding on the left makes them."""
    mask = torch.zeros(BATCH, 1, QUERIES, KEYS, dtype=dtype)
    mask[0, :, :, -2:] = mask[1, :, 0] = torch.finfo(dtype).min
    return mask


def outcome(function: Any, case: Case, dtype: torch.dtype, like: torch.dtype, used: str) -> dict[str, Tensor]:
    """Results and gradients for inputs rounded to `like`, computed in dtype. used: what the loss is a function of."""
    leaves = {name: x.to(like).to(dtype).detach().requires_grad_() for name, x in drawn(case).items()}
    output, weights = function(leaves, padding(dtype) if case.mask else None, case, 0.35)
    results = {"output": output} if weights is None else {"output": output, "weights": weights}
    generator = torch.Generator().manual_seed(1)
    cotangents = {name: torch.randn(y.shape, generator=generator).to(like).to(dtype) for name, y in results.items()}
    loss = sum((y * cotangents[name]).sum() for name, y in results.items() if used in (name, "both"))
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {name: y.detach() for name, y in results.items()} | dict(zip(leaves, gradients, strict=True))


@pairwise(name=list(CASES), dtype=DTYPES, used=["output", "weights", "both"])
def test_results_and_gradients(name: str, dtype: torch.dtype, used: str) -> None:
    case = CASES[name]
    exact = outcome(eager, case, torch.float64, dtype, used)
    theirs = outcome(eager, case, dtype, dtype, used)
    actual = outcome(ours, case, dtype, dtype, used)
    for key, tensor in actual.items():
        if key == "sinks":  # a sum over queries of gradients that were rounded, here as in torch
            roundings = math.sqrt(BATCH * QUERIES) * torch.finfo(dtype).eps * exact[key].abs().max().item()
            assert max_error(tensor, exact[key]) <= 2 * max_error(theirs[key], exact[key]) + roundings
        else:
            assert_like_torch(tensor, theirs[key], exact[key], terms=HEADS * QUERIES * KEYS)


@pairwise(name=list(CASES), heads_at_once=[1, 3, HEADS], used=["output", "weights", "both"])
def test_cuts_of_batches_and_heads_change_no_result(
    name: str, heads_at_once: int, used: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    whole = outcome(ours, case, torch.float64, torch.float64, used)
    module = importlib.import_module("onetrip.ops.attention.heads")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    bytes_of_a_head = torch.float64.itemsize * QUERIES * (KEYS + case.sinks) * (HEADS // case.key_heads)
    monkeypatch.setattr(module, "_CUT_BYTES", heads_at_once * bytes_of_a_head)
    tensors = drawn(case)
    cuts = module._cuts(tensors["query"].double(), tensors["key"], KEYS + case.sinks, "cpu")
    assert len(cuts) == BATCH * math.ceil(case.key_heads / heads_at_once) or len(cuts) == 1 < heads_at_once
    for key, tensor in outcome(ours, case, torch.float64, torch.float64, used).items():
        torch.testing.assert_close(tensor, whole[key], msg=lambda text, key=key: f"{key}: {text}")


@pairwise(name=list(CASES), dtype=DTYPES | {"fp64": torch.float64}, heads_at_once=[1, 3, BATCH * HEADS])
def test_without_weights(name: str, dtype: torch.dtype, heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output and its gradients are those of a call with weights, but for the order of sums; or as exact (half)."""
    case = CASES[name]
    module = importlib.import_module("onetrip.ops.attention.recomputed")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    bytes_of_a_head = dtype.itemsize * QUERIES * KEYS * (HEADS // case.key_heads)
    monkeypatch.setattr(module, "_CACHE_BYTES", heads_at_once * bytes_of_a_head)
    expected = outcome(ours, case, dtype, dtype, "output")
    actual = outcome(ours, replace(case, need_weights=False), dtype, dtype, "output")
    assert "weights" not in actual
    exact = outcome(eager, case, torch.float64, dtype, "output")
    for key, tensor in actual.items():
        if dtype in (torch.float16, torch.bfloat16):
            assert_like_torch(tensor, expected[key], exact[key], terms=HEADS * QUERIES * KEYS)
        else:
            torch.testing.assert_close(tensor, expected[key], msg=lambda text, key=key: f"{key}: {text}")


def test_without_weights_nothing_of_their_size_is_kept() -> None:
    case = Case(mask=True, need_weights=False)
    leaves = {key: x.detach().requires_grad_() for key, x in drawn(case).items()}
    (output, weights), kept = saved_tensors(lambda: ours(leaves, padding(torch.float32), case, 0.35))
    assert weights is None and output.requires_grad
    shapes = [tuple(each.tensor.shape) for each in kept]
    assert shapes == [*(tuple(x.shape) for x in leaves.values()), (2, 1, 5, 7)]


@pytest.mark.parametrize("shape", [(KEYS,), (QUERIES, KEYS), (HEADS, 1, KEYS), (BATCH, 1, 1, KEYS)], ids=str)
def test_masks_of_fewer_dimensions_without_weights(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("onetrip.ops.attention.recomputed"), "_CACHE_BYTES", 1)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.3
    tensors = drawn(Case())
    for mask in (keep, torch.zeros(shape).masked_fill(~keep, -torch.inf)):
        expected, _ = attention(*tensors.values(), mask, scale=0.35)
        output, _ = attention(*tensors.values(), mask, scale=0.35, need_weights=False)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("mask", ["none", "bool", "added"])
@pytest.mark.parametrize("spread", [1.0, 16.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_weights_half_types_are_as_accurate_as_sdpa(dtype: torch.dtype, spread: float, mask: str) -> None:
    """Large scores, rounded to bfloat16, would be 10 times as far off."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(2, 4, 40, 32, generator=generator) for _ in range(4)]
    tensors[0] *= spread
    *leaves, cotangent = (x.to(dtype) for x in tensors)
    added = {"none": None, "bool": torch.rand(2, 1, 40, 40, generator=generator) > 0.3,
             "added": (20 * torch.randn(1, 4, 40, 40, generator=generator)).to(dtype)}[mask]  # fmt: skip

    def errors(function: Any, computed: torch.dtype) -> list[Tensor]:
        inputs = [x.to(computed).requires_grad_() for x in leaves]
        given = added if added is None or added.dtype == torch.bool else added.to(computed)
        output = function(*inputs, given)
        return [output.detach(), *torch.autograd.grad(output, inputs, cotangent.to(computed))]

    def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.2)

    def without_weights(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return attention(query, key, value, mask, scale=0.2, need_weights=False)[0]

    exact = errors(sdpa, torch.float64)
    for ours, theirs, truth in zip(errors(without_weights, dtype), errors(sdpa, dtype), exact, strict=True):
        assert (ours.double() - truth).norm() <= 1.6 * (theirs.double() - truth).norm()


def test_float16_products_beyond_its_range() -> None:
    """q k^T is below -65504 for one key, and scores, 0.01 times as large, are not."""
    query, key = torch.full((1, 1, 3, 8), 100.0), torch.full((1, 1, 3, 8), 1.0)
    key[:, :, 1] = -100.0
    leaves = [x.half().requires_grad_() for x in (query, key, torch.randn(1, 1, 3, 8))]
    for mask in (None, torch.tensor([[True, False, True]])):
        output, _ = attention(*leaves, mask, scale=0.01, need_weights=False)
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in leaves), mask, scale=0.01)
        torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))
    output, _ = attention(*leaves, scale=1.0, need_weights=False)  # now they are: a probability of 0
    assert output.isfinite().all()


@pytest.mark.parametrize("need_weights", [True, False])
def test_wrong_shapes_and_dtypes_are_refused(need_weights: bool) -> None:
    query, key, value = drawn(Case(key_heads=2)).values()
    for mask in (torch.ones(3, 1, 5, 7), torch.ones(1, 1, 4, 7), torch.ones(6), torch.ones(1, 1, 1, 1, 7)):
        with pytest.raises(ValueError, match="attention: mask must broadcast"):
            attention(query, key, value, mask, scale=1.0, need_weights=need_weights)
    with pytest.raises(TypeError, match="attention: mask must be float32, float16, bfloat16, float64 or bool"):
        attention(query, key, value, torch.ones(7, dtype=torch.int64), scale=1.0, need_weights=need_weights)
    with pytest.raises(ValueError, match="attention: mask must be on the device of query, cpu, got meta"):
        attention(query, key, value, torch.ones(7, device="meta"), scale=1.0, need_weights=need_weights)
    with pytest.raises(ValueError, match="attention: sinks must broadcast"):
        attention(query, key, value, scale=1.0, sinks=torch.ones(1, 4, 1, 7), need_weights=need_weights)
    few_keys, few_values, no_batch, narrow = key[:1], value[:, :1], key[0], query[..., :3]
    for wrong in ((query, few_keys, value), (query, key, few_values), (query, no_batch, value), (narrow, key, value)):
        with pytest.raises(ValueError, match="attention: query, key and value must be"):
            attention(*wrong, scale=1.0, need_weights=need_weights)
    with pytest.raises(ValueError, match="heads must be a multiple of key heads"):
        attention(query[:, :3], key, value, scale=1.0, need_weights=need_weights)


def test_a_scale_of_zero_gives_equal_weights() -> None:
    query, key, value = drawn(Case()).values()
    output, _ = attention(query, key, value, scale=0.0)
    torch.testing.assert_close(output, value.mean(dim=2, keepdim=True).expand_as(output))


@pytest.mark.parametrize(
    ("shape", "heads_a_cut"),
    [
        ((2, 12, 550), [2] * 12),  # three heads of 550 fit, but two threads share two
        ((2, 12, 64), [24]),
        ((11, 4, 228), [16, 16, 12]),
        ((1, 3, 2048), [1] * 3),  # one head is more than the cache
    ],
    ids=str,
)
def test_cuts(shape: tuple[int, int, int], heads_a_cut: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    batch, n_heads, length = shape
    query = torch.empty(batch, n_heads, length, 8, dtype=torch.bfloat16)
    cuts = importlib.import_module("onetrip.ops.attention.heads").cuts_of(query, query, length, 1 << 20)
    assert [query[cut].shape[:2].numel() for cut in cuts] == heads_a_cut


def test_without_weights_under_autocast() -> None:
    leaves = [x.detach().requires_grad_() for x in drawn(Case()).values()]
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = attention(*leaves, scale=0.35, need_weights=False)
        gradients = torch.autograd.grad(output.sum(), leaves)
    expected, _ = attention(*(x.bfloat16() for x in leaves), scale=0.35, need_weights=False)
    assert_bitwise(output, expected)
    assert [x.dtype for x in gradients] == [torch.float32] * 3


def test_a_bool_mask_leaves_blind_queries_nothing() -> None:
    tensors = drawn(Case())
    keep = padding(torch.float32) == 0
    output, weights = attention(*tensors.values(), keep, scale=1.0)
    assert (output[1, :, 0] == 0).all() and (weights[1, :, 0] == 0).all()
    added, _ = attention(*tensors.values(), padding(torch.float32), scale=1.0)
    torch.testing.assert_close(output[0], added[0])


def test_a_mask_that_learns_beside_a_position_bias() -> None:
    tensors = drawn(Case(bias=True))
    mask = torch.randn(BATCH, 1, 1, KEYS, requires_grad=True)
    bias = tensors["bias"].requires_grad_()
    gradients = []
    for function in (ours, eager):
        output, _ = function(tensors, mask, Case(bias=True), 0.35)
        gradients.append(torch.autograd.grad(output.square().sum(), [mask, bias]))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("name", ["mask", "bias", "sinks", "softcap-mask"])
def test_keeps_query_key_value_and_one_tensor_of_probabilities(name: str, dropout_p: float) -> None:
    case = CASES[name]
    leaves = {key: x.detach().requires_grad_() for key, x in drawn(case).items()}
    case = replace(case, mask=False, dropout_p=dropout_p)
    (output, _), kept = saved_tensors(lambda: ours(leaves, None, case, 0.35))
    assert output.requires_grad
    of_scores = [each for each in kept if tuple(each.tensor.shape[-2:]) in ((QUERIES, KEYS), (QUERIES, KEYS + 1))]
    assert len(of_scores) == 1 and len(kept) == 4


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "learns", "kept"),
    [
        ("plain", {"value"}, set()),
        ("plain", {"query"}, {"key", "value"}),
        ("plain", {"key", "value"}, {"query", "value"}),
        ("bias", {"bias"}, {"value"}),
        ("sinks", {"sinks"}, {"value"}),
        ("softcap-mask", {"value"}, set()),
        ("softcap-mask", {"query"}, {"query", "key", "value"}),
    ],
)
def test_keeps_only_what_the_wanted_gradients_read(
    name: str, learns: set[str], kept: set[str], dropout_p: float
) -> None:
    case = replace(CASES[name], dropout_p=dropout_p)
    tensors = {key: x.requires_grad_(key in learns) for key, x in drawn(case).items()}
    mask = padding(torch.float32) if case.mask else None
    (output, _), saved = saved_tensors(lambda: ours(tensors, mask, case, 0.35))
    shapes = {each.tensor.shape for each in saved if each.tensor.untyped_storage().nbytes() > 4}
    assert kept == {key for key in ("query", "key", "value") if tensors[key].shape in shapes}
    wanted = [x for x in tensors.values() if x.requires_grad]
    expected, _ = eager(tensors, mask, case, 0.35)
    dy = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(torch.autograd.grad(output, wanted, dy), torch.autograd.grad(expected, wanted, dy))


def test_refuses_a_soft_cap_beside_sinks() -> None:
    with pytest.raises(ValueError, match="softcap must be None"):
        ours(drawn(CASES["sinks"]), None, Case(sinks=True, softcap=1.0), 0.35)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_autocast_around_backward_alone_changes_nothing(softcap, dropout_p):
    """Autocast casts the products of whoever calls backward; the saved probabilities have the dtype of forward."""
    torch.manual_seed(0)
    leaves = [torch.randn(2, 4, 16, 32, requires_grad=True) for _ in range(3)]
    output, _ = attention(*leaves, scale=0.2, softcap=softcap, dropout_p=dropout_p, rng=(1, 8))
    loss = output.square().sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(loss, leaves)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_the_output_may_be_written_to(dtype, dropout_p):
    """Also in training in bfloat16 without dropout, which keeps no scores; and as models lay it out."""
    leaves = [torch.randn(2, 4, 16, 32, dtype=dtype, requires_grad=True) for _ in range(3)]

    def gradients(write):
        output, _ = attention(*leaves, scale=0.2, dropout_p=dropout_p, rng=(1, 8), need_weights=False)
        output = output.transpose(1, 2).contiguous()
        output = output.mul_(2.0) if write else 2.0 * output
        return torch.autograd.grad(output.square().sum(), leaves)

    assert all(map(torch.equal, gradients(True), gradients(False)))


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_watched_calls_show_the_operators_of_an_eager_call_and_its_results(dropout_p: float) -> None:
    def run() -> list[Tensor]:
        q, k, v = (
            t.clone().requires_grad_() for t in torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(0))
        )
        y, _ = attention(q, k, v, scale=0.3, causal=True, dropout_p=dropout_p, rng=(3, 4))
        y.square().sum().backward()
        return [y, q.grad, k.grad, v.grad]

    expected = run()
    with watched("cpu"):
        watched_mode = TrafficMode()
        with watched_mode:
            found = run()
    for ours, eager_s in zip(found, expected, strict=True):
        assert_bitwise(ours, eager_s)
    names = {each.name for each in watched_mode.traffic.operators.values()}
    assert {"onetrip::softmax_", "onetrip::softmax_backward_", "aten::bmm"} <= names
    scores = 4 * 2 * 4 * 16 * 16
    softmax = watched_mode.traffic.operators["forward", "onetrip::softmax_"]
    assert softmax.bytes - (16 if dropout_p else 0) == (3 if dropout_p else 2) * scores  # and the seed
    assert watched_mode.traffic.operators["backward", "onetrip::softmax_backward_"].bytes == 3 * scores
    with TrafficMode() as composed:
        run()
    assert "onetrip::softmax" in {each.name for each in composed.traffic.operators.values()}
