"""`onetrip bench --everything`: the full validation and benchmark suite, which can be cut and continued.

Tests of the GPU kernels, sanitizers, all suites, training steps, other libraries, environment and report: each part
(plan.py) is a process of its own with a log. What became of each is in DIR/everything.json.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from onetrip import html, terminal
from onetrip.command_line import BAD_USAGE, CHECK_FAILED, INTERRUPTED
from onetrip.environment import header
from onetrip.processes import process_group

from ..measure.results import SCHEMA, UsageError, differences, unwritable
from ..runner import Options, describe
from ..show import run_tables
from . import EXIT_SKIPPED, gpu_tests, plan
from .plan import Part, Place

PASSED, FAILED, SKIPPED, UNFINISHED = "passed", "failed", "skipped", "unfinished"
_MOST_FAILURES = 50
_PATIENCE_S = 10.0
"""What a part that is stopped may take to keep what it has done."""
_REPORT_S = 30.0
"""Kept of the budget for the report, which ends every call."""


class Limits(NamedTuple):
    """Seconds. budget_s: of a call; the part that runs when they are over is stopped, and goes on with --resume.
    part_s: of a part; one that takes longer has failed, as one that hangs would."""

    budget_s: float = float("inf")
    part_s: float = 3600.0


_DEFAULT = Limits()


class State:
    """DIR/everything.json: what describes the run, and part -> status, seconds, reason."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self.content = path, content
        self.parts: dict[str, dict[str, Any]] = content["parts"]

    def status(self, part: Part) -> str | None:
        """None where it has not run."""
        return self.parts.get(part.name, {}).get("status")

    def set(self, part: Part, status: str, seconds: float, reason: str, failures: Sequence[str] = ()) -> None:
        found = {"status": status, "seconds": round(seconds, 1), "reason": reason}
        self.parts[part.name] = found | ({"failures": list(failures)} if failures else {})
        self.write()

    def write(self) -> None:
        html.write(self._path, json.dumps(self.content, indent=1) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _begin(place: Place, resume: bool, selected: bool) -> State:
    """The state to go on with."""
    path = place.output / "everything.json"
    described = describe(place.device, place.quick, Options.parse(quick=place.quick).measured())
    content = {"schema": SCHEMA, **described, "parts": {}}
    if not path.exists():
        return State(path, content)
    if not (resume or selected):
        raise UsageError(f"{path} holds a run already: --resume goes on with it, --part runs one part again")
    try:
        old = State(path, json.loads(path.read_text()))
        different = differences(old.content, content)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not the state of a run ({type(error).__name__}: {error}): move it away") from None
    if different:
        raise UsageError(f"{path} is of a run with another {', '.join(different)}: name another folder")
    return old


def _choose(known: Sequence[Part], wanted: Sequence[str] | None) -> list[Part]:
    for pattern in wanted or ():
        if not any(fnmatch.fnmatchcase(part.name, pattern) for part in known):
            names = "\n  ".join(part.name for part in known)
            raise UsageError(f"--part {pattern}: unknown part; choose from:\n  {names}")
    return [p for p in known if not wanted or p.always or any(fnmatch.fnmatchcase(p.name, each) for each in wanted)]


def _failures(printed: str) -> list[str]:
    """Lines that begin with FAILED, as doctor, the parts and pytest print them, or with ERROR (pytest)."""
    found = re.findall(r"^(?:FAILED|ERROR(?! {2})) (.+)$", printed, re.MULTILINE)  # no logged lines
    return [line[:500] for line in dict.fromkeys(found)][:_MOST_FAILURES]


def _run(part: Part, state: State, place: Place, limits: Limits) -> None:
    """Runs one part and writes down what became of it. limits.budget_s: what is left of it. KeyboardInterrupt is passed
    on afterwards."""
    allotted = min(limits)
    log = place.output / "logs" / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", *part.command]
    start, code = time.monotonic(), None
    with log.open("wb") as file:
        file.write(f"$ {shlex.join(command)}\n".encode())
        file.flush()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}  # lines of failures are not cut
        options = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "cwd": part.folder}
        try:
            # SIGINT, as Ctrl-C: what is done is kept.
            with process_group(command, signal.SIGINT, _PATIENCE_S, env=environment, **options) as process:
                code = process.wait(allotted)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            state.set(part, UNFINISHED, time.monotonic() - start, "interrupted")
            raise
    seconds, printed = time.monotonic() - start, log.read_text(errors="replace")
    last_line, failures = printed.rstrip().rpartition("\n")[2].strip()[:300], _failures(printed)
    if code == 0:
        state.set(part, PASSED, seconds, "")
    elif code == EXIT_SKIPPED:
        state.set(part, SKIPPED, seconds, last_line)
    elif code is not None:
        words = f"{len(failures)} failed" if failures else f"exit code {code}: {last_line}"
        state.set(part, FAILED, seconds, words, failures)
    elif allotted == limits.part_s:
        words = f"stopped after {seconds:.0f} s, longer than --part-limit: {last_line}"
        state.set(part, FAILED, seconds, words, failures)
    else:
        state.set(part, UNFINISHED, seconds, f"stopped after {seconds:.0f} s: {last_line}", failures)


