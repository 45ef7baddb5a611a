"""The methods as data: what each changes in the way of training, what it needs, and what is commonly said of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from ..anatomy import UsageError


@dataclass(frozen=True)
class Recipe:
    """One way of training. Every method is a change of these; the defaults are the baseline."""

    batch_size: int
    """Samples of one forward pass."""
    accumulation: int = 1
    """Forward and backward passes for one step of the optimizer."""
    checkpointing: bool = False
    autocast: str = ""
    """The dtype of autocast around the forward pass; "" without."""
    optimizer: str = "adamw"
    gradient_release: bool = False
    """Whether layers step during backward: onetrip.optim.enable_gradient_release."""
    workers: int = 0
    pin_memory: bool = False
    compiled: bool = False
    lora: bool = False
    patched: bool = False
    linear_loss: bool = False
    """Whether linear_cross_entropy is among the patterns."""
    zero_stage: int = 0
    offload: bool = False
    matmul_precision: str = ""
    """As torch.set_float32_matmul_precision takes it; "" leaves it as it is."""
    empty_cache_steps: int = 0
    """Every how many steps torch's cache of GPU memory is emptied between forward and backward; 0 for never."""
    source: str = ""
    """Where samples come from: "" for tensors in memory, "datasets" or "datasets-stream" for the datasets library."""
    attention: str = ""
    """The attn_implementation of transformers; "" leaves its choice."""

    @property
    def samples_per_step(self) -> int:
        return self.batch_size * self.accumulation


@dataclass(frozen=True)
class Setting:
    """Where the methods are to work."""

    device: torch.device
    dtype: str
    can_checkpoint: bool = True
    """Whether the model has gradient checkpointing."""
    has_token_loss: bool = True
    """Whether the model computes a loss over its vocabulary."""
    has_flash_attention: bool = True
    """Whether transformers has flash-attention 2 for this model."""
    reads_text: bool = True


Change = Callable[[Recipe, Setting], dict[str, Any]]
Missing = Callable[[Recipe, Setting], str]


def _nothing(recipe: Recipe, setting: Setting) -> str:
    return ""


@dataclass(frozen=True)
class Method:
    """A change of the recipe. Two methods of one family cannot be combined."""

    name: str
    family: str
    title: str
    change: Change
    missing: Missing = _nothing
    """Why it cannot run with a recipe that holds its change; "" where it can."""
    own: bool = False
    """Whether onetrip answers for it."""
    isolated: bool = False
    """Whether it leaves something behind in its process, so that it has one of its own."""
    parts: tuple[str, ...] = ()
    """The methods that a combination is made of."""

    @property
    def said(self) -> tuple[str, str]:
        """What guides say of (speed, memory) of its family, "" where they say nothing: see docs/methods.md."""
        return SAID.get(self.family, ("", ""))


def _set(**fields: Any) -> Change:
    return lambda recipe, setting: fields


def _times(factor: int) -> Change:
    return lambda recipe, setting: {"batch_size": factor * recipe.batch_size}


