"""Recorded results: one JSON file a suite in a folder a machine. While a run lasts every case is on disk when the next
one starts, and the run can be continued."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
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
    "moe",
    "cross_entropy",
    "attention",
    "overhead",
    "training",
    "default_patch",
    "adam",
    "adam_streams",
    "adam_training",
)
"""Each is a module suites/<name>.py, and leaves <name>.json."""
OPERATOR_SUITES = ("row_norm", "softmax", "rotary", "glu", "moe", "cross_entropy")
"""The suites whose cases are operators of one family, every one timed by measure.side_by_side."""
RECORDED = PACKAGE / "results"
OTHERS = ("anatomy", "methods")
"""The commands whose files, named after them, may lie beside the results."""
PARTIAL = ".partial.json"
"""The end of the name of a file whose run has not come to its end, beside the whole record of another run."""

Results = dict[str, dict[str, Any]]
"""Suite name -> what its JSON holds, for one machine."""


class UsageError(Exception):
    """What was asked for does not exist or cannot be done: one line for the user, exit 2."""


def failures(record: dict[str, Any]) -> dict[str, str]:
    """Providers that failed their check -> why."""
    checked = [entry for entry in record.get("providers", ()) if "check" in entry]
    return {entry["name"]: entry["check"]["detail"] for entry in checked if not entry["check"]["passed"]}


def own_failures(record: dict[str, Any]) -> dict[str, str]:
    """failures, of onetrip's providers alone."""
    return {name: why for name, why in failures(record).items() if name.startswith("onetrip")}


def unwritable(folder: Path) -> str:
    """Why nothing could be written into the folder, which need not be there yet; empty where it could."""
    reason = html.unwritable(folder)
    return reason and f"--output: cannot write to {folder}: {reason}"


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
    """Results by machine: of the one machine whose own folder it is, or of every machine's folder in it."""
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    found = {path.name: results for path in folders if (results := read_machine(path))}
    try:
        own = read_machine(folder)
    except ValueError:  # beside machines' folders lie records of other commands
        if not found:
            raise
        own = {}
    return {folder.resolve().name: own} if own else found


def suite_files(folder: Path) -> dict[str, Path]:
    """Suite -> its file in a machine's own folder; where a suite has no whole one, what an unfinished run left."""
    partial = {path.name.removesuffix(PARTIAL): path for path in sorted(folder.glob(f"*{PARTIAL}"))}
    return partial | {path.stem: path for path in sorted(folder.glob("*.json")) if not path.name.endswith(PARTIAL)}


def read_machine(folder: Path) -> Results:
    """The results in a machine's own folder; files of other commands are passed over."""
    return {suite: read_suite(path) for suite, path in suite_files(folder).items() if not suite.startswith(OTHERS)}


def rounded(value: Any) -> Any:
    """Five significant digits: what a clock knows, and diffs that can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


@cache
def fingerprint() -> str:
    """Hash of the code that runs: an installed package names no commit, and a changed source tree no difference to
    it."""
    import onetrip

    digest = hashlib.sha256()
    folders = [Path(onetrip.__file__).parent, PACKAGE]
    kernels = importlib.util.find_spec("onetrip.kernels")
    folders += map(Path, (kernels and kernels.submodule_search_locations) or ())
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".so")}
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two runs differ that must not be mixed."""

    def lasting(content: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: content.get(name) for name in ("machine", "versions", "commit", "code", "measured")}
        # By its id alone: files of this very run may count as changes, and code tells of others.
        found["commit"] = found["commit"] and found["commit"]["id"]
        if isinstance(found["machine"], dict):
            found["machine"] = {key: item for key, item in found["machine"].items() if key != "driver and clocks"}
        return found

    was, now = lasting(old), lasting(new)
    names = {"measured": "choice of --quick, --pass or --against"}
    return [names.get(name, name) for name in was if was[name] != now[name]]


class Store:
    """The results so far, and where there is a DIR, DIR/<machine id>/<suite>.partial.json after every case.

    When the run has come to its end that becomes <suite>.json, in place of what another run left there.
    """

    def __init__(self, folder: Path | None, header: dict[str, Any], expected: Mapping[str, list[str]]) -> None:
        """header: what every file says of the run. expected: the ids of the cases to measure, by suite."""
        self._folder = None if folder is None else folder / header["machine"]["id"]
        self._header = header
        self._expected = expected
        self.results: Results = {}
        self.paths: dict[str, Path] = {}
        """The files that hold these results, by suite."""

    def resume(self) -> dict[str, set[str]]:
        """Takes over what the same code has measured in the same way on the same machine; gives the ids of the cases
        that need not run, by suite. Raises UsageError where something else lies in the folder."""
        done = {}
        for suite, ids in self._expected.items():
            if (previous := self._previous(suite)) is not None:
                kept = [found for found in previous["cases"] if found["case"] not in ids or not own_failures(found)]
                self._content(suite)["cases"] += kept
                done[suite] = {record["case"] for record in kept} & set(ids)
        return done

    def _previous(self, suite: str) -> dict[str, Any] | None:
        """What the same run left of a suite. Raises UsageError for a file of another run, or one that is no record."""
        ends = (PARTIAL, ".json") if self._folder is not None else ()
        path = next((path for end in ends if (path := self._folder / (suite + end)).exists()), None)
        if path is None:
            return None
        try:
            content = read_suite(path)
        except ValueError as error:
            raise UsageError(f"--resume: {error}") from None
        if different := differences(content, self._header):
            raise UsageError(
                f"--resume: {path} was measured with another {', '.join(different)}: name another folder, or leave "
                "out --resume to replace it"
            )
        path.rename(path.with_name(suite + PARTIAL))  # the run goes on: no whole file, which would be read
        return content

    def _content(self, suite: str) -> dict[str, Any]:
        fresh = {"schema": SCHEMA, "suite": suite, **self._header, "complete": False, "cases": []}
        return self.results.setdefault(suite, fresh)

    def _write(self, suite: str, end: str) -> None:
        if self._folder is not None:
            self.paths[suite] = self._folder / (suite + end)
            write_suite(self.paths[suite], self.results[suite])

    def add(self, suite: str, record: dict[str, Any]) -> None:
        content = self._content(suite)
        content["cases"] = [other for other in content["cases"] if other["case"] != record["case"]] + [record]
        self._write(suite, PARTIAL)

    def finish(self) -> None:
        """The run came to its end."""
        for suite, content in self.results.items():
            content["complete"] = True
            order = {case: position for position, case in enumerate(self._expected.get(suite, ()))}
            content["cases"].sort(key=lambda record: order.get(record["case"], -1))
            self._write(suite, ".json")
            if self._folder is not None:
                (self._folder / (suite + PARTIAL)).unlink(missing_ok=True)
