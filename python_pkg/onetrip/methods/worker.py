"""One method in a process of its own: `python -m onetrip.methods.worker FD`, the job as JSON on standard input.

Answers go to file descriptor FD as lines of JSON: {"progress": ...} as it goes, at the end {"figures": ...} or
{"failed": ...}.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NoReturn

import torch

from ..anatomy.models import reason_of
from ..processes import process_group
from .catalog import Method, find
from .session import Advance, MethodFailed, Options, Session

_PATIENCE_S = 5.0


def measure_isolated(options: Options, method: Method, advance: Advance) -> dict[str, Any]:
    """Session.measure in a fresh process. Raises MethodFailed; leaves no process behind, interrupted or not."""
    job = {"options": asdict(options), "method": method.name, "threads": torch.get_num_threads()}
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "onetrip.methods.worker", str(write_fd)]
    with os.fdopen(read_fd) as answers, tempfile.TemporaryFile("w+") as output:
        pipes = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT, "pass_fds": [write_fd]}
        with process_group(command, signal.SIGTERM, _PATIENCE_S, text=True, **pipes) as process:
            os.close(write_fd)
            assert process.stdin is not None
            with suppress(BrokenPipeError), process.stdin as stdin:  # one that has died already is told of below
                stdin.write(json.dumps(job))
            for line in answers:
                answer = json.loads(line)
                if "figures" in answer:
                    return answer["figures"]
                if "failed" in answer:
                    raise MethodFailed(answer["failed"])
                advance(answer["progress"])
            code = process.wait()
        output.seek(0)
        last = (output.read().strip().splitlines() or ["without a word"])[-1]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        raise MethodFailed(f"its process {how}: {last}")


def _serve(fd: int) -> NoReturn:
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    given: dict[str, Any] = job["options"]
    options = Options(**given | {name: tuple(given[name]) for name in ("only", "combine")})
    with os.fdopen(fd, "w", buffering=1) as answers:

        def say(**answer: Any) -> None:
            answers.write(json.dumps(answer) + "\n")

        try:
            session = Session(options)
            method = find(job["method"], session.setting)
            say(figures=session.measure(method, lambda what: say(progress=what)))
        except Exception as error:
            say(failed=str(error) if isinstance(error, MethodFailed) else reason_of(error))
    sys.exit(0)


if __name__ == "__main__":
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    _serve(int(sys.argv[1]))
