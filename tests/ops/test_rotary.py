"""onetrip.ops.rotary_embedding against float64 and against transformers: layouts, dtypes, gradients, memory, errors."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module

import pytest
import torch
from onetrip import ops
from onetrip.measure import saved_bytes
from operator_cases import Watching
from pairwise import pairwise
from rotary_cases import DTYPES, LAYOUTS, exact, heads, short, tables, unfused
from targets import TARGETS_WITHOUT_CUDA_KERNELS, target_fixture
from tolerances import assert_bitwise, assert_like_torch, assert_ulps

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


target = target_fixture(TARGETS_WITHOUT_CUDA_KERNELS)


def gradients(function, q, k, cos, sin, dq, dk, **options):
    """(q, k, dq, dk) of function, with q and k as leaves of these strides."""
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    results = function(*leaves, cos, sin, **options)
    return *results, *torch.autograd.grad(results, leaves, (dq, dk))


@pairwise(
    layout={name or "contiguous": name for name in LAYOUTS},
    dtype={short(d): d for d in DTYPES},
    table_dtype={short(d): d for d in DTYPES},
    head_dim={"D64": 64, "D80": 80, "D6": 6, "D128": 128},
    part={"whole": 1.0, "quarter": 0.25},
    interleaved={"halves": False, "interleaved": True},
    batch={"2-dims": None, "shared": 1, "3-dims": 2},
    out_dtype={"": None} | {f"to_{short(d)}": d for d in DTYPES},
)
def test_result_and_gradients(target, layout, dtype, table_dtype, head_dim, part, interleaved, batch, out_dtype):
    """Within one rounding of float64 where all is float32 inside; where each step is rounded, as near as torch."""
    n = max(2, int(head_dim * part) // 2 * 2)
    q = heads(2, 4, 7, head_dim, dtype, target.device, layout)
    k = heads(2, 2, 7, head_dim, dtype, target.device, LAYOUTS[LAYOUTS.index(layout) - 1])
    cos, sin = tables(7, n, table_dtype, target.device, batch)
    of_result = out_dtype or dtype
    dq, dk = (
        torch.randn(x.shape, device=target.device).to(of_result).transpose(1, 2).contiguous().transpose(1, 2)
        for x in (q, k)
    )
    ours = gradients(ops.rotary_embedding, q, k, cos, sin, dq, dk, interleaved=interleaved, out_dtype=out_dtype)
    truth = gradients(exact, q, k, cos, sin, dq, dk, interleaved=interleaved)
    torchs = gradients(unfused, q, k, cos, sin, dq, dk, interleaved=interleaved)
    for i, (result, true) in enumerate(zip(ours, truth, strict=True)):
        assert result.dtype == (of_result if i < 2 else dtype)
        if dtype == table_dtype == of_result:
            assert torch.equal(result, torchs[i])
            assert_like_torch(result, torchs[i], true.double())
        else:
            assert_ulps(result, true.double())
    for x, y in zip((q, k), ours, strict=False):
        given = x if x.stride(-1) == 1 else x.contiguous()
        assert y.stride() == torch.empty_like(given).stride()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=short)
@pytest.mark.parametrize(
    ("model", "head_dim", "n", "interleaved", "table_dtype"),
    [
        ("llama", 64, 64, False, None),
        ("gpt_neox", 80, 20, False, None),
        ("glm", 64, 32, True, None),
        ("cohere", 64, 64, True, F32),
    ],
    ids=["llama", "gpt_neox", "glm", "cohere"],
)
def test_bits_of_transformers_functions(target, model, head_dim, n, interleaved, table_dtype, dtype):
    """Forward and backward; of all columns and of some. Cohere computes in float32; GLM takes halves of its tables."""
    theirs = import_module(f"transformers.models.{model}.modeling_{model}").apply_rotary_pos_emb
    q, k = (heads(2, h, 33, head_dim, dtype, target.device, "transposed") for h in (4, 2))
    angles = torch.arange(33)[None, :, None] * 10.0 ** -torch.linspace(0, 4, n // 2)
    halves, pairs = torch.cat((angles, angles), -1), angles.repeat_interleave(2, -1)
    given = pairs if model == "cohere" else halves
    of_theirs, of_ours = (
        [table.to(target.device, dtype) for table in (each.cos(), each.sin())]
        for each in (given, pairs if interleaved else halves)
    )
    of_ours = [table.to(table_dtype or dtype) for table in of_ours]
    grads = torch.randn_like(q), torch.randn_like(k)
    expected = gradients(theirs, q, k, *of_theirs, *grads)
    found = gradients(ops.rotary_embedding, q, k, *of_ours, *grads, interleaved=interleaved)
    for our, their in zip(found, expected, strict=True):
        assert torch.equal(our, their)


@pytest.mark.parametrize(("interleaved", "n_rotated"), [(False, 4), (True, 6)], ids=["halves", "interleaved"])
def test_gradcheck(interleaved, n_rotated):
    """First and second derivatives, of cos and sin too."""
    q, k = (heads(2, h, 3, 6, F64, layout="transposed").requires_grad_() for h in (2, 1))
    cos, sin = tables(3, n_rotated, F64, batch=2)

    def function(q, k, cos, sin):
        return ops.rotary_embedding(q, k, cos, sin, interleaved=interleaved)

    assert torch.autograd.gradcheck(function, (q, k, cos, sin), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(function, (q, k, cos, sin))
    with Watching():  # the traced operator
        assert torch.autograd.gradgradcheck(function, (q, k, cos, sin))
    assert torch.autograd.gradcheck(function, (q, k, cos.requires_grad_(), sin.requires_grad_()))
    assert torch.autograd.gradcheck(function, (q.detach(), k, cos.detach(), sin))


@pytest.mark.parametrize("out_dtype", [F32, BF16], ids=short)
def test_backward_can_be_differentiated_again(target, out_dtype):
    q, k = (heads(1, 2, 3, 8, F32, target.device).requires_grad_() for _ in range(2))
    cos, sin = tables(3, 8, F32, target.device)
    dq = torch.randn_like(q, dtype=out_dtype).requires_grad_()
    results = ops.rotary_embedding(q, k, cos, sin, out_dtype=out_dtype)
    (first,) = torch.autograd.grad(results[0], q, dq, create_graph=True)
    (second,) = torch.autograd.grad(first, dq, v := torch.randn_like(q))
    assert first.dtype == F32
    assert_bitwise(second, ops.rotary_embedding(v, v, cos, sin, out_dtype=out_dtype)[0])


@pytest.mark.parametrize("mode", [nullcontext, Watching], ids=["eager", "traced"])
def test_gradients_of_one_of_the_two(target, mode):
    """Only q requires grad; only k's result is used; a sum's gradient, which has no memory of its own."""
    q, k = (heads(2, h, 5, 16, F32, target.device, "transposed") for h in (4, 2))
    cos, sin = tables(5, 16, F32, target.device)
    leaf = q.detach().requires_grad_()
    with mode():
        q_out, k_out = ops.rotary_embedding(leaf, k, cos, sin)
    assert q_out.requires_grad and not k_out.requires_grad
    q_out.sum().backward()
    assert_ulps(leaf.grad, torch.autograd.grad(exact(leaf, k, cos, sin)[0].sum(), leaf)[0].double())
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    dq, dk = torch.autograd.grad(
        ops.rotary_embedding(*leaves, cos, sin)[1].sum(), leaves, allow_unused=True, materialize_grads=False
    )
    assert dq is None
    assert_ulps(dk, torch.autograd.grad(exact(*leaves, cos, sin)[1].sum(), leaves[1])[0].double())


def test_gradients_of_cos_and_sin(target):
    q, k = (heads(2, 2, 5, 16, F32, target.device) for _ in range(2))
    cos, sin = (table.requires_grad_() for table in tables(5, 8, F32, target.device))
    ours, truth = (
        torch.autograd.grad(sum(y.sum() for y in function(q, k, cos, sin)), (cos, sin))
        for function in (ops.rotary_embedding, exact)
    )
    for our, true in zip(ours, truth, strict=True):
        assert_ulps(our, true.double())


def test_a_graph_recorded_without_gradients_of_cos_and_sin_raises():
    """They were None, without an error."""

    class Rotary(torch.nn.Module):
        def forward(self, *operands):
            return ops.rotary_embedding(*operands)

    operands = (*(heads(2, 2, 5, 16, F32) for _ in range(2)), *tables(5, 8, F32))
    graph = torch.export.export(Rotary(), operands).module()
    leaves = [each.detach().requires_grad_() for each in operands]
    y, _ = graph(*leaves)
    with pytest.raises(RuntimeError, match=r"^rotary_embedding: cos and sin had no gradients when"):
        y.sum().backward()
    y, _ = torch.export.export(Rotary(), tuple(leaves)).module()(*leaves)
    expected = torch.autograd.grad(ops.rotary_embedding(*leaves)[0].sum(), leaves[2:])
    torch.testing.assert_close(torch.autograd.grad(y.sum(), leaves[2:]), expected)


def test_saves_cos_and_sin_only():
    q, k = (heads(2, 4, 8, 32, F32, layout="transposed").requires_grad_() for _ in range(2))
    cos, sin = tables(8, 32, F32)
    assert saved_bytes(lambda: ops.rotary_embedding(q, k, cos, sin)) == 2 * cos.numel() * 4


def test_tables_of_any_strides(target):
    """Columns of cos apart, rows of a longer table, and a tensor that torch negates lazily."""
    q, k = (heads(2, 2, 5, 8, F32, target.device) for _ in range(2))
    wide, apart = torch.randn(2, 9, 16, device=target.device), torch.randn(8, 5, device=target.device)
    negated = torch.randn(5, 8, dtype=torch.complex64, device=target.device).conj().imag
    assert negated.is_neg()
    for cos, sin in ((wide[:, 2:7, 4:12], wide[:, 4:, 8:]), (apart.t(), apart.t().flip(0)), (negated, negated)):
        for ours, truth in zip(ops.rotary_embedding(q, k, cos, sin), exact(q, k, cos, sin), strict=True):
            assert_ulps(ours, truth)


BAD = {
    "no-tensor": ({"q": [1.0]}, TypeError, "q must be a Tensor, got list"),
    "integers": ({"k": torch.ones(2, 2, 3, 8, dtype=torch.int64)}, TypeError, "k must be float32, .* got int64"),
    "sparse": ({"cos": torch.ones(3, 8).to_sparse()}, TypeError, "cos must be a dense"),
    "device": ({"sin": torch.ones(3, 8, device="meta")}, ValueError, "sin must be on the device of q, cpu, got meta"),
    "rank": ({"q": torch.ones(2, 3, 8)}, ValueError, r"q must have shape \(batch, heads, .* got \(2, 3, 8\)"),
    "k-dtype": ({"k": torch.ones(2, 1, 3, 8).half()}, TypeError, "k must have the dtype of q, float32, got float16"),
    "k-head-dim": (
        {"k": torch.ones(2, 1, 3, 6)},
        ValueError,
        r"k must have shape \(2, heads, 3, 8\), got \(2, 1, 3, 6",
    ),
    "k-positions": ({"k": torch.ones(2, 1, 4, 8)}, ValueError, r"k must have shape \(2, heads, 3, 8\), got"),
    "k-batch": ({"k": torch.ones(1, 1, 3, 8)}, ValueError, r"k must have shape \(2, heads, 3, 8\), got"),
    "odd": ({"cos": torch.ones(3, 5), "sin": torch.ones(3, 5)}, ValueError, "cos must have an even number .* 8, got 5"),
    "wide": ({"cos": torch.ones(3, 10), "sin": torch.ones(3, 10)}, ValueError, "cos must have an even .* 8, got 10"),
    "none": ({"cos": torch.ones(3, 0), "sin": torch.ones(3, 0)}, ValueError, "cos must have an even .* 8, got 0"),
    "positions": (
        {"cos": torch.ones(4, 8), "sin": torch.ones(4, 8)},
        ValueError,
        r"cos must have shape \(3, d\), .* got",
    ),
    "batch": (
        {"cos": torch.ones(3, 3, 8)},
        ValueError,
        r"cos must have shape \(3, d\), \(2, 3, d\) or .* got \(3, 3, 8",
    ),
    "rank-4": ({"cos": torch.ones(2, 1, 3, 8)}, ValueError, r"cos must have shape .* got \(2, 1, 3, 8\)"),
    "sin-shape": ({"sin": torch.ones(3, 6)}, ValueError, r"sin must have the shape of cos, \(3, 8\), got \(3, 6\)"),
    "sin-dtype": ({"sin": torch.ones(3, 8).half()}, TypeError, "sin must have the dtype of cos, float32, got float16"),
    "rank-0": ({"cos": torch.ones(())}, ValueError, r"cos must have .* got (a 0-dim|\(\))"),
    "interleaved": ({"interleaved": 1}, TypeError, "interleaved must be a bool, got 1"),
    "out-dtype": ({"out_dtype": F64}, TypeError, "out_dtype must be float32, float16 or bfloat16, got torch.float64"),
}


@pytest.mark.parametrize("change, error, message", BAD.values(), ids=BAD.keys())
def test_bad_input(change, error, message):
    given = {"q": torch.ones(2, 2, 3, 8), "k": torch.ones(2, 1, 3, 8), "cos": torch.ones(3, 8), "sin": torch.ones(3, 8)}
    with pytest.raises(error, match=f"^rotary_embedding: {message}"):
        ops.rotary_embedding(**(given | change))
