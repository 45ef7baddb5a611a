"""enable_gradient_release: blocks step during backward, to the bits of a step after it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import onetrip
import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit, enable_gradient_release
from optim_cases import make_params, same, set_grads, snapshot
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

HIDDEN, N_LAYERS = 128, 3


class Model(nn.Module):
    """An embedding tied to the output, layers, a norm; a layer that no call takes on demand."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, HIDDEN)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(N_LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.output = nn.Linear(HIDDEN, 64)
        self.output.weight = self.embedding.weight
        self.reentrant, self.left_out = reentrant, -1

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            if i == self.left_out:
                hidden = hidden + layer[0].weight.sum()  # its bias has no gradient
            elif self.reentrant is None:
                hidden = hidden + layer(hidden)
            else:
                hidden = hidden + checkpoint(layer, hidden, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.output(self.norm(hidden)).flatten(0, 1), tokens.flatten())


def both(**arguments: Any) -> list[tuple[Model, AdamW8bit]]:
    """Equal models, and their optimizers, of two groups."""
    torch.manual_seed(0)
    model = Model(**arguments)
    found = []
    for each in (model, copy.deepcopy(model)):
        matrices = [p for p in each.parameters() if p.dim() == 2]
        vectors = [p for p in each.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "weight_decay": 0.0}]
        found.append((each, AdamW8bit(groups, lr=1e-3)))
    return found


def train(model: Model, optimizer: AdamW8bit, first: int, last: int) -> None:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    for step in range(first, last):
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(step))
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "checkpoint", "checkpoint-reentrant"])
def test_steps_are_those_after_backward(reentrant: bool | None) -> None:
    (model, optimizer), (other, plain) = both(reentrant=reentrant)
    enable_gradient_release(model, optimizer)
    train(model, optimizer, 0, 4)
    train(other, plain, 0, 4)
    assert same(snapshot(optimizer), snapshot(plain))


def test_no_more_than_a_block_has_gradients() -> None:
    """Counted by the tensors that live, whoever holds them."""
    (model, optimizer), _ = both()
    grads: list[weakref.ref[Tensor]] = []
    most = 0

    def count(p: Tensor) -> None:
        nonlocal most
        grads.append(weakref.ref(p.grad))
        most = max(most, sum(grad() is not None for grad in grads))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    release = enable_gradient_release(model, optimizer)
    for _ in range(2):
        model(torch.zeros(2, 4, dtype=torch.int64)).backward()
        assert most <= 3  # a weight, its bias, and what is made next
        assert not any(grad() is not None for grad in grads)
        optimizer.step()
    release.remove()
    model(torch.zeros(2, 4, dtype=torch.int64)).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_removed_handle_keeps_neither_model_nor_optimizer() -> None:
    (model, optimizer), _ = both()
    release = enable_gradient_release(model, optimizer)
    train(model, optimizer, 0, 1)
    kept = [weakref.ref(model), weakref.ref(model.norm.weight), weakref.ref(optimizer)]
    release.remove()
    del model, optimizer
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


EVENTS: dict[str, Callable[[Model, AdamW8bit], Any]] = {
    "a-block-takes-no-part": lambda model, _: setattr(model, "left_out", 1),
    "a-checkpoint-is-loaded": lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
    "a-parameter-is-frozen": lambda model, _: model.layers[0][0].bias.requires_grad_(False),
    "groups-in-another-order": lambda _, optimizer: optimizer.param_groups.reverse(),
}


@pytest.mark.parametrize("event", EVENTS)
def test_what_happens_between_steps_changes_no_bit(event: str) -> None:
    """One parameter is frozen from the start."""
    (model, optimizer), (other, plain) = both()
    for each in (model, other):
        each.norm.bias.requires_grad_(False)
    enable_gradient_release(model, optimizer)
    for each, its_optimizer in ((model, optimizer), (other, plain)):
        train(each, its_optimizer, 0, 2)
        EVENTS[event](each, its_optimizer)
        train(each, its_optimizer, 2, 4)
        each.left_out = -1
        train(each, its_optimizer, 4, 5)
    assert same(snapshot(optimizer), snapshot(plain))


def test_a_patched_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    other = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 16))
    found = []
    for each in (model, other):
        onetrip.patch_model(each)
        optimizer = AdamW8bit(each.parameters(), lr=1e-2)
        if each is model:
            enable_gradient_release(each, optimizer)
        for _ in range(3):
            each(input_ids=tokens, labels=tokens).loss.backward()
            assert each is other or all(p.grad is None for p in each.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append(snapshot(optimizer))
    assert same(*found)


def test_a_second_gradient_before_the_step_raises() -> None:
    (model, optimizer), _ = both()
    enable_gradient_release(model, optimizer)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model(tokens).backward()
    with pytest.raises(RuntimeError, match="one gradient between two calls"):
        model(tokens).backward()


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    with pytest.raises(TypeError, match="optimizer must be AdamW8bit or Adam8bit, got SGD"):
        enable_gradient_release(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_grad_norm must be None"):
        enable_gradient_release(model, AdamW8bit(model.parameters(), max_grad_norm=1.0))
    with pytest.raises(ValueError, match="must have parameters of the model"):
        enable_gradient_release(model, AdamW8bit(make_params()))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="must be called without"):
        enable_gradient_release(model, Adam8bit(model.parameters()))


@pytest.mark.parametrize("unscales", [False, True], ids=["scaled", "unscaled"])
def test_a_grad_scaler_is_refused_at_the_step(unscales: bool) -> None:
    (model, optimizer), _ = both()
    release = enable_gradient_release(model, optimizer)
    optimizer.grad_scale, optimizer.found_inf = None if unscales else torch.tensor(2.0), torch.tensor(0.0)
    set_grads(model.parameters(), 0)
    with pytest.raises(RuntimeError, match="GradScaler must not be used"):
        optimizer.step()
    release.remove()
    optimizer.step()


def test_clipping_and_foreign_gradients_are_refused_later_too() -> None:
    (model, optimizer), _ = both()
    enable_gradient_release(model, optimizer)
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    model(tokens).backward()
    set_grads(model.parameters(), 0)  # as DistributedDataParallel writes its averages
    with pytest.raises(RuntimeError, match="gradients must come from backward alone"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    optimizer.max_grad_norm = 1.0
    with pytest.raises(RuntimeError, match="max_grad_norm must be None"):
        model(tokens).backward()
