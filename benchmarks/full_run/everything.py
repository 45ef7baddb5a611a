"""Everything that a machine can show, in one command that can be called again until it is done.

Tests of the GPU kernels, sanitizers, all suites, training steps, peers, environment and report, each part (parts.py)
in a process of its own with a time limit and a log. What became of each is in DIR/everything.json.
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
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from onetrip import html

from ..measure.machine import header
from ..measure.results import SCHEMA, unwritable
from ..run.store import fingerprint
from . import gpu_tests
from .plan import LIMIT_S, Part, Place
from .plan import parts as all_parts

PASSED, FAILED, SKIPPED, UNFINISHED = "passed", "failed", "skipped", "unfinished"
EXIT_UNFINISHED, EXIT_SKIPPED = 4, 5
"""How a part's process says that it ran out of time, or that something was missing after all."""
INTERRUPTED = 130
_MOST_FAILURES = 50
_MARGIN_S = 15.0
"""Between the moment when a part is told to have ended and the one when it is stopped."""


class State:
    """DIR/everything.json: the header of the run, and part -> status, seconds, reason."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path, self.content = path, content

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        return self.content["parts"]

    def done(self, name: str) -> bool:
        return self.parts.get(name, {}).get("status") == PASSED

    def set(self, name: str, status: str, seconds: float = 0.0, reason: str = "", failures: Sequence[str] = ()) -> None:
        self.parts[name] = {"status": status, "seconds": round(seconds, 1), "reason": reason} | (
            {"failures": list(failures)} if failures else {}
        )
        self.write()

    def write(self) -> None:
        html.write(self._path, json.dumps(self.content, indent=1) + "\n")


def _id(commit: Mapping[str, Any] | None) -> str | None:
    return None if commit is None else commit["id"]


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """What has changed since the run began, so that figures of two things would stand in one table; else empty."""
    found = {
        "machine": (old["machine"]["id"], new["machine"]["id"]),
        "versions": (old["versions"], new["versions"]),
        "commit": (_id(old["commit"]), _id(new["commit"])),  # files of this very run may count as changes: see code
        "code": (old["code"], new["code"]),
        "--quick": (old["quick"], new["quick"]),
    }
    return "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in found.items() if before != after)


def _usage(message: str) -> int:
    print(f"onetrip bench --everything: {message}", file=sys.stderr)
    return 2


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _terminated_as_by_ctrl_c() -> Iterator[None]:
    """SIGTERM, as of timeout(1), docker stop and schedulers, stops the running part too, and keeps what is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _begin(place: Place, resume: bool, selected: bool) -> State | str:
    """The state to go on with, or why the run must not start."""
    path = place.output / "everything.json"
    content = {"schema": SCHEMA, **header(place.device), "code": fingerprint(), "quick": place.quick, "parts": {}}
    if not path.exists():
        return State(path, content)
    if not (resume or selected):
        return f"{path} holds a run already: --resume goes on with it, --part runs one part again"
    try:
        old = json.loads(path.read_text())
        difference = _difference(old, content)
    except (ValueError, KeyError, TypeError) as error:
        return f"{path} is not the state of a run ({type(error).__name__}: {error}): move it away"
    if difference:
        return f"{path} is of another run ({difference}): name another folder"
    return State(path, old)


def _choose(known: Sequence[Part], wanted: Sequence[str] | None) -> list[Part] | str:
    if not wanted:
        return list(known)
    for pattern in wanted:
        if not any(fnmatch.fnmatchcase(part.name, pattern) for part in known):
            names = "\n  ".join(part.name for part in known)
            return f"--part {pattern}: no such part. There are:\n  {names}"
    return [p for p in known if p.always or any(fnmatch.fnmatchcase(p.name, pattern) for pattern in wanted)]


