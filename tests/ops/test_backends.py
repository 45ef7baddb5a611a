"""Which backend computes: preference, names, scopes, threads, the environment; nothing falls back in silence."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import onetrip
import pytest
import torch
from onetrip import ops
from onetrip.ops import row_norm_native
from onetrip.ops.common import backends, native
from onetrip.reference import row_norm as reference

pytestmark = pytest.mark.promise("backends")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _process_choice_is_restored() -> Iterator[None]:
    yield
    onetrip.set_backend("auto")


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test changes is seen, and forgotten with the test."""
    caches = (backends.unavailable_reason, backends._automatic)
    for cache in caches:
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def without_native(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was installed without a compiler."""
    monkeypatch.setattr(backends, "native", lambda: None)


def chosen() -> str:
    return backends.choose("test", CPU, True)


def test_the_native_library_is_there_where_a_compiler_is():
    """Else every test of the cpu backend would be skipped in silence."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    assert backends.native() is not None
    assert onetrip.available_backends()[0] == "cpu"


def test_reference_is_always_there_and_last():
    for device in ("cpu", CPU, "meta", "cuda:0"):
        assert onetrip.available_backends(device)[-1] == "reference"
    with pytest.raises(RuntimeError, match=r"^available_backends: device must be .*, got 'no such device'"):
        onetrip.available_backends("no such device")


def test_auto_takes_the_first_that_is_available():
    assert chosen() == onetrip.available_backends()[0]
    assert backends.choose("test", CPU, False) == "reference"


def test_without_the_native_library_the_cpu_is_served_by_reference(without_native):
    assert "cpu" not in onetrip.available_backends()
    assert chosen() != "cpu"
    assert ops.layer_norm(torch.randn(2, 8)).isfinite().all()
    with onetrip.use_backend("cpu"), pytest.raises(RuntimeError, match=r"layer_norm: backend 'cpu' .* was not built"):
        ops.layer_norm(torch.randn(2, 8))


@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_a_named_backend_that_cannot_run_raises(name):
    if name in onetrip.available_backends():
        pytest.skip(f"{name} runs on CPU tensors here (TRITON_INTERPRET)")
    with onetrip.use_backend(name), pytest.raises(RuntimeError, match=f"rms_norm: backend '{name}' was asked for"):
        ops.rms_norm(torch.randn(2, 8))
    onetrip.set_backend(name)
    with pytest.raises(RuntimeError, match=f"backend '{name}' was asked for and cannot run on cpu: ."):
        ops.rms_norm(torch.randn(2, 8))


def test_a_named_backend_without_kernels_of_the_family_raises(anew, monkeypatch):
    monkeypatch.setitem(backends.FAMILIES, "cpu", frozenset())
    assert backends.choose("test", CPU, True, "softmax") == "reference"
    with onetrip.use_backend("cpu"), pytest.raises(RuntimeError, match=r"^test: backend 'cpu' .* has no softmax"):
        backends.choose("test", CPU, True, "softmax")


@pytest.mark.parametrize("name", ["", "CPU", "gpu", "torch", None, 0])
def test_unknown_names_are_refused_and_change_nothing(name):
    onetrip.set_backend("reference")
    with pytest.raises(ValueError, match=r"^set_backend: name must be one of"):
        onetrip.set_backend(name)
    with pytest.raises(ValueError, match=r"^use_backend: name must be one of"), onetrip.use_backend(name):
        pass
    assert chosen() == "reference"


def test_scopes_nest_and_win_over_the_process():
    onetrip.set_backend("reference")
    assert chosen() == "reference"
    with onetrip.use_backend("auto"):
        assert chosen() == onetrip.available_backends()[0]
        with onetrip.use_backend("reference"):
            assert chosen() == "reference"
        assert chosen() == onetrip.available_backends()[0]
    assert chosen() == "reference"


def test_a_scope_ends_where_an_exception_leaves_it():
    before = chosen()
    with pytest.raises(KeyError), onetrip.use_backend("auto"), onetrip.use_backend("reference"):
        raise KeyError
    assert chosen() == before


def test_a_scope_holds_in_its_own_thread_and_the_process_choice_in_all():
    found: list[str] = []
    with onetrip.use_backend("cuda"):
        thread = threading.Thread(target=lambda: found.append(chosen()))
        thread.start()
        thread.join()
    onetrip.set_backend("reference")
    thread = threading.Thread(target=lambda: found.append(chosen()))
    thread.start()
    thread.join()
    assert found == [onetrip.available_backends()[0], "reference"]


def test_scopes_of_interleaved_tasks_do_not_mix():
    async def task(name: str) -> list[str | None]:
        found = []
        with onetrip.use_backend(name):
            for _ in range(3):
                await asyncio.sleep(0)
                found.append(backends._local_choice.get())
        return found

    async def both() -> list[list[str | None]]:
        return await asyncio.gather(task("reference"), task("auto"))

    assert asyncio.run(both()) == [["reference"] * 3, ["auto"] * 3]


def test_threads_of_a_backward_on_a_gpu_follow_the_block_that_was_entered_last(monkeypatch):
    """No context variable goes there. Other threads do not look at it, nor do those that compute on a CPU."""
    gpu = torch.device("cuda", 0)
    onetrip.set_backend("cpu")
    with onetrip.use_backend("auto"), onetrip.use_backend("reference"), ThreadPoolExecutor(1) as pool:
        with pytest.raises(RuntimeError, match="backend 'cpu' was asked for and cannot run on cuda:0"):
            pool.submit(backends.choose, "test", gpu, True).result()
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 3)
        assert pool.submit(backends.choose, "test", gpu, True).result() == "reference"
        assert backends._of_an_open_block(CPU) is None
    assert backends._of_an_open_block(gpu) is None


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends whose backward has run, in order."""
    if "cpu" not in onetrip.available_backends():
        pytest.skip("the native library was not built")
    ran: list[str] = []
    for name, module, function in (("reference", reference, "backward"), ("cpu", row_norm_native, "backward")):
        real = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, real=real, name=name: ran.append(name) or real(*a))
    return ran


def forward_by_each_and_backward_by_the_other(norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    with onetrip.use_backend("reference"):
        by_reference = norm(x)
    by_cpu = norm(x)
    by_reference.sum().backward()
    with onetrip.use_backend("reference"):
        by_cpu.sum().backward()


def test_an_eager_backward_follows_the_forward_it_belongs_to(ran):
    forward_by_each_and_backward_by_the_other(ops.layer_norm)
    assert ran == ["reference", "cpu"]


def test_a_compiled_backward_chooses_its_backend_when_it_runs(ran):
    assert "compiled one chooses when it runs" in " ".join(onetrip.use_backend.__doc__.split())
    forward_by_each_and_backward_by_the_other(torch.compile(ops.layer_norm, backend="aot_eager", fullgraph=True))
    assert ran == ["cpu", "reference"]


ENVIRONMENT = """
import torch, onetrip
from onetrip.ops.common import backends
try:
    print(backends.choose("test", torch.device("cpu"), True))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ("reference", "reference"),
        ("", "cpu"),
        ("cuda", "RuntimeError test: backend 'cuda'"),
        ("fast", "ValueError ONETRIP_BACKEND: name must be"),
    ],
)
def test_environment_names_the_backend(value, printed):
    environment = {**os.environ, "ONETRIP_BACKEND": value}
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(printed)


