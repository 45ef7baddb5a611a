"""The optimizers to choose from, each with a learning rate that suits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..optim import AdamW8bit

LEARNING_RATE = 5e-4
SGD_LEARNING_RATE = 5e-2  # without Adam's normalisation the same step needs a larger rate

Parameters = Iterable[nn.Parameter]


def _adafactor(params: Parameters) -> torch.optim.Optimizer:
    from transformers import Adafactor

    return Adafactor(params, lr=LEARNING_RATE, scale_parameter=False, relative_step=False)


def _bitsandbytes(params: Parameters) -> torch.optim.Optimizer:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=LEARNING_RATE)


def _torchao(params: Parameters) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit

    return TorchaoAdamW8bit(params, lr=LEARNING_RATE)


OPTIMIZERS: dict[str, Callable[[Parameters], Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True),
    "adamw8bit": lambda params: AdamW8bit(params, lr=LEARNING_RATE),
    "adafactor": _adafactor,
    "sgd": lambda params: torch.optim.SGD(params, lr=SGD_LEARNING_RATE, momentum=0.9),
    "bnb-adamw8bit": _bitsandbytes,
    "torchao-adamw8bit": _torchao,
}
