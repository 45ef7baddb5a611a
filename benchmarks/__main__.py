"""python -m onetrip.benchmarks: measure, print, record. Exits 0, 1 where a check failed, 2 on bad usage."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

_BUSY = 0.3  # of the CPUs: above it, other work would be timed too


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m onetrip.benchmarks",
        description="Check and time onetrip's kernels beside PyTorch's on this machine.",
        epilog="A full run in a source tree records to benchmarks/results and renders docs/benchmarks.md. "
        "A partial one (--only, --quick) only prints, unless --output names a folder.",
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="write DIR/<machine>/<suite>.json")
    parser.add_argument("--only", metavar="PATTERN", help="cases to run: a glob over their ids, or a part of them")
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer rounds: under a minute")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a card")
    parser.add_argument("--render", action="store_true", help="only render docs/benchmarks.md from the recorded JSON")
    return parser


def _usage_error(message: str) -> int:
    print(f"python -m onetrip.benchmarks: {message}", file=sys.stderr)
    return 2


def _writable(folder: Path) -> str:
    """Why nothing can be written into the folder (made if need be); empty where it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write to {folder}: {error.strerror}"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        import jinja2  # noqa: F401
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        return _usage_error(f"{error.name} is missing: pip install 'onetrip[bench]'")
    import torch

    from . import report, results, runner
    from .machine import checkout, load_average

    root = checkout()
    if options.render:
        if root is None:
            return _usage_error("--render needs a source tree: this is an installed package")
        report.write_docs(results.read(results.RECORDED), root / "docs/benchmarks.md")
        return 0

    if options.device == "cuda" and not torch.cuda.is_available():
        return _usage_error("--device cuda: torch sees no CUDA device")
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    selected = results.select(options.only, options.quick)
    if not selected:
        known = "\n  ".join(case.id for cases in results.select(None, options.quick).values() for case in cases)
        return _usage_error(f"--only {options.only}: no such case. There are:\n  {known}")
    partial = options.quick or options.only is not None
    output = options.output or (results.RECORDED if root is not None and not partial else None)
    if output is not None and (reason := _writable(output)):
        return _usage_error(reason)

    load = load_average()
    if device.type == "cpu" and load is not None and load > _BUSY * (os.cpu_count() or 1):
        print(f"Other work is running (load average {load:.1f}): times will suffer, ratios less so.", file=sys.stderr)
    found = runner.run(selected, device, options.quick, options.only)
    report.print_tables(found.results)
    if output is not None and found.results:
        for path in results.write(found.results, output):
            print(f"wrote {path}")
    if output == results.RECORDED and root is not None and found.results:
        report.write_docs(results.read(results.RECORDED), root / "docs/benchmarks.md")
        print(f"rendered {root / 'docs/benchmarks.md'}")
    for line in found.failures:
        print(f"FAILED {line}", file=sys.stderr)
    return 1 if found.failures else 0


def _bind_threads() -> None:
    """Start again with each OpenMP thread bound to a core, unless the user has chosen.

    After a serial stretch (eager dropout draws its mask on one thread) the other thread may be woken on the core where
    the first one spins for it; the next parallel loop, whoever's it is, then waits for the scheduler's tick: 8 ms in
    place of 1 for a copy, measured on a virtual machine of 2 cores. libgomp reads the variable when it is loaded.
    """
    if "OMP_PROC_BIND" not in os.environ:
        os.environ["OMP_PROC_BIND"] = "true"
        os.execv(sys.executable, [sys.executable, "-m", "onetrip.benchmarks", *sys.argv[1:]])


if __name__ == "__main__":
    _bind_threads()
    sys.exit(main())
