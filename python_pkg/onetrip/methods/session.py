"""Measuring methods in this process: each takes turns with the baseline, step by step."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .. import anatomy, measure
from ..anatomy import UsageError, format_bytes
from ..anatomy.models import classifies_text, reads_images
from ..measure import spread
from ..patching.linear_loss import output_layer
from .catalog import Method, Recipe, Setting, check_names
from .data import Data, make_data
from .trainer import Trainer
from .verdict import paired_ratio

DTYPES = ("float32", "bfloat16")
Advance = Callable[[str], None]
"""Told what comes next, once for each unit of work of Session.n_units."""

_LEAST_HELD_OUT = 32
_FIRST_STEPS = 5
"""The first steps of a process are slow: its heap grows, pools of threads start. The first method shall not pay."""


class MethodFailed(Exception):
    """The method could not be measured; the message is one line and says why. Where it needs more memory than there is
    it begins with NO_MEMORY, and says how much where the allocator told."""


NO_MEMORY = "does not fit in memory"


@dataclass(frozen=True)
class Options:
    """What to measure. Names are those of the command's options."""

    model: str
    batch_size: int = 8
    sequence_length: int = 128
    steps: int = 20
    dtype: str = "float32"
    device: str = "auto"
    only: tuple[str, ...] = ()
    combine: tuple[str, ...] = ()
    warm_up: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises UsageError for what can be known wrong before a model is loaded."""
        if self.dtype not in DTYPES:
            raise UsageError(
                f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype} (float16 is measured by --only fp16)"
            )
        self._of_anatomy().check()
        check_names(self.only, self.combine)

    def torch_device(self) -> torch.device:
        return self._of_anatomy().torch_device()

    def _of_anatomy(self) -> anatomy.Options:
        return anatomy.Options(
            self.model, self.batch_size, self.sequence_length, self.dtype, device=self.device, steps=self.steps
        )


def check_fits(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UsageError where the least that training keeps is more than is free. model: on any device, also on meta.

    That is on the CPU the model that all others are copied from, which is loaded in float32, and on the device a copy
    of this dtype, its gradients and AdamW's states.
    """
    numel = sum(p.numel() for p in model.parameters())
    source, trained = numel * dtype.itemsize, 4 * numel * dtype.itemsize
    needed = {torch.device("cpu"): 4 * numel, device: trained}
    if device.type == "cpu":
        needed = {device: max(4 * numel, source + trained)}
    for where, n in needed.items():
        free = measure.free_bytes(where)
        if free is not None and n > free:
            raise UsageError(
                f"the model does not fit on {where}: what training keeps there takes {format_bytes(n)}, "
                f"{format_bytes(free)} are free, {format_bytes(n - free)} too little"
            )


_NO_MEMORY = ("can't allocate memory", "could not create a primitive", "could not create a memory", "bad_alloc")
"""As torch's allocator on the CPU, oneDNN (which keeps its reasons to itself) and C++ say it."""


