"""AdamW8bit for transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .adam import AdamW8bit


class _EmbeddingsIn32Bit(AdamW8bit):
    """AdamW8bit that keeps float32 states for some parameters, in param groups of their own."""

    def __init__(self, params: Any, *, embeddings: list[Tensor], **arguments: Any) -> None:
        of_embeddings = {id(p) for p in embeddings}
        groups = []
        for given in params:
            group = given if isinstance(given, dict) else {"params": [given]}
            members = list(group["params"])
            rest = [p for p in members if id(p) not in of_embeddings]
            inside = [p for p in members if id(p) in of_embeddings]
            if rest or not inside:
                groups.append({**group, "params": rest})
            if inside:
                groups.append({**group, "params": inside, "optim_bits": 32})
        super().__init__(groups, **arguments)


_REPLACED = ("adamw_torch", "adamw_torch_fused")
"""Values of TrainingArguments.optim that AdamW8bit replaces with the same result but for quantisation: its defaults."""


def _check_nothing_is_ignored(training_args: Any) -> None:
    """Trainer reads none of these where it gets optimizer_cls_and_kwargs."""
    function = "trainer_optimizer: training_args"
    optim = str(getattr(training_args.optim, "value", training_args.optim))
    if optim not in _REPLACED:
        raise ValueError(f"{function}.optim must be its default, AdamW8bit takes its place, got {optim!r}")
    hints = {
        "optim_args": "pass its arguments to trainer_optimizer",
        "optim_target_modules": "AdamW8bit steps every parameter",
        "adafactor": "AdamW8bit takes its place",
    }
    for name, hint in hints.items():
        if value := getattr(training_args, name, None):
            raise ValueError(f"{function}.{name} must be unset, {hint}, got {value!r}")


def trainer_optimizer(
    training_args: Any, *, model: nn.Module | None = None, embeddings_32bit: bool = False, **overrides: Any
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """What Trainer(optimizer_cls_and_kwargs=...) takes: AdamW8bit with learning_rate, adam_beta1, adam_beta2 and
    adam_epsilon of the TrainingArguments. Their weight_decay comes in Trainer's own groups: not for biases and norms.

    embeddings_32bit: parameters of the model's nn.Embedding modules (output layers tied to them included) have float32
    states, in groups with optim_bits=32; model is the one that Trainer gets. overrides: arguments of AdamW8bit.

    Raises ValueError for settings that Trainer would then ignore: an optim other than torch's AdamW, optim_args,
    optim_target_modules, adafactor.
    """
    _check_nothing_is_ignored(training_args)
    if "weight_decay" in overrides:  # Trainer's groups would outvote it in silence
        raise TypeError("trainer_optimizer: weight_decay must be set in training_args, got it as an override")
    arguments: dict[str, Any] = {
        "lr": training_args.learning_rate,
        "betas": (training_args.adam_beta1, training_args.adam_beta2),
        "eps": training_args.adam_epsilon,
        **overrides,
    }
    if not embeddings_32bit:
        return AdamW8bit, arguments
    if not isinstance(model, nn.Module):
        got = type(model).__name__
        raise TypeError(f"trainer_optimizer: model must be what Trainer gets where embeddings_32bit, got {got}")
    modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return _EmbeddingsIn32Bit, {**arguments, "embeddings": [module.weight for module in modules]}
