from dataclasses import replace

import pytest
import torch
from onetrip import anatomy, measure
from onetrip.methods import Recipe
from onetrip.methods.data import make_data
from onetrip.methods.trainer import Trainer
from onetrip.methods.zero import _single_process_group
from torch import nn

CPU = torch.device("cpu")


@pytest.fixture
def source(small_preset):
    """Without dropout, so that two ways of training can be compared digit by digit."""
    torch.manual_seed(0)
    model = anatomy.load_model(small_preset)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.fixture
def trainer(source):
    data = make_data("small", source, 16, 4, 0)
    made = []

    def make(**changes):
        made.append(Trainer(source, replace(Recipe(8), **changes), data, CPU, seed=0))
        return made[-1]

    yield make
    for each in made:
        each.close()


def gradients(trainer):
    kept = {}
    trainer._update = lambda: kept.update(  # instead of the optimizer's step
        {name: p.grad.clone() for name, p in trainer.model.named_parameters() if p.grad is not None}
    )
    trainer.train_step()
    return kept


def assert_close(a, b, **tolerances):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}", **tolerances)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"batch_size": 2, "accumulation": 4}, id="accumulation-of-batches-with-unequal-labels"),
        pytest.param({"checkpointing": True}, id="checkpointing"),
        pytest.param({"patched": True}, id="fused-kernels"),
        pytest.param({"patched": True, "linear_loss": True}, id="linear-cross-entropy"),
        pytest.param({"workers": 1}, id="preloading"),
        pytest.param({"attention": "eager"}, id="another-attention"),
    ],
)
def test_the_gradients_are_the_baseline_s(trainer, changes):
    assert_close(gradients(trainer(**changes)), gradients(trainer()), rtol=2e-4, atol=2e-6)


def test_the_attention_is_the_one_asked_for(trainer, source):
    before = source.config._attn_implementation
    assert trainer(attention="eager").model.config._attn_implementation == "eager" != before
    assert trainer().model.config._attn_implementation == before


def test_the_precision_of_products_holds_for_the_method_s_steps_only(trainer, monkeypatch):
    before = torch.get_float32_matmul_precision()
    seen = []
    made = trainer(matmul_precision="high"), trainer()
    for each in made:
        monkeypatch.setattr(each, "_backward", lambda *_: seen.append(torch.get_float32_matmul_precision()))
        monkeypatch.setattr(each, "_update", lambda: None)
        each.train_step()
    assert seen == ["high", before] and before != "high"
    assert torch.get_float32_matmul_precision() == before


def test_the_cache_is_emptied_between_forward_and_backward(trainer, monkeypatch):
    made = trainer(empty_cache_steps=2)
    order = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("empty"))
    monkeypatch.setattr(made, "_backward", lambda *_: order.append("backward"))
    monkeypatch.setattr(made, "_update", lambda: None)
    for _ in range(3):
        made.train_step()
    assert order == ["empty", "backward", "backward", "empty", "backward"]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_nothing_is_cached_for_generation(trainer, source, checkpointing):
    assert source.config.use_cache
    assert not trainer(checkpointing=checkpointing).model.config.use_cache
    assert source.config.use_cache


def test_autocast_computes_in_bfloat16(trainer):
    made = trainer(autocast="bfloat16")
    seen = []
    linear = next(module for module in made.model.modules() if isinstance(module, nn.Linear))
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    made.train_step()
    assert seen == [torch.bfloat16]


def test_dropout_is_that_of_the_step_whoever_trains_in_between(source):
    torch.manual_seed(0)
    dropping = anatomy.load_model("small")
    data = make_data("small", dropping, 16, 4, 0)
    losses = []
    for others in (0, 2):
        trainer = Trainer(dropping, Recipe(4), data, CPU, seed=0)
        for _ in range(3):
            torch.rand(100 * others)
            trainer.train_step()
        losses.append(trainer.held_out_loss())
    assert losses[0] == losses[1]


def test_every_step_draws_its_own_dropout(trainer, monkeypatch):
    made, seeds = trainer(), []
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for _ in range(3):
        made.train_step()
    assert len(set(seeds)) == 3


def test_training_leaves_the_source_alone_and_learns(trainer, source):
    before = {name: p.clone() for name, p in source.named_parameters()}
    made = trainer()
    start = made.held_out_loss()
    for _ in range(15):
        made.train_step()
    assert made.held_out_loss() < start - 0.05
    assert all(torch.equal(p, before[name]) for name, p in source.named_parameters())


def test_held_out_loss_does_not_depend_on_the_batch(trainer):
    assert trainer().held_out_loss() == pytest.approx(trainer(batch_size=3).held_out_loss(), rel=1e-5)


@pytest.mark.slow
def test_memory_of_the_methods_is_ordered_as_it_must_be(trainer):
    made = {
        name: trainer(**changes)
        for name, changes in {
            "baseline": {},
            "larger": {"batch_size": 32},
            "checkpointing": {"checkpointing": True},
            "patched": {"patched": True},
            "adamw8bit": {"optimizer": "adamw8bit"},
            "sgd": {"optimizer": "sgd"},
        }.items()
    }
    for each in made.values():
        each.train_step()
    saved = {name: each.saved_bytes() for name, each in made.items()}
    assert saved["checkpointing"] < saved["patched"] < saved["baseline"] < saved["larger"]
    states = {name: each.state_bytes() for name, each in made.items()}
    assert states["sgd"] < states["baseline"] == states["checkpointing"]
    assert states["adamw8bit"] < states["baseline"]  # small tensors keep float32 states
    peaks = {name: each.peak_bytes() for name, each in made.items()}
    assert peaks["baseline"] < peaks["larger"]
    # Where a batch is so small that gradients outweigh what the forward pass keeps.
    kept, released = (trainer(batch_size=1, optimizer="adamw8bit", gradient_release=each) for each in (False, True))
    for each in (kept, released):
        each.train_step()
    assert released.peak_bytes() < kept.peak_bytes()
    assert all(peaks[name] > made[name].held_bytes() for name in peaks)
    weights = measure.tensor_bytes(made["sgd"].model.parameters())
    buffers = measure.tensor_bytes(made["sgd"].model.buffers())
    assert made["sgd"].held_bytes() == 2 * weights + buffers


def test_lora_trains_little(trainer):
    pytest.importorskip("peft")
    pytest.importorskip("accelerate")
    made, baseline = trainer(lora=True), trainer()
    for each in (made, baseline):
        each.train_step()
    assert 0 < made.state_bytes() < baseline.state_bytes() / 2
    assert made.held_out_loss() > 0


def test_patched_sites_are_counted(trainer):
    made = trainer(patched=True)
    made.train_step()
    assert made.patched_sites >= 4 and made.fallback_calls() == 0
    assert trainer().patched_sites is None


@pytest.mark.parametrize(("device", "rank"), [("cpu", "0"), ("cuda", "0"), ("cuda:1", "1")])
def test_the_local_rank_is_the_number_of_the_device(monkeypatch, device, rank):
    given = {}
    monkeypatch.setattr("onetrip.methods.zero.os.environ", given)
    _single_process_group(torch.device(device))
    assert (given["LOCAL_RANK"], given["RANK"], given["WORLD_SIZE"]) == (rank, "0", "1")
