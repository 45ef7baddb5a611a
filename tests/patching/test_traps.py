"""Residual sums and links under what other libraries do to a model: the results stay those of the unpatched model."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import Outcome, assert_agree, loss_outcome
from patching_cases import classes, gpt2
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


# modules_to_save wraps norms that sums absorb (ln_2) and link (ln_f).
ADAPTERS: dict[str, dict[str, list[str]]] = {
    "branch": {"target_modules": ["c_proj"]},
    "all": {"target_modules": ["c_attn", "c_fc", "c_proj"]},
    "trained norms": {"target_modules": ["c_attn"], "modules_to_save": ["ln_2", "ln_f"]},
}


@ORDER
@pytest.mark.parametrize("name", ADAPTERS)
def test_lora(order: str, name: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, init_lora_weights=False, fan_in_fan_out=True, **ADAPTERS[name])

    def prepare(model: nn.Module) -> nn.Module:
        torch.manual_seed(3)
        return peft.get_peft_model(model, config)

    model, expected = prepared(order, prepare)
    if name == "trained norms":
        with torch.no_grad():
            for each in (model, expected):
                each.base_model.model.transformer.ln_f.modules_to_save["default"].weight.mul_(2.0)
    assert_steps_agree(model, expected)


@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_checkpointing_with_dropout_recomputes_the_same_masks(use_reentrant: bool) -> None:
    model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3).train()
    patch_model(model)
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        for _ in range(2):
            torch.manual_seed(7)
            last = step(model, batch(0))
        found.append(last)
    assert_agree(found[1], found[0], relative=2e-6)


def test_deepcopy_and_pickle_of_a_model_with_links() -> None:
    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    for i in range(2):
        model(batch(i)).logits.sum().backward()  # no hidden states: the hooks that record them cannot be pickled
    model.zero_grad(set_to_none=True)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert classes(loaded) == classes(expected)
    assert_steps_agree(copy.deepcopy(model), expected)
    assert_steps_agree(loaded, expected)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"use_cache": False}], ids=["greedy", "beams", "no cache"])
def test_generate(options: dict[str, Any]) -> None:
    """Links made while training, then a prompt and single tokens through the cache."""
    model, expected = gpt2(), gpt2().eval()
    patch_model(model)
    step(model.train(), batch(0))
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    for i in range(2):
        ours: Any = model.eval()
        assert torch.equal(ours.generate(batch(i), **arguments), expected.generate(batch(i), **arguments))


@pytest.mark.parametrize("change", ["replaced", "edited in place", "detached"])
def test_a_hidden_state_changed_between_layers(change: str) -> None:
    """By a forward hook on a layer, registered once links exist."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        h = output[0] if isinstance(output, tuple) else output
        if change == "edited in place":
            h.mul_(1.5)
            return output
        h = h + 1.0 if change == "replaced" else h.detach()
        return (h, *output[1:]) if isinstance(output, tuple) else h

    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    for i in range(2):
        step(model, batch(i))
        step(expected, batch(i))  # registers the hooks that record hidden states: before those below in both
    for each in (model, expected):
        each.get_submodule("transformer.h.0").register_forward_hook(hook)
        each.get_submodule("transformer.h.1").register_forward_hook(hook)
    assert_steps_agree(model, expected)


def test_one_block_used_twice() -> None:
    """As ALBERT shares its layer."""
    model, expected = gpt2().train(), gpt2().train()
    for each in (model, expected):
        each.transformer.h[1] = each.transformer.h[0]
    patch_model(model)
    assert_steps_agree(model, expected, n_steps=5)


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
