"""Low-rank adapters of PEFT: added by their product, one gradient of what they read."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import outcomes
import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.linear import readers
from onetrip.patching.verify import RNG, MaskedDropout
from outcomes import assert_agree, assert_compiles, assert_equal, assert_obeys, patch_and_compare, penalty_gradients
from patching_cases import DECODER, WIDTH, checkpointed, inputs, randomised, tiny_model
from torch import Tensor, nn

peft = pytest.importorskip("peft")

outcome = functools.partial(outcomes.outcome, is_leaf=False)


class Layers(nn.Module):
    """Two layers of one input, and one of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.q(x) * self.k(x))
        return y


def adapted(names: tuple[str, ...] = ("default",), **options: Any) -> Any:
    """Layers with adapters of these names in use."""
    model: Any = Layers()
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q", "k", "out"], "init_lora_weights": False} | options
    for name in names:
        model = peft.inject_adapter_in_model(peft.LoraConfig(**options), model, name)
    randomised(model)
    for each in model.modules():
        if isinstance(each, peft.tuners.tuners_utils.BaseTunerLayer):
            each.set_adapter(list(names))
    return model.train()


def with_base_in(dtype: torch.dtype) -> Any:
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.to(dtype)
    return model


@pytest.mark.parametrize("names", [("default",), ("one", "two")], ids=len)
def test_outputs_and_gradients_are_the_unpatched_model_s(names: tuple[str, ...]) -> None:
    model, (x,) = adapted(names), inputs()
    expected = outcome(model, x)
    assert len(expected) == 2 + 6 * len(names)
    report = patch_model(model)
    assert [(site.name, site.pattern) for site in report.patched] == [(name, "lora") for name in ("q", "k", "out")]
    assert_agree(outcome(model, x), expected)
    n_calls = 1 + 2 * len(names)  # the layer, and both of each adapter
    assert report.calls() == dict.fromkeys(("q", "k", "out"), (n_calls, 0))
    with torch.no_grad():
        assert_agree({"y": model(2.0 * x)}, {"y": expected["y"]})
    unpatch_model(model)
    assert_equal(outcome(model, x), expected)


def test_the_traffic_that_is_saved() -> None:
    model, (x,) = adapted(), inputs()
    outside = traffic(lambda: outcome(model, x)).outside()
    patch_model(model)
    saved = outside - traffic(lambda: outcome(model, x)).outside()
    results, shared = 24 + 24 + 8, 3 * 16 + 24  # columns: B's products; sums of the gradients of x and of y
    small = 4 * (2 * 3 * 10 * 4 + 2 * 4 * results)  # multiples of the gradients of A's products and of B's weights
    assert saved == 4 * 10 * (7 * results + 3 * shared) - small


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_dropout(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x,) = adapted(lora_dropout=p), inputs()
    with MaskedDropout():
        expected = outcome(model, x)
    monkeypatch.setattr(readers, "draw_rng", lambda device: RNG)
    report = patch_model(model, patterns=["lora"])
    assert_agree(outcome(model, x), expected)
    assert set(report.calls().values()) == {(3, 0)}


def test_an_adapter_with_an_excluded_child_is_left() -> None:
    for names in ("*.lora_A.*", "*.lora_B.*", "*.lora_dropout.*"):
        assert not patch_model(adapted(lora_dropout=0.3), patterns=["lora"], exclude=[names]).patched


def test_dropout_keeps_one_tensor_for_all_adapters_of_an_input() -> None:
    model, (x,) = adapted(lora_dropout=0.3), inputs()
    patch_model(model)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == x.shape:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    leaf = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(2.0 * leaf)
    assert len(kept) == 1
    y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_cast_what_it_casts_back(dtype: torch.dtype) -> None:
    """Adapters in float32 beside a layer in bfloat16: PEFT's default, under Trainer's bf16."""
    model, (x,) = with_base_in(dtype), inputs()

    def run(model: Any, dtype: torch.dtype) -> outcomes.Outcome:
        with torch.autocast("cpu", torch.bfloat16):
            return outcome(model, x.to(dtype))

    def casts() -> int:
        """Of tensors as large as the input."""
        found = traffic(lambda: run(model, dtype)).operators.values()
        return sum(each.calls for each in found if each.name == "aten::_to_copy")

    expected, before = run(model, dtype), casts()
    report = patch_model(model)
    assert_agree(run(model, dtype), expected, 3e-2)
    assert all(fallbacks == 0 for _, fallbacks in report.calls().values())
    assert casts() < before


def test_float32_adapters_of_a_bfloat16_layer_without_autocast_are_left() -> None:
    """Their sum is in float32: no product of bfloat16 computes it."""
    model, (x,) = with_base_in(torch.bfloat16), inputs()
    report = patch_and_compare(model, lambda: outcome(model, x.bfloat16()), relative=3e-2)
    assert all(fallbacks == 1 for _, fallbacks in report.calls().values())


def test_results_that_others_hold_are_not_written_to() -> None:
    model, (x,) = adapted(), inputs()
    held: list[Tensor] = []
    patch_model(model)
    model.q.base_layer.register_forward_hook(lambda module, args, y: held.append(y))
    y = model(x)
    assert torch.equal(held[0], nn.functional.linear(x, model.q.base_layer.weight, model.q.base_layer.bias))
    assert y.requires_grad


