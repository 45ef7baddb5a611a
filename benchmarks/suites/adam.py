"""A step of AdamW over all parameters of a model, and over many small ones: whose optimizer takes how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from onetrip.measure import optimizer_state_bytes, peak_bytes
from onetrip.optim import AdamW8bit

from ..measure.cases import DTYPE_NAMES, Record, Session, available, needed, one_line
from ..measure.timing import at_speed, clock_for, rotated
from .optimizers import OptimizerProvider, make, providers_for, relative_rms, updates

ROUNDS, QUICK_ROUNDS = 21, 5
MOST_SECONDS = 20.0  # of one provider in one case
MAX_GRAD_NORM = 1.0
LARGEST_ERROR = 0.1  # of updates, relative to exact ones; 8-bit states are at 0.02 to 0.05


@dataclass(frozen=True)
class AdamCase:
    model: str
    dtype: torch.dtype
    quick: bool
    is_warm: bool = False
    """Timed right after another step, in place of emptied caches."""
    clips: bool = False
    """Gradients are clipped by their norm: by torch.nn.utils.clip_grad_norm_, and by onetrip within the step."""

    @property
    def name(self) -> str:
        return self.model + ("_clipped" if self.clips else "")

    @property
    def id(self) -> str:
        return f"adam-{self.name}-{DTYPE_NAMES[self.dtype]}"

    def shapes(self) -> list[torch.Size]:
        if self.model == "10000_tensors_of_100":
            return [torch.Size([100])] * 10_000
        if self.model == "adapters_of_rank_8":
            return [torch.Size([8, 768]), torch.Size([768, 8])] * 24
        bert = needed("transformers.models.bert.modeling_bert")
        with torch.device("meta"):
            model = bert.BertModel(bert.BertConfig(num_hidden_layers=2 if self.quick else 12))
        return [p.shape for p in model.parameters()]


def cases(quick: bool = False) -> list[AdamCase]:
    found = [AdamCase("bert_base", torch.float32, quick), AdamCase("10000_tensors_of_100", torch.float32, quick)]
    found.append(AdamCase("adapters_of_rank_8", torch.float32, quick, is_warm=True))
    found.append(AdamCase("bert_base", torch.float32, quick, clips=True))
    return found if quick else [*found, AdamCase("bert_base", torch.bfloat16, quick)]


def _gradients() -> Iterator[list[torch.Tensor]]:
    """Of 20 steps, of a normal distribution: a parameter that is large enough for 8 bits, small ones beside it."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        yield [torch.randn(shape, generator=generator) for shape in ((64, 256), (100,), (3, 5))]


@dataclass
class _Candidate:
    provider: OptimizerProvider
    optimizer: torch.optim.Optimizer
    clipped: list[torch.nn.Parameter]
    """Parameters whose gradients are clipped before the step."""
    samples: list[float] = field(default_factory=list)

    def step(self) -> None:
        if self.clipped:
            torch.nn.utils.clip_grad_norm_(self.clipped, MAX_GRAD_NORM)
        self.optimizer.step()


def _candidate(
    provider: OptimizerProvider, params: list[torch.nn.Parameter], clips: bool, device: torch.device
) -> tuple[_Candidate | None, Record]:
    """Its optimizer, None where it fails its check; and what its record says of the check and of memory."""
    error, detail = None, ""
    try:
        error = relative_rms(updates(provider, device, _gradients()))
        candidate = _Candidate(provider, make(provider, params), clipped=[])
        if isinstance(candidate.optimizer, AdamW8bit) and clips:
            candidate.optimizer.max_grad_norm = MAX_GRAD_NORM
        elif clips:
            candidate.clipped = params
        candidate.step()
        temporary_bytes = peak_bytes(candidate.step, device)
        if error > LARGEST_ERROR:
            detail = f"updates differ by {error:.1e} of their root mean square"
    except Exception as failure:  # a provider that raises is reported, and the others are measured
        detail = one_line(failure)
    check = {"passed": not detail, "detail": detail, "largest_error": None if detail else error}
    record: Record = {"name": provider.name, "check": check}
    if detail:
        return None, record
    state_bytes = optimizer_state_bytes(candidate.optimizer) / sum(p.numel() for p in params)
    return candidate, record | {"state_bytes_per_parameter": state_bytes, "temporary_bytes": temporary_bytes}


def measure(case: AdamCase, session: Session) -> Record:
    device = session.device
    clock = clock_for(device)
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, device=device).to(case.dtype)) for shape in case.shapes()]
    for p in params:
        p.grad = torch.randn_like(p)
    numel = sum(p.numel() for p in params)
    source = torch.randn(max(numel, 1 << 24), device=device)
    target = torch.empty_like(source)
    providers, unavailable = available(providers_for(session.against, case.dtype), device)
    admitted = [_candidate(provider, params, case.clips, device) for provider in providers]
    candidates = [candidate for candidate, _ in admitted if candidate is not None]
    copies: list[float] = []
    rounds = 0

    def one_round() -> None:
        nonlocal rounds
        for candidate in rotated(candidates, rounds):
            if sum(candidate.samples) < MOST_SECONDS * 1e3:
                candidate.step() if case.is_warm else clock.evict()
                candidate.samples.append(clock.time(candidate.step)[0])
        clock.evict()
        copies.append(clock.time(lambda: target.copy_(source))[0])
        rounds += 1

    one_round()
    for samples in (copies, *(candidate.samples for candidate in candidates)):
        samples.clear()
    session.rounds(one_round, QUICK_ROUNDS if session.quick else ROUNDS)
    copy, itemsize = at_speed(copies, 2 * source.nbytes), case.dtype.itemsize
    grad_bytes = 2 * itemsize if case.clips else itemsize  # read for the norm, and for the step
    for candidate, record in admitted:
        if candidate is not None:
            least = candidate.provider.least_bytes(numel, itemsize, grad_bytes)
            record["step"] = at_speed(candidate.samples, least, copy["gb_per_s"])
    return {
        "case": case.id,
        "model": case.name,
        "dtype": DTYPE_NAMES[case.dtype],
        "n_tensors": len(params),
        "n_parameters": numel,
        "copy": copy,
        "providers": [record for _, record in admitted],
        "unavailable": unavailable,
    }
