"""A part of the sweep of tools/coverage: types that cover every pattern, none of which may fuse less than recorded.

The first two of each kind are tried in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
check = pytest.importorskip("tools.coverage.check")

RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "transformers-5.24.0.json").read_text())
ROWS = {row["type"]: row for row in RECORDED["types"]}
TYPES = {
    "post-norm, dropout": "bert deberta-v2 roberta-prelayernorm electra camembert layoutlm deberta mpnet megatron-bert",
    "post-norm, two stacks": "bart funnel blenderbot-small led",
    "pre-norm, LayerNorm": "gpt2 vit opt gpt_neo gptj gpt_bigcode biogpt clip_text_model clip_vision_model imagegpt",
    "pre-norm, two stacks": "t5 m2m_100 bigbird_pegasus pegasus umt5",
    "pre-norm, RMSNorm": "llama apertus mistral qwen2 qwen3 granite gemma helium jais2 glm starcoder2 arcee",
    "two norms per sublayer": "gemma2 olmo2 gemma3_text glm4 exaone4",
    "parallel blocks": "gpt_neox falcon phi cohere",
    "mixtures of experts": "mixtral gpt_oss qwen2_moe glm4_moe jetmoe granitemoe olmoe",
    "shared layers": "albert",
    "state spaces": "mamba",
    "images, audio, both": "dinov2 hubert beit deit wav2vec2 clip blip_vision_model git",
    "other": "mpt modernbert bloom fnet xlnet",
}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(model_type, marks=[pytest.mark.slow] if i >= 2 else [])
        for types in TYPES.values()
        for i, model_type in enumerate(types.split())
    ],
)
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
