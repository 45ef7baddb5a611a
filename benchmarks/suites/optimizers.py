"""AdamW of every library: torch's, apex' and TransformerEngine's, bitsandbytes' and torchao's of 8 bits, onetrip's;
and exact AdamW."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from onetrip.optim import AdamW8bit
from torch import Tensor

from ..measure.providers import imported, why_absent

LR, BETAS, EPS, WEIGHT_DECAY = 1e-3, (0.9, 0.999), 1e-8, 1e-2
Make = Callable[..., torch.optim.Optimizer]
"""Make(params, lr=..., betas=..., eps=..., weight_decay=...)."""


@dataclass(frozen=True)
class OptimizerProvider:
    name: str
    make: Make
    state_bytes: float
    """Bytes of state an element of a large tensor, scales included. A step reads and writes them."""
    key: str = "onetrip"
    """Its name as a value of --against; onetrip's own are always measured."""
    module: str = "torch"
    """What must be installed."""
    needs_cuda: bool = False
    for_16_bits: bool = False
    """Whether it differs from another one for parameters of 16 bits only."""

    def unavailable(self, device: torch.device) -> str:
        return why_absent(self.module, device, self.needs_cuda)

    def least_bytes(self, numel: int, param_size: int, grad_size: int) -> float:
        """Parameter and states are read and written, the gradient is read."""
        return numel * (2 * param_size + grad_size + 2 * self.state_bytes)


def _of(module: str, name: str, **fixed: object) -> Make:
    return lambda params, **numbers: imported(module, name)(params, **fixed, **numbers)


ONETRIP = OptimizerProvider("onetrip AdamW8bit", AdamW8bit, 2 + 8 / 128)
FUSED = OptimizerProvider("torch AdamW fused", functools.partial(torch.optim.AdamW, fused=True), 8, "eager")
FOREACH = OptimizerProvider("torch AdamW foreach", functools.partial(torch.optim.AdamW, foreach=True), 8, "eager")
BITSANDBYTES = OptimizerProvider(
    "bitsandbytes AdamW8bit", _of("bitsandbytes.optim", "AdamW8bit"), 2 + 8 / 256, "bitsandbytes", "bitsandbytes"
)
TORCHAO = OptimizerProvider(
    "torchao AdamW8bit", _of("torchao.optim", "AdamW8bit"), 2 + 8 / 256, "torchao", "torchao.optim"
)
_APEX, _TRANSFORMER_ENGINE = "apex.optimizers", "transformer_engine.pytorch.optimizers"
APEX = OptimizerProvider("apex FusedAdam", _of(_APEX, "FusedAdam", adam_w_mode=True), 8, "apex", _APEX, needs_cuda=True)
TRANSFORMER_ENGINE = OptimizerProvider(
    "TransformerEngine FusedAdam",
    _of(_TRANSFORMER_ENGINE, "FusedAdam", adam_w_mode=True),
    8,
    "transformer-engine",
    _TRANSFORMER_ENGINE,
    needs_cuda=True,
)
ONETRIP_32 = OptimizerProvider("onetrip AdamW8bit, 32-bit states", functools.partial(AdamW8bit, optim_bits=32), 8)
ROUNDINGS = tuple(
    OptimizerProvider(f"onetrip AdamW8bit, {what}", functools.partial(AdamW8bit, **options), size, for_16_bits=True)
    for what, options, size in (
        ("master weights of 32 bits", {"master_weight_bits": 32}, 4 + 8 / 128),
        ("master weights of 24 bits", {"master_weight_bits": 24}, 3 + 8 / 128),
        ("stochastic rounding", {"bf16_stochastic_round": True}, 2 + 8 / 128),
    )
)
PROVIDERS = (FUSED, FOREACH, BITSANDBYTES, TORCHAO, APEX, TRANSFORMER_ENGINE, ONETRIP, ONETRIP_32, *ROUNDINGS)


def providers_for(against: Sequence[str], dtype: torch.dtype) -> list[OptimizerProvider]:
    """Those for parameters of a dtype that were asked for, or all; onetrip's own in any case."""
    return [
        provider
        for provider in PROVIDERS
        if (not against or provider.key in ("onetrip", *against)) and (dtype.itemsize == 2 or not provider.for_16_bits)
    ]


def make(
    provider: OptimizerProvider, params: Sequence[Tensor], weight_decay: float = WEIGHT_DECAY
) -> torch.optim.Optimizer:
    return provider.make(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=weight_decay)


def updates(
    provider: OptimizerProvider, device: torch.device, grads: Iterable[Sequence[Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(What a step without decay takes from all parameters, divided by lr; the same of exact Adam in float64), step by
    step. grads: of all parameters, step by step."""
    params: list[torch.nn.Parameter] = []
    exp_avg = exp_avg_sq = torch.zeros((), dtype=torch.float64)
    for t, step in enumerate(grads, start=1):
        if not params:
            params = [torch.nn.Parameter(torch.zeros(grad.shape, device=device)) for grad in step]
            optimizer = make(provider, params, weight_decay=0.0)
        for p, grad in zip(params, step, strict=True):
            p.data.zero_()
            p.grad = grad.to(device)
        optimizer.step()
        g = torch.cat([grad.flatten() for grad in step]).double()
        exp_avg = torch.lerp(exp_avg.expand_as(g), g, 1 - BETAS[0])
        exp_avg_sq = BETAS[1] * exp_avg_sq + (1 - BETAS[1]) * g * g
        root = (exp_avg_sq / (1 - BETAS[1] ** t)).sqrt()
        exact = exp_avg / (1 - BETAS[0] ** t) / (root + EPS)
        yield torch.cat([p.detach().cpu().double().flatten() for p in params]) / -LR, exact


def relative_rms(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Root mean square of the error of the updates over that of exact ones."""
    squares = [((taken - exact).square().sum(), exact.square().sum()) for taken, exact in pairs]
    wrong, right = map(sum, zip(*squares, strict=True))
    return (wrong / right).sqrt().item()
