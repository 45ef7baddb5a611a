"""Which case runs, and how long the rest will take, on standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


def duration(seconds: float) -> str:
    """As a person reads it: 48 s, 3:05, 1:02:03."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class Watch:
    """How far a run is. weights: of every case, in any unit of time; only their ratios matter."""

    def __init__(self, weights: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        self._weights, self._now = weights, now
        self._start = now()
        self._waiting = dict(weights)
        self._ended: list[str] = []

    def end(self, case: str) -> None:
        if self._waiting.pop(case, None) is not None:
            self._ended.append(case)

    @property
    def n_ended(self) -> int:
        return len(self._ended)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def share(self) -> float:
        total = sum(self._weights.values())
        return 1.0 if total == 0 else 1.0 - sum(self._waiting.values()) / total

    def remaining(self) -> float | None:
        """Seconds, from what the cases so far took; None before the first one has ended."""
        if not self._ended:
            return None
        spent = self._now() - self._start
        return spent / self.share * (1.0 - self.share)

    def words(self) -> str:
        left = self.remaining()
        return f"{self.n_ended}/{len(self)}" + ("" if left is None else f", about {duration(left)} left")


class Reporter:
    """Shows a Watch. silent: shows nothing."""

    def __init__(self, watch: Watch, stream: TextIO, silent: bool = False) -> None:
        self.watch = watch
        self._silent = silent
        self.console = Console(file=stream)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[words]}"))
        self._bar = Progress(*columns, console=self.console, disable=silent or not self.console.is_terminal)
        self._task = self._bar.add_task("", total=1.0, words=watch.words())

    def __enter__(self) -> Reporter:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def start(self, case: str) -> None:
        self._bar.update(self._task, description=case)
        if not self.console.is_terminal:
            self.say(f"{case} ({self.watch.words()})")

    def end(self, case: str) -> None:
        self.watch.end(case)
        self._bar.update(self._task, completed=self.watch.share, words=self.watch.words())

    def say(self, line: str) -> None:
        if not self._silent:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
