"""Other libraries: who is there, why not, and that each is called as its own signature wants it.

None of them runs on a CPU, so stand-ins with their signatures compute in PyTorch: what is tested is the call. The same
checks passed with their own Python code, its kernels interpreted or replaced: Liger-Kernel 0.6.2 and 0.8.5, flash-attn
2.6.3 and 2.8.3, QuACK 0.3.3 and 0.6.5, TransformerEngine 2.10.0 and 2.20.2.
"""

import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onetrip.benchmarks.measure import providers as providers_
from onetrip.benchmarks.measure.cases import Case, Operator, Session
from onetrip.benchmarks.measure.checks import Truth, make_inputs
from onetrip.benchmarks.measure.providers import LIBRARIES, has, providers, why_absent
from onetrip.benchmarks.suites import attention, row_norm, softmax
from torch import Tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPERATORS = {
    operator.name: operator
    for operator in (*row_norm.SINGLE, *row_norm.FUSED, softmax.SOFTMAX, *softmax.ATTENTION_SOFTMAX.values())
} | {"attention-L64-p0": attention.cases(quick=True)[0].operator}


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _liger() -> dict[str, Any]:
    """Liger-Kernel 0.8.5, transformers/functional.py; in place is its default, which must not be used."""

    def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        assert not in_place
        return _rms_norm(X, W, eps)

    def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        assert not in_place
        return _rms_norm(X + R, W, eps), X + R

    return {
        "liger_layer_norm": lambda X, W, B, eps: _layer_norm(X, W, B, eps),
        "liger_rms_norm": liger_rms_norm,
        "liger_fused_add_rms_norm": liger_fused_add_rms_norm,
        "liger_softmax": lambda x: torch.softmax(x, -1),
    }


def _apex_norms() -> dict[str, Any]:
    """apex/normalization/fused_layer_norm.py."""

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6, memory_efficient=False):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6, memory_efficient=False):
        return F.rms_norm(input, normalized_shape, weight, eps)

    return {"fused_layer_norm_affine": fused_layer_norm_affine, "fused_rms_norm_affine": fused_rms_norm_affine}


def _apex_softmax() -> dict[str, Any]:
    """apex/transformer/functional/fused_softmax.py: four dimensions, a boolean mask over queries and keys."""

    def scaled_masked_softmax(inputs, mask, scale):
        assert inputs.dim() == mask.dim() == 4
        assert mask.dtype == torch.bool
        assert mask.shape == (inputs.shape[0], 1, *inputs.shape[2:])
        return torch.softmax((inputs * scale).masked_fill(mask, -10000.0), -1)

    return {"scaled_masked_softmax": scaled_masked_softmax}


def _flash_attn_norms() -> dict[str, Any]:
    """flash_attn/ops/triton/layer_norm.py."""

    def layer_norm_fn(
        x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None,
        prenorm=False, residual_in_fp32=False, zero_centered_weight=False, is_rms_norm=False,
    ):  # fmt: skip
        z = F.dropout(x, dropout_p) if dropout_p else x
        z = z if residual is None else z + residual
        y = _rms_norm(z, weight, eps) if is_rms_norm else _layer_norm(z, weight, bias, eps)
        return (y, z) if prenorm else y

    return {"layer_norm_fn": layer_norm_fn}


def _quack() -> dict[str, Any]:
    """QuACK 0.6.5, rmsnorm.py and softmax.py."""

    def rmsnorm(
        x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False,
        weight_offset=0.0,
    ):  # fmt: skip
        z = x if residual is None else x + residual
        return (_rms_norm(z, weight, eps), z) if prenorm else _rms_norm(z, weight, eps)

    return {"rmsnorm": rmsnorm, "softmax": lambda x: torch.softmax(x, -1)}


def _transformer_engine() -> dict[str, Any]:
    """transformer_engine.pytorch: modules with keyword arguments eps, device, dtype."""

    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None):
            super().__init__(normalized_shape, eps=eps, device=device, dtype=dtype)

    class RMSNorm(torch.nn.RMSNorm):
        def __init__(self, normalized_shape, *, eps=1e-5, device=None, dtype=None):
            super().__init__(normalized_shape, eps=eps, device=device, dtype=dtype)

    return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def _flash_attn() -> dict[str, Any]:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None):
        assert q.dim() == 4  # batch, length, heads, width
        heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(*heads, dropout_p=dropout_p).transpose(1, 2)

    return {"flash_attn_func": flash_attn_func}


MODULES = {
    "liger_kernel.transformers.functional": _liger,
    "apex.normalization.fused_layer_norm": _apex_norms,
    "apex.transformer.functional.fused_softmax": _apex_softmax,
    "flash_attn": _flash_attn,
    "flash_attn.ops.triton.layer_norm": _flash_attn_norms,
    "quack": _quack,
    "transformer_engine.pytorch": _transformer_engine,
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in MODULES.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            parent = ".".join(parts[:n])
            if parent not in MODULES or parent not in sys.modules:
                module = ModuleType(parent)
                module.__spec__ = importlib.machinery.ModuleSpec(parent, None)
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, module)
        vars(sys.modules[name]).update(make())


CALLS = [(name, peer) for name, operator in OPERATORS.items() for peer in operator.others if peer in LIBRARIES]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "peer"), CALLS, ids=lambda value: value)
def test_every_library_computes_the_operator(name: str, peer: str) -> None:
    operator = OPERATORS[name]
    inputs = make_inputs(operator, 128, attention.WIDTH, torch.float32, CPU, seed=0)
    check = Truth(operator, inputs).check(operator.others[peer]())
    assert check.passed, check.detail