@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        ("3.2.0", (7, 5), r"triton 3\.2\.0 compiles bfloat16 for compute capability 8\.0"),
        ("3.2.0", (8, 0), "^$"),
        ("3.3.1", (7, 0), "^$"),
        ("3.3.1", (6, 1), r"compute capability 6\.1 is below"),
    ],
)
def test_triton_is_left_out_where_it_cannot_compile(version, capability, reason, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert re.search(reason, backends._triton_unavailable_reason("cuda", 0))


def test_auto_says_once_why_a_gpu_runs_another_backend(anew, monkeypatch):
    """A driver older than the runtime that the kernels were built with, or a GPU that they were not built for."""
    gpu = torch.device("cuda", 0)
    library = SimpleNamespace(cuda_architectures=lambda: "8.0 9.0", cuda_unavailable_reason=lambda index: "too old")
    monkeypatch.setattr(backends, "native", lambda: library)
    monkeypatch.setattr(backends, "_triton_unavailable_reason", lambda *device: "")
    with pytest.warns(UserWarning, match="onetrip: cuda:0 runs triton in place of the CUDA kernels: too old"):
        assert backends.choose("test", gpu, True, "row_norm") == "triton"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.choose("test", gpu, True, "row_norm") == "triton"
        assert backends.choose("test", gpu, True, "rotary") == "triton"  # has no CUDA kernels


@pytest.mark.parametrize(
    "code, advice",
    [(700, "a kernel that ran before on cuda:1"), (900, "once before the capture"), (9, r"CUDA error 9: of CUDA$")],
)
def test_an_error_of_cuda_says_whose_it_is(code, advice):
    message = native.cuda_error("softmax forward", torch.device("cuda", 1), code, "of CUDA")
    assert message.startswith("softmax forward: ") and f"CUDA error {code}: of CUDA" in message
    assert re.search(advice, message)


def test_gpu_independent_sums_are_the_native_library_s(monkeypatch):
    set_to = []
    monkeypatch.setattr(backends, "native", lambda: SimpleNamespace(set_gpu_independent_sums=set_to.append))
    onetrip.use_gpu_independent_sums()
    onetrip.use_gpu_independent_sums(False)
    assert set_to == [True, False]
    monkeypatch.setattr(backends, "native", lambda: None)
    onetrip.use_gpu_independent_sums()
