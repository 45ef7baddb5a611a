"""The tests marked gpu, in shards, each a run of pytest-xdist with this module as a plugin.

A kernel that faults breaks the CUDA context of its process for good: that worker ends with the test, and xdist starts
another one.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from onetrip.environment import checkout

_BROKEN_CONTEXT = 9  # exit code of a worker that the plugin ends
_MOST_WORKERS = 6
_HANGS_S = 600
"""A test that takes longer has the stacks of its threads printed."""


@dataclass(frozen=True)
class Shard:
    name: str
    what: str
    paths: tuple[str, ...]
    """Below tests/."""
    keywords: str = ""
    """pytest's -k."""
    alone: bool = False
    """One worker: its tests fill the GPU's memory."""


_SPECIAL = ("ops/test_row_norm_gpu.py", "ops/test_softmax_gpu.py", "ops/test_adam_gpu.py")
_ROW_NORM = (
    *(f"ops/test_row_norm_{name}.py" for name in ("forward", "backward", "checks", "dropout", "determinism")),
    "nn/test_row_norm.py",
)
_COMPILE = (
    "ops/test_contract_compile.py",
    "ops/test_row_norm_compile.py",
    "ops/test_jit_trace.py",
    "kernels/test_triton_cases.py",
)
_GLU = ("ops/glu/test_glu.py", "ops/glu/test_glu_clamped.py", "ops/glu/test_glu_dropout.py")
_MODELS = (
    *("patching/test_models_gpu.py", "patching/attention/test_one_mask.py"),
    *("patching/linear/test_readers_autocast.py", "patching/linear/test_shared_factors.py"),
)
_LARGE = "more_than_two_to_the or many_rows"
SHARDS = (
    Shard("special", "graphs, streams, autocast, wide rows, Adam's bits", _SPECIAL, f"not ({_LARGE})"),
    Shard("operators", "what every operator promises", ("ops/test_contract.py",)),
    Shard("row_norm-cuda", "the contract of row_norm, CUDA C++", _ROW_NORM, "not triton"),
    Shard("row_norm-triton", "the contract of row_norm, Triton", _ROW_NORM, "triton"),
    Shard("softmax-cuda", "the contract of softmax, CUDA C++", ("ops/test_softmax.py",), "not triton"),
    Shard("softmax-triton", "the contract of softmax, Triton", ("ops/test_softmax.py",), "triton"),
    Shard("rotary", "the contract of rotary, Triton", ("ops/test_rotary.py",)),
    Shard("moe", "the contract of moe, Triton", ("ops/moe/test_moe.py",)),
    Shard("glu", "the contract of glu, Triton", _GLU),
    Shard("cross_entropy", "the contract of cross_entropy, Triton", ("ops/test_cross_entropy.py",)),
    Shard("models", "patched models: gradients, checkpointing, a training loop", _MODELS),
    Shard("large", "2^31 elements and more, a million rows", _SPECIAL, _LARGE, alone=True),
    Shard("compile", "torch.compile, and cases of Triton's kernels", _COMPILE),
)


def root() -> Path | None:
    """Root of a source tree with tests: the one that the package runs from, else the current folder."""
    for folder in (checkout(), Path.cwd()):
        if folder is not None and (folder / "tests/conftest.py").is_file() and (folder / "csrc").is_dir():
            return folder
    return None


def missing() -> str:
    """What the tests need and is not installed."""
    needed = {"xdist": "pytest-xdist", "pytest_benchmark": "pytest-benchmark"}
    needed |= {"hypothesis": "hypothesis", "transformers": "transformers"}
    absent = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    return f"not installed: {', '.join(absent)} (pip install 'onetrip[test]')" if absent else ""


def command(shard: Shard, tree: Path, output: Path) -> tuple[str, ...]:
    """What python -m is called with, in the tree."""
    workers = 1 if shard.alone else max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) // 2))
    options = ["-p", __name__, f"--junitxml={output / 'gpu-tests' / shard.name}.xml", "-p", "no:cacheprovider"]
    options += [f"--numprocesses={workers}", "--max-worker-restart=1000", "--continue-on-collection-errors"]
    options += ["-q", "--tb=short", "-rNfEs", "--durations=10", f"--rootdir={tree}"]
    options += ["-o", f"faulthandler_timeout={_HANGS_S}"]
    options += ["-m", "gpu", *(["-k", shard.keywords] if shard.keywords else [])]
    return "pytest", *options, *(str(tree / "tests" / path) for path in shard.paths)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ.pop("OMP_PROC_BIND", None)  # all workers' threads would share one core


@pytest.hookimpl(trylast=True)  # the controller knows the failure by then
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In a worker; the controller has no CUDA context."""
    if report.failed and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(_BROKEN_CONTEXT)
