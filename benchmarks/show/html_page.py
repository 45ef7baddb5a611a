"""Every result below a folder as one HTML page that needs no network: `onetrip bench report`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from onetrip import html
from onetrip.environment import describe
from onetrip.html import Section, Table

from ..measure.results import OPERATOR_SUITES, OTHERS, RECORDED, Results, UsageError
from ..measure.results import read as read_machines
from . import tables, targets
from .plots import drawings

_TITLE = "onetrip: measurements"
_SECTIONS = {
    "targets": "Targets",
    "speed-ups": "Speed-up over torch eager",
    "widths": "Bandwidth against width",
    "attention": "Attention and SDPA",
    "training": "Training steps",
    "optimizers": "Optimizers",
    "overhead": "Overhead of a call",
    "measurements": "Every measurement",
    "installation": "Installation",
    "run": "What was run",
    "missing": "Without a number",
    "origin": "Origin",
}
"""Topic -> title: what decides first."""


def write(folder: Path | None = None, output: Path | None = None) -> dict[str, Any]:
    """Reads every machine's results below folder (default: the recorded ones), writes the page. Returns its path, the
    machines, the others: files of `onetrip anatomy` and `onetrip methods`; and how many figures and tables it has.

    output: a file, or a folder for report.html; default the folder of the results. Raises UsageError where there is
    nothing to read, a file cannot be read, a package is missing or the page cannot be written; then nothing is.
    """
    folder = RECORDED if folder is None else folder
    output = folder if output is None else output
    path = output / "report.html" if output.is_dir() or not output.suffix else output
    try:
        html.require()
        machines, others = read(folder)
        sections = [*_of_machines(machines), *_of_others(others)]
        page = html.page(_TITLE, facts(machines, others), sections)
        html.write(path, page)
    except html.MissingPackage as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from None
    parts = [part for section in sections for part in section.parts]
    kinds = {"figures": html.Figure, "tables": Table}
    counts = {name: sum(isinstance(part, kind) for part in parts) for name, kind in kinds.items()}
    return {"path": str(path), "machines": list(machines), "others": list(map(str, others)), **counts}


def read(folder: Path) -> tuple[dict[str, Results], dict[Path, dict[str, Any]]]:
    """(results by machine, the other commands' results by file), whether folder holds machines or is one."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder")
    try:
        machines = read_machines(folder)
        paths = sorted(path for kind in OTHERS for path in folder.rglob(f"{kind}*.json"))
        others = {path: json.loads(path.read_text()) for path in paths}
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from None
    if not machines and not others:
        raise UsageError(f"{folder}: no results in it; `onetrip bench --output {folder}` records some")
    return machines, others


def facts(machines: dict[str, Results], others: dict[Path, dict[str, Any]]) -> dict[str, str]:
    """Each subject of the headers with all that was found for it."""
    headers = [content for results in machines.values() for content in results.values()]
    headers += [content for content in others.values() if {"date", "commit", "versions", "machine"} <= content.keys()]
    found: dict[str, dict[str, None]] = {}
    for header in headers:
        for subject, words in describe(header).items():
            found.setdefault(subject, {})[words] = None
    return {subject: "; ".join(words) for subject, words in found.items()}


def _sections(read: Callable[[Any], Sequence[Section]], content: Any, failed: str) -> list[Section]:
    try:
        return list(read(content))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        # A file of another program, or of a version to come, that passed for results.
        raise UsageError(f"{failed}: {type(error).__name__}: {error}") from error


def _of_machines(machines: dict[str, Results]) -> Iterator[Section]:
    for machine, results in machines.items():
        for section in _sections(sections, results, f"{machine}: its results cannot be read"):
            yield Section(f"{machine}: {section.title}" if len(machines) > 1 else section.title, section.parts)


def sections(results: Results) -> list[Section]:
    """One machine's results; sections without content are left out."""
    verdicts = targets.verdicts(results)
    judged = [verdict for verdict in verdicts if verdict.reached is not None]
    reached = sum(bool(verdict.reached) for verdict in judged)
    unmeasured = [verdict.target for verdict in verdicts if verdict.reached is None]
    summary = [f"{reached} of {len(judged)} measured targets are reached."] if judged else []
    missing = [f"Not measured here: {'; '.join(unmeasured)}."] if judged and unmeasured else []
    origins = [(", ".join(suites), *origin) for origin, suites in tables.origins(results).items()]
    columns = ("suites", "date", "machine", "versions", "commit")
    found = tables.by_topic(results)
    content: dict[str, list[str | Table]] = {
        **found,
        "targets": [*summary, *found["targets"], *missing],
        "measurements": [*tables.measurements(tables.cases(results, *OPERATOR_SUITES)), *found["graphs"]],
        "origin": [Table("What was measured when, where and at which commit", columns, origins)],
    }
    for drawing in reversed(list(drawings(results))):
        figure = html.figure(drawing.plot(), drawing.title, drawing.note)
        content[drawing.topic] = [figure, *content.get(drawing.topic, [])]
    return [Section(title, content[topic]) for topic, title in _SECTIONS.items() if content.get(topic)]


def _of_others(others: dict[Path, dict[str, Any]]) -> Iterator[Section]:
    """By the functions of the commands that wrote them."""
    for path, content in others.items():
        kind = next(kind for kind in OTHERS if path.name.startswith(kind))
        read = importlib.import_module(f"onetrip.{kind}.report").sections
        yield from _sections(read, content, f"{path}: not what `onetrip {kind}` writes")
