"""Gated products in methods, and in forwards inside of wrappers: mixtures of experts."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import assert_agree, assert_equal, outcome, patch_and_compare
from patching_cases import WIDTH, inputs, randomised, tiny_mixture, written
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def dispatched(cls: type) -> type:
    """As transformers' use_experts_implementation."""
    original = cls.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        chosen = by_method if self.implementation == "method" else original
        return chosen(self, *args, **kwargs)

    cls.forward = forward
    return cls


def by_method(self: Any, x: Tensor) -> Tensor:
    return torch.nn.functional.linear(self.gated(torch.nn.functional.linear(x, self.gate_up[0])), self.down[0])


@dispatched
class Experts(nn.Module):
    def __init__(self, implementation: str = "method") -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2, 2 * WIDTH, WIDTH))
        self.down = nn.Parameter(torch.empty(2, WIDTH, WIDTH))
        self.act_fn = nn.SiLU()
        self.implementation = implementation

    def gated(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for expert in range(2):
            gate, up = torch.nn.functional.linear(x, self.gate_up[expert]).chunk(2, dim=-1)
            h = self.act_fn(gate) * up
            total = total + torch.nn.functional.linear(h, self.down[expert])
        return total


@pytest.mark.parametrize(("implementation", "n_fused"), [("method", 1), ("eager", 2)])
def test_methods_and_the_forward_in_a_wrapper_are_fused(implementation: str, n_fused: int) -> None:
    model, (x,) = randomised(Experts(implementation)), inputs()
    expected = outcome(model, x)
    report = patch_model(model)
    assert [(site.pattern, site.detail) for site in report.patched] == [("gated_mlp", "silu")]
    assert_agree(outcome(model, x), expected)
    assert report.calls() == {"": (n_fused, 0)}
    assert "gate = gate_up" in report.diff("") and "gated_0_(self, self.act_fn, gate)" in report.diff("")
    assert "gated_0_gated_(self, self.act_fn, gate)" in report.diff("")
    unpatch_model(model)
    assert type(model) is Experts
    assert_equal(outcome(model, x), expected)


@pytest.mark.parametrize("implementation", ["method", "eager"])
def test_patched_experts_are_copied_pickled_and_compiled(implementation: str) -> None:
    model, (x,) = randomised(Experts(implementation)), inputs()
    expected = outcome(model, x)
    report = patch_model(model)
    assert_agree(outcome(copy.deepcopy(model), x), expected)
    assert type(pickle.loads(pickle.dumps(model))) is Experts
    assert_agree(outcome(torch.compile(model, backend="aot_eager", fullgraph=True), x), expected)
    model.act_fn.register_forward_hook(lambda *_: None)
    before = report.calls()[""][0]
    assert_agree(outcome(model, x), expected)
    assert report.calls()[""][0] == before and report.calls()[""][1] > 0


def test_the_choice_of_an_implementation_stays_the_wrapper_s() -> None:
    model, (x,) = randomised(Experts("eager")), inputs()
    eager = outcome(model, x)
    patch_model(model)
    model.implementation = "method"
    expected = outcome(unpatch_model(copy.deepcopy(model)), x)
    assert_agree(outcome(model, x), expected)
    assert not torch.allclose(expected["y"], eager["y"])


class StaticGate(nn.Module):
    @staticmethod
    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.gated(x, x + 1.0)


def test_a_static_method_is_left_alone() -> None:
    model, (x,) = StaticGate(), inputs()
    expected = model(x)
    patch_model(model)
    assert torch.equal(model(x), expected)


def kept_twice(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that keeps the function in two places."""
    also = function

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args) + 0.0 * also(*args)

    return wrapper


class Halves(nn.Module):
    """Parts of the forwards below."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU()


PARTS = "gate, up = self.packed(x).chunk(2, dim=-1)"
NAMED = "gate, up = self.packed(x).chunk(2, -1); h = self.act(gate); return h * up"
ONE = {
    "swapped": "up, gate = self.packed(x).chunk(2, dim=-1); return up * self.act(gate)",
    "named": NAMED,
    "up is rebound (Phi-3)": """
        up = self.packed(x)
        gate, up = up.chunk(2, dim=-1)
        up = up * self.act(gate)
        return up""",
    "in a loop": f"""
        for _ in range(2):
            {PARTS}
            x = self.act(gate) * up
        return x""",
}
TWO = {
    "read again": f"{PARTS}; return self.act(gate) * up + up",
    "read again in the next round": f"""
        up = x
        for _ in range(2):
            x = x + up
            {PARTS}
            x = self.act(gate) * up
        return x""",
    "scaled": f"{PARTS}; gate = gate * 2.0; return self.act(gate) * up",
    "another dimension": """
        gate, up = torch.cat([x, 2.0 * self.packed(x)[..., :WIDTH]]).chunk(2, dim=0)
        return self.act(gate) * up""",
    "two of three parts": "gate, up = self.packed(x).chunk(3, dim=-1)[:2]; return self.act(gate) * up",
}
"""Gated products of halves as one tensor, and of two tensors."""


def test_a_wrapper_that_keeps_its_function_twice_is_left_alone() -> None:
    assert patch_model(written(Halves, NAMED, globals(), decorators=[kept_twice])()).patched == ()


@pytest.mark.parametrize("name", ONE | TWO)
def test_halves_stay_one_tensor_where_nothing_else_reads_them(name: str) -> None:
    model, (x,) = randomised(written(Halves, (ONE | TWO)[name], globals())()), inputs()
    report = patch_and_compare(model, lambda: outcome(model, x))
    assert [site.pattern for site in report.patched] == ["gated_mlp"]
    assert report.calls()[""][0] >= 1 and report.calls()[""][1] == 0
    added = [line for line in report.diff("").splitlines() if line.startswith("+") and "gated_0_(" in line]
    assert len(added) == 1 and added[0].count(",") == (3 if name in TWO else 2)


def test_halves_of_an_odd_tensor_raise_what_they_raised() -> None:
    model = written(Halves, NAMED, globals())()
    model.packed = nn.Linear(WIDTH, 5)
    with pytest.raises(RuntimeError) as expected:
        model(torch.randn(2, WIDTH))
    patch_model(model)
    with pytest.raises(RuntimeError) as found:
        model(torch.randn(2, WIDTH))
    assert str(found.value) == str(expected.value)


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 4, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen2_moe": {"shared_expert_intermediate_size": 24}, "qwen3_moe": {}, "olmoe": {}, "glm4_moe": {},
    "deepseek_v3": LATENT,
}  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [
        pytest.param(model_type, implementation, marks=[] if (i + j) % 3 == 0 else [pytest.mark.slow])
        for i, model_type in enumerate(MIXTURES)
        for j, implementation in enumerate(["eager", "batched_mm", "grouped_mm"])
    ],
)
def test_experts_of_transformers_are_fused_in_every_implementation(model_type: str, implementation: str) -> None:
    model, ids = tiny_mixture(model_type, implementation, **MIXTURES[model_type]), torch.randint(3, 64, (2, 9))
    expected = outcome(model, ids, use_cache=False)
    report = patch_model(model)
    experts = [site.name for site in report.patched if site.name.endswith("experts")]
    assert experts and all(site.pattern == "gated_mlp" for site in report.patched if site.name in experts)
    assert_agree(outcome(model, ids, use_cache=False), expected)
    assert all(report.calls()[name][0] > 0 and report.calls()[name][1] == 0 for name in experts)
    unpatch_model(model)
    assert_equal(outcome(model, ids, use_cache=False), expected)


def test_llama4_s_experts_are_fused() -> None:
    model, ids = tiny_mixture("llama4_text", intermediate_size_mlp=48), torch.randint(3, 64, (2, 9))
    report = patch_and_compare(model, lambda: outcome(model, ids, use_cache=False))
    names = [site.name for site in report.patched if site.name.endswith("experts")]
    assert names and "gated_0_(self, self.act_fn, gate)" in report.diff(names[0])
