import math
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from onetrip import anatomy, doctor, patch_model, selfcheck, set_backend
from onetrip.ops.common import backends
from onetrip.reference import adam

CPU = torch.device("cpu")
KERNELS = {kernel.name: kernel for kernel in selfcheck.KERNELS}


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


@pytest.fixture
def without_native(monkeypatch):
    """As on a machine without a C++ compiler."""

    def forget():
        backends.unavailable_reason.cache_clear()
        backends._automatic.cache_clear()

    monkeypatch.setattr(backends, "native", lambda: None)
    monkeypatch.setattr(doctor, "native", lambda: None)
    forget()
    yield
    monkeypatch.undo()
    forget()


def test_every_available_backend_is_checked_and_passes(report):
    failed = [check for check in report.checks if not check.passed]
    assert not failed
    assert report.healthy
    checked = {(check.device, check.backend) for check in report.checks}
    assert checked == {
        (str(device), backend) for device in doctor.devices() for backend in backends.available_backends(device)
    }
    for backend in backends.available_backends("cpu"):
        here = [check for check in report.checks if (check.device, check.backend) == ("cpu", backend)]
        assert {check.kernel for check in here} == set(KERNELS)
        assert {check.direction for check in here} == {"forward", "backward", "step"}
        assert {"fp32", "fp16", "bf16", "bf16/fp32"} <= {check.dtype for check in here}


def test_choices_cover_every_device_and_dtype(report):
    for device in doctor.devices():
        choices = [choice for choice in report.choices if choice.device == str(device)]
        dtypes = [dtype for choice in choices for dtype in choice.dtypes.split(", ")]
        assert sorted(dtypes) == ["bfloat16", "float16", "float32", "float64"]
        assert next(c for c in choices if "float64" in c.dtypes).backend == "reference"
        assert next(c for c in choices if "float32" in c.dtypes).backend == backends.available_backends(device)[0]
        assert all(choice.why for choice in choices)


def test_report_reads_whole_in_eighty_columns(report, printed):
    text = printed(doctor.render(report))
    assert "bias+dropout+residual+layer" in text
    assert f"all {len(report.checks)} checks passed" in text


def test_without_the_native_library_it_says_so_and_what_to_do(without_native):
    facts, choices = doctor._facts(), doctor._choices(CPU)
    assert facts["native library"].startswith("not built: install a C++ compiler")
    assert facts["CUDA kernels"] == "not built"
    assert "cpu" not in backends.available_backends("cpu")
    assert "onetrip._native was not built" in choices[0].why


def test_doctor_names_why_there_are_no_cuda_kernels():
    """ONETRIP_CUDA=0 at build time was reported as no nvcc."""
    reasons = ("ONETRIP_CUDA=0 at installation", "no nvcc was found at installation", "nvcc knew none of the GPUs")
    library = SimpleNamespace(
        cuda_architectures=lambda: "", cuda_unavailable_reason=lambda index: f"built: {reasons[0]}"
    )
    assert doctor._cuda_kernels(library) == f"built: {reasons[0]}; NVIDIA GPUs are served by the Triton kernels"
    real = backends.native()
    if real is not None and not real.cuda_architectures():
        assert any(reason in doctor._facts()["CUDA kernels"] for reason in reasons)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.1


@pytest.mark.parametrize(
    "name",
    [
        "bias+dropout+residual+layer",
        "scale+mask+softmax+dropout",
        "packed glu, silu",
        "bias+gelu",
        "rotary",
        "moe",
        "cross_entropy",
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "bf16/fp32"])
@pytest.mark.parametrize(
    ("change", "failing"),
    [
        pytest.param(lambda y: y * 1.1, {"forward", "backward"}, id="ten-percent-off"),
        pytest.param(_WrongGradient.apply, {"backward"}, id="wrong-gradients"),
        pytest.param(lambda y: y.index_fill(0, torch.tensor(3), math.nan), {"forward"}, id="a-row-of-nan"),
        pytest.param(lambda y: y.roll(1, 0), {"forward", "backward"}, id="rows-shifted"),
    ],
)
def test_a_wrong_kernel_fails(change, failing, dtype, name):
    kernel = replace(KERNELS[name], fused=lambda **inputs: change(KERNELS[name].fused(**inputs)))
    checks = selfcheck.run_check(CPU, "reference", kernel, dtype)
    assert failing <= {check.direction for check in checks if not check.passed}
    if failing == {"backward"}:
        assert checks[0].passed


