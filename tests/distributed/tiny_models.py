"""Tiny models of transformers with drawn weights, for the tests of several processes and of gathered parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip


def bert() -> Any:
    import transformers

    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _drawn(transformers.BertForMaskedLM(config))


def llama(tied: bool = False) -> Any:
    import transformers

    return _drawn(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)))


def gemma() -> Any:
    """Its norms multiply by 1 + weight, its embedding scales."""
    import transformers

    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=4, head_dim=8)
    return _drawn(transformers.GemmaForCausalLM(config))


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "llama": lambda: llama(tied=True), "gemma": gemma}


def _drawn(model: Any) -> Any:
    """The same weights in every process."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.05 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.train()


def layers(model: Any) -> Any:
    return model.bert.encoder.layer if hasattr(model, "bert") else model.model.layers
