"""Residual sums and links under what other libraries do to a model: the results stay those of the unpatched model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import Outcome, assert_agree, loss_outcome
from patching_cases import gpt2
from patching_distributed import batch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def step(model: nn.Module, ids: Tensor) -> Outcome:
    return loss_outcome(model, {"input_ids": ids, "labels": ids, "output_hidden_states": True})


def assert_steps_agree(model: nn.Module, expected: nn.Module, n_steps: int = 3) -> None:
    """The first step lets sums find their norms; the second has links."""
    for i in range(n_steps):
        theirs = step(expected, batch(i))
        assert any(name not in ("loss", "logits") and not name.startswith("hidden") for name in theirs)
        assert_agree(step(model, batch(i)), theirs)


def prepared(order: str, prepare: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """(patched, unpatched), both prepared; the first one patched before or after. Links are made before `prepare`."""
    model, expected = gpt2().train(), prepare(gpt2().train())
    if order == "before":
        patch_model(model)
        for i in range(2):
            step(model, batch(i))
        model = prepare(model)
    else:
        model = prepare(model)
        patch_model(model)
    return model, expected


ORDER = pytest.mark.parametrize("order", ["before", "after"])


@ORDER
@pytest.mark.parametrize(
    "target", ["transformer.h.0", "transformer.h.1.ln_2", "transformer.h.0.mlp", "transformer.ln_f"]
)
def test_accelerate_hooks(order: str, target: str) -> None:
    """On a block, on norms that sums absorb or link, and on a child with the dropout. The hook doubles its output."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Double(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return tuple(2 * y for y in output) if isinstance(output, tuple) else 2 * output

    def prepare(model: nn.Module) -> nn.Module:
        hooks.add_hook_to_module(model.get_submodule(target), Double())
        return model

    model, expected = prepared(order, prepare)
    assert_steps_agree(model, expected)


@ORDER
def test_weights_offloaded_to_the_cpu_between_calls(order: str) -> None:
    """accelerate's cpu_offload: parameters are on the meta device except during their module's call."""
    accelerate = pytest.importorskip("accelerate")
    ids, expected = batch(0), gpt2().eval()
    model = gpt2().eval()
    with torch.no_grad():
        if order == "before":
            patch_model(model)
            model(ids)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        if order == "after":
            patch_model(model)
        for _ in range(3):
            torch.testing.assert_close(model(ids).logits, expected(ids).logits)


def test_saved_tensors_offloaded_to_the_cpu() -> None:
    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    step(model, batch(0))
    with torch.autograd.graph.save_on_cpu():
        assert_steps_agree(model, expected)


def test_two_threads_run_one_model() -> None:
    """As a server does. Links are shared by threads: a y must not be returned for the other thread's z."""
    model, expected = gpt2().eval(), gpt2().eval()
    patch_model(model)
    wrong: list[int] = []

    def serve(seed: int) -> None:
        ids = batch(seed)
        with torch.no_grad():
            logits = expected(ids).logits
            for i in range(40):
                if not torch.allclose(model(ids).logits, logits, rtol=1e-3, atol=1e-4):
                    wrong.append(i)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_replicas_of_data_parallel() -> None:
    """nn.DataParallel copies every module, with its class, for each call."""
    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    step(model, batch(0))
    for i in range(3):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in copies.items():
            for name, child in module.named_children():
                replica._modules[name] = copies[child]
            for name, parameter in module._parameters.items():  # plain attributes, as nn.parallel.replicate makes them
                setattr(replica, name, None if parameter is None else parameter.clone())
        ids = batch(i)
        torch.testing.assert_close(copies[model](ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-4)


def test_grad_scaler_steps_and_skips() -> None:
    """Scaled losses, a step skipped for a gradient of infinity, and the weights after it."""
    models = [gpt2().train(), gpt2().train()]
    patch_model(models[0])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for i in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=batch(i), labels=batch(i)).loss
            scaler.scale(loss * float("inf") if i == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_agree(*(dict(model.named_parameters()) for model in models))


def patch_seconds(config: Any, device: str) -> float:
    with torch.device(device):
        model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(device != "meta")
    begin = time.perf_counter()
    report = patch_model(model)
    seconds = time.perf_counter() - begin
    assert len(report.patched) >= 2 * config.num_hidden_layers
    unpatch_model(model)
    return seconds


@pytest.mark.slow
def test_patch_model_is_quick() -> None:
    """Far above what is measured (docs/coverage.md), so that a busy machine does not matter."""
    patch_seconds(transformers.BertConfig(num_hidden_layers=1, hidden_size=96, intermediate_size=48), "cpu")  # imports
    assert patch_seconds(transformers.BertConfig(), "cpu") < 5.0
    assert patch_seconds(transformers.LlamaConfig(), "meta") < 10.0  # 7B: 32 layers of 4096
