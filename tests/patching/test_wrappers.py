"""Hooks and the wrappers of other libraries, before and after patching; checkpoints and the Trainer."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import Outcome, assert_agree, loss_outcome
from patching_cases import COMMON, DECODER, Model, classes, gpt2, tiny_model, token_ids
from torch import Tensor, nn


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def test_hooks_on_a_block_run_and_hooks_on_its_children_make_it_fall_back(model: Model, x: Tensor) -> None:
    report = patch_model(model)
    expected, seen = model(x), []
    handles = [model.tails[0].register_forward_hook(lambda *_: seen.append("block"))]
    assert torch.equal(model(x), expected)
    assert seen == ["block"] and report.calls()["tails.0"] == (2, 0)
    handles.append(model.tails[0].norm.register_forward_hook(lambda *_: seen.append("norm")))
    torch.testing.assert_close(model(x), expected)
    assert seen == ["block", "norm", "block"] and report.calls()["tails.0"] == (2, 1)
    for handle in handles:
        handle.remove()
    assert torch.equal(model(x), expected) and report.calls()["tails.0"] == (3, 1)


def test_a_hooked_dense_is_called(model: Model, x: Tensor) -> None:
    """ZeRO-3 and FSDP gather weights in hooks of the child: its weight must not be read behind its back."""
    report, seen = patch_model(model), []
    expected = model(x)
    model.tails[0].dense.register_forward_pre_hook(lambda *_: seen.append("dense"))
    torch.testing.assert_close(model(x), expected)
    assert seen == ["dense"] and report.calls()["tails.0"] == (2, 0)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_global_hook_sees_every_child(model: Model, x: Tensor, kind: str) -> None:
    patch_model(model)
    seen: list[type] = []
    register = getattr(nn.modules.module, f"register_module_{kind}_hook")
    handle = register(lambda m, *_: seen.append(type(m)))
    try:
        model(x.requires_grad_()).sum().backward()
    finally:
        handle.remove()
    assert seen.count(nn.Dropout) == 2 and seen.count(nn.Linear) == 2


def test_a_parametrised_dense_is_called(model: Model, x: Tensor) -> None:
    report = patch_model(model)
    nn.utils.parametrize.register_parametrization(model.tails[0].dense, "weight", Doubled())
    expected = unpatch_model(copy.deepcopy(model))(x)
    torch.testing.assert_close(model(x), expected)
    assert report.calls()["tails.0"] == (1, 0)


def test_unpatching_refuses_a_class_on_top_of_a_patched_one(model: Model, x: Tensor) -> None:
    before = classes(model)
    patch_model(model)
    nn.utils.parametrize.register_parametrization(model.final, "weight", Doubled())
    report = patch_model(model)
    assert "final" in {site.name for site in report.patched}  # its forward is still the fused one
    assert report.diff("final") and not report.skipped
    with pytest.raises(RuntimeError, match="unpatch_model: final was given the class ParametrizedLayerNorm"):
        unpatch_model(model)
    nn.utils.parametrize.remove_parametrizations(model.final, "weight", leave_parametrized=False)
    assert classes(unpatch_model(model)) == before


def test_accelerate_hooks_before_patching_and_blocks_around_them_are_left_alone(model: Model) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    for module in (model.final, model.tails[0].dense):
        hooks.add_hook_to_module(module, hooks.ModelHook())
    report = patch_model(model)
    assert {(site.name, site.reason) for site in report.skipped} >= {("final", "hf_hook"), ("tails.0", "hf_hook")}
    assert {site.name for site in report.patched} == {"tails.0.dropout", "tails.0.norm", "tails.1"}


def test_accelerate_hooks_after_patching_keep_the_fused_forward(model: Model, x: Tensor) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    expected = model(x)
    report = patch_model(model)
    hooks.add_hook_to_module(model.final, hooks.ModelHook())
    hooks.add_hook_to_module(model.tails[0].norm, hooks.ModelHook())
    torch.testing.assert_close(model(x), expected)
    assert report.calls() == {"tails.0": (0, 1), "tails.1": (1, 0), "final": (1, 0)}
    unpatch_model(model)
    assert torch.equal(model(x), expected)
    assert report.calls()["final"] == (1, 0), "accelerate still called the patched forward"


@pytest.mark.parametrize("order", ["before", "after"])
def test_modules_to_save_wraps_the_norm(model: Model, x: Tensor, order: str) -> None:
    """The wrapper proxies .weight; what runs is the copy inside it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["dense"], r=2, modules_to_save=["norm", "final"])
    if order == "after":
        patch_model(model)
    model = peft.get_peft_model(model, config).eval()
    report = patch_model(model)
    with torch.no_grad():
        model.base_model.model.tails[0].norm.modules_to_save["default"].weight.fill_(3.0)
    expected = unpatch_model(copy.deepcopy(model))(x)
    torch.testing.assert_close(model(x), expected)
    inner = [count for name, count in report.calls().items() if name.endswith("final.modules_to_save.default")]
    assert inner == [(1, 0)]
    if order == "before":
        patterns = {site.name.rpartition(".model.")[2]: site.pattern for site in report.patched}
        assert patterns["tails.0"] == "dropout_add"  # without its norm


