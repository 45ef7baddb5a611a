"""Training steps of whole models: eager attention, SDPA, torch.compile, patched, patched with AdamW8bit.

Encoders have dropout 0.1. Models with a loss over the vocabulary are also patched with linear_cross_entropy, and with
the patterns of norms, sums and softmax alone.

The same random weights, tokens and order of operations for all: time depends on neither values nor labels. A step is
forward, backward and an optimizer step; torch's fused AdamW unless the name says otherwise.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import onetrip
import torch
from onetrip.measure import optimizer_state_bytes, peak_bytes, saved_bytes, storage_bytes
from onetrip.patching import PATTERNS
from torch import Tensor

from ..measure.cases import DTYPE_NAMES, Record, Session, one_line
from ..measure.timing import summarise
from .default_patch import config_of, model_of
from .optimizers import FUSED, ONETRIP, OptimizerProvider, make

ROUNDS, QUICK_ROUNDS, WARM_UP = 7, 2, 1
MOST_SECONDS, FEWEST_ROUNDS = 20.0, 3
"""No more rounds than the fewest once the slowest variant's steps have taken this many seconds."""
AT_ONCE = {"cpu": 4, "cuda": 1}
"""How many variants take turns, and are in memory: on a GPU, whose clock is steady, each may need it all."""
PHASES = ("forward", "backward", "optimizer")
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far the loss without dropout may be from the first variant's, relative to it where it is above 1."""
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")

_BERT_LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
_LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
_LLAMA_100M = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
LABELLED = {"CausalLM": 1.0, "MaskedLM": 0.15}
"""Heads with a loss over the vocabulary, and the fraction of the positions that have a label."""
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_base": ("bert", "SequenceClassification", {}),
    "bert_large": ("bert", "SequenceClassification", _BERT_LARGE),
    "bert_base_mlm": ("bert", "MaskedLM", {}),
    "gpt2": ("gpt2", "CausalLM", {}),
    "llama_100m": ("llama", "CausalLM", _LLAMA_100M | {"vocab_size": 32000}),
    "llama_100m_128k": ("llama", "CausalLM", _LLAMA_100M | {"vocab_size": 128256}),
    "llama_1b": ("llama", "CausalLM", _LLAMA_1B),  # grouped heads, 8 queries to a key
}
"""(model_type, head, arguments of its config)."""


