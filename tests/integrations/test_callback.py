"""OnetripCallback in transformers' Trainer: patched while it trains, and the model it was afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.integrations import OnetripCallback
from onetrip.optim import trainer_optimizer
from onetrip.patching import PATTERNS
from optim_cases import Rows, same
from patching_cases import classes

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class CallsSeen(transformers.TrainerCallback):
    """(fused, fallen back) calls of each site after every step."""

    def __init__(self, callback: OnetripCallback) -> None:
        self.callback, self.calls = callback, []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append(self.callback.report.calls())


def tiny_llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=200, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=64, attention_dropout=0.1,
        )
    )  # fmt: skip


def trainer(folder: Path, callbacks: list[Any], model: Any = None, **more: Any) -> Any:
    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=1e-3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        **{"save_strategy": "no", **more},
    )  # fmt: skip
    return transformers.Trainer(
        model=model if model is not None else tiny_llama(), args=args, train_dataset=Rows(), callbacks=callbacks,
        optimizer_cls_and_kwargs=trainer_optimizer(args, min_8bit_numel=512),
    )  # fmt: skip


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_patched_while_it_trains(tmp_path: Path, bf16: bool) -> None:
    """Every site runs fused in each of the accumulated passes; the report is logged once; all is undone at the end."""
    texts: list[str] = []
    callback = OnetripCallback(log=texts.append)
    seen = CallsSeen(callback)
    model, original = tiny_llama(), classes(tiny_llama())
    trainer(tmp_path, [callback, seen], model, bf16=bf16).train()
    assert len(texts) == 1 and "sites patched" in texts[0]
    assert callback.report is not None and len(callback.report.patched) > 8
    assert all(fused >= 8 for fused, _ in seen.calls[-1].values()), seen.calls[-1]
    assert bf16 or not any(fallen_back for _, fallen_back in seen.calls[-1].values())  # q, k, v of one input: not there
    assert classes(model) == original


def test_resuming_is_training_on(tmp_path: Path) -> None:
    """Bit for bit, dropout included."""
    whole = trainer(tmp_path / "a", [OnetripCallback(log=None)], bf16=True, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer(tmp_path / "b", [OnetripCallback(log=None)], bf16=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert resumed.state.global_step == 4
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    assert same(whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"])


def test_options_are_those_of_patch_model(tmp_path: Path) -> None:
    """linear_cross_entropy rewrites the root module, whose forward Accelerate wraps for mixed precision. A generator is
    read once."""
    callback = OnetripCallback(log=None, patterns=(name for name in ("rms_norm", "linear_cross_entropy")), strict=True)
    seen = CallsSeen(callback)
    run = trainer(tmp_path, [callback, seen], bf16=True)
    run.train()
    assert callback.report is not None
    assert {site.pattern for site in callback.report.patched} == {"rms_norm", "linear_cross_entropy"}
    assert all(fused == 8 and fallen_back == 0 for fused, fallen_back in seen.calls[-1].values()), seen.calls[-1]
    logits = run.model(**{name: row[None] for name, row in Rows()[0].items()}).logits
    assert type(logits) is torch.Tensor


def test_a_second_training_patches_again(tmp_path: Path) -> None:
    """Also where the callback was added after the Trainer was made."""
    callback = OnetripCallback(log=None, exclude=["lm_head"], patterns=PATTERNS)
    run = trainer(tmp_path, [])
    run.add_callback(callback)
    for _ in range(2):
        callback.report = None
        run.train()
        assert callback.report is not None and len(callback.report.patched) > 8
