"""OnetripCallback: patches the model of transformers' Trainer until its training ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from onetrip import PatchReport, patch_model, unpatch_model

from . import needs

with needs("transformers"):
    from transformers import TrainerCallback


class OnetripCallback(TrainerCallback):
    """Patches a Trainer's model until its training ends: Trainer(callbacks=[OnetripCallback()], ...).

    options: arguments of patch_model. log: called with the report as text, in the main process; None for no report.
    report: the PatchReport of the last training, with its live call counts; None before the first.

    The model is patched as soon as the Trainer has it, before Accelerate wraps its forward; with FSDP at the start of
    training, after it was sharded. There is no state to save: a resumed training patches again, before its first step.
    After an exception, or without training, the model stays patched: call unpatch_model(model).
    """

    def __init__(self, *, log: Callable[[str], Any] | None = print, **options: Any) -> None:
        self.log = log
        self.options: dict[str, Any] = {  # read twice
            name: tuple(value) if isinstance(value, Iterator) else value for name, value in options.items()
        }
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None and not _shards(args):
            patch_model(model, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.report = patch_model(model, **self.options)
        if self.log is not None and state.is_world_process_zero:
            self.log(str(self.report))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        unpatch_model(model)


def _shards(args: Any) -> bool:
    """Whether FSDP will put its classes on top of the model's. ACCELERATE_USE_FSDP: set by accelerate launch."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true", "yes")
    return launched or bool(getattr(args, "fsdp", None))
