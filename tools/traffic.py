"""Counts the bytes that patched and unpatched models read and write in a training step, and records the ratios.

    python -m tools.traffic --output benchmarks/results/traffic.json

Six model shapes, four layers of 768 columns, bfloat16, train mode, 2 x 384 tokens, vocabulary 8,192. Fake tensors go
through forward and backward: no step runs, and the counts are the same on every machine. See docs/anatomy.md.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import onetrip
import torch
from onetrip import anatomy
from onetrip.environment import header
from onetrip.html import write
from onetrip.measure.traffic import Traffic
from onetrip.patching.model import PATTERNS
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH_SIZE, SEQUENCE_LENGTH = 2, 384
_SIZES = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
_VOCABULARY = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "BERT": ("bert", "MaskedLM", {**_SIZES, "intermediate_size": 3072, **_VOCABULARY}),
    "GPT-2": ("gpt2", "CausalLM", {"n_embd": 768, "n_layer": 4, "n_head": 12, **_VOCABULARY}),
    "T5": (
        "t5",
        "Seq2SeqLM",
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 4, "num_heads": 12, "decoder_start_token_id": 0}
        | _VOCABULARY,
    ),
    "BART": (
        "bart",
        "Seq2SeqLM",
        {"d_model": 768, **{f"{side}_layers": 4 for side in ("encoder", "decoder")}}
        | {f"{side}_attention_heads": 12 for side in ("encoder", "decoder")}
        | {f"{side}_ffn_dim": 3072 for side in ("encoder", "decoder")}
        | _VOCABULARY,
    ),
    "ViT": ("vit", "ImageClassification", {**_SIZES, "intermediate_size": 3072}),
    "Llama": ("llama", "CausalLM", {**_SIZES, "intermediate_size": 2048, **_VOCABULARY}),
}
"""(model_type, head, arguments of its config). ViT has images of 224 x 224 pixels: 197 tokens."""

BY_NAME = (*PATTERNS, "linear_cross_entropy")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "with_loss": {"patterns": BY_NAME},
    "everything": {"patterns": BY_NAME, "attention": True},
}
"""Arguments of patch_model."""


def traffic_of(shape: str, device_type: str, **patch: Any) -> Traffic:
    """Of one step; patch: arguments of patch_model, of which unpatched=True stands for none."""
    model_type, head, arguments = SHAPES[shape]
    import transformers

    config = transformers.AutoConfig.for_model(model_type, **arguments)
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    mode = FakeTensorMode()
    model = anatomy.fake_copy(model, mode, torch.bfloat16).train()
    make_batch = partial(anatomy.make_batch, model, BATCH_SIZE, SEQUENCE_LENGTH)
    how: dict[str, Any] = {"device_type": device_type, "peak_only": True}
    if not patch.pop("unpatched", False):
        how["context"] = partial(onetrip.patched, model, verify=False, **patch)
    counted = anatomy.predict(model, make_batch, anatomy.OPTIMIZERS["sgd"], mode, **how).traffic
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
        for shape in SHAPES:
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
        "shapes": {shape: {"model_type": kind, "config": arguments} for shape, (kind, _, arguments) in SHAPES.items()},
        "traffic": counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to write; standard output has the ratios in any case")
    options = parser.parse_args()
    result = record()
    for device_type, shapes in result["traffic"].items():
        for shape, found in shapes.items():
            megabytes = found["unpatched"]["outside"] / 1e6
            ratios = ", ".join(f"{way} {ratio:.2f}" for way, ratio in found["ratios"].items())
            print(f"{device_type:5}{shape:6}{megabytes:8.1f} MB outside products, unpatched; patched over it: {ratios}")
    if options.output is not None:
        write(options.output, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
