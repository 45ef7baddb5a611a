"""Counts the bytes that patched and unpatched models read and write in a training step, and records the ratios.

    python -m tools.traffic

The six model shapes of benchmarks/suites/default_patch.py, one with low-rank adapters (PEFT) on all linear layers, a
mixture of experts, two that scan the sequence, Gemma 2 with its caps, Granite with its factors, CLIP's image encoder,
bfloat16, train mode; the six also with float32 weights under autocast (Trainer's bf16=True).
Fake tensors go through forward and backward: no step runs, and the counts are the same on every machine. On a CPU they
are those of two threads, which cut attention into other parts than one.
See docs/anatomy.md.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import onetrip
import peft
import torch
from onetrip import anatomy
from onetrip.benchmarks.suites.default_patch import BATCH_SIZE, SEQUENCE_LENGTH, SHAPES, config_of, model_of
from onetrip.environment import header
from onetrip.html import write
from onetrip.measure.traffic import Traffic
from onetrip.patching.model import PATTERNS
from torch._subclasses.fake_tensor import FakeTensorMode

RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "traffic.json"
BY_NAME = (*PATTERNS, "linear_cross_entropy")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "with_loss": {"patterns": BY_NAME},
    "everything": {"patterns": BY_NAME, "attention": True},
}
"""Arguments of patch_model."""


_LLAMA = SHAPES["Llama"][2] | {"num_key_value_heads": 4, "head_dim": 64}
_MIXTURE = {"moe_intermediate_size": 384, "num_experts": 32, "num_experts_per_tok": 8}
_LINEAR_HEADS = {"linear_num_value_heads": 12, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
_VISION = {**SHAPES["ViT"][2], "image_size": 224, "patch_size": 16}
MORE_SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Qwen3-MoE": ("qwen3_moe", "CausalLM", _LLAMA | _MIXTURE),
    "Qwen3.5": ("qwen3_5_text", "CausalLM", _LLAMA | _LINEAR_HEADS | {"linear_num_key_heads": 6}),
    "Mamba": ("mamba", "CausalLM", {each: _LLAMA[each] for each in ("hidden_size", "num_hidden_layers", "vocab_size")}),
    "Gemma 2": ("gemma2", "CausalLM", _LLAMA | {"query_pre_attn_scalar": 64}),
    "Granite": ("granite", "CausalLM", _LLAMA | {"residual_multiplier": 0.22}),
    "CLIP": ("clip", "ImageClassification", {"vision_config": _VISION}),
}
ADAPTED, _RANK = "Llama with LoRA", 16
_AUTOCAST = " under autocast"
ALL_SHAPES = (*SHAPES, ADAPTED, *MORE_SHAPES, *(f"{shape}{_AUTOCAST}" for shape in SHAPES))
_N_THREADS = 2


def _model_of(shape: str) -> Any:
    model_type, head, arguments = (SHAPES | MORE_SHAPES)[shape.removesuffix(" with LoRA")]
    config = config_of(model_type, **arguments)
    if "num_experts" in arguments:
        config._experts_implementation = "grouped_mm"
    model = model_of(head, config)
    if shape != ADAPTED:
        return model
    config = peft.LoraConfig(r=_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def traffic_of(shape: str, device_type: str, **patch: Any) -> Traffic:
    """Traffic of one step; patch: arguments of patch_model, of which unpatched=True stands for none."""
    with torch.device("meta"):
        model = _model_of(shape.removesuffix(_AUTOCAST))
    mode, is_autocast = FakeTensorMode(), shape.endswith(_AUTOCAST)
    model = anatomy.fake_copy(model, mode, torch.float32 if is_autocast else torch.bfloat16).train()
    make_batch = partial(anatomy.make_batch, model, BATCH_SIZE, SEQUENCE_LENGTH)
    is_patched = not patch.pop("unpatched", False)

    how: dict[str, Any] = {
        "device_type": device_type,
        "autocast": torch.bfloat16 if is_autocast else None,
        "peak_only": True,
        "context": partial(onetrip.patched, model, verify=False, **patch) if is_patched else nullcontext,
    }
    n_threads = torch.get_num_threads()
    torch.set_num_threads(_N_THREADS)
    try:
        counted = anatomy.predict(model, make_batch, anatomy.OPTIMIZERS["sgd"], mode, **how).traffic
    finally:
        torch.set_num_threads(n_threads)
    assert counted is not None
    return counted


def _described(traffic: Traffic) -> dict[str, Any]:
    described = traffic.to_dict()
    return {part: described[part] for part in ("outside", "loss", "products", "attention")} | {
        "by_operator": traffic.by_operator(outside=True)
    }


def record(device_types: tuple[str, ...] = ("cpu", "cuda")) -> dict[str, Any]:
    """By kind of device and shape: bytes unpatched and patched, and the ratios of "outside"."""
    counted: dict[str, Any] = {}
    for device_type in device_types:
        for shape in ALL_SHAPES:
            base = traffic_of(shape, device_type, unpatched=True)
            found = {way: traffic_of(shape, device_type, **patch) for way, patch in WAYS.items()}
            counted.setdefault(device_type, {})[shape] = {
                "unpatched": _described(base),
                **{way: _described(each) for way, each in found.items()},
                "ratios": {way: round(each.outside() / base.outside(), 4) for way, each in found.items()},
            }
    return {
        **header(torch.device("cpu")),
        "options": {"batch_size": BATCH_SIZE, "sequence_length": SEQUENCE_LENGTH, "dtype": "bfloat16"},
        "shapes": {
            shape: {"model_type": kind, "config": arguments}
            for shape, (kind, _, arguments) in (SHAPES | MORE_SHAPES).items()
        },
        "lora": {"shape": ADAPTED, "r": _RANK, "target_modules": "all-linear", "peft": peft.__version__},
        "traffic": counted,
    }


def main() -> None:
    result = record()
    for device_type, shapes in result["traffic"].items():
        for shape, found in shapes.items():
            megabytes = found["unpatched"]["outside"] / 1e6
            ratios = ", ".join(f"{way} {ratio:.2f}" for way, ratio in found["ratios"].items())
            print(f"{device_type:5}{shape:22}{megabytes:8.1f} MB outside products; patched over it: {ratios}")
    write(RECORD, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
