"""What one eager call costs before any arithmetic: the wall time of every operator's forward on a tensor of 1 x 8.

On CUDA it is the time in which the host has enqueued the call; the device runs behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from ..measure.cases import DTYPE_NAMES, Case, Operator, Provider, Record, Session, available
from ..measure.checks import Truth, make_inputs
from ..measure.providers import EAGER, own_provider, providers
from ..measure.side_by_side import bound_and_checked
from ..measure.timing import summarise
from . import cross_entropy, glu, rotary, row_norm, softmax

N_ROWS, N_COLS = 1, 8
ROUNDS, QUICK_ROUNDS = 301, 15
"""A second: of a fifth of one, a hiccup of the machine would be the median."""
CALLS = {"cpu": 200, "cuda": 50}
"""A sample is their mean, so that the clock itself costs nothing; on CUDA few enough for the queue of launches to hold
them all (1024 on today's drivers), or the host would wait for the device."""
OPERATORS = (
    *row_norm.SINGLE,
    *row_norm.FUSED,
    softmax.SOFTMAX,
    *softmax.ATTENTION_SOFTMAX.values(),
    rotary.ROTARY,
    *glu.OPERATORS,
    cross_entropy.CROSS_ENTROPY,
    cross_entropy.linear_cross_entropy(N_COLS),
    cross_entropy.linear_logprobs(N_COLS),
)


@dataclass(frozen=True)
class OverheadCase:
    operator: Operator
    requires_grad: bool
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f"-{DTYPE_NAMES[self.dtype]}"
        return f"overhead-{self.operator.name}-{'grad' if self.requires_grad else 'no_grad'}{dtype}"


def cases(quick: bool = False) -> list[OverheadCase]:
    return [OverheadCase(operator, grad) for operator in OPERATORS for grad in (False, True)]


def _compared(case: OverheadCase, session: Session) -> list[Provider]:
    """By default eager and onetrip without a scope: picking the backend is part of what a call costs."""
    own = own_provider(session.device, case.operator.family)
    if not session.against:
        return [EAGER, Provider(own.name, own.bind)]
    small = Case(case.operator, N_ROWS, N_COLS, case.dtype, full=False)
    return [Provider(p.name, p.bind) if p.name == own.name else p for p in providers(small, session)]


def _microseconds_a_call(
    function: Callable[..., object], inputs: dict[str, torch.Tensor], device: torch.device
) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    calls = CALLS[device.type]
    start = time.perf_counter()
    for _ in range(calls):
        function(**inputs)
    return (time.perf_counter() - start) / calls * 1e6


def measure(case: OverheadCase, session: Session) -> Record:
    device = session.device
    inputs = make_inputs(case.operator, N_ROWS, N_COLS, case.dtype, device, seed=0)
    truth = Truth(case.operator, inputs)
    torch._dynamo.reset()
    compared, unavailable = available(_compared(case, session), device)
    found = {p.name: (p, *bound_and_checked(p, case.operator, truth)) for p in compared}
    tensors = {name: tensor.detach() for name, tensor in inputs.tensors.items()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(case.requires_grad and inputs.tensors[name].requires_grad)
    samples: dict[str, list[float]] = {name: [] for name, (_, _, check) in found.items() if check.passed}

    def one_round() -> None:
        for name, values in samples.items():
            provider, function, _ = found[name]
            with provider.scope():
                values.append(_microseconds_a_call(function, tensors, device))

    one_round()
    for values in samples.values():
        values.clear()
    session.rounds(one_round, QUICK_ROUNDS if session.quick else ROUNDS)
    return {
        "case": case.id,
        "operator": case.operator.name,
        "dtype": DTYPE_NAMES[case.dtype],
        "n_rows": N_ROWS,
        "n_cols": N_COLS,
        "requires_grad": case.requires_grad,
        "providers": [
            {"name": name, "check": asdict(check)}
            | ({"forward": summarise(samples[name], "us")} if check.passed else {})
            for name, (_, _, check) in found.items()
        ],
        "unavailable": unavailable,
    }
