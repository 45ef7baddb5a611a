"""What the native library asks tensors by itself: `operands`, and the arguments of launchers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from onetrip import ops
from onetrip.ops import row_norm_native as native
from onetrip.ops import softmax_autograd
from onetrip.ops.common import native as helpers
from onetrip.ops.common.backends import native as native_library
from onetrip.reference.row_norm import NORM_LAYER, Dtypes, Operands, RowNormPlan
from onetrip.reference.softmax import SoftmaxPlan
from torch import Tensor

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")
needs_dlpack = pytest.mark.skipif(
    not hasattr(Tensor, "__dlpack_c_exchange_api__"), reason="torch before 2.10 has no DLPack C exchange"
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
N = 8


class Subclass(Tensor):
    pass


def matrix(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(shape or (2, N), dtype=dtype)


def vector(n: int = N, dtype: torch.dtype = F32) -> Tensor:
    return torch.ones(n, dtype=dtype)


FITTING = {
    "x_alone": (matrix(), None, None, None, None),
    "all": (matrix(), matrix(), vector(), vector(), vector()),
    "parameters": (matrix(), None, None, torch.nn.Parameter(vector()), torch.nn.Parameter(vector())),
    "each_its_dtype": (matrix(dtype=F16), matrix(), vector(dtype=BF16), vector(dtype=F16), vector()),
    "rank_1": (vector(), vector(), None, vector(), None),
    "rank_4": (matrix(2, 1, 3, N), matrix(2, 1, 3, N), None, vector(), None),
    "one_row_of_any_stride": (matrix(4, N)[::2][:1], None, None, vector(), None),
    "requires_grad": (matrix().requires_grad_(), None, None, vector().requires_grad_(), None),
}

NOT_PLAIN = {
    "strided_x": (matrix(2, 2 * N)[:, ::2], None, None, None, None),
    "strided_rows": (matrix(2, 2 * N)[:, :N], None, None, None, None),
    "transposed_residual": (matrix(N, N), matrix(N, N).t(), None, None, None),
    "strided_weight": (matrix(), None, None, vector(2 * N)[::2], None),
    "negated_x": (torch._neg_view(matrix()), None, None, None, None),
    "negated_norm_bias": (matrix(), None, None, None, torch._neg_view(vector())),
    "no_rows": (matrix(0, N), None, None, vector(), None),
    "no_columns": (matrix(2, 0), None, None, vector(0), None),
}

NOT_FITTING = {
    "x_none": (None, None, None, None, None),
    "x_list": ([1.0], None, None, None, None),
    "x_0_dimensional": (torch.tensor(1.0), None, None, None, None),
    "x_float64": (matrix(dtype=torch.float64), None, None, None, None),
    "x_int32": (matrix(dtype=torch.int32), None, None, None, None),
    "x_complex64": (matrix(dtype=torch.complex64), None, None, None, None),
    "x_sparse": (matrix().to_sparse(), None, None, None, None),
    "x_nested": (torch.nested.nested_tensor([vector()]), None, None, None, None),
    "x_meta": (matrix().to("meta"), None, None, None, None),
    "x_subclass": (matrix().as_subclass(Subclass), None, None, None, None),
    "weight_subclass": (matrix(), None, None, vector().as_subclass(Subclass), None),
    "weight_float64": (matrix(), None, None, vector(dtype=torch.float64), None),
    "weight_on_meta": (matrix(), None, None, vector().to("meta"), None),
    "weight_too_long": (matrix(), None, None, vector(N + 1), None),
    "weight_of_one_row": (matrix(), None, None, matrix(1, N), None),
    "weight_of_the_rank_of_x": (matrix(), None, None, matrix(), None),
    "bias_a_number": (matrix(), None, 1.0, None, None),
    "residual_of_fewer_rows": (matrix(), matrix(1, N), None, None, None),
    "residual_of_one_dimension_more": (matrix(), matrix(1, 2, N), None, None, None),
    "residual_a_row": (matrix(), vector(), None, None, None),
}


def read(*tensors: Tensor | None) -> tuple[Dtypes, bool] | None:
    code = helpers.read.operands(Operands(*tensors))
    return None if code < 0 else native.decode(code)


@needs_dlpack
@pytest.mark.parametrize("name", [*FITTING, *NOT_PLAIN])
def test_operands_that_fit_and_whether_kernels_can_read_them_as_they_are(name):
    tensors = FITTING.get(name) or NOT_PLAIN[name]
    assert read(*tensors) == (native.dtypes_of(tensors), name in FITTING)


@pytest.mark.parametrize("tensors", [pytest.param(tensors, id=name) for name, tensors in NOT_FITTING.items()])
def test_operands_that_are_left_to_the_checks(tensors):
    assert read(*tensors) is None


@needs_dlpack
def test_a_batched_tensor_is_left_to_the_checks():
    seen = []
    torch.func.vmap(lambda x: seen.append(read(x, None, None, None, None)) or x)(matrix())
    assert seen == [None]


@pytest.fixture
def torch_without_dlpack(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch before 2.10."""

    class Old:
        pass

    assert library.operands_reader(Old, Old) is None
    for name in ("operands", "scores"):
        monkeypatch.setattr(helpers.read, name, lambda *_: -1)
    yield


