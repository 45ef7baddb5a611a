"""A language model of a million parameters on real text, with each optimizer, from the same seeds on the same batches.

The text is the prose of the standard library's own documentation, pydoc_data.topics, as bytes; one tenth is held out.
The model is a decoder of four layers. Five seeds make five sets of weights and orders of batches.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from ..measure.cases import Record, Session, available
from .optimizers import BITSANDBYTES, FUSED, ONETRIP, OptimizerProvider

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 144, 4, 4, 64, 16
N_STEPS, QUICK_STEPS, SEEDS = 2000, 60, 5
LR, WARM_UP, WEIGHT_DECAY = 2e-3, 100, 0.1
EVERY = 50
"""Steps between two points of the recorded training curve; each is the mean since the one before."""


@dataclass(frozen=True)
class LanguageModelCase:
    seed: int

    @property
    def id(self) -> str:
        return f"adam_training-seed{self.seed}"


def cases(quick: bool = False) -> list[LanguageModelCase]:
    return [LanguageModelCase(seed) for seed in range(1 if quick else SEEDS)]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits; ids: (batch, CONTEXT). The token embedding is the output's weight too."""
        x = self.tokens(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.norm(x) @ self.tokens.weight.T

    def loss(self, text: Tensor) -> Tensor:
        """text: (batch, CONTEXT + 1)."""
        return nn.functional.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def _text() -> tuple[Tensor, Tensor]:
    """(for training, held out): bytes as int64."""
    content = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    ids = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    n = len(ids) * 9 // 10
    return ids[:n], ids[n:]


def _windows(ids: Tensor, starts: Tensor) -> Tensor:
    return ids[starts[:, None] + torch.arange(CONTEXT + 1)]


def _train(provider: OptimizerProvider, seed: int, n_steps: int, device: torch.device) -> tuple[list[float], float]:
    """(mean training loss of every EVERY steps, loss on all of the held-out text)."""
    torch.manual_seed(seed)
    model = Decoder().to(device)
    optimizer = provider.make(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: min((t + 1) / WARM_UP, max(0.05, 1.0 - t / n_steps))
    )
    train, held_out = _text()
    generator = torch.Generator().manual_seed(seed)
    losses, curve = [], []
    for _ in range(n_steps):
        batch = _windows(train, torch.randint(len(train) - CONTEXT, (BATCH,), generator=generator))
        loss = model.loss(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) == EVERY:
            curve.append(statistics.fmean(losses))
            losses.clear()
    starts = torch.arange(0, len(held_out) - CONTEXT, CONTEXT)
    with torch.no_grad():
        parts = [model.loss(_windows(held_out, part).to(device)).item() * len(part) for part in starts.split(64)]
    return curve, sum(parts) / len(starts)


def measure(case: LanguageModelCase, session: Session) -> Record:
    n_steps = QUICK_STEPS if session.quick else N_STEPS
    providers, unavailable = available((FUSED, ONETRIP, BITSANDBYTES), session.device)
    found: dict[str, tuple[list[float], float]] = {}

    def run() -> None:
        for provider in providers:
            found[provider.name] = _train(provider, case.seed, n_steps, session.device)

    session.rounds(run, 1)
    return {
        "case": case.id,
        "seed": case.seed,
        "n_steps": n_steps,
        "every": EVERY,
        "n_parameters": sum(p.numel() for p in Decoder().parameters()),
        "providers": [
            {"name": name, "training_loss": curve, "held_out_loss": loss} for name, (curve, loss) in found.items()
        ],
        "unavailable": unavailable,
    }
