"""What 8-bit states do to the updates, gradient stream by gradient stream, beside exact Adam in float64.

Figures of a stream: the root mean square of the updates' error over that of exact updates, and the largest |update|,
both over all steps; an update is what a step without decay takes from a parameter, divided by lr.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from ..measure.cases import Record, Session, available
from .optimizers import BITSANDBYTES, LR, ONETRIP, TORCHAO, ExactUpdates, make

N_ROWS, N_COLS = 64, 256
N_STEPS, QUICK_STEPS = 400, 40
LARGEST_UPDATE = 7.28
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


def _check(largest_update: float) -> dict[str, Any]:
    """Exact Adam never exceeds 7.27 lr."""
    return {"passed": largest_update <= LARGEST_UPDATE, "detail": f"an update of {largest_update:.2f} lr"}


def measure(case: StreamCase, session: Session) -> Record:
    device = session.device
    n_steps = QUICK_STEPS if session.quick else N_STEPS
    providers, unavailable = available((ONETRIP, BITSANDBYTES, TORCHAO), device)
    params, optimizers = {}, {}
    for provider in providers:
        params[provider.name] = p = torch.nn.Parameter(torch.zeros(N_ROWS, N_COLS, device=device))
        optimizers[provider.name] = make(provider, [p], weight_decay=0.0)
    wrong = {name: torch.zeros(n_steps, dtype=torch.float64) for name in (*params, "exact")}
    largest = {name: torch.zeros(n_steps, dtype=torch.float64) for name in (*params, "exact")}

    def run() -> None:
        generator = torch.Generator().manual_seed(0)
        exact = ExactUpdates(torch.Size([N_ROWS, N_COLS]))
        for t, grad in zip(range(n_steps), gradients(case.stream, generator), strict=False):
            truth = exact.next(grad)
            wrong["exact"][t], largest["exact"][t] = truth.square().sum(), truth.abs().max()
            for name, p in params.items():
                p.data.zero_()
                p.grad = grad.to(device)
                optimizers[name].step()
                update = p.detach().cpu().double() / -LR
                wrong[name][t], largest[name][t] = (update - truth).square().sum(), update.abs().max()

    session.rounds(run, 1)
    total = wrong["exact"].sum()
    every = max(1, n_steps // 100)
    return {
        "case": case.id,
        "stream": case.stream,
        "n_steps": n_steps,
        "every": every,
        "providers": [
            {
                "name": name,
                "check": _check(largest[name].max().item()) if name == ONETRIP.name else {"passed": True, "detail": ""},
                "relative_rms": 0.0 if name == "exact" else (wrong[name].sum() / total).sqrt().item(),
                "largest_update": largest[name].max().item(),
                "largest_update_of_steps": largest[name].unflatten(0, (-1, every)).amax(1).tolist(),
            }
            for name in wrong
        ],
        "unavailable": unavailable,
    }
