"""In transformers' Trainer and in Accelerate: groups, resuming, accumulation, clipping, schedulers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.optim import AdamW8bit, trainer_optimizer
from optim_cases import Rows, bits_of, same
from torch import nn

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")


def tiny_bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=200, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=32, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def arguments(folder: Path, **more: Any) -> Any:
    return transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, learning_rate=1e-3, weight_decay=0.1, adam_beta1=0.8,
        adam_beta2=0.95, adam_epsilon=1e-6, max_steps=8, save_steps=4, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="cosine", warmup_steps=2, seed=3, **more,
    )  # fmt: skip


def trainer(folder: Path, ours: bool = True, **more: Any) -> Any:
    """With the optimizer that trainer_optimizer chooses, or with Trainer's own."""
    model, args = tiny_bert(), arguments(folder)
    options = {"optimizer_cls_and_kwargs": trainer_optimizer(args, model=model, **more)} if ours else {}
    return transformers.Trainer(model=model, args=args, train_dataset=Rows(), **options)


def test_the_pair_has_the_numbers_of_training_arguments(tmp_path):
    cls, kwargs = trainer_optimizer(arguments(tmp_path), optim_bits=32)
    assert cls is AdamW8bit
    assert kwargs == {"lr": 1e-3, "betas": (0.8, 0.95), "eps": 1e-6, "optim_bits": 32}
    with pytest.raises(TypeError, match="trainer_optimizer: weight_decay must be set in training_args"):
        trainer_optimizer(arguments(tmp_path), weight_decay=0.3)
    with pytest.raises(TypeError, match="trainer_optimizer: model must be what Trainer gets"):
        trainer_optimizer(arguments(tmp_path), embeddings_32bit=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optim", "adafactor"),
        ("optim", "adamw_bnb_8bit"),
        ("optim", "sgd"),
        ("optim_args", "beta1=0.5"),
        ("optim_target_modules", ["attn"]),
        ("adafactor", True),
    ],
    ids=lambda value: str(value),
)
def test_what_trainer_would_ignore_is_rejected(tmp_path, name, value):
    """Trainer reads none of these beside optimizer_cls_and_kwargs. adafactor: of transformers 4."""
    args = arguments(tmp_path)
    setattr(args, name, transformers.training_args.OptimizerNames(value) if name == "optim" else value)
    with pytest.raises(ValueError, match=rf"trainer_optimizer: training_args\.{name} must be .*, got"):
        trainer_optimizer(args)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_torchs_adamw_may_be_named(tmp_path, optim):
    assert trainer_optimizer(arguments(tmp_path, optim=optim))[0] is AdamW8bit


def test_groups_of_trainer(tmp_path):
    """Its own: no decay of biases and norms."""
    optimizer = trainer(tmp_path, min_8bit_numel=512).create_optimizer()
    assert type(optimizer) is AdamW8bit and [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert all(group["betas"] == (0.8, 0.95) and group["min_8bit_numel"] == 512 for group in optimizer.param_groups)


def test_embeddings_in_32_bits(tmp_path):
    """In groups of their own with the decay that Trainer gave them; every parameter once; tied weights too."""
    run = trainer(tmp_path, embeddings_32bit=True, min_8bit_numel=512)
    model, own = run.model, run.create_optimizer()
    by_bits: dict[int, set[int]] = {8: set(), 32: set()}
    for group in own.param_groups:
        by_bits[group["optim_bits"]] |= set(map(id, group["params"]))
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    assert by_bits[32] == embeddings and id(model.get_output_embeddings().weight) in embeddings
    assert by_bits[8] == {id(p) for p in model.parameters()} - embeddings
    model(**{key: value[None] for key, value in Rows()[0].items()}).loss.backward()
    own.step()
    assert bits_of(own.state[model.get_input_embeddings().weight]) == 32
    assert bits_of(own.state[model.bert.encoder.layer[0].intermediate.dense.weight]) == 8
    assert all(group["weight_decay"] in (0.0, 0.1) for group in own.param_groups)


@pytest.mark.parametrize("of", [lambda model: [{"params": model.parameters()}], lambda model: model.parameters()])
def test_embeddings_are_found_in_groups_of_any_kind(tmp_path, of):
    """As a create_optimizer of one's own may give them."""
    model = trainer(tmp_path).model
    cls, options = trainer_optimizer(arguments(tmp_path), embeddings_32bit=True, model=model)
    own = cls(of(model), **options)
    assert {p.shape for group in own.param_groups if group["optim_bits"] == 32 for p in group["params"]} == {
        m.weight.shape for m in model.modules() if isinstance(m, nn.Embedding)
    }


@pytest.mark.promise("C1")
@pytest.mark.parametrize("embeddings_32bit", [False, True], ids=["8-bit", "embeddings-32-bit"])
def test_resuming_with_trainer_is_training_on(tmp_path, embeddings_32bit):
    """C1: eight steps, and four from the checkpoint of the fourth, dropout and schedule included: the same bits."""
    options = {"embeddings_32bit": embeddings_32bit, "min_8bit_numel": 512}
    whole, resumed = (trainer(tmp_path / name, **options) for name in "ab")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert resumed.state.global_step == 8
    assert same(dict(whole.model.state_dict()), dict(resumed.model.state_dict()))
    assert same(whole.optimizer.state_dict()["state"], resumed.optimizer.state_dict()["state"])
    assert {bits_of(entry) for entry in whole.optimizer.state_dict()["state"].values()} == {8, 32}


def test_resuming_without_its_optimizer_raises_until_the_checkpoint_is_converted(tmp_path):
    """Trainer's own AdamW took codes as moments. Converted, it continues: near the run that kept AdamW8bit."""
    first = trainer(tmp_path / "a", min_8bit_numel=512)
    first.train()
    folder = tmp_path / "a" / "checkpoint-4"
    plain = trainer(tmp_path / "b", ours=False)
    with pytest.raises(KeyError, match="step"):
        plain.train(resume_from_checkpoint=str(folder))
    converter = trainer(tmp_path / "c", min_8bit_numel=512).create_optimizer()
    converter.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))
    torch.save(converter.state_dict_for_torch(), folder / "optimizer.pt")
    plain = trainer(tmp_path / "b", ours=False)
    plain.train(resume_from_checkpoint=str(folder))
    assert plain.state.global_step == 8
    losses = [[e["loss"] for e in run.state.log_history if "loss" in e and e["step"] > 4] for run in (first, plain)]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


def test_accelerate_with_accumulation_clipping_and_a_schedule():
    """accelerator.prepare: two micro-batches a step, clipped, scheduled: as a plain loop over their mean."""

    def build() -> tuple[nn.Module, AdamW8bit, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        optimizer = AdamW8bit(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)

    batches = [torch.randn(4, 64) for _ in range(12)]
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
    model, optimizer, scheduler = accelerator.prepare(*build())
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()
            optimizer.zero_grad()
    plain_model, plain, plain_scheduler = build()
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for batch in (first, second):
            (plain_model(batch).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(plain_model.parameters(), 0.05)
        plain.step()
        plain_scheduler.step()
        plain.zero_grad()
    assert same(dict(accelerator.unwrap_model(model).state_dict()), dict(plain_model.state_dict()))
    assert same(optimizer.state_dict(), plain.state_dict())
