"""Child processes that end with everything they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def process_group(
    command: Sequence[str], gentle: signal.Signals, patience_s: float, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """The process of a command, in a session of its own. options: of subprocess.Popen.

    At the end of the with block, whatever ends it, the process and its children get the signal `gentle`, and SIGKILL
    once the process has ended or patience_s have passed.
    """
    with _not_ignored(gentle):
        process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        for number, seconds in ((gentle, patience_s), (signal.SIGKILL, None)):
            with suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)


@contextmanager
def _not_ignored(number: signal.Signals) -> Iterator[None]:
    """A process that starts meanwhile does not ignore the signal. What a script's `command &` runs ignores SIGINT."""
    ignored = signal.getsignal(number) == signal.SIG_IGN and threading.current_thread() is threading.main_thread()
    if ignored:
        signal.signal(number, lambda *_: None)  # still nothing here; a new program starts with the default
    try:
        yield
    finally:
        if ignored:
            signal.signal(number, signal.SIG_IGN)