def _estimate(part: Part, state: State) -> float:
    """What a part that was cut took is a lower bound of what it needs."""
    before = state.parts.get(part.name, {})
    if before.get("status") == UNFINISHED and not part.is_check:
        return min(LIMIT_S, max(part.seconds, 1.5 * before["seconds"]))
    return min(part.seconds, LIMIT_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does, so that what is done is kept; then for good, with everything that it started."""
    for number, patience in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number == signal.SIGINT:
                continue  # its children may be left


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _failures(log: Path) -> list[str]:
    """Lines that begin with FAILED, as the parts print them."""
    found = re.findall(r"^FAILED (.+)$", log.read_text(errors="replace"), re.MULTILINE)
    return [line[:500] for line in dict.fromkeys(found)][:_MOST_FAILURES]


def _run(part: Part, state: State, place: Place, allotted: float) -> None:
    """Runs one part and writes down what became of it. KeyboardInterrupt is passed on afterwards."""
    log = place.output / "logs" / f"{part.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    # A moment, not a duration: a part that takes long to start has no more time for that.
    deadline = time.time() + max(allotted - _MARGIN_S, 5.0)
    words = [word.replace("{deadline}", f"{deadline:.0f}") for word in part.command]
    command = [sys.executable, "-m", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with log.open("wb") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(allotted)
        except subprocess.TimeoutExpired:
            _stop(process)
            spent = time.monotonic() - start
            status, reason = UNFINISHED, f"stopped after {spent:.0f} s"
            if allotted >= LIMIT_S:  # it would be stopped there again, unless it keeps what has ended
                status = FAILED
                if not any("{deadline}" in word for word in part.command):  # else the part keeps to its limit by itself
                    reason += f"; without a limit: python -m {shlex.join(words)}"
            state.set(part.name, status, spent, reason, _failures(log))
            return
        except KeyboardInterrupt:
            _stop(process)
            state.set(part.name, UNFINISHED, time.monotonic() - start, "interrupted")
            raise
    seconds, failures = time.monotonic() - start, _failures(log)
    if code == 0:
        state.set(part.name, PASSED, seconds)
    elif code == EXIT_UNFINISHED:
        state.set(part.name, UNFINISHED, seconds, _last_line(log), failures)
    elif code == EXIT_SKIPPED:
        state.set(part.name, SKIPPED, seconds, _last_line(log))
    else:
        reason = f"{len(failures)} failed" if failures else f"exit code {code}: {_last_line(log)}"
        state.set(part.name, FAILED, seconds, reason, failures)


def _summary(state: State, known: Sequence[Part]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from ..show.terminal import console

    out = console()
    table = Table("part", "status", "s", "why", title="Everything", title_justify="left")
    styles = {PASSED: "green", FAILED: "red", UNFINISHED: "yellow", SKIPPED: "dim"}
    for part in known:
        found = state.parts.get(part.name)
        if found is None:
            table.add_row(part.name, "not run", "", "")
        else:
            table.add_row(
                part.name,
                found["status"],
                f"{found['seconds']:.0f}",
                escape(found["reason"]),
                style=styles[found["status"]],
            )
    out.print(table)
    for name, found in state.parts.items():
        for line in found.get("failures", ()):
            out.print(f"FAILED {name}: {line}", style="red", markup=False, highlight=False)


def run(
    output: Path,
    device: torch.device,
    *,
    quick: bool = False,
    parts: Sequence[str] | None = None,
    resume: bool = False,
    budget_s: float = float("inf"),
    as_json: bool = False,
    known: Sequence[Part] | None = None,
) -> int:
    """Runs what is to be run and prints a summary. 0: nothing failed, 1: something did, 2: bad usage, 130: Ctrl-C.

    parts: names or globs; those alone, again even where they passed (unless resume). resume: only what is missing or
    failed. budget_s: no part is started that would not end within it. known: for tests, in place of the real parts.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        return _usage("--device cuda: torch sees no CUDA device")
    if not budget_s > 0:
        return _usage(f"--budget must be greater than 0 seconds, got {budget_s:g}")
    begun = time.monotonic()
    output = output.resolve()
    place = Place(output, device, quick, gpu_tests.root())
    known = all_parts(place) if known is None else known
    selected = _choose(known, parts)
    if isinstance(selected, str):
        return _usage(selected)
    if reason := unwritable(output):
        return _usage(reason)
    state = _begin(place, resume, bool(parts))
    if isinstance(state, str):
        return _usage(state)
    with _terminated_as_by_ctrl_c():
        interrupted = _run_all(selected, state, place, resume, begun + budget_s)
    if as_json:
        print(json.dumps(state.content, indent=1))
    else:
        _summary(state, known)
    left = [part.name for part in known if state.parts.get(part.name, {}).get("status") in (None, UNFINISHED)]
    if left:
        _say(f"{len(left)} of {len(known)} parts are left: call again with --resume")
    if interrupted:
        return INTERRUPTED
    return 1 if any(found["status"] == FAILED or found.get("failures") for found in state.parts.values()) else 0


def _run_all(selected: Sequence[Part], state: State, place: Place, resume: bool, deadline: float) -> bool:
    """Whether it was interrupted. The parts that always run come last, and have their time kept for them."""
    reserve = sum(part.seconds for part in selected if part.always)
    todo = [part for part in selected if not part.always and not (resume and state.done(part.name))]
    # What did not end or failed may take as long again, each time: first what has not run.
    behind = {UNFINISHED: 1, FAILED: 2}
    todo.sort(key=lambda part: behind.get(state.parts.get(part.name, {}).get("status", ""), 0))
    state.write()
    try:
        for i, part in enumerate(todo):
            if part.missing:
                state.set(part.name, SKIPPED, reason=part.missing)
                continue
            left = deadline - time.monotonic() - reserve
            estimate = _estimate(part, state)
            if estimate > left:
                _say(f"{part.name} needs about {estimate:.0f} s, {max(left, 0):.0f} s are left: not started")
                continue
            ahead = sum(_estimate(other, state) for other in todo[i:] if not other.missing)
            _say(f"[{i + 1}/{len(todo)}] {part.name}: {part.proves} (about {estimate:.0f} s, {ahead:.0f} s for all)")
            _run(part, state, place, min(LIMIT_S, left))
            found = state.parts[part.name]
            _say(f"    {found['status']} after {found['seconds']:.0f} s{': ' * bool(found['reason'])}{found['reason']}")
        for part in selected:
            if part.always:
                _run(part, state, place, LIMIT_S)
    except KeyboardInterrupt:
        _say("interrupted: what is done is kept")
        return True
    return False
