"""What 8-bit states do to the updates, gradient stream by gradient stream, beside exact Adam in float64.

Figures of a stream: the root mean square of the updates' error over that of exact updates, and the largest |update|,
both over all steps; an update is what a step without decay takes from a parameter, divided by lr.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Generator, Tensor

from ..measure.cases import Record, Session, available
from .optimizers import BITSANDBYTES, ONETRIP, TORCHAO, updates

N_ROWS, N_COLS = 64, 256
N_STEPS, QUICK_STEPS = 400, 40
LARGEST_UPDATE = 7.28
"""Exact Adam's never exceeds 7.27 lr."""
STREAMS = {
    "gaussian": "normal",
    "six_decades": "neighbours differ by up to a million times",
    "sparse_rows": "2% of the rows at a time, as an embedding's gradients come",
    "outlier": "one element of 256 is 1e5 times its neighbours",
}


def gradients(stream: str, generator: Generator) -> Iterator[Tensor]:
    scale = torch.ones(N_ROWS, N_COLS)
    if stream == "six_decades":
        scale = 10.0 ** (-6.0 * torch.rand(N_ROWS, N_COLS, generator=generator))
    elif stream == "outlier":
        scale[:, 7] = 1e5
    while True:
        grad = torch.randn(N_ROWS, N_COLS, generator=generator) * scale
        if stream == "sparse_rows":
            grad *= torch.rand(N_ROWS, 1, generator=generator) < 0.02
        yield grad


@dataclass(frozen=True)
class StreamCase:
    stream: str

    @property
    def id(self) -> str:
        return f"adam_streams-{self.stream}"


def cases(quick: bool = False) -> list[StreamCase]:
    return [StreamCase(stream) for stream in STREAMS]


def measure(case: StreamCase, session: Session) -> Record:
    n_steps = QUICK_STEPS if session.quick else N_STEPS
    providers, unavailable = available((ONETRIP, BITSANDBYTES, TORCHAO), session.device)
    largest_of, error_of = {}, {"exact": 0.0}

    def run() -> None:
        for provider in providers:
            grads = islice(gradients(case.stream, torch.Generator().manual_seed(0)), n_steps)
            steps = [
                ((taken - exact).square().sum(), exact.square().sum(), taken.abs().max(), exact.abs().max())
                for taken, exact in updates(provider, session.device, ([grad] for grad in grads))
            ]
            wrong, right, largest_of[provider.name], exact_largest = torch.tensor(steps, dtype=torch.float64).unbind(1)
            error_of[provider.name] = (wrong.sum() / right.sum()).sqrt().item()
        largest_of["exact"] = exact_largest

    session.rounds(run, 1)
    every = max(1, n_steps // 100)

    def entry(name: str) -> Record:
        largest = largest_of[name]
        passed = name != ONETRIP.name or largest.max().item() <= LARGEST_UPDATE
        return {
            "name": name,
            "check": {"passed": passed, "detail": "" if passed else f"an update of {largest.max().item():.2f} lr"},
            "relative_rms": error_of[name],
            "largest_update": largest.max().item(),
            "largest_update_of_steps": largest.unflatten(0, (-1, every)).amax(1).tolist(),
        }

    return {
        "case": case.id,
        "stream": case.stream,
        "n_steps": n_steps,
        "every": every,
        "providers": list(map(entry, largest_of)),
        "unavailable": unavailable,
    }