def _memory_error(error: RuntimeError | MemoryError) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def _obtainable(device: torch.device) -> int | None:
    """What may still be allocated on the CPU, in this process, when it is there that training happens."""
    free = measure.free_bytes(device) if device.type == "cpu" else None
    return None if free is None else free * 15 // 16  # the rest is for other processes, and for ours beside its heap


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Session:
    """The model, its data, and the baseline that every method is measured beside."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.device = options.torch_device()
        dtype = getattr(torch, options.dtype)
        on_meta = anatomy.load_model(options.model, weights=False)
        if classifies_text(on_meta):
            raise UsageError(
                f"methods has no text with labels for {type(on_meta).__name__}; onetrip anatomy measures it"
            )
        check_fits(on_meta, dtype, self.device)
        torch.manual_seed(options.seed)
        self.source = anatomy.load_model(options.model).to(dtype)
        # Raises UsageError for sequences that are too long for the model.
        anatomy.make_batch(self.source, 1, options.sequence_length)
        self._partner: Trainer | None = None

    @cached_property
    def data(self) -> Data:
        options = self.options
        n_held_out = max(_LEAST_HELD_OUT, options.batch_size)
        return make_data(options.model, self.source, options.sequence_length, n_held_out, options.seed)

    @cached_property
    def setting(self) -> Setting:
        source: Any = self.source
        return Setting(
            self.device,
            self.options.dtype,
            can_checkpoint=bool(getattr(source, "supports_gradient_checkpointing", False)),
            has_token_loss=output_layer(source) is not None,
            has_flash_attention=any(
                getattr(source, name, False) for name in ("_supports_flash_attn", "_supports_flash_attn_2")
            ),
            reads_text=not reads_images(source),
        )

    @property
    def n_units(self) -> int:
        """Units of work of one method."""
        return self.options.warm_up + self.options.steps + 2

    def recipe(self, method: Method) -> Recipe:
        baseline = Recipe(self.options.batch_size)
        return replace(baseline, **method.change(baseline, self.setting))

    def missing(self, method: Method) -> str:
        """Why the method cannot run here; "" where it can."""
        return method.missing(self.recipe(method), self.setting)

    def measure(self, method: Method, advance: Advance) -> dict[str, Any]:
        """The figures of one method.

        Its steps alternate with those of a baseline in the same process; where both do not fit together, it goes alone.
        So does one that empties the cache that both share. Raises MethodFailed where a method does not fit alone, and
        whatever training raises.
        """
        recipe, why = self.recipe(method), ""
        for paired in (False,) if recipe.empty_cache_steps else (True, False):
            try:
                with measure.at_most_more(_obtainable(self.device)):
                    return self._measure(recipe, paired, advance)
            except (RuntimeError, MemoryError) as error:
                if not _memory_error(error):
                    raise
                why = (str(error).strip() or "out of memory").splitlines()[0]
            self.release()
        raise MethodFailed(f"{NO_MEMORY}: {why}")

    def release(self) -> None:
        """Gives the baseline's memory back; the next method makes it anew."""
        if self._partner is not None:
            self._partner.close()
        self._partner = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _trainer(self, recipe: Recipe) -> Trainer:
        kind = Trainer
        if recipe.zero_stage:
            from .zero import ZeroTrainer

            kind = ZeroTrainer
        return kind(self.source, recipe, self.data, self.device, self.options.seed)

    def _measure(self, recipe: Recipe, paired: bool, advance: Advance) -> dict[str, Any]:
        options = self.options
        if paired and self._partner is None:
            self._partner = self._trainer(Recipe(options.batch_size))
            for _ in range(_FIRST_STEPS):
                self._partner.train_step()
        partner = self._partner if paired else None
        trainer = self._trainer(recipe)
        try:
            advance("loss before")
            loss_before = trainer.held_out_loss()
            own, others = [], []
            for turn in range(options.warm_up + options.steps):
                advance(f"{'step' if turn >= options.warm_up else 'warm-up'} {turn + 1}")
                # What runs second finds the caches full of the other's tensors: each does so every other turn.
                if partner is not None and turn % 2:
                    others.append(partner.timed_step())
                own.append(trainer.timed_step())
                if partner is not None and not turn % 2:
                    others.append(partner.timed_step())
            advance("loss after, memory")
            loss_after = trainer.held_out_loss()
            timed, timed_others = own[options.warm_up :], others[options.warm_up :]
            figures = {
                "recipe": asdict(recipe),
                "paired": paired,
                "trained_steps": trainer.n_steps,
                "samples_per_step": recipe.samples_per_step,
                "first_step_s": own[0],
                "step_ms": spread([1e3 * seconds for seconds in timed]).to_dict(),
                "samples_per_s": spread([recipe.samples_per_step / seconds for seconds in timed]).to_dict(),
                "loss_before": _finite(loss_before),
                "loss": _finite(loss_after),
                "saved_activations": trainer.saved_bytes(),
                "optimizer_states": trainer.state_bytes(),
                "held_memory": trainer.held_bytes(),
                "peak_memory": trainer.peak_bytes(),
                "patched_sites": trainer.patched_sites,
                "fallback_calls": trainer.fallback_calls(),
            }
            if timed_others:
                factor = recipe.samples_per_step / options.batch_size
                figures["samples_per_s_ratio"] = paired_ratio(timed_others, timed, factor).to_dict()
            return figures
        finally:
            trainer.close()
