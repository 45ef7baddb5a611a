"""OnetripCallback: patches the model of transformers' Trainer until its training ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from onetrip import PatchReport, patch_model, unpatch_model

from . import needs

with needs("transformers"):
    from transformers import TrainerCallback


class OnetripCallback(TrainerCallback):
    """Patches a Trainer's model until its training ends: Trainer(callbacks=[OnetripCallback()], ...).

    options: arguments of patch_model. log: called with the report as text, in the main process; None for no report.
    report: the PatchReport of the last training, with its live call counts; None before the first.

    The model is patched as soon as the Trainer has it, before Accelerate wraps its forward or FSDP shards it. There is
    no state to save: a resumed training patches again, before its first step. The model stays patched after an
    exception, without training (call unpatch_model(model)), and where FSDP2 has put its classes on the patched ones.
    """

    def __init__(self, *, log: Callable[[str], Any] | None = print, **options: Any) -> None:
        self.log = log
        self.options: dict[str, Any] = {  # read twice
            name: tuple(value) if isinstance(value, Iterator) else value for name, value in options.items()
        }
        self.report: PatchReport | None = None

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if model is not None:
            patch_model(model, **self.options)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.report = patch_model(model, **self.options)
        if self.log is not None and state.is_world_process_zero:
            self.log(str(self.report))

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with suppress(RuntimeError):  # FSDP2 has put its classes on the patched ones
            unpatch_model(model)