def _accumulate(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """The same samples for a step in 4 passes, or in 2, or one by one."""
    passes = next((n for n in (4, 2) if recipe.batch_size % n == 0), recipe.batch_size)
    return {"batch_size": recipe.batch_size // passes, "accumulation": passes}


def _preload(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    cores = os.cpu_count() or 1
    return {"workers": max(1, min(4, cores // 2)), "pin_memory": setting.device.type == "cuda"}


def _needs(*packages: str) -> Missing:
    def missing(recipe: Recipe, setting: Setting) -> str:
        absent = [package for package in packages if find_spec(package) is None]
        return f"not installed: {', '.join(absent)} (pip install {' '.join(absent)})" if absent else ""

    return missing


def _bf16_missing(recipe: Recipe, setting: Setting) -> str:
    if setting.dtype != "float32":
        return f"the weights are {setting.dtype} already"
    if setting.device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU computes no bfloat16"
    return ""


def _fp16_missing(recipe: Recipe, setting: Setting) -> str:
    if setting.device.type != "cuda":
        return "needs a CUDA device"
    return f"the weights are {setting.dtype} already" if setting.dtype != "float32" else ""


def _tf32_missing(recipe: Recipe, setting: Setting) -> str:
    if setting.device.type != "cuda":
        return "needs a CUDA device: TF32 is a mode of NVIDIA's tensor cores"
    if setting.dtype != "float32":
        return f"the weights are {setting.dtype}, TF32 multiplies float32 matrices"
    if torch.cuda.get_device_capability(setting.device) < (8, 0):
        return "this GPU has no TF32: compute capability 8.0 is the first with it"
    return ""


def _empty_cache_missing(recipe: Recipe, setting: Setting) -> str:
    return "" if setting.device.type == "cuda" else "needs a CUDA device: torch keeps no cache of a CPU's memory"


def _datasets_missing(recipe: Recipe, setting: Setting) -> str:
    if not setting.reads_text:
        return "needs a model of text: samples of images are computed, there is no file of them"
    if recipe.source == "datasets-stream" and recipe.workers:
        return "one file is streamed by one process"
    return _needs("datasets")(recipe, setting)


def _flash_attention_missing(recipe: Recipe, setting: Setting) -> str:
    if setting.device.type != "cuda":
        return "needs a CUDA device"
    if torch.cuda.get_device_capability(setting.device) < (8, 0):
        return "flash-attention 2 runs from compute capability 8.0 on"
    if not setting.has_flash_attention:
        return "transformers has no flash-attention 2 for this model"
    if setting.dtype == "float32" and not recipe.autocast:
        return "computes in float16 and bfloat16 alone: --dtype bfloat16, or --combine flash-attention-2+bf16"
    if find_spec("flash_attn") is None:
        return "not installed: flash_attn (pip install flash-attn --no-build-isolation)"
    return ""


def _checkpointing_missing(recipe: Recipe, setting: Setting) -> str:
    return "" if setting.can_checkpoint else "transformers has no gradient checkpointing for this model"


def _linear_loss_missing(recipe: Recipe, setting: Setting) -> str:
    return "" if setting.has_token_loss else "the model has no loss over a vocabulary"


def _accumulation_missing(recipe: Recipe, setting: Setting) -> str:
    return "" if recipe.accumulation > 1 else "needs a batch of at least 2"


def _release_missing(recipe: Recipe, setting: Setting) -> str:
    if recipe.accumulation > 1 or recipe.zero_stage:
        return "each backward pass would be a step"
    return "steps before a GradScaler has seen all gradients" if recipe.autocast == "float16" else ""


def _compile_missing(recipe: Recipe, setting: Setting) -> str:
    if setting.device.type == "cuda":
        return "" if find_spec("triton") else "torch.compile needs triton here (pip install triton)"
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return "" if any(name and shutil.which(name) for name in compilers) else "torch.compile needs a C++ compiler here"


def _zero_missing(recipe: Recipe, setting: Setting) -> str:
    if recipe.autocast == "float16":
        return "DeepSpeed takes no GradScaler"
    if recipe.offload and setting.device.type != "cuda":
        return "offloads from a CUDA device"
    return _needs("deepspeed")(recipe, setting)


BATCH, ACCUMULATION, CHECKPOINTING = "Batch size", "Gradient accumulation", "Gradient checkpointing"
PRECISION, OPTIMIZER, PRELOADING = "Mixed precision", "Optimizer choice", "Data preloading"
COMPILE, PEFT, ZERO, FUSED, COMBINED = "torch.compile", "PEFT", "DeepSpeed ZeRO", "Fused kernels", "Combined"
PIPELINE, EMPTY_CACHE, ATTENTION = "Data pipeline", "Emptied cache", "Attention"

# The table in transformers' guide to training on one GPU (perf_train_gpu_one, with the rows of its older releases).
SAID = {
    BATCH: ("yes", "yes"),
    ACCUMULATION: ("no", "yes"),
    CHECKPOINTING: ("no", "yes"),
    PRECISION: ("yes", "depends"),
    OPTIMIZER: ("yes", "yes"),
    PRELOADING: ("yes", "no"),
    EMPTY_CACHE: ("no", "yes"),
    ATTENTION: ("yes", "yes"),
    ZERO: ("no", "yes"),
    COMPILE: ("yes", "no"),
    PEFT: ("no", "yes"),
}


BASELINE = Method("baseline", "Baseline", "Baseline", _set())

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("batch-2x", BATCH, "Batch size 2x", _times(2)),
        Method("batch-4x", BATCH, "Batch size 4x", _times(4)),
        Method("accumulation", ACCUMULATION, "Gradient accumulation", _accumulate, _accumulation_missing),
        Method(
            "checkpointing", CHECKPOINTING, "Gradient checkpointing", _set(checkpointing=True), _checkpointing_missing
        ),
        Method("bf16", PRECISION, "Mixed precision, bf16", _set(autocast="bfloat16"), _bf16_missing),
        Method("fp16", PRECISION, "Mixed precision, fp16", _set(autocast="float16"), _fp16_missing),
        Method("tf32", PRECISION, "TF32 matrix products", _set(matmul_precision="high"), _tf32_missing),
        Method("adamw-fused", OPTIMIZER, "Optimizer: fused AdamW", _set(optimizer="adamw-fused")),
        Method("adamw8bit", OPTIMIZER, "Optimizer: AdamW8bit", _set(optimizer="adamw8bit"), own=True),
        Method(
            "gradient-release",
            OPTIMIZER,
            "Optimizer: AdamW8bit, gradients released",
            _set(optimizer="adamw8bit", gradient_release=True),
            _release_missing,
            own=True,
        ),
        Method("adafactor", OPTIMIZER, "Optimizer: Adafactor", _set(optimizer="adafactor")),
        Method("sgd", OPTIMIZER, "Optimizer: SGD, momentum", _set(optimizer="sgd")),
        Method(
            "bnb-adamw8bit",
            OPTIMIZER,
            "Optimizer: bitsandbytes' AdamW8bit",
            _set(optimizer="bnb-adamw8bit"),
            _needs("bitsandbytes"),
        ),
        Method(
            "torchao-adamw8bit",
            OPTIMIZER,
            "Optimizer: torchao's AdamW8bit",
            _set(optimizer="torchao-adamw8bit"),
            _needs("torchao"),
            isolated=True,
        ),
        Method("preloading", PRELOADING, "Data preloading", _preload),
        Method("datasets-map", PIPELINE, "datasets, map style", _set(source="datasets"), _datasets_missing),
        Method("datasets-stream", PIPELINE, "datasets, streaming", _set(source="datasets-stream"), _datasets_missing),
        Method(
            "empty-cache",
            EMPTY_CACHE,
            "Cache emptied every 4 steps",
            _set(empty_cache_steps=4),
            _empty_cache_missing,
        ),
        Method(
            "flash-attention-2",
            ATTENTION,
            "flash-attention 2",
            _set(attention="flash_attention_2"),
            _flash_attention_missing,
        ),
        Method("compile", COMPILE, "torch.compile", _set(compiled=True), _compile_missing, isolated=True),
        Method("lora", PEFT, "PEFT: LoRA, rank 8", _set(lora=True), _needs("peft", "accelerate")),
        Method("zero", ZERO, "DeepSpeed ZeRO, stage 2", _set(zero_stage=2), _zero_missing, isolated=True),
        Method(
            "zero-offload",
            ZERO,
            "DeepSpeed ZeRO, offloaded",
            _set(zero_stage=2, offload=True),
            _zero_missing,
            isolated=True,
        ),
        Method("fused-kernels", FUSED, "Fused kernels", _set(patched=True), own=True),
        Method(
            "linear-cross-entropy",
            FUSED,
            "Fused kernels, linear cross-entropy",
            _set(patched=True, linear_loss=True),
            _linear_loss_missing,
            own=True,
        ),
    )
}
COMBINATIONS = ("combined", "combined-memory")
NAMES = (*METHODS, *COMBINATIONS)


def combine(names: tuple[str, ...], *, name: str = "", title: str = "") -> Method:
    """Several methods at once. Raises UsageError for unknown ones and for two of one family."""
    spelt = "+".join(names)
    for each in names:
        if each not in METHODS:
            raise UsageError(f"--combine {spelt}: unknown method {each!r}; there are {', '.join(METHODS)}")
    if len(names) < 2:
        raise UsageError(f"--combine {spelt}: give at least two methods, as fused-kernels+adamw8bit")
    methods = [METHODS[each] for each in names]
    of_family: dict[str, str] = {}
    for method in methods:
        if method.family in of_family:
            raise UsageError(
                f"--combine {spelt}: {of_family[method.family]} and {method.name} exclude each other ({method.family})"
            )
        of_family[method.family] = method.name

    def change(recipe: Recipe, setting: Setting) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for method in methods:
            fields |= method.change(replace(recipe, **fields), setting)
        return fields

    def missing(recipe: Recipe, setting: Setting) -> str:
        return next((reason for method in methods if (reason := method.missing(recipe, setting))), "")

    return Method(
        name or spelt,
        COMBINED,
        title or " + ".join(names),
        change,
        missing,
        own=any(method.own for method in methods),
        isolated=any(method.isolated for method in methods),
        parts=names,
    )


def combined(name: str, setting: Setting) -> Method:
    """One of COMBINATIONS: what is sensible together here."""
    parts = ["fused-kernels", "adamw8bit"]
    if setting.device.type == "cuda":
        parts.append("preloading")
        for precision in ("bf16", "fp16"):
            if not METHODS[precision].missing(Recipe(1), setting):
                parts.append(precision)
                break
    title = "Combined"
    if name == "combined-memory":
        title = "Combined, for memory"
        parts += ["checkpointing"] * setting.can_checkpoint + ["accumulation"]
    return combine(tuple(parts), name=name, title=title)


def find(name: str, setting: Setting) -> Method:
    """A method by its name: one of NAMES, or names joined by "+"."""
    if name == BASELINE.name:
        return BASELINE
    if name in METHODS:
        return METHODS[name]
    return combined(name, setting) if name in COMBINATIONS else combine(tuple(name.split("+")))


def chosen(only: tuple[str, ...], combinations: tuple[str, ...], setting: Setting) -> list[Method]:
    """The methods to measure, the baseline first, in the order of the tables. check_names has checked the names."""
    names = [name for name in NAMES if not only or name in only]
    return [find(name, setting) for name in (BASELINE.name, *names, *dict.fromkeys(combinations))]


def check_names(only: tuple[str, ...], combinations: tuple[str, ...]) -> None:
    """Raises UsageError for unknown methods and for combinations that cannot be."""
    for name in only:
        if name not in NAMES:
            raise UsageError(f"--only {name}: unknown method; there are {', '.join(NAMES)}")
    for spelt in combinations:
        combine(tuple(spelt.split("+")))
