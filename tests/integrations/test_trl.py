"""Trainers of TRL: a model patched before or after TRL replaces its forward trains as the unpatched one does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import onetrip
import pytest
import torch
from onetrip.integrations import OnetripCallback
from onetrip.patching import PATTERNS

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl", minversion="1.16")

pytestmark = pytest.mark.slow
LOGGED = {
    "sft": ("loss", "grad_norm", "entropy", "mean_token_accuracy"),
    "sft-lora": ("loss", "grad_norm", "entropy", "mean_token_accuracy"),
    "dpo": ("loss", "grad_norm", "entropy", "mean_token_accuracy", "rewards/margins"),
    "grpo": ("loss", "grad_norm", "entropy", "reward", "kl"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama and a tokenizer of its words, where trainers look for the tokenizer and the reference model."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(200))]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(path)
    return path


def rows(*columns: str) -> Any:
    words = random.Random(0)
    return pytest.importorskip("datasets").Dataset.from_list(
        [
            {each: " ".join(f"w{words.randrange(200)}" for _ in range(words.randint(6, 20))) for each in columns}
            for _ in range(32)
        ]
    )


def number_of_letters(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each)) for each in completions]


def trainer(kind: str, model: Any, output: Path, **more: Any) -> Any:
    shared: dict[str, Any] = {
        "output_dir": str(output), "per_device_train_batch_size": 4, "max_steps": 3, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "learning_rate": 1e-2,
        "disable_tqdm": True,
    }  # fmt: skip
    if kind == "sft-lora":
        peft = pytest.importorskip("peft")
        more["peft_config"] = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    if kind.startswith("sft"):
        return trl.SFTTrainer(model, trl.SFTConfig(**shared), train_dataset=rows("text"), **more)
    if kind == "dpo":
        args = trl.DPOConfig(**shared)
        return trl.DPOTrainer(model, args=args, train_dataset=rows("prompt", "chosen", "rejected"), **more)
    args = trl.GRPOConfig(**shared, num_generations=4, max_completion_length=8, beta=0.05)
    return trl.GRPOTrainer(model, number_of_letters, args=args, train_dataset=rows("prompt"), **more)


def logged(kind: str, folder: Path, patched: str) -> list[dict[str, float]]:
    """What the trainer logs, step by step."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    patterns = [*PATTERNS, "linear_cross_entropy"]
    callback = OnetripCallback(patterns=patterns, log=None)
    report = onetrip.patch_model(model, patterns=patterns) if patched == "before" else None
    callbacks = [callback] if patched == "by the callback" else None
    made = trainer(kind, model, folder / kind / patched, callbacks=callbacks)
    if patched == "after":
        report = onetrip.patch_model(made.model, patterns=patterns)
    made.train()
    if patched != "never":
        calls = (report := report or callback.report).calls()
        fused = {site.pattern for site in report.patched if calls[site.name][0] > 0}
        assert fused >= {"add_norm", "rms_norm", "rotary", "gated_mlp"}, report
    return [{key: entry[key] for key in LOGGED[kind]} for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", LOGGED)
def test_trains_as_the_unpatched_model(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = logged(kind, folder, "never")
    assert len(expected) == 3 and expected[0]["grad_norm"] > 0
    for patched in ("before", "after", "by the callback"):
        for entry, reference in zip(logged(kind, folder, patched), expected, strict=True):
            assert entry == pytest.approx(reference, rel=1e-3, abs=1e-5)
