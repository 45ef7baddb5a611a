"""The speed-ups in README's table are those of the committed record."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from onetrip.benchmarks.show.targets import ADAM, ADAM_OF_TORCH, EAGER, PATCHING, speed_up

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "amd-epyc-2-cores"
SUITES = "row_norm", "softmax", "default_patch", "training", "adam"
BOTH = "forward_backward"
ROWS: dict[str, list[tuple[str, ...]]] = {
    "bias + dropout + residual + LayerNorm": [
        ("bias_dropout_residual_layer_norm-p0.1-M4096-N1024-fp32", BOTH, EAGER),
    ],
    "scale + mask + softmax + dropout": [
        ("scale_mask_softmax_dropout-p0.1-M65536-N512-fp32", BOTH, other) for other in (EAGER, "torch.compile")
    ],
    "`patch_model(model)`": [
        (f"default_patch-{model}-{dtype}-train", *PATCHING)
        for dtype in ("fp32", "bf16")
        for model in ("BERT", "GPT-2", "T5", "BART", "ViT", "Llama")
    ],
    "a step of a BERT-base masked LM": [
        ("training-bert_base_mlm-12_layers-4x256-bf16", "step", "sdpa", "sdpa, patched, linear_cross_entropy"),
    ],
    "AdamW8bit, one step of BERT-base": [
        (f"adam-{case}-fp32", "step", other, ADAM)
        for case in ("bert_base", "bert_base_clipped")
        for other in (ADAM_OF_TORCH, "bitsandbytes AdamW8bit")
    ],
}
"""How a line of the table begins -> the arguments of speed_up, after the case's name, for each figure in it."""


@pytest.mark.parametrize("line", ROWS)
def test_speed_ups_are_the_records(line: str) -> None:
    row = re.search(rf"^\| {re.escape(line)}.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert row is not None
    shown = re.findall(r"([\d.]+)x", row[0].rsplit("|", 2)[1])
    recorded = [case for suite in SUITES for case in json.loads((RECORD / f"{suite}.json").read_text())["cases"]]
    cases = {case["case"]: case for case in recorded}
    found = [speed_up(cases[case], *compared) for case, *compared in ROWS[line]]
    assert shown == [f"{ratio:.{len(text.partition('.')[2])}f}" for ratio, text in zip(found, shown, strict=True)]
