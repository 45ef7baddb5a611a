"""A part of the sweep of tools/coverage: types that cover every pattern, none of which may fuse less than recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
check = pytest.importorskip("tools.coverage.check")

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "transformers-5.24.0.json").read_text())
ROWS = {row["type"]: row for row in RECORDED["types"]}
TYPES = {
    "post-norm, dropout": "bert roberta-prelayernorm electra camembert layoutlm deberta deberta-v2 mpnet megatron-bert",
    "post-norm, two stacks": "bart blenderbot-small led funnel",
    "pre-norm, LayerNorm": "gpt2 opt gpt_neo gptj gpt_bigcode biogpt clip_text_model clip_vision_model vit imagegpt",
    "pre-norm, two stacks": "t5 bigbird_pegasus m2m_100 pegasus umt5",
    "pre-norm, RMSNorm": "llama mistral qwen2 qwen3 granite gemma helium jais2 glm starcoder2 arcee apertus",
    "two norms per sublayer": "gemma2 gemma3_text glm4 olmo2 exaone4",
    "parallel blocks": "gpt_neox falcon phi cohere",
    "mixtures of experts": "mixtral qwen2_moe glm4_moe gpt_oss jetmoe granitemoe olmoe",
    "shared layers": "albert",
    "state spaces": "mamba",
    "images, audio, both": "beit deit dinov2 hubert wav2vec2 clip blip_vision_model git",
    "other": "bloom mpt fnet xlnet modernbert",
}


@pytest.mark.parametrize("model_type", [each for types in TYPES.values() for each in types.split()])
def test_a_type_computes_what_it_computed_and_fuses_what_is_recorded(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    row = check.check(model_type)
    assert row["result"] == "ok", row["why"]
    if transformers.__version__ == RECORDED["versions"]["transformers"]:
        for kind in check.KINDS:
            recorded = ROWS[model_type][kind]
            assert row[kind]["traced"] == recorded["traced"], kind
            assert row[kind]["fused"] >= recorded["fused"], f"{kind}: {row[kind]}"
