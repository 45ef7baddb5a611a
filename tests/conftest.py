"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from onetrip import use_backend
from rich.console import Console, RenderableType
from targets import TARGETS, Target, needs, target_fixture
from triton_runner import EMULATED

if EMULATED:
    from simulators import run_triton_on_the_emulator

    run_triton_on_the_emulator()

QUIET_SECONDS = 2.0
"""A test that takes longer on a quiet machine is marked slow."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked gpu where no GPU is visible: thousands of skips tell nothing. -m gpu shows them."""
    if torch.cuda.is_available() or "gpu" in config.option.markexpr or any("::" in arg for arg in config.args):
        return
    left_out = [item for item in items if "gpu" in item.keywords]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if "gpu" not in item.keywords]


def pytest_collection_finish() -> None:
    """A garbage collection that visited all that was imported and collected took 0.9 s."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that took longer and are not marked slow; a loaded machine makes more of them."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and "slow" not in report.keywords:
                seconds[report.nodeid] += report.duration
    long = [(name, took) for name, took in seconds.most_common() if took > QUIET_SECONDS]
    if long:
        terminalreporter.section(f"not marked slow, and took longer than {QUIET_SECONDS:g} s")
        for name, took in long:
            terminalreporter.write_line(f"{took:6.1f} s  {name}")


target = target_fixture(TARGETS)


@pytest.fixture(params=["cuda", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each kernel backend of the GPU, in use during the test."""
    needs(Target("cuda", request.param))
    with use_backend(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of pytest-xdist may have COLUMNS, which tables obey."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def printed() -> Callable[..., str]:
    """printed(renderable, width): its text on a console. No line is longer, and no column is cut off."""

    def text(renderable: RenderableType, width: int = 80) -> str:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(renderable)
        lines = capture.get().splitlines()
        assert max(len(line.rstrip()) for line in lines) <= width and not any("…" in line for line in lines)
        return capture.get()

    return text


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile starts anew, and reads no graphs that others have left on the disk."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):
        yield


@pytest.fixture
def cuda() -> str:
    """The CUDA device, for tests that only it can run."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is visible")
    return "cuda"