def test_save_pretrained_and_from_pretrained(tmp_path: Any) -> None:
    model = tiny_model("BertModel", COMMON).eval()
    BertModel = type(model)
    patch_model(model)
    model.save_pretrained(tmp_path)
    loaded = BertModel.from_pretrained(tmp_path).eval()
    assert not any("_onetrip_original" in vars(cls) for cls in classes(loaded))
    assert type(loaded) is BertModel
    ids = torch.arange(10).view(1, 10)
    torch.testing.assert_close(loaded(ids).last_hidden_state, model(ids).last_hidden_state)


def test_trainer_weight_decay_groups_do_not_change() -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    for model in (tiny_model("BertModel", COMMON), tiny_model("LlamaModel", DECODER)):
        decayed = transformers.Trainer.get_decay_parameter_names(None, model)
        patch_model(model)
        assert transformers.Trainer.get_decay_parameter_names(None, model) == decayed
        assert decayed and len(decayed) < len(list(model.parameters()))


def step(model: nn.Module, seed: int = 0) -> Outcome:
    ids = token_ids(seed=seed)
    return loss_outcome(model, {"input_ids": ids, "labels": ids, "output_hidden_states": True})


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    "target", ["transformer.h.0", "transformer.h.1.ln_2", "transformer.h.0.mlp", "transformer.ln_f"]
)
def test_accelerate_hooks_before_and_after_links(order: str, target: str) -> None:
    """On a block, on norms that sums absorb or link, and on a child with the dropout. The hook doubles its output."""
    hooks = pytest.importorskip("accelerate.hooks")

    class Double(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return tuple(2 * y for y in output) if isinstance(output, tuple) else 2 * output

    model, expected = gpt2().train(), gpt2().train()
    hooks.add_hook_to_module(expected.get_submodule(target), Double())
    if order == "before":
        patch_model(model)
        for seed in range(2):
            step(model, seed)
    hooks.add_hook_to_module(model.get_submodule(target), Double())
    if order == "after":
        patch_model(model)
    for seed in range(3):  # the first step lets sums find their norms; the second has links
        assert_agree(step(model, seed), step(expected, seed))


@pytest.mark.parametrize("order", ["before", "after"])
def test_weights_offloaded_to_the_cpu_between_calls(order: str) -> None:
    """accelerate's cpu_offload: parameters are on the meta device except during their module's call."""
    accelerate = pytest.importorskip("accelerate")
    ids, model, expected = token_ids(), gpt2().eval(), gpt2().eval()
    with torch.no_grad():
        if order == "before":
            patch_model(model)
            model(ids)
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        if order == "after":
            patch_model(model)
        for _ in range(3):
            torch.testing.assert_close(model(ids).logits, expected(ids).logits)


def test_two_threads_run_one_model() -> None:
    """As a server does. Links are shared by threads: a y must not be returned for the other thread's z."""
    model, expected = gpt2().eval(), gpt2().eval()
    patch_model(model)

    def serve(seed: int) -> bool:
        ids = token_ids(seed=seed)
        with torch.no_grad():
            logits = expected(ids).logits
            return all(torch.allclose(model(ids).logits, logits, rtol=1e-3, atol=1e-4) for _ in range(40))

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(serve, range(2)))


def test_replicas_of_data_parallel() -> None:
    """nn.DataParallel copies every module, with its class, for each call."""
    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    step(model)
    for seed in range(3):
        copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
        for module, replica in copies.items():
            for name, child in module.named_children():
                replica._modules[name] = copies[child]
            for name, parameter in module._parameters.items():  # plain attributes, as nn.parallel.replicate makes them
                setattr(replica, name, None if parameter is None else parameter.clone())
        ids = token_ids(seed=seed)
        torch.testing.assert_close(copies[model](ids).logits, expected(ids).logits, rtol=1e-3, atol=1e-4)


def test_saved_tensors_offloaded_to_the_cpu() -> None:
    model, expected = gpt2().train(), gpt2().train()
    patch_model(model)
    step(model)
    with torch.autograd.graph.save_on_cpu():
        for seed in range(3):
            assert_agree(step(model, seed), step(expected, seed))


def test_grad_scaler_steps_and_skips() -> None:
    """Scaled losses, a step skipped for a gradient of infinity, and the weights after it."""
    models = [gpt2().train(), gpt2().train()]
    patch_model(models[0])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for seed in range(4):
            optimizer.zero_grad()
            loss = model(input_ids=token_ids(seed=seed), labels=token_ids(seed=seed)).loss
            scaler.scale(loss * float("inf") if seed == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    assert_agree(*(dict(model.named_parameters()) for model in models))