def scores(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(sizes or (2, 3, N), dtype=dtype)


KEEPS = torch.tensor([True] * (N - 1) + [False])
FITTING_SCORES = {
    "alone": (scores(), None, False),
    "causal": (scores(dtype=BF16), None, True),
    "one_dimension": (scores(N), None, False),
    "a_row_of_bool": (scores(), KEEPS, False),
    "a_mask_of_a_batch": (scores(dtype=F16), scores(2, 1, N), True),
    "any_strides_of_a_mask": (scores(), scores(2, N, 3).mT, False),
    "a_number_in_a_tensor": (scores(), torch.tensor(0.5), False),
    "parameters": (torch.nn.Parameter(scores()), torch.nn.Parameter(scores(3, N, dtype=BF16)), False),
}
PREPARED_SCORES = {
    "rows_apart": (scores(2, 3, 2 * N)[..., :N], None, False),
    "empty": (scores(0, N), None, False),
    "lazily_negated": (torch._neg_view(scores()), None, False),
    "mask_lazily_negated": (scores(), torch._neg_view(scores()), False),
    "both_empty": (scores(0, N), scores(0, N), False),
}
UNFIT_SCORES = {
    "list": ([1.0], None, False),
    "0_dimensional": (torch.tensor(1.0), None, False),
    "float64": (scores(dtype=torch.float64), None, False),
    "causal_of_one_dimension": (scores(N), None, True),
    "meta": (scores().to("meta"), None, False),
    "subclass": (scores().as_subclass(Subclass), None, False),
    "zeros_without_memory": (torch._efficientzerotensor(2, N), None, False),
    "mask_float64": (scores(), scores(dtype=torch.float64), False),
    "mask_int64": (scores(), torch.ones(N, dtype=torch.int64), False),
    "mask_uint8": (scores(), torch.ones(N, dtype=torch.uint8), False),
    "mask_subclass": (scores(), scores().as_subclass(Subclass), False),
    "mask_on_meta": (scores(), scores().to("meta"), False),
    "mask_sparse": (scores(), scores().to_sparse(), False),
    "mask_of_another_width": (scores(), scores(N + 1), False),
    "mask_of_more_dimensions": (scores(3, N), scores(2, 3, N), False),
    "mask_of_fewer_rows": (scores(), scores(2, N), False),
    "mask_a_list": (scores(), [True] * N, False),
}
MASK_DIGIT = {F32: 1, F16: 2, BF16: 3, torch.bool: 4}


@needs_dlpack
@pytest.mark.parametrize("name", [*FITTING_SCORES, *PREPARED_SCORES])
def test_scores_and_masks_that_softmax_takes(name):
    given = FITTING_SCORES.get(name) or PREPARED_SCORES[name]
    digits = (0 if tensor is None else MASK_DIGIT[tensor.dtype] for tensor in given[:2])
    code = sum(8**place * digit for place, digit in zip((1, 0), digits, strict=True))
    assert helpers.read.scores(*given) == 2 * code + (name in FITTING_SCORES)


@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in UNFIT_SCORES.items()])
def test_scores_and_masks_that_are_left_to_the_checks(given):
    assert helpers.read.scores(*given) == -1


