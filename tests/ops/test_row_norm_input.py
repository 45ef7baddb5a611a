"""What the row_norm operators accept and reject: empty, strided, misaligned, wrong; and that they modify nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip import ops
from pairwise import pairwise
from row_norm_cases import Inputs, call, make
from tolerances import assert_bitwise, bits
from torch import Tensor

RNG = (5, 12)
ALL = "residual bias weight norm_bias"

# Every public operator on the same Inputs.
OPERATORS: dict[str, Callable[[Inputs], Any]] = {
    "layer_norm": lambda i: ops.layer_norm(i.x, i.weight, i.norm_bias),
    "rms_norm": lambda i: ops.rms_norm(i.x, i.weight),
    "bias_dropout_residual": lambda i: ops.bias_dropout_residual(i.x, i.residual, i.bias, dropout_p=0.3, rng=RNG),
    "bias_dropout_residual_norm": lambda i: call(i, dropout_p=0.3, rng=RNG, return_residual=True),
    "bias_dropout_residual_norm-rms": lambda i: call(
        Inputs(i.x, i.residual, i.bias, i.weight), dropout_p=0.3, rng=RNG, norm="rms"
    ),
    "add_norm": lambda i: call(i),
}
operators = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())


def results(operator: Callable[[Inputs], Any], i: Inputs) -> list[Tensor]:
    """Outputs and every gradient for fixed gradients of the outputs."""
    leaves = i.map(lambda tensor: tensor.detach().requires_grad_())
    outputs = operator(leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    found = torch.autograd.grad(outputs, list(leaves.tensors().values()), grads, allow_unused=True)
    return [*outputs, *(gradient for gradient in found if gradient is not None)]


@pytest.mark.promise("B1, B2")
@pairwise(
    dtype=[torch.float32, torch.bfloat16, torch.float64],
    shape=[(0,), (0, 8), (3, 0), (2, 0, 8), (0, 0), (2, 3, 0)],
    operator=OPERATORS,
)
def test_empty_tensors_give_empty_results_and_zero_gradients(target, dtype, shape, operator):
    if dtype == torch.float64 and target.backend != "reference":
        pytest.skip("float64 goes through reference")
    i = make(shape, dtype, ALL, device=target.device)
    leaves = i.leaves()
    outputs = operator(leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for output in outputs:
        assert output.shape == shape and output.dtype == dtype
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    used = [tensor for tensor in leaves.tensors().values() if tensor.grad is not None]
    assert leaves.x.grad is not None and len(used) >= 2
    for tensor in used:
        assert tensor.grad.shape == tensor.shape and tensor.grad.dtype == dtype and not tensor.grad.any()


@pytest.mark.promise("B1, B2")
@operators
@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 5), (5, 1), (1, 1, 1)], ids=str)
def test_one_row_and_one_column(target, shape, operator):
    i = make(shape, torch.float32, ALL, device=target.device)
    rows = Inputs(i.x.reshape(-1, shape[-1]), i.residual.reshape(-1, shape[-1]), i.bias, i.weight, i.norm_bias)
    for ours, expected in zip(results(operator, i), results(operator, rows), strict=True):
        assert_bitwise(ours.reshape(expected.shape), expected)


def spread(tensor: Tensor) -> Tensor:
    """The same values behind a storage offset of one element, in rows three elements too long."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 3), float("nan")).flatten()
    wide = torch.cat([wide.new_full((1,), float("nan")), wide])[1:].view(*tensor.shape[:-1], tensor.shape[-1] + 3)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def column_major(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.dim() < 2 else tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def every_other(tensor: Tensor) -> Tensor:
    doubled = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"))
    return doubled[..., ::2].copy_(tensor)


def permuted(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.dim() < 3 else tensor.transpose(0, 1).contiguous().transpose(0, 1)


def one_element_off(tensor: Tensor) -> Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


def lazily_negated(tensor: Tensor) -> Tensor:
    """A sign that does not show in the memory."""
    return torch._neg_view(-tensor)


LAYOUTS = [spread, column_major, every_other, permuted, one_element_off, lazily_negated]


@pytest.mark.promise("B3, B4")
@pairwise(width=[40, 67], dtype=[torch.float32, torch.bfloat16], layout=LAYOUTS, operator=OPERATORS)
def test_layout_changes_no_bit(target, width, dtype, layout, operator):
    i = make((3, 4, width), dtype, ALL, device=target.device)
    laid_out = i.map(layout)
    for ours, expected in zip(results(operator, laid_out), results(operator, i), strict=True):
        assert_bitwise(ours, expected)


@pytest.mark.promise("B3, B4")
@operators
@pytest.mark.parametrize("dims", ["rows", "batch", "columns", "all"])
def test_expanded_tensors_equal_their_copies(target, dims, operator):
    base = {"rows": (3, 1, 40), "batch": (1, 4, 40), "columns": (3, 4, 1), "all": (1, 1, 1)}[dims]
    i = make((3, 4, 40), torch.float32, ALL, device=target.device)
    i.x, i.residual = (make(base, torch.float32, device=target.device, seed=s).x.expand(3, 4, 40) for s in (1, 2))
    copies = i.map(lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
    for ours, expected in zip(results(operator, i), results(operator, copies), strict=True):
        assert_bitwise(ours, expected)


def test_parameters_may_be_strided_views(target):
    i = make((6, 33), torch.float32, ALL, device=target.device)
    views = Inputs(i.x, i.residual, *(every_other(tensor) for tensor in (i.bias, i.weight, i.norm_bias)))
    for operator in OPERATORS.values():
        for ours, expected in zip(results(operator, views), results(operator, i), strict=True):
            assert_bitwise(ours, expected)


@pytest.mark.promise("B10")
def test_one_tensor_in_every_role(target):
    x = torch.randn(8, 8, device=target.device)
    row = torch.randn(8, device=target.device)
    aliased = ops.bias_dropout_residual_norm(x, x, row, row, bias=row)
    apart = ops.bias_dropout_residual_norm(x, x.clone(), row.clone(), row.clone(), bias=row.clone())
    assert_bitwise(aliased, apart)


@pytest.mark.promise("B11")
@operators
def test_arguments_are_never_modified(target, operator):
    i = make((5, 64), torch.float32, ALL, device=target.device).map(spread)
    before = {
        name: bits(tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0)).clone()
        for name, tensor in i.tensors().items()
    }
    results(operator, i)
    for name, tensor in i.tensors().items():
        whole = bits(tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,), 0))
        assert torch.equal(whole, before[name]), name


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """New memory holds NaN (all ones in float32 workspaces too), as memory used before might."""
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = real(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.promise("T4")
@pairwise(n_rows=[1, 3, 130], width=[1, 5, 64, 1027], operator=OPERATORS)
def test_everything_allocated_is_written(target, n_rows, width, operator, request):
    i = make((n_rows, width), torch.float32, ALL, device=target.device)
    expected = results(operator, i)
    request.getfixturevalue("poisoned")
    for ours, clean in zip(results(operator, i), expected, strict=True):
        assert not ours.isnan().any()
        assert_bitwise(ours, clean)


def bad(name: str, value: Any, **options: Any) -> Callable[[Inputs], Any]:
    def run(i: Inputs) -> Any:
        setattr(i, name, value(i) if callable(value) else value)
        return call(i, **options)

    return run


X = torch.randn(4, 6)
REJECTED: dict[str, tuple[type[Exception], str, Callable[[Inputs], Any]]] = {
    "residual shape": (
        ValueError,
        r"residual must have the shape of x, \(4, 6\), got \(4, 5\)",
        bad("residual", X[:, :5]),
    ),
    "residual broadcast": (ValueError, r"residual must have the shape of x", bad("residual", X[:1])),
    "weight length": (ValueError, r"weight must have shape \(6,\), got \(5,\)", bad("weight", torch.ones(5))),
    "weight rank": (ValueError, r"weight must have shape \(6,\), got \(1, 6\)", bad("weight", torch.ones(1, 6))),
    "norm_bias length": (ValueError, r"norm_bias must have shape \(6,\), got \(7,\)", bad("norm_bias", torch.ones(7))),
    "bias length": (ValueError, r"bias must have shape \(6,\), got \(1,\)", bad("bias", torch.ones(1))),
    "x scalar": (ValueError, r"x must have at least one dimension", bad("x", torch.tensor(1.0))),
    "x integer": (TypeError, r"x must be float32, float16, bfloat16 or float64, got int64", bad("x", X.long())),
    "x bool": (TypeError, r"x must be .* got bool", bad("x", X > 0)),
    "x complex": (TypeError, r"x must be .* got complex64", bad("x", X.to(torch.complex64))),
    "x float8": (TypeError, r"x must be .* got float8_e4m3fn", bad("x", X.to(torch.float8_e4m3fn))),
    "x sparse": (TypeError, r"x must be a dense \(strided\) tensor, got torch.sparse_coo", bad("x", X.to_sparse())),
    "x csr": (TypeError, r"x must be a dense", bad("x", lambda i: i.x.to_sparse_csr())),
    "x nested": (TypeError, r"x must be a dense", bad("x", lambda i: torch.nested.nested_tensor([i.x, i.x]))),
    "x jagged": (
        TypeError,
        r"x must be a dense",
        bad("x", lambda i: torch.nested.nested_tensor([i.x, i.x], layout=torch.jagged)),
    ),
    "x numpy": (TypeError, r"x must be a Tensor, got ndarray", bad("x", X.numpy())),
    "x None": (TypeError, r"x must be a Tensor, got NoneType", bad("x", None)),
    "weight integer": (TypeError, r"weight must be .* got int32", bad("weight", torch.ones(6, dtype=torch.int32))),
    "weight complex": (
        TypeError,
        r"weight must be .* got complex",
        bad("weight", torch.ones(6, dtype=torch.complex64)),
    ),
    "bias list": (TypeError, r"bias must be a Tensor, got list", bad("bias", [0.0] * 6)),
    "residual half integer": (TypeError, r"residual must be .* got int16", bad("residual", X.short())),
    "residual on meta": (
        ValueError,
        r"residual must be on the device of x, cpu, got meta",
        bad("residual", X.to("meta")),
    ),
    "weight on meta": (
        ValueError,
        r"weight must be on the device of x, cpu, got meta",
        bad("weight", torch.ones(6, device="meta")),
    ),
    "p above one": (ValueError, r"dropout_p must be in \[0, 1\], got 1.5", bad("x", X, dropout_p=1.5)),
    "p below zero": (ValueError, r"dropout_p must be in \[0, 1\], got -0.1", bad("x", X, dropout_p=-0.1)),
    "p nan": (ValueError, r"dropout_p must be in \[0, 1\], got nan", bad("x", X, dropout_p=float("nan"))),
    "p string": (TypeError, r"dropout_p must be a number, got str", bad("x", X, dropout_p="0.1")),
    "weight_offset tensor": (TypeError, r"weight_offset must be a number, got Tensor", bad("x", X, weight_offset=X[0])),
    "eps negative": (ValueError, r"eps must be >= 0, got -1e-05", bad("x", X, eps=-1e-5)),
    "eps nan": (ValueError, r"eps must be >= 0, got nan", bad("x", X, eps=float("nan"))),
    "eps None": (TypeError, r"eps must be a number, got NoneType", bad("x", X, eps=None)),
    "norm name": (ValueError, r'norm must be "layer" or "rms", got \'batch\'', bad("x", X, norm="batch")),
    "cast order": (
        ValueError,
        r"cast_before_weight must be False, True or",
        bad("x", X, norm="rms", cast_before_weight="x"),
    ),
    "cast order of a layer norm": (
        ValueError,
        r"cast_before_weight must be False with",
        bad("x", X, cast_before_weight=True),
    ),
    "rng list": (TypeError, r"rng must be None or a \(seed, offset\) pair of ints", bad("x", X, rng=[1, 2])),
    "rng of floats": (TypeError, r"rng must be None or a", bad("x", X, rng=(1.0, 2))),
    "rng of three": (TypeError, r"rng must be None or a", bad("x", X, rng=(1, 2, 3))),
    "rng of 65 bits": (ValueError, r"rng must be a pair of 64-bit ints", bad("x", X, rng=(2**64, 0))),
}


@pytest.mark.promise("B5")
@pytest.mark.promise("B7, B8")
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("error", "message", "run"), REJECTED.values(), ids=REJECTED.keys())
def test_wrong_arguments_are_refused_by_name(error, message, run):
    state = torch.random.get_rng_state()
    with pytest.raises(error, match="^bias_dropout_residual_norm: " + message):
        run(make((4, 6), torch.float32, ALL))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_messages_name_the_function_that_was_called():
    short_weight = torch.ones(5)
    for run in (
        lambda: ops.layer_norm(X, short_weight),
        lambda: ops.rms_norm(X, short_weight),
        lambda: ops.layer_norm(X, eps=-1.0),
        lambda: ops.rms_norm(X, cast_before_weight="no"),  # type: ignore[arg-type]
        lambda: ops.bias_dropout_residual(X, X[:1]),
        lambda: ops.bias_dropout_residual(X, X, dropout_p=2.0),
    ):
        name = run.__code__.co_names[1]
        with pytest.raises(ValueError, match=f"^{name}: "):
            run()
    with pytest.raises(ValueError, match=r"^layer_norm: bias must have shape \(6,\), got \(5,\)"):
        ops.layer_norm(X, None, short_weight)


