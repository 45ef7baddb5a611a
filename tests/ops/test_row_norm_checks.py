"""Arguments of every row_norm function, role by role: exactly the wrong ones raise, always with the same words; and
what is unusual and right.

Calls with plain floats and no rng take a combined check, all others one check an argument: each case runs both ways.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip import nn, ops
from row_norm_cases import NAMES, call, make
from tolerances import assert_bitwise
from torch import Tensor

SHAPE = (4, 6)
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("x", "weight", "bias"),
    "rms_norm": ("x", "weight"),
    "bias_dropout_residual": ("x", "residual", "bias"),
    "bias_dropout_residual_norm": ("x", "residual", "weight", "norm_bias", "bias"),
}
ROLES = [pytest.param(name, role, id=f"{name}-{role}") for name, roles in FUNCTIONS.items() for role in roles]

# The same numbers, the second time such that the combined check does not apply.
WAYS = {
    "floats": {name: {} if name == "bias_dropout_residual" else {"eps": 1.0} for name in FUNCTIONS},
    "other_numbers": {name: {"rng": (0, 0)} if name == "bias_dropout_residual" else {"eps": 1} for name in FUNCTIONS},
}


def assert_raises(function: str, given: dict[str, Any], error: type[Exception], message: str) -> None:
    """Both ways, with the same words; with dropout too, before anything is drawn."""
    state = torch.random.get_rng_state()
    drops = [{"dropout_p": 0.5}] if "dropout" in function else []
    for way in [*(way[function] for way in WAYS.values()), *drops]:
        with pytest.raises(error) as raised:
            getattr(ops, function)(**given, **way)
        assert str(raised.value) == f"{function}: {message}"
    assert torch.equal(torch.random.get_rng_state(), state)


def arguments(function: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": SHAPE, "residual": SHAPE}
    return {
        role: torch.randn(shapes.get(role, SHAPE[-1:]), generator=generator).to(dtype) for role in FUNCTIONS[function]
    }


def fitting(role: str) -> str:
    """What the message says of a wrong shape in this role."""
    return f"must have the shape of x, {SHAPE}" if role == "residual" else f"must have shape ({SHAPE[-1]},)"


DTYPES = "must be float32, float16, bfloat16 or float64, got"
DENSE = "must be a dense (strided) tensor, got"
WRONG: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "int64": (lambda t: t.long(), TypeError, f"{DTYPES} int64"),
    "bool": (lambda t: t > 0, TypeError, f"{DTYPES} bool"),
    "complex64": (lambda t: t.to(torch.complex64), TypeError, f"{DTYPES} complex64"),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), TypeError, f"{DTYPES} float8_e4m3fn"),
    "sparse": (lambda t: t.to_sparse(), TypeError, f"{DENSE} torch.sparse_coo"),
    "csr": (lambda t: torch.atleast_2d(t).to_sparse_csr(), TypeError, f"{DENSE} torch.sparse_csr"),
    "mkldnn": (lambda t: t.to_mkldnn(), TypeError, f"{DENSE} torch._mkldnn"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), TypeError, f"{DENSE} a nested tensor"),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        TypeError,
        f"{DENSE} a nested tensor",
    ),
    "list": (lambda t: t.tolist(), TypeError, "must be a Tensor, got list"),
    "ndarray": (lambda t: t.numpy(), TypeError, "must be a Tensor, got ndarray"),
    "number": (lambda t: 1.0, TypeError, "must be a Tensor, got float"),
    "no_dimension": (
        lambda t: torch.tensor(1.0),
        ValueError,
        "must have at least one dimension, got a 0-dimensional tensor",
    ),
}
WRONG_BESIDE_X: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "one_column_less": (lambda t: t[..., :-1], ValueError, "{fitting}, got {shape}"),
    "one_column_more": (lambda t: torch.cat([t, t[..., :1]], -1), ValueError, "{fitting}, got {shape}"),
    "one_column": (lambda t: t[..., :1], ValueError, "{fitting}, got {shape}"),
    "one_dimension_more": (lambda t: t[None], ValueError, "{fitting}, got {shape}"),
    "empty": (lambda t: t[..., :0], ValueError, "{fitting}, got {shape}"),
    "meta": (lambda t: t.to("meta"), ValueError, "must be on the device of x, cpu, got meta"),
}
ACCEPTED: dict[str, Callable[[Tensor], Any]] = {
    "float16": lambda t: t.half(),
    "bfloat16": lambda t: t.bfloat16(),
    "float64": lambda t: t.double(),
    "leaf": lambda t: t.requires_grad_(),
    "parameter": lambda t: torch.nn.Parameter(t),
    "every_other_element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "expanded": lambda t: t[..., :1].expand(t.shape),
    "column_major": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t.clone(),
    "lazily_negated": lambda t: torch._neg_view(t),
}


@pytest.mark.promise("B7, B8")
@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize(("function", "role"), ROLES)
def test_what_no_argument_may_be(function, role, change, error, message):
    given = arguments(function)
    assert_raises(function, given | {role: change(given[role])}, error, f"{role} {message}")
    if role == "x" and function != "bias_dropout_residual":  # where nothing else is given, too
        rest = {"residual": None} if "residual" in given else {}
        assert_raises(function, {"x": change(given["x"])} | rest, error, f"x {message}")


@pytest.mark.promise("B5")
@pytest.mark.promise("B7, B8")
@pytest.mark.parametrize(("change", "error", "message"), WRONG_BESIDE_X.values(), ids=WRONG_BESIDE_X.keys())
@pytest.mark.parametrize(("function", "role"), [param for param in ROLES if param.values[1] != "x"])
def test_what_does_not_fit_x(function, role, change, error, message):
    given = arguments(function)
    given[role] = change(given[role])
    message = message.format(fitting=fitting(role), shape=tuple(given[role].shape))
    assert_raises(function, given, error, f"{role} {message}")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_are_needed(function):
    assert_raises(function, arguments(function) | {"x": None}, TypeError, "x must be a Tensor, got NoneType")


@pytest.mark.parametrize("change", ACCEPTED.values(), ids=ACCEPTED.keys())
@pytest.mark.parametrize(("function", "role"), ROLES)
def test_what_every_argument_may_be_gives_the_same_bits_both_ways(function, role, change):
    given = arguments(function)
    given[role] = change(given[role])
    one, other = (getattr(ops, function)(**given, **WAYS[way][function]) for way in WAYS)
    assert one.shape == SHAPE and one.isfinite().all()
    assert_bitwise(one, other)


@pytest.mark.parametrize(
    ("function", "role"),
    [param for param in ROLES if param.values[1] != "x" and param.values != ("bias_dropout_residual", "residual")],
)
def test_what_may_be_left_out(function, role):
    one, other = (getattr(ops, function)(**{**arguments(function), role: None}, **WAYS[way][function]) for way in WAYS)
    assert_bitwise(one, other)


NUMBERS: dict[str, tuple[str, Any, type[Exception], str]] = {
    "negative_eps": ("eps", -1e-9, ValueError, "must be >= 0, got -1e-09"),
    "nan_eps": ("eps", float("nan"), ValueError, "must be >= 0, got nan"),
    "eps_past_float64": ("eps", 2**53 + 1, ValueError, "must be a number that float64 holds"),
    "no_eps": ("eps", None, TypeError, "must be a number, got NoneType"),
    "eps_tensor": ("eps", torch.tensor(1.0), TypeError, "must be a number, got Tensor"),
    "offset_text": ("weight_offset", "1", TypeError, "must be a number, got str"),
    "offset_past_float64": ("weight_offset", -(2**60), ValueError, "must be a number that float64 holds"),
    "offset_nan": ("weight_offset", float("nan"), ValueError, "must be finite"),
    "offset_infinite": ("weight_offset", float("inf"), ValueError, "must be finite"),
    "offset_overflow": ("weight_offset", 1e39, ValueError, "must be finite in float32, got 1e+39"),
    "offset_tensor": ("weight_offset", torch.tensor(1.0), TypeError, "must be a number, got Tensor"),
    "cast_list": ("cast_before_weight", [], ValueError, 'must be False, True or "weight", got []'),
    "cast_tensor": ("cast_before_weight", torch.ones(2), ValueError, 'must be False, True or "weight", got tensor'),
    "cast_one": ("cast_before_weight", 1, ValueError, 'must be False, True or "weight", got 1'),
    "residual_one": ("return_residual", 1, TypeError, "must be a bool, got 1"),
    "norm": ("norm", "batch", ValueError, 'must be "layer" or "rms", got \'batch\''),
    "p_above_one": ("dropout_p", 1.5, ValueError, "must be in [0, 1], got 1.5"),
    "p_below_zero": ("dropout_p", -0.1, ValueError, "must be in [0, 1], got -0.1"),
    "nan_p": ("dropout_p", float("nan"), ValueError, "must be in [0, 1], got nan"),
    "p_text": ("dropout_p", "0.1", TypeError, "must be a number, got str"),
    "rng_list": ("rng", [1, 2], TypeError, "must be None or a (seed, offset) pair of ints"),
    "rng_floats": ("rng", (1.0, 2), TypeError, "must be None or a (seed, offset) pair of ints"),
    "rng_of_three": ("rng", (1, 2, 3), TypeError, "must be None or a (seed, offset) pair of ints"),
    "rng_of_65_bits": ("rng", (2**64, 0), ValueError, "must be a pair of 64-bit ints"),
}


@pytest.mark.promise("B7, B8")
@pytest.mark.parametrize(
    ("function", "argument", "value", "error", "message"),
    [
        pytest.param(function, *case, id=f"{function}-{name}")
        for name, case in NUMBERS.items()
        for function in FUNCTIONS
        if case[0] in inspect.signature(getattr(ops, function)).parameters
    ],
)
def test_wrong_numbers(function, argument, value, error, message):
    state = torch.random.get_rng_state()
    with pytest.raises(error) as raised:
        getattr(ops, function)(**arguments(function), **{argument: value})
    assert str(raised.value).startswith(f"{function}: {argument} {message}")
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("function", ["rms_norm", "bias_dropout_residual_norm"])
def test_an_offset_without_a_weight(function):
    given = arguments(function) | {"weight": None}
    assert_raises(
        function, given | {"weight_offset": 0.5}, ValueError, "weight_offset must be 0 without a weight, got 0.5"
    )
    for make_module in (nn.RMSNorm, nn.BiasDropoutResidualNorm):
        with pytest.raises(ValueError, match=f"^{make_module.__name__}: weight_offset must be 0 without a weight"):
            make_module(6, elementwise_affine=False, weight_offset=0.5)
        make_module(6, elementwise_affine=False)


def test_a_module_that_returns_its_residual():
    with pytest.raises(TypeError, match=r"^BiasDropoutResidualNorm: return_residual must be a bool, got 1"):
        nn.BiasDropoutResidualNorm(6, return_residual=1)


def test_a_cast_order_of_a_layer_norm():
    with pytest.raises(ValueError, match="cast_before_weight must be False with"):
        ops.bias_dropout_residual_norm(**arguments("bias_dropout_residual_norm"), cast_before_weight=True)


@pytest.mark.parametrize(
    ("value", "shown"), [(torch.int8, "torch.int8"), ("half", "'half'"), (torch.ones(2), "tensor")]
)
@pytest.mark.parametrize("function", ["layer_norm", "rms_norm"])
def test_wrong_dtypes_of_results(function, value, shown):
    with pytest.raises(TypeError) as raised:
        getattr(ops, function)(**arguments(function), out_dtype=value)
    assert str(raised.value).startswith(f"{function}: out_dtype must be float32, float16 or bfloat16, got {shown}")


ALL = "residual bias weight norm_bias"


@pytest.mark.promise("B10")
def test_one_tensor_in_every_role(target):
    x = torch.randn(8, 8, device=target.device)
    row = torch.randn(8, device=target.device)
    aliased = ops.bias_dropout_residual_norm(x, x, row, row, bias=row)
    apart = ops.bias_dropout_residual_norm(x, x.clone(), row.clone(), row.clone(), bias=row.clone())
    assert_bitwise(aliased, apart)


@pytest.mark.promise("B12")
def test_float64_goes_through_reference_in_any_part():
    for name in NAMES:
        leaves = make((4, 6), torch.float32, ALL, dtypes={name: torch.float64}).leaves()
        y, z = call(leaves, dropout_p=0.3, rng=(5, 12), return_residual=True)
        assert (y.dtype == z.dtype == torch.float64) == (name not in ("weight", "norm_bias"))
        (y + z).sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in leaves.tensors().values())


def test_meta_dropout_draws_from_no_generator():
    state = torch.random.get_rng_state()
    x = torch.empty(4, 6, device="meta")
    assert ops.bias_dropout_residual(x, x, dropout_p=0.5).is_meta
    assert torch.equal(torch.random.get_rng_state(), state)
