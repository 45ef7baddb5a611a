"""Recorded results: one JSON file a suite in a folder a machine."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from .machine import PACKAGE
from .suite import Named, selects

SCHEMA = 1
SUITES = (
    "row_norm",
    "softmax",
    "attention",
    "overhead",
    "bert_blocks",
    "training",
    "adam",
    "adam_streams",
    "adam_training",
)
"""Each is a file bench_<name>.py, and leaves <name>.json."""
RECORDED = PACKAGE / "results"

Results = dict[str, dict[str, Any]]
"""Suite name -> what its JSON holds, for one machine."""


def bench_file(suite: str) -> Path:
    return PACKAGE / f"bench_{suite}.py"


def select(pattern: str | None, quick: bool) -> dict[str, list[Named]]:
    """The cases that a pattern means, by suite; suites without any are left out."""
    found = {}
    for suite in SUITES:
        module = importlib.import_module(f"onetrip.benchmarks.{bench_file(suite).stem}")
        cases = [case for case in module.cases(quick) if selects(pattern, case.id)]
        if cases:
            found[suite] = cases
    return found


def from_pytest_benchmark(path: Path, header: dict[str, object]) -> Results:
    """What one run left: pytest-benchmark's JSON, reduced to the records of the cases, under the header."""
    found: Results = {}
    for benchmark in json.loads(path.read_text())["benchmarks"]:
        suite = Path(benchmark["fullname"].split("::")[0]).stem.removeprefix("bench_")
        content = found.setdefault(suite, {"schema": SCHEMA, "suite": suite, **header, "cases": []})
        if "record" in benchmark["extra_info"]:
            content["cases"].append(benchmark["extra_info"]["record"])
    return found


def write(results: Results, folder: Path) -> list[Path]:
    """One file a suite into folder/<machine id>/."""
    written = []
    for suite, content in results.items():
        path = folder / content["machine"]["id"] / f"{suite}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(content), indent=1) + "\n")
        written.append(path)
    return written


def read(folder: Path) -> dict[str, Results]:
    """Every machine's results under folder, by machine id."""
    found: dict[str, Results] = {}
    for path in sorted(folder.glob("*/*.json")):
        content = json.loads(path.read_text())
        if content.get("schema") != SCHEMA:
            raise ValueError(f"{path}: schema must be {SCHEMA}, got {content.get('schema')}")
        found.setdefault(path.parent.name, {})[path.stem] = content
    return found


def _rounded(value: Any) -> Any:
    """Five significant digits: what a clock knows, and diffs that can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
