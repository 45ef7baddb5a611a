"""What patch_model(model) gains with default arguments: six model shapes as transformers ships them, beside patched.

Four layers of 768 columns, vocabulary 8,192, 2 x 384 tokens (ViT: 2 x 197), weights in the dtype of the case. In
training forward and backward, in evaluation forward without gradients. The models take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onetrip
import torch
from onetrip.measure import saved_bytes
from torch import Tensor, nn

from ..measure.cases import DTYPE_NAMES, Record, Session, Skip, needed
from ..measure.timing import Clock, clock_for, summarise

BATCH_SIZE, SEQUENCE_LENGTH, VOCABULARY = 2, 384, 8192
ROUNDS, QUICK_ROUNDS, WARM_UP = 11, 2, 3
"""Sums find their norms in the first calls."""
BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""How far the patched loss without dropout may be from the unpatched one, relative to that."""
_MOST_TIMES_FLOAT32 = 10.0
"""What a matrix product in another dtype may take for its steps to mean anything."""

_SIZES = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_SIDES = {"layers": 4, "attention_heads": 12, "ffn_dim": 3072}
_BART = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in _SIDES.items()}
_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 4, "num_heads": 12, "decoder_start_token_id": 0}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("bert", "MaskedLM", {**_SIZES, "intermediate_size": 3072, **_TOKENS}),
    "GPT-2": ("gpt2", "CausalLM", {"n_embd": 768, "n_layer": 4, "n_head": 12, **_TOKENS}),
    "T5": ("t5", "Seq2SeqLM", _T5 | _TOKENS),
    "BART": ("bart", "Seq2SeqLM", {"d_model": 768} | _BART | _TOKENS),
    "ViT": ("vit", "ImageClassification", {**_SIZES, "intermediate_size": 3072}),
    "Llama": ("llama", "CausalLM", {**_SIZES, "intermediate_size": 2048, **_TOKENS}),
}
"""(model_type, head, arguments of its config)."""


@dataclass(frozen=True)
class PatchCase:
    shape: str
    dtype: torch.dtype
    training: bool

    @property
    def mode(self) -> str:
        return "train" if self.training else "eval"

    @property
    def id(self) -> str:
        return f"default_patch-{self.shape}-{DTYPE_NAMES[self.dtype]}-{self.mode}"


def cases(quick: bool = False) -> list[PatchCase]:
    if quick:
        return [PatchCase("BERT", torch.float32, True)]
    modes = (True, False)
    return [PatchCase(shape, dtype, training) for dtype in BOUND for training in modes for shape in SHAPES]


def config_of(model_type: str, **arguments: Any) -> Any:
    return needed("transformers").AutoConfig.for_model(model_type, **arguments)


def model_of(head: str, config: Any) -> nn.Module:
    model: nn.Module = getattr(needed("transformers"), f"AutoModelFor{head}").from_config(config)
    return model


def _batch(case: PatchCase, config: Any, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if case.shape == "ViT":
        images = torch.randn(BATCH_SIZE, 3, config.image_size, config.image_size, generator=generator)
        labels = torch.randint(config.num_labels, (BATCH_SIZE,), generator=generator)
        return {"pixel_values": images.to(device, case.dtype), "labels": labels.to(device)}
    ids = torch.randint(1, VOCABULARY, (BATCH_SIZE, SEQUENCE_LENGTH), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def _times_float32(dtype: torch.dtype, clock: Clock, device: torch.device) -> float:
    """What a matrix product takes, in that of float32."""

    def milliseconds(of: torch.dtype) -> float:
        matrix = torch.ones(256, 256, dtype=of, device=device)
        return min(clock.time(lambda: matrix @ matrix)[0] for _ in range(3))

    return 1.0 if dtype == torch.float32 else milliseconds(dtype) / milliseconds(torch.float32)


class _Model:
    """One model and its call."""

    def __init__(self, case: PatchCase, device: torch.device, is_patched: bool) -> None:
        torch.manual_seed(0)
        model_type, head, arguments = SHAPES[case.shape]
        config = config_of(model_type, **arguments)
        self.model = model_of(head, config).to(device, case.dtype)
        self.batch, self._training = _batch(case, config, device), case.training
        self.n_sites = len(onetrip.patch_model(self.model).patched) if is_patched else 0

    def loss(self) -> Tensor:
        loss: Tensor = self.model(**self.batch).loss
        return loss

    def loss_without_dropout(self) -> float:
        with torch.no_grad():
            self.model.eval()
            found = self.loss().item()
        self.model.train(self._training)
        return found

    def call(self) -> None:
        with torch.set_grad_enabled(self._training):
            loss = self.loss()
        if self._training:
            loss.backward()

    def saved_bytes(self) -> int:
        return saved_bytes(self.loss, excluded=list(self.model.parameters())) if self._training else 0


def measure(case: PatchCase, session: Session) -> Record:
    clock = clock_for(session.device)
    times = _times_float32(case.dtype, clock, session.device)
    if times > _MOST_TIMES_FLOAT32:
        raise Skip(f"a matrix product in {DTYPE_NAMES[case.dtype]} takes {times:.0f} times that in float32 here")
    models = {name: _Model(case, session.device, name == "patched") for name in ("unpatched", "patched")}
    expected, found = (model.loss_without_dropout() for model in models.values())
    assert abs(found - expected) <= BOUND[case.dtype] * abs(expected), f"the loss is {found}, not {expected}: no number"
    samples: dict[str, list[float]] = {name: [] for name in models}

    def run() -> None:
        for turn in range(WARM_UP + (QUICK_ROUNDS if session.quick else ROUNDS)):
            order = list(models) if turn % 2 else list(models)[::-1]
            for name in order:
                models[name].model.zero_grad()
                spent, _ = clock.time(models[name].call)
                if turn >= WARM_UP:
                    samples[name].append(spent)

    session.rounds(run, 1)
    return {
        "case": case.id,
        "shape": case.shape,
        "dtype": DTYPE_NAMES[case.dtype],
        "mode": case.mode,
        "patched_sites": models["patched"].n_sites,
        "loss_without_dropout": {"unpatched": expected, "patched": found},
        "steps": {
            name: {"call": summarise(samples[name], "ms"), "saved_bytes": model.saved_bytes()}
            for name, model in models.items()
        },
    }
