"""Recorded results: one JSON file a suite in a folder a machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onetrip import html

PACKAGE = Path(__file__).resolve().parents[1]
SCHEMA = 1
SUITES = (
    "row_norm",
    "softmax",
    "rotary",
    "glu",
    "cross_entropy",
    "attention",
    "overhead",
    "bert_blocks",
    "training",
    "adam",
    "adam_streams",
    "adam_training",
)
"""Each is a module suites/<name>.py, and leaves <name>.json."""
OPERATOR_SUITES = ("row_norm", "softmax", "rotary", "glu", "cross_entropy")
"""The suites whose cases are operators of one family, every one timed by measure.side_by_side."""
RECORDED = PACKAGE / "results"
OTHERS = ("anatomy", "methods")
"""The commands whose files, named after them, may lie beside the results."""
PARTIAL = ".partial.json"
"""The end of the name of a file that waits for its run to be continued, beside the whole record of another run."""

Results = dict[str, dict[str, Any]]
"""Suite name -> what its JSON holds, for one machine."""


class UsageError(Exception):
    """What was asked for does not exist or cannot be done: one line for the user, exit 2."""


def own_failures(record: dict[str, Any]) -> dict[str, str]:
    """Providers of our own that failed their check -> why."""
    return {
        entry["name"]: entry["check"]["detail"]
        for entry in record.get("providers", ())
        if entry["name"].startswith("onetrip") and not entry.get("check", {"passed": True})["passed"]
    }


def unwritable(folder: Path) -> str:
    """Why nothing could be written into the folder, which need not be there yet; empty where it could."""
    reason = html.unwritable(folder)
    return reason and f"cannot write to {folder}: {reason}"


def write_suite(path: Path, content: dict[str, Any]) -> None:
    html.write(path, json.dumps(rounded(content), indent=1) + "\n")


def write(results: Results, folder: Path) -> list[Path]:
    """One file a suite into folder/<machine id>/."""
    written = []
    for suite, content in results.items():
        written.append(folder / content["machine"]["id"] / f"{suite}.json")
        write_suite(written[-1], content)
    return written


def read_suite(path: Path) -> dict[str, Any]:
    """What one file holds; raises ValueError where it is none of ours."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ValueError(f"{path}: {why}") from None
    found = content.get("schema") if isinstance(content, dict) else None
    if found != SCHEMA:
        raise ValueError(f"{path}: schema must be {SCHEMA}, got {found}")
    return content


def read(folder: Path) -> dict[str, Results]:
    """Every machine's results under folder, by machine id."""
    found = {path.name: read_machine(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    return {machine: results for machine, results in found.items() if results}


def read_machine(folder: Path) -> Results:
    """The results in a machine's own folder; files of other commands and of unfinished runs are passed over."""
    return {
        path.stem: read_suite(path)
        for path in sorted(folder.glob("*.json"))
        if not path.name.endswith(PARTIAL) and not path.name.startswith(OTHERS)
    }


def rounded(value: Any) -> Any:
    """Five significant digits: what a clock knows, and diffs that can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