def test_a_backend_is_asked_for_its_families_only():
    by_backend = {backend: {kernel.family for kernel, _ in selfcheck.cases(backend)} for backend in backends.BACKENDS}
    every = {kernel.family for kernel in selfcheck.KERNELS}
    assert by_backend.pop("reference") == every
    for backend, families in by_backend.items():
        assert families == backends.FAMILIES[backend] & every


@pytest.mark.parametrize("name", ["adam, 8-bit states", "adam, 32-bit states"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "bf16/fp32"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "decayed-moment"])
def test_adam_s_updates_are_checked(wrong, dtype, name, monkeypatch):
    if wrong:
        scalars = adam.scalars
        monkeypatch.setattr(adam, "scalars", lambda *args: scalars(*args)._replace(one_minus_beta1=0.11))
    (check,) = selfcheck.run_check(CPU, "reference", KERNELS[name], dtype)
    assert (check.direction, check.passed) == ("step", not wrong), check


@pytest.mark.parametrize("name", ["bias+dropout+residual", "scale+mask+softmax+dropout"])
def test_another_dropout_mask_fails(name):
    right = KERNELS[name]
    kernel = replace(right, unfused=lambda keep, **inputs: right.unfused(keep.roll(1, 1), **inputs))
    checks = selfcheck.run_check(CPU, "reference", kernel, "fp32")
    assert not any(check.passed for check in checks)


def test_a_kernel_that_raises_is_a_failure_with_its_message(printed):
    def broken(**inputs):
        raise RuntimeError("CUDA error 700: an illegal memory access\nmore lines")

    checks = selfcheck.run_check(CPU, "reference", replace(KERNELS["layer_norm"], fused=broken), "fp32")
    assert [check.failure for check in checks] == ["RuntimeError: CUDA error 700: an illegal memory access"] * 2
    text = printed(doctor.render(doctor.Report({}, (), checks)), width=200)
    assert "2 of 2 checks failed" in text
    assert "illegal memory access" in text


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("", ""),
        ("auto", ""),
        ("reference", ""),
        ("bogus", "ONETRIP_BACKEND must be one of"),
        ("cuda", "ONETRIP_BACKEND=cuda: every operator raises, since the cuda backend runs on cuda tensors only"),
    ],
)
def test_a_backend_that_the_environment_names_in_vain_is_a_fault(monkeypatch, value, told, printed):
    monkeypatch.setenv("ONETRIP_BACKEND", value)
    monkeypatch.setattr(backends, "_process_choice", None)
    fault = backends.environment_fault([torch.device("cpu")])
    assert fault.startswith(told) and bool(fault) == bool(told)
    report = doctor.Report({}, (), (), fault)
    assert report.healthy == (not told) and told in printed(doctor.render(report), width=200)
    with pytest.raises(anatomy.UsageError, match=f"^{re.escape(told)}") if told else nullcontext():
        anatomy.Options(model="tiny-bert", device="cpu").check()
    with pytest.raises(ValueError, match=f"^patch_model: {told}") if value == "bogus" else nullcontext():
        patch_model(torch.nn.Linear(2, 2))
    set_backend("reference")  # instead
    patch_model(torch.nn.Linear(2, 2))


def test_checks_leave_the_generator_alone():
    state = torch.get_rng_state()
    selfcheck.run_check(CPU, "reference", KERNELS["bias+dropout+residual+rms"], "fp32")
    assert torch.equal(torch.get_rng_state(), state)