def weights(given: tuple[Any, ...], needs: tuple[bool, bool]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [
        tensor.detach().requires_grad_(needed and tensor.is_floating_point()) if tensor is not None else None
        for tensor, needed in zip(given[:2], needs, strict=True)
    ]
    y = ops.softmax(leaves[0], leaves[1], causal=given[2], scale=0.5, dropout_p=0.25)
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return [y, *(torch.autograd.grad(y.float().square().sum(), wanted) if wanted else ())]


@pytest.mark.parametrize("needs", [(False, False), (True, False), (True, True)], ids=["no_grad", "scores", "both"])
@pytest.mark.parametrize("given", [pytest.param(given, id=name) for name, given in FITTING_SCORES.items()])
def test_an_older_torch_gets_the_same_weights(given, needs, request: pytest.FixtureRequest):
    expected = weights(given, needs)
    request.getfixturevalue("torch_without_dlpack")
    assert all(torch.equal(a, b) for a, b in zip(weights(given, needs), expected, strict=True))


@needs_dlpack
def test_arguments_that_eager_calls_do_not_take():
    softmax = import_module("onetrip.ops.softmax")  # onetrip.ops.softmax is the function
    plan, call = softmax._prepare(1.0, False, 0.0, False, helpers.read.scores(scores(), None, False))
    assert plan == SoftmaxPlan(1.0, False, 0.0, False) and call is not None
    for arguments, message in (
        (((scores(), None),), "operands, and rng"),
        (((scores(),), None), "operands, and rng"),
        (([scores(), None], None), "operands, and rng"),
        (((None, None), None), "tensors with memory"),
        (((scores(), "mask"), None), "tensors with memory"),
    ):
        with pytest.raises(TypeError, match=message):
            call(*arguments)
    with pytest.raises(TypeError, match="ctx, operands and a tuple"):
        softmax_autograd._Softmax.forward(None, scores(), None)
    with pytest.raises(TypeError, match="a function of the native library"):
        softmax_autograd._Softmax.forward(None, scores(), None, (None, object()))


def results() -> list[Tensor]:
    torch.manual_seed(0)
    x, residual = (torch.randn(3, N, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(N, requires_grad=True) for _ in range(2))
    leaves = (x, residual, weight, bias)
    y = ops.bias_dropout_residual_norm(x, residual, weight, bias, bias=bias, dropout_p=0.5)
    return [y, *torch.autograd.grad(y.square().sum(), leaves)]


def test_an_older_torch_gets_the_same_bits_and_checks(request: pytest.FixtureRequest):
    expected = results()
    request.getfixturevalue("torch_without_dlpack")
    assert all(torch.equal(a, b) for a, b in zip(results(), expected, strict=True))
    with pytest.raises(ValueError, match=r"layer_norm: weight must have shape \(8,\), got \(9,\)"):
        ops.layer_norm(matrix(), vector(N + 1))


LAUNCH = (-1, 0, 1, N, (matrix(1, N), *(None,) * 4), N, 0, (matrix(1, N), None, None, None), None)


PLAN = RowNormPlan(NORM_LAYER, 1e-5, 0.0, 0.0, F32, F32, F32, False, False, False)
UNREADABLE = {
    "too_few": (LAUNCH[:-1], TypeError, "too few arguments"),
    "too_many": ((*LAUNCH, None), TypeError, "too many arguments"),
    "no_tensor": ((*LAUNCH[:4], (1.0, *(None,) * 4), *LAUNCH[5:]), AttributeError, "data_ptr"),
    "too_few_operands": ((*LAUNCH[:4], LAUNCH[4][:4], *LAUNCH[5:]), TypeError, "too few arguments"),
    "too_many_operands": ((*LAUNCH[:4], (*LAUNCH[4], None), *LAUNCH[5:]), TypeError, "too many arguments"),
    "no_tuple": ((*LAUNCH[:4], LAUNCH[4][0], *LAUNCH[5:]), TypeError, "needs a tuple"),
    "device_no_int": (("cpu", *LAUNCH[1:]), TypeError, "int"),
    "seed_no_int": ((*LAUNCH[:-1], ("seed", 0)), TypeError, "int"),
    "too_large": ((*LAUNCH[:2], 2**63, *LAUNCH[3:]), OverflowError, "int"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_launcher_names_what_it_cannot_read(arguments, error, message):
    launch = native.forward_launcher(PLAN, Dtypes(F32))
    assert launch(*LAUNCH) == 0
    with pytest.raises(error, match=message):
        launch(*arguments)


@pytest.mark.skipif(bool(library and library.cuda_architectures()), reason="built with CUDA")
def test_a_launch_on_a_card_needs_a_build_with_cuda():
    with pytest.raises(RuntimeError, match="was built without CUDA"):
        native.forward_launcher(PLAN, Dtypes(F32))(0, *LAUNCH[1:])


@pytest.mark.parametrize("role", range(5), ids=["x", "residual", "bias", "weight", "norm_bias"])
def test_torchs_zeros_without_memory_are_zeros(role):
    given = [matrix(), matrix(), vector(), vector(), vector()]
    given[role] = torch._efficientzerotensor(given[role].shape)
    assert read(*given) is None
    zeros = [tensor.clone() for tensor in given]
    results = [ops.bias_dropout_residual_norm(x, r, w, n, bias=b) for x, r, b, w, n in (given, zeros)]
    assert torch.equal(*results)


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("role", range(5), ids=["x", "residual", "bias", "weight", "norm_bias"])
def test_a_tensor_whose_memory_was_freed_is_refused(role):
    given = [matrix(), matrix(), vector(), vector(), vector()]
    given[role] = freed(given[role])
    x, residual, bias, weight, norm_bias = given
    with pytest.raises(RuntimeError, match="a launcher got a tensor without memory"):
        ops.bias_dropout_residual_norm(x, residual, weight, norm_bias, bias=bias)


def test_seeds_whose_memory_was_freed_are_refused():
    launch = native.forward_launcher(PLAN._replace(dropout_p=0.5), Dtypes(F32))
    assert launch(*LAUNCH[:-1], torch.tensor([1, 2])) == 0
    with pytest.raises(RuntimeError, match="a launcher got a tensor without memory"):
        launch(*LAUNCH[:-1], freed(torch.tensor([1, 2])))
