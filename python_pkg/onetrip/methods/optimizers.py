"""The optimizers to choose from, each with a learning rate that suits it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

from torch import nn

LEARNING_RATE = 5e-4
SGD_LEARNING_RATE = 5e-2  # without Adam's normalisation the same step needs a larger rate

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Any]


def _optimizer(module: str, name: str, lr: float = LEARNING_RATE, **options: Any) -> MakeOptimizer:
    """Makes module.name, and imports the module only then."""
    return lambda params: getattr(import_module(module), name)(params, lr=lr, **options)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": _optimizer("torch.optim", "AdamW"),
    "adamw-fused": _optimizer("torch.optim", "AdamW", fused=True),
    "adamw8bit": _optimizer("onetrip.optim", "AdamW8bit"),
    "adafactor": _optimizer("transformers", "Adafactor", scale_parameter=False, relative_step=False),
    "sgd": _optimizer("torch.optim", "SGD", SGD_LEARNING_RATE, momentum=0.9),
    "bnb-adamw8bit": _optimizer("bitsandbytes.optim", "AdamW8bit"),
    "torchao-adamw8bit": _optimizer("torchao.optim", "AdamW8bit"),
}
