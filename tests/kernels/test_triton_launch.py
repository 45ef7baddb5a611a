"""Launch: which launches share what Triton compiled, and with which arguments that is run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onetrip.kernels
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
from onetrip.kernels import launch as launching  # noqa: E402


class Kernel:
    """Stands in for a JITFunction of (x_ptr, bias_ptr, seed, n, scale, ALIGN, BLOCK), and for what it is compiled
    to."""

    arg_names = ("x_ptr", "bias_ptr", "seed", "n", "scale", "ALIGN", "BLOCK")
    constexprs = (5, 6)
    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.fn: Callable[[], None] = lambda: None
        self.searches = 0
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def search(*arguments: Any, **named: Any) -> Any:
            self.searches += 1
            return self

        return search

    def run(self, *arguments: Any) -> None:
        self.runs.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    if not launching._TAKES_CONSTANTS:
        pytest.skip("before triton 3.3 all launches are Triton's")
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launching, "_compiled", {})
    return Kernel()


class OnAnotherDevice(Tensor):
    """Which Triton, when it is asked, refuses or does not."""

    def get_device(self) -> int:
        return 1


X = torch.zeros(64)
GIVEN = {"n": 64, "scale": 1.0, "ALIGN": 16, "BLOCK": 32, "num_warps": 4}


def run(
    kernel: Kernel,
    x: Tensor | None = X,
    bias: Tensor | None = None,
    seed: int = 7,
    grid: tuple[int, ...] = (2,),
    **new: Any,
) -> None:
    launching.Launch(kernel, grid, **{**GIVEN, **new})(x, bias, seed)


def test_other_values_are_no_other_kernel(kernel: Kernel) -> None:
    """Among them 1 and multiples of 16, on which Triton specializes unless a kernel forbids it."""
    run(kernel)
    other = torch.ones(16)
    run(kernel, other, grid=(3, 5), BLOCK=32, scale=0.5, n=1, ALIGN=16, seed=1)
    assert kernel.searches == 1
    hooks = None, None, None
    values = other.data_ptr(), None, 1, 1, 0.5, 16, 32
    assert kernel.runs == [(3, 5, 1, "stream of 0", "function", "metadata", *hooks, *values)]


def test_one_launch_with_other_tensors(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a Launch has found it keeps, apart for every dtype and alignment, and no seed with it."""
    launch = launching.Launch(kernel, (2,), **GIVEN)
    given = [(X, None), (X.half(), None), (X[1:], None), (torch.ones(16), None), (None, X), (None, None)]
    for tensors in given * 2:
        launch(*tensors, 0)
    assert kernel.searches == 5
    monkeypatch.setattr(launching, "_compiled", {})
    kernel.runs.clear()
    for seed, tensors in enumerate(given):
        launch(*tensors, seed)
    assert kernel.searches == 5
    addresses = [tuple(None if x is None else x.data_ptr() for x in tensors) for tensors in given]
    assert [run[9:12] for run in kernel.runs] == [(*found, seed) for seed, found in enumerate(addresses)]


@pytest.mark.parametrize(
    "new",
    [
        {"x": X.half()},
        {"x": X[1:]},
        {"x": X[2:]},
        {"x": None},
        {"x": X.as_subclass(OnAnotherDevice)},
        {"bias": X},
        {"ALIGN": 8},
        {"num_warps": 8},
        {"maxnreg": 64},
        {"enable_fp_fusion": False},
    ],
    ids=lambda new: next(iter(new)),
)
def test_what_is_compiled_anew(new: dict[str, Any], kernel: Kernel) -> None:
    run(kernel)
    run(kernel, **new)
    assert kernel.searches == 2
    run(kernel, **new)
    run(kernel)
    assert kernel.searches == 2


def test_products_and_sums_fuse_unless_a_kernel_forbids_it() -> None:
    """Whatever Triton's default is."""
    assert launching.Launch(Kernel(), (2,), **GIVEN).named["enable_fp_fusion"] is True
    assert launching.Launch(Kernel(), (2,), **GIVEN, enable_fp_fusion=False).named["enable_fp_fusion"] is False


def test_another_device_and_another_kernel(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    run(kernel)
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_device", lambda: 1)
    run(kernel)
    run(kernel)
    run(other := Kernel())
    assert (kernel.searches, other.searches) == (2, 1)
    ((_, _, _, stream, *_),) = kernel.runs
    assert stream == "stream of 1"


def test_every_kernel_is_one_that_a_launch_can_tell() -> None:
    """Constants last, and no number that Triton would specialize on."""
    kernels = {
        name: kernel
        for module in pkgutil.iter_modules(onetrip.kernels.__path__)
        for name, kernel in vars(importlib.import_module(f"onetrip.kernels.{module.name}")).items()
        if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction)
    }
    assert len(kernels) >= 15
    for name, kernel in kernels.items():
        variables = kernel.params[: len(kernel.params) - len(kernel.constexprs)]
        assert not any(parameter.is_constexpr for parameter in variables), name
        for parameter in variables:
            is_pointer = parameter.name.endswith("_ptr")
            is_number = parameter.do_not_specialize or parameter.annotation in ("tl.float32", "fp32")
            assert is_pointer or is_number, (name, parameter.name)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 9, 1023, 1025])
def test_sizes_of_grids(n: int) -> None:
    assert launching.cdiv(n, 8) == triton.cdiv(n, 8)
    assert launching.next_power_of_2(max(n, 1)) == triton.next_power_of_2(max(n, 1))