def run(
    output: Path,
    device: torch.device,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    resume: bool = False,
    limits: Limits = _DEFAULT,
    as_json: bool = False,
) -> int:
    """Runs what is to be run and prints a summary; the exit code is one of command_line.py.

    parts: names or globs; those alone, again even where they passed (unless resume). resume: only what is missing or
    failed.
    """
    begun = time.monotonic()
    output = output.resolve()
    place = Place(output, device, quick, gpu_tests.root(), header(device)["machine"]["id"])
    try:
        if not min(limits) > 0:
            raise UsageError(f"--budget and --part-limit must be greater than 0 seconds, got {min(limits):g}")
        known = plan.parts(place)
        selected = _choose(known, parts)
        if reason := unwritable(output):
            raise UsageError(reason)
        state = _begin(place, resume, bool(parts))
    except UsageError as error:
        _say(f"onetrip bench --everything: {error}")
        return BAD_USAGE
    # SIGTERM, as of timeout(1), docker stop and schedulers, stops the running part as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        interrupted = _run_all(selected, state, place, resume, limits, begun + limits.budget_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    if as_json:
        print(json.dumps(state.content, indent=1))
    else:
        not_run = {"status": "not run", "seconds": None}
        shown = [{"case": part.name, **state.parts.get(part.name, not_run)} for part in known]
        lines = [f"FAILED {name}: {line}" for name, part in state.parts.items() for line in part.get("failures", ())]
        terminal.show([*run_tables.verified(shown), *lines])
    left = [part for part in known if state.status(part) in (None, UNFINISHED)]
    if left:
        _say(f"{len(left)} of {len(known)} parts are left: call again with --resume")
    if interrupted:
        return INTERRUPTED
    failed = any(found["status"] == FAILED or found.get("failures") for found in state.parts.values())
    return CHECK_FAILED if failed else 0


def _run_all(
    selected: Sequence[Part], state: State, place: Place, resume: bool, limits: Limits, deadline: float
) -> bool:
    """Whether it was interrupted. The parts that always run come last, and have their time kept for them."""
    todo = [part for part in selected if not (part.always or (resume and state.status(part) == PASSED))]
    # What did not end or failed may take as long again, each time: first what has not run.
    behind = {UNFINISHED: 1, FAILED: 2}
    todo.sort(key=lambda part: behind.get(state.status(part), 0))
    state.write()
    try:
        for i, part in enumerate(todo):
            left = deadline - time.monotonic() - _REPORT_S
            if part.missing:
                state.set(part, SKIPPED, 0.0, part.missing)
            elif left <= 0:
                _say(f"{part.name}: not started, the budget is spent")
            else:
                _say(f"[{i + 1}/{len(todo)}] {part.name}: {part.proves}")
                _run(part, state, place, limits._replace(budget_s=left))
                found = state.parts[part.name]
                words = f"{found['status']} after {found['seconds']:.0f} s"
                _say("    " + ": ".join(filter(None, (words, found["reason"]))))
        for part in selected:
            if part.always:
                _run(part, state, place, Limits(part_s=limits.part_s))
    except KeyboardInterrupt:
        _say("interrupted: what is done is kept")
        return True
    return False
