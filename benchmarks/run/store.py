"""The results of a run while it runs: every case is on disk when the next one starts, and a run can be continued."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import onetrip

from ..measure.results import PACKAGE, PARTIAL, SCHEMA, Results, own_failures, read_suite, write_suite

_VOLATILE = ("driver and clocks",)
"""Of a machine: what changes from one minute to the next."""


@cache
def fingerprint() -> str:
    """Of the code that runs: an installed package names no commit, and a changed source tree no difference to it."""
    digest = hashlib.sha256()
    folders = [Path(onetrip.__file__).parent, PACKAGE]
    kernels = importlib.util.find_spec("onetrip.kernels")
    folders += map(Path, (kernels and kernels.submodule_search_locations) or ())
    files = {path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".so")}
    for path in sorted(files):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """In what two runs differ that must not be mixed."""

    def lasting(content: Mapping[str, Any], name: str) -> Any:
        value = content.get(name)
        if name == "machine" and isinstance(value, dict):
            return {key: item for key, item in value.items() if key not in _VOLATILE}
        return value

    return [
        name
        for name in ("machine", "versions", "commit", "code", "measured")
        if lasting(old, name) != lasting(new, name)
    ]


class Store:
    """The results so far, and in DIR/<machine id>/<suite>.json, if there is a DIR, after every case.

    A file there that another run left is replaced when this run's suite is whole; until then its cases wait in
    <suite>.partial.json. resume: cases that the same code measured in the same way on the same machine are kept.
    """

    def __init__(self, folder: Path | None, header: dict[str, Any], expected: Mapping[str, list[str]]) -> None:
        """header: what every file says of the run. expected: the ids of the cases to measure, by suite."""
        self._folder = None if folder is None else folder / header["machine"]["id"]
        self._header = header
        self._expected = expected
        self.results: Results = {}
        self.notes: list[str] = []
        """What a user must know of results that were there before."""

    def _path(self, suite: str) -> Path | None:
        return None if self._folder is None else self._folder / f"{suite}.json"

    def _previous(self, suite: str) -> tuple[dict[str, Any] | None, list[str]]:
        """What the same run left of a suite, and what stands in the way of continuing others."""
        path, reasons = self._path(suite), []
        for candidate in [] if path is None else [path.with_name(suite + PARTIAL), path]:
            if candidate.exists():
                try:
                    content = read_suite(candidate)
                except ValueError as error:
                    reasons.append(str(error))
                    continue
                if not (different := _differences(content, self._header)):
                    return content, reasons
                reasons.append(f"{candidate}: of another {', '.join(different)}")
        return None, reasons

    def resume(self) -> dict[str, set[str]]:
        """Takes over what the same run has left; gives the ids of the cases that need not run, by suite."""
        done = {}
        for suite, ids in self._expected.items():
            previous, reasons = self._previous(suite)
            self.notes += [f"not continued: {reason}" for reason in reasons if previous is None]
            if previous is not None:
                kept = [record for record in previous["cases"] if not own_failures(record)]
                self._content(suite)["cases"] += kept
                done[suite] = {record["case"] for record in kept} & set(ids)
        if self._folder is not None and self._folder.parent.is_dir():
            others = [path.name for path in sorted(self._folder.parent.iterdir()) if any(path.glob("*.json"))]
            self.notes += [f"kept apart: results of {name}" for name in others if name != self._folder.name]
        return done

    def _content(self, suite: str) -> dict[str, Any]:
        fresh = {"schema": SCHEMA, "suite": suite, **self._header, "complete": False, "cases": []}
        return self.results.setdefault(suite, fresh)

    def add(self, suite: str, record: dict[str, Any]) -> None:
        content = self._content(suite)
        content["cases"] = [other for other in content["cases"] if other["case"] != record["case"]] + [record]
        self._write(suite)

    def finish(self) -> None:
        """The run came to its end."""
        for suite, content in self.results.items():
            content["complete"] = True
            order = {case: position for position, case in enumerate(self._expected.get(suite, ()))}
            content["cases"].sort(key=lambda record: order.get(record["case"], -1))
            self._write(suite)

    def _write(self, suite: str) -> None:
        path = self._path(suite)
        if path is not None:
            partial = path.with_name(suite + PARTIAL)
            if self.results[suite]["complete"]:
                write_suite(path, self.results[suite])
                partial.unlink(missing_ok=True)
            else:
                write_suite(partial if self._is_of_another(path) else path, self.results[suite])

    def _is_of_another(self, path: Path) -> bool:
        if not path.exists():
            return False
        try:
            found = read_suite(path)
        except ValueError:
            return True
        return bool(_differences(found, self._header)) or found.get("date") != self._header["date"]

    def paths(self) -> list[Path]:
        """The files that hold these results."""
        found = []
        for suite in self.results:
            path = self._path(suite)
            if path is not None:
                partial = path.with_name(suite + PARTIAL)
                found.append(partial if not self.results[suite]["complete"] and partial.exists() else path)
        return found