class _Bound(Exception):
    """The call fits."""


@pytest.mark.parametrize(("name", "peer"), CALLS, ids=lambda value: value)
def test_the_call_fits_the_signature_of_what_is_installed(
    name: str, peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(LIBRARIES[peer].module.partition(".")[0]) is None:
        pytest.skip(f"{LIBRARIES[peer].title} is not installed")

    def binding(module: str, function: str) -> Any:
        try:
            library = importlib.import_module(module)
        except Exception as error:  # it is there and does not load: without its GPU it may raise anything
            if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
                raise  # it is there, and what we import from it is not
            pytest.skip(f"{module} does not load here: {error}")
        signature = inspect.signature(getattr(library, function))

        def call(*args: Any, **words: Any) -> None:
            signature.bind(*args, **words)
            raise _Bound

        return call

    monkeypatch.setattr(providers_, "imported", binding)
    monkeypatch.setattr(row_norm, "imported", binding)
    operator = OPERATORS[name]
    inputs = make_inputs(operator, 64, attention.WIDTH, torch.float32, CPU, seed=0)
    with pytest.raises(_Bound):
        operator.others[peer]()(**inputs.tensors)


@pytest.mark.usefixtures("installed")
def test_the_parameters_of_a_module_are_those_of_the_call() -> None:
    operator = row_norm.LAYER_NORM
    function = operator.others["transformer-engine"]()
    for seed in range(2):
        inputs = make_inputs(operator, 8, 16, torch.float32, CPU, seed)
        assert Truth(operator, inputs).check(function).passed


def test_which_library_has_what() -> None:
    found = {name: {peer for peer in LIBRARIES if has(operator, peer)} for name, operator in OPERATORS.items()}
    assert found == {
        "layer_norm": {"liger", "apex", "flash-attn", "transformer-engine"},
        "rms_norm": {"liger", "apex", "flash-attn", "quack", "transformer-engine"},
        "bias_dropout_residual_layer_norm-p0.1": {"flash-attn"},
        "bias_dropout_residual_layer_norm-p0": {"flash-attn"},
        "bias_dropout_residual-p0.1": set(),
        "add_rms_norm": {"liger", "flash-attn", "quack"},
        "softmax": {"liger", "quack"},
        "scale_mask_softmax_dropout-p0.1": {"apex"},
        "scale_mask_softmax_dropout-p0": {"apex"},
        "attention-L64-p0": {"flash-attn"},
    }


def test_an_absent_library_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for library in LIBRARIES.values():
        assert why_absent(library.module, CPU) == why_absent(library.module, CUDA) == "not installed"


@pytest.mark.usefixtures("installed")
def test_an_installed_library_needs_a_gpu() -> None:
    for library in LIBRARIES.values():
        assert why_absent(library.module, CPU) == "needs CUDA"
        assert why_absent(library.module, CUDA) == ""


@pytest.mark.usefixtures("installed")
def test_a_broken_installation_says_what_its_import_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> ModuleType:
        raise OSError("undefined symbol: _ZN3c10\nand more")

    monkeypatch.setattr("importlib.import_module", broken)
    assert why_absent("quack", CUDA) == "quack cannot be imported (OSError: undefined symbol: _ZN3c10"


def _names(case: Case, **words: Any) -> list[str]:
    return [provider.name for provider in providers(case, Session(CPU, **words))]


def _case(operator: Operator, dtype: torch.dtype = torch.float32, full: bool = True) -> Case:
    return Case(operator, 8, 8, dtype, full)


def test_a_full_case_races_everybody_and_names_who_is_absent() -> None:
    assert _names(_case(row_norm.RMS_NORM)) == [
        "torch eager", "torch.compile", "Liger-Kernel", "apex", "flash-attn", "QuACK", "TransformerEngine",
        "onetrip cpu", "onetrip cuda", "onetrip triton", "onetrip reference",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [{"full": False}, {"dtype": torch.bfloat16}], ids=["width", "bf16"])
def test_a_small_case_races_eager_and_the_own_backend(words: dict[str, Any]) -> None:
    assert _names(_case(row_norm.RMS_NORM, **words)) == ["torch eager", "onetrip cpu"]
    assert _names(_case(row_norm.RMS_NORM), quick=True) == ["torch eager", "onetrip cpu"]


def test_attention_races_sdpa() -> None:
    case = attention.cases()[0]
    assert _names(case)[:6] == [
        "torch eager", "torch.compile", "SDPA flash", "SDPA efficient", "SDPA cudnn", "SDPA math",
    ]  # fmt: skip


def test_the_providers_asked_for_and_the_own_backend_are_measured_and_no_others() -> None:
    assert _names(_case(row_norm.RMS_NORM), against=("compile", "reference")) == [
        "torch.compile",
        "onetrip cpu",
        "onetrip reference",
    ]
    assert _names(_case(row_norm.RMS_NORM, full=False), quick=True, against=("cpu",)) == ["onetrip cpu"]


def test_who_lacks_the_operator_is_named_with_that_reason() -> None:
    (liger, _) = providers(_case(row_norm.BIAS_DROPOUT_RESIDUAL), Session(CPU, against=("liger",)))
    assert liger.unavailable(CPU) == "has no bias_dropout_residual-p0.1"