def test_nested_tensors() -> None:
    model, (x,) = adapted(), inputs()

    def run() -> outcomes.Outcome:
        model.zero_grad()
        y = model(torch.nested.nested_tensor([*x], layout=torch.jagged, requires_grad=True))
        y.values().square().sum().backward()
        return {"y": y.values().detach()} | outcomes.parameter_gradients(model)

    patch_and_compare(model, run, relative=0.0)


def test_a_copy_of_a_patched_model_has_its_wrapper() -> None:
    """PEFT's wrapper passes what it does not know on to the model in it."""
    model = tiny_model("LlamaForCausalLM", DECODER)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"]))
    patch_model(model)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and type(copied.base_model.model) is type(model.base_model.model)
    assert_equal(dict(copied.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, contextlib.nullcontext])
def test_inputs_without_gradients(context: Callable[[], Any]) -> None:
    model, (x,) = adapted(), inputs()
    frozen_base(model)
    expected = model(x)
    patch_model(model)
    with context():
        y = model(x)
    assert_agree({"y": y}, {"y": expected.detach()})
    assert y.requires_grad == (context is contextlib.nullcontext)


def frozen_base(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name)


def with_bias(model: Any) -> None:
    model.q.lora_B["default"].bias = nn.Parameter(torch.ones(24))


def layers(model: Any) -> list[Any]:
    return [model.q, model.k, model.out]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "frozen": frozen_base,
    "hooked": lambda model: model.q.lora_B["default"].register_forward_hook(lambda module, args, y: 2.0 * y),
    "disabled": lambda model: [each.enable_adapters(False) for each in layers(model)],
    "merged": lambda model: [each.merge() for each in layers(model)],
    "rescaled": lambda model: model.q.scale_layer(3.0),
    "deleted": lambda model: model.k.delete_adapter("default"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_layers_changed_after_patching(name: str) -> None:
    assert_obeys(CHANGES[name], adapted(), *inputs(), compute=outcome)


class Broadcast(nn.Linear):
    """One row of results for all rows of x."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)[:, :1]


def scaled_by_a_tensor(model: Any) -> None:
    model.q.scaling["default"] = torch.tensor([1.5])


def broadcast(model: Any) -> None:
    model.q.base_layer.__class__ = Broadcast


CHANGES_OF_SUMS = {scaled_by_a_tensor: 2, broadcast: 1, with_bias: 2}


@pytest.mark.parametrize("change", CHANGES_OF_SUMS)
def test_sums_that_no_product_computes(change: Callable[[Any], None]) -> None:
    report = assert_obeys(change, adapted(), *inputs(), compute=outcome)
    assert report.calls()["q"] == (CHANGES_OF_SUMS[change], 1)


def test_traced_by_torchscript() -> None:
    model, (x,) = adapted().eval(), inputs()
    expected = model(x)
    patch_model(model)
    torch.testing.assert_close(torch.jit.trace(model, x)(x), expected)


def test_another_variant_beside_a_plain_adapter() -> None:
    """DoRA takes the sum so far, and the input as PEFT casts it."""
    model, (x,) = adapted(("one",)), inputs()
    config = peft.LoraConfig(r=4, target_modules=["q"], use_dora=True, init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, model, "two")
    model.q.set_adapter(["one", "two"])
    patch_and_compare(model, lambda: outcome(model, x), relative=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("autocast", [False, True])
def test_checkpointing(autocast: bool, p: float, use_reentrant: bool) -> None:
    """Without gradients first, if reentrant: with the same masks, rounded alike."""
    model, (x,) = adapted(lora_dropout=p), inputs()
    patch_model(model)

    def run(model: Any) -> outcomes.Outcome:
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return outcome(model, x)

    expected, found = run(model), run(checkpointed(model, use_reentrant))
    assert torch.equal(found["y"], expected["y"])
    assert_agree(found, expected, relative=0.01 if autocast else 1e-5)  # autocast rounds parts of the input's gradient


def test_second_derivatives() -> None:
    model, (x,) = adapted().double(), inputs()
    expected = penalty_gradients(model, x.double())
    patch_model(model.float())
    assert_agree(penalty_gradients(model, x), expected, relative=1e-4)


def test_compiles_without_a_break() -> None:
    assert_compiles(adapted(), *inputs(), compute=outcome)


def test_vmap() -> None:
    model, (x,) = adapted().eval(), inputs()
    expected = model(x)
    patch_model(model)
    torch.testing.assert_close(torch.func.vmap(model)(x), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_layers_of_bitsandbytes(dtype: torch.dtype) -> None:
    """QLoRA: the result is another library's, copied and converted on the way."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model: Any = nn.Sequential(bitsandbytes.nn.Linear4bit(64, 32, bias=False, compute_dtype=dtype))
    model[0].weight = bitsandbytes.nn.Params4bit(torch.randn(32, 64), requires_grad=False)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, model.to("cpu"))
    x = torch.randn(2, 5, 64, dtype=dtype)
    if dtype == torch.bfloat16:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.bfloat16() if "lora" in name else parameter.data
    report = patch_and_compare(model, lambda: outcome(model, x), relative=3e-2 if dtype == torch.bfloat16 else 1e-5)
    assert [(site.name, site.pattern) for site in report.patched] == [("0", "lora")]
    assert report.calls() == {"0": (2, 0)}
    model[0].lora_A.float()
    model[0].lora_B.float()
    y = model(x)
    assert y.dtype == dtype and report.calls()["0"][1] == (dtype == torch.bfloat16)
    torch.testing.assert_close(y, unpatch_model(model)(x), rtol=2e-2, atol=2e-1)