@pytest.mark.promise("B12")
def test_float64_goes_through_reference_in_any_part():
    i = make((4, 6), torch.float32, ALL)
    for name in i.tensors():
        mixed = (
            make((4, 6), torch.float32, ALL, dtypes={name: torch.float64})
            if name != "x"
            else make((4, 6), torch.float64, ALL)
        )
        for operator in OPERATORS.values():
            for result in results(operator, mixed):
                assert result.isfinite().all()
    assert call(make((4, 6), torch.float32, ALL, dtypes={"bias": torch.float64})).dtype == torch.float64


@pytest.mark.promise("B12")
@operators
def test_meta_tensors_give_meta_results(operator):
    i = make((4, 6), torch.bfloat16, ALL)
    expected = results(operator, i)
    found = results(operator, i.map(lambda tensor: tensor.to("meta")))
    assert [(r.shape, r.dtype, r.device.type) for r in found] == [(r.shape, r.dtype, "meta") for r in expected]


def test_meta_dropout_draws_from_no_generator():
    state = torch.random.get_rng_state()
    x = torch.empty(4, 6, device="meta")
    assert ops.bias_dropout_residual(x, x, dropout_p=0.5).is_meta
    assert torch.equal(torch.random.get_rng_state(), state)


class Wrapper(Tensor):
    """A tensor without memory of its own, as DTensor and quantised weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return function(*map(unwrap, args), **(kwargs or {}))


@pytest.mark.promise("B12")
@pytest.mark.parametrize("name", ["x", "residual", "bias", "weight", "norm_bias"])
def test_wrapped_tensors_reach_their_own_dispatch_in_any_role(target, name):
    """A kernel that took such a tensor's address would read null."""
    i = make((4, 6), torch.float32, ALL, device=target.device)
    expected = call(i)
    setattr(i, name, Wrapper(getattr(i, name)))
    with torch.no_grad():
        assert_bitwise(call(i), expected)


def test_parameter_subclasses_are_plain_tensors(target):
    i = make((4, 6), torch.float32, "weight", device=target.device)
    assert_bitwise(ops.layer_norm(i.x, torch.nn.Parameter(i.weight)), ops.layer_norm(i.x, i.weight))


@operators
def test_results_may_be_written_to(operator, target):
    """As torch's; autograd forbids it of views that a Function returns. What backward needs of them it misses."""
    i = make((2, 3, 8), torch.float32, ALL, device=target.device)
    leaves = i.leaves()
    outputs = operator(leaves)
    y, z = outputs if isinstance(outputs, tuple) else (outputs, None)
    y.mul_(3.0)
    y.sum().backward()
    assert_bitwise(leaves.x.grad, results_of_three(operator, i))
    if z is not None:
        y, z = operator(i.leaves())
        z.mul_(3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def results_of_three(operator: Callable[[Inputs], Any], i: Inputs) -> Tensor:
    """The gradient of x for gradients of 3."""
    leaves = i.leaves()
    outputs = operator(leaves)
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    y.backward(torch.full_like(y, 3.0))
    return leaves.x.grad