@dataclass(frozen=True)
class TrainingCase:
    model: str
    batch_size: int
    sequence_length: int
    n_layers: int
    dtype: torch.dtype = torch.float32
    """Dtype of autocast; float32: no autocast. Weights are float32."""

    @property
    def id(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f"-{DTYPE_NAMES[self.dtype]}"
        return f"training-{self.model}-{self.n_layers}_layers-{self.batch_size}x{self.sequence_length}{dtype}"


_GPU_CASES = (
    TrainingCase("bert_large", 4, 512, 24),
    *(TrainingCase("bert_large", batch_size, 512, 24, torch.bfloat16) for batch_size in (4, 16, 64)),
    TrainingCase("gpt2", 8, 1024, 12, torch.bfloat16),
    *(TrainingCase("llama_1b", batch_size, 1024, 22, torch.bfloat16) for batch_size in (4, 12)),
)
_LANGUAGE_MODELS = (
    TrainingCase("bert_base_mlm", 4, 256, 12, torch.bfloat16),
    TrainingCase("llama_100m", 4, 768, 12, torch.bfloat16),
    TrainingCase("llama_100m_128k", 1, 1024, 12),
)


def cases(quick: bool = False) -> list[TrainingCase]:
    if quick:
        return [TrainingCase("bert_base", 2, 512, n_layers=2), TrainingCase("llama_100m", 1, 128, n_layers=1)]
    return [TrainingCase("bert_base", 2, 512, n_layers=12), *_LANGUAGE_MODELS, *_GPU_CASES]


def unavailable(case: TrainingCase, device: torch.device) -> str:
    """Why a case is not for this device; empty where it is."""
    return "full size: for a GPU" if case in _GPU_CASES and device.type != "cuda" else ""


@dataclass(frozen=True)
class Variant:
    """One way to train the model."""

    name: str
    attention: str
    patterns: tuple[str, ...] = ()
    """Patterns of patch_model; none: not patched."""
    optimizer: OptimizerProvider = FUSED
    compiled: bool = False


_COMPILED = Variant("torch.compile", "sdpa", compiled=True)
VARIANTS = (
    Variant("eager", "eager"),
    Variant("sdpa", "sdpa"),
    Variant("patched", "eager", PATTERNS),
    Variant("sdpa, patched", "sdpa", PATTERNS),
    Variant("patched + AdamW8bit", "eager", PATTERNS, ONETRIP),
    Variant("sdpa, patched + AdamW8bit", "sdpa", PATTERNS, ONETRIP),
    _COMPILED,
)
_SUMS = tuple(name for name in PATTERNS if "norm" in name or name in ("dropout_add", "attention_softmax"))
_WITH_LOSS = (*PATTERNS, "linear_cross_entropy")
LANGUAGE_MODEL_VARIANTS = (
    Variant("sdpa", "sdpa"),
    Variant("sdpa, norms, sums, softmax patched", "sdpa", _SUMS),
    Variant("sdpa, patched", "sdpa", PATTERNS),
    Variant("sdpa, patched, linear_cross_entropy", "sdpa", _WITH_LOSS),
    Variant("sdpa, patched, linear_cross_entropy + AdamW8bit", "sdpa", _WITH_LOSS, ONETRIP),
    _COMPILED,
)


def variants_of(case: TrainingCase) -> tuple[Variant, ...]:
    """The ways to train the case's model."""
    return LANGUAGE_MODEL_VARIANTS if MODELS[case.model][1] in LABELLED else VARIANTS


class _Stopwatch:
    """Laps in milliseconds; on a GPU between events, so that no lap waits for the one before."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._on_gpu:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def laps(self) -> list[float]:
        pairs = list(zip(self._marks[:-1], self._marks[1:], strict=True))
        if self._on_gpu:
            self._marks[-1].synchronize()
            return [start.elapsed_time(end) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


class Trainer:
    """A model, its optimizer and the batch it is trained on."""

    def __init__(self, case: TrainingCase, variant: Variant, device: torch.device) -> None:
        model_type, head, arguments = MODELS[case.model]
        arguments = arguments | {"num_hidden_layers": case.n_layers, "attn_implementation": variant.attention}
        config = config_of(model_type, **arguments)
        torch.manual_seed(0)
        with device:  # weights are drawn where they are used: a second, not a minute
            self.model = model_of(head, config).to(device).train()
        self.batch = _batch(case, head, config, device)
        self.patched_sites = 0
        if variant.patterns:
            self.patched_sites = len(onetrip.patch_model(self.model, patterns=variant.patterns).patched)
        self.parameters = list(self.model.parameters())
        self.optimizer = make(variant.optimizer, self.parameters)
        self._device, self._dtype = device, case.dtype
        self._call: Callable[..., Any] = self.model
        if variant.compiled:
            torch._dynamo.reset()
            self._call = torch.compile(self.model, dynamic=False)

    def forward(self) -> Tensor:
        with nullcontext() if self._dtype == torch.float32 else torch.autocast(self._device.type, self._dtype):
            return self._call(**self.batch).loss

    def step(self, mark: Callable[[], None] = lambda: None) -> None:
        """mark: called before each phase and at the end. Leaves no gradients: other trainers may need their memory."""
        mark()
        loss = self.forward()
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        mark()
        self.optimizer.zero_grad()

    def loss_without_dropout(self) -> float:
        """All variants compute the same function then. In training, where linear_cross_entropy has its effect."""
        dropouts = {module: module.p for module in self.model.modules() if isinstance(module, torch.nn.Dropout)}
        for module in dropouts:
            module.p = 0.0
        loss = self.forward().item()
        for module, p in dropouts.items():
            module.p = p
        return loss

    def matrix_products_ms(self) -> float:
        """Milliseconds of matrix products in one forward and backward, in the calling thread."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.forward().backward()
        self.optimizer.zero_grad()
        return sum(event.self_cpu_time_total for event in profile.key_averages() if event.key in _PRODUCTS) / 1e3

    def memory(self) -> dict[str, int]:
        saved = saved_bytes(self.forward, excluded=self.parameters)
        peak = peak_bytes(self.step, self._device)
        held = storage_bytes([*self.parameters, *self.model.buffers()]) + optimizer_state_bytes(self.optimizer)
        return {"saved_bytes": saved, "peak_bytes": peak, "held_bytes": held, "training_bytes": held + peak}


def _batch(case: TrainingCase, head: str, config: Any, device: torch.device) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = case.batch_size, case.sequence_length
    ids = torch.randint(config.vocab_size, shape, generator=generator)
    if head in LABELLED:
        is_labelled = torch.rand(shape, generator=generator) < LABELLED[head]
        labels = torch.where(is_labelled, ids, -100)
        return {"input_ids": ids.to(device), "labels": labels.to(device)}
    mask = torch.ones(shape, dtype=torch.long)
    mask[:, -case.sequence_length // 8 :] = 0
    labels = torch.randint(config.num_labels, shape[:1], generator=generator)
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def _kernels_ms(case: TrainingCase, variant: Variant, device: torch.device) -> float:
    """Milliseconds of all kernels of one step, added up: where a step takes longer, the GPU waited for its host."""
    gc.collect()
    torch.cuda.empty_cache()
    trainer = Trainer(case, variant, device)
    for _ in range(WARM_UP):
        trainer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.step()
        torch.cuda.synchronize(device)
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


@dataclass
class _Found:
    """What is known of the variants of one case."""

    case: TrainingCase
    device: torch.device
    rounds: int
    losses: dict[str, float] = field(default_factory=dict)
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    patched_sites: int = 0

    def compare(self, variants: tuple[Variant, ...]) -> None:
        """The variants in turns, so that a disturbance meets them all."""
        trainers = {variant.name: trainer for variant in variants if (trainer := self._admit(variant)) is not None}
        samples: dict[str, list[list[float]]] = {name: [] for name in trainers}
        for done in range(self.rounds):
            slowest_s = max((sum(map(sum, laps)) / 1e3 for laps in samples.values()), default=0.0)
            if done >= FEWEST_ROUNDS and slowest_s > MOST_SECONDS:
                break  # for all of them: turns are taken to the end
            for name, trainer in trainers.items():
                watch = _Stopwatch(self.device)
                trainer.step(watch.mark)
                samples[name].append(watch.laps())
        for name, trainer in trainers.items():
            self.steps[name] = self._figures(samples[name]) | trainer.memory()
            if self.device.type == "cpu":
                self.steps[name]["matrix_products_ms"] = trainer.matrix_products_ms()

    def _admit(self, variant: Variant) -> Trainer | None:
        """Built, checked and warm; None where it has no number, with the reason in self.unavailable."""
        try:
            trainer = Trainer(self.case, variant, self.device)
            loss = trainer.loss_without_dropout()
            for _ in range(WARM_UP):
                trainer.step()
        except torch.OutOfMemoryError:
            self.unavailable[variant.name] = "out of memory"
            return None
        except Exception as error:
            if variant.patterns:
                raise
            self.unavailable[variant.name] = one_line(error)
            return None
        truth = next(iter(self.losses.values()), loss)
        bound = BOUND[self.case.dtype] * max(1.0, abs(truth))
        if not abs(loss - truth) <= bound:
            self.unavailable[variant.name] = f"the loss differs by {abs(loss - truth):.1e} (bound {bound:.0e})"
            assert not variant.patterns, f"{variant.name}: {self.unavailable[variant.name]}: no number"
            return None
        self.losses[variant.name] = loss
        self.patched_sites = max(self.patched_sites, trainer.patched_sites)
        return trainer

    def _figures(self, laps: list[list[float]]) -> dict[str, Any]:
        times = dict(zip(PHASES, map(list, zip(*laps, strict=True)), strict=True))
        times["forward_backward"] = [forward + backward for forward, backward, _ in laps]
        times["step"] = [sum(lap) for lap in laps]
        figures: dict[str, Any] = {name: summarise(values, "ms") for name, values in times.items()}
        figures["samples_per_s"] = 1e3 * self.case.batch_size / figures["step"]["median_ms"]
        return figures


def measure(case: TrainingCase, session: Session) -> Record:
    device, quick = session.device, session.quick
    found = _Found(case, device, QUICK_ROUNDS if quick else ROUNDS)
    variants, at_once = variants_of(case), AT_ONCE[device.type]
    if quick:
        found.unavailable["torch.compile"] = "left out of quick runs: it compiles for minutes"
        variants = tuple(variant for variant in variants if not variant.compiled)

    def run() -> None:
        for first in range(0, len(variants), at_once):
            found.compare(variants[first : first + at_once])
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        if device.type == "cuda" and found.steps:
            # In another process: from its first use on, the profiler makes every launch slower.
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                for variant in (each for each in variants if each.name in found.steps):
                    try:
                        kernels_ms = process.submit(_kernels_ms, case, variant, device).result()
                        found.steps[variant.name]["kernels_ms"] = kernels_ms
                    except Exception as error:  # the times are measured already
                        print(f"{case.id}, {variant.name}: no time of kernels: {one_line(error)}", file=sys.stderr)

    session.rounds(run, 1)
    return {
        "case": case.id,
        "model": case.model,
        "dtype": DTYPE_NAMES[case.dtype],
        "n_layers": case.n_layers,
        "batch_size": case.batch_size,
        "sequence_length": case.sequence_length,
        "dropout_p": 0.0 if case.model.startswith("llama") else 0.1,
        "patched_sites": found.patched_sites,
        "loss_without_dropout": found.losses,
        "steps": found.steps,
        "unavailable": found.unavailable,
    }
