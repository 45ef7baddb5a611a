"""SwiGLU with bounds on gate and up, as gpt-oss, DeepSeek-V4, MiniMax-M3 and others write it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from outcomes import assert_agree, assert_equal, outcome, patch_and_compare
from patching_cases import WIDTH, inputs, randomised, tiny_mixture, written
from torch import nn
from torch.nn import functional as F  # noqa: F401 (forwards read it)

transformers = pytest.importorskip("transformers")

MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {}, "openai_privacy_filter": {}, "hy_v4": {}, "deepseek_v4": {}, "minimax_m3_vl_text": {},
    "glm5_next_text": {
        "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 0, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("model_type", "implementation"),
    [(name, how) for name in MODELS for how in ("eager", "grouped_mm") if "glm5" not in name]
    + [  # half a minute each
        pytest.param("glm5_next_text", "eager", marks=pytest.mark.slow),
        pytest.param("glm5_next_text", "grouped_mm", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_models_of_transformers(model_type: str, implementation: str) -> None:
    """With a limit that many values are beyond."""
    model = tiny_mixture(model_type, implementation, swiglu_limit=0.02, **MODELS[model_type])
    ids = torch.randint(3, 64, (2, 9))
    expected = outcome(model, ids, use_cache=False)
    report = patch_model(model, patterns=("gated_mlp",))
    bounded = [site.name for site in report.patched if "limit" in report.diff(site.name)]
    experts = [name for name, _ in model.named_modules() if name.endswith("mlp.experts")]
    assert experts and set(experts) <= set(bounded)
    assert_agree(outcome(model, ids, use_cache=False), expected)
    assert all(report.calls()[name][0] > 0 and report.calls()[name][1] == 0 for name in bounded)
    unpatch_model(model)
    assert_equal(outcome(model, ids, use_cache=False), expected)


class Parts(nn.Module):
    """Parts of the forwards below."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.act, self.limit, self.alpha = nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), 0.5, 1.702
        self.gate, self.up, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)


def of(body: str) -> Any:
    return written(Parts, body, globals())


GATE = "gate = self.gate(x).clamp(max=self.limit)"
UP = "up = self.up(x).clamp(min=-self.limit, max=self.limit)"
PRODUCT = "return self.act(gate) * up"
PARTS = "gate, up = self.packed(x).chunk(2, dim=-1)"
COLUMNS = "h = self.packed(x); gate, up = h[..., ::2], h[..., 1::2]"
GATE_PART = "gate = gate.clamp(max=self.limit)"
UP_PART = "up = up.clamp(min=-self.limit, max=self.limit)"
FORMS = {
    "gated_0_(self, None, glu, limit=self.limit, alpha=self.alpha)": f"""
        {COLUMNS}
        gate = gate.clamp(min=None, max=self.limit)
        {UP_PART}
        glu = gate * torch.sigmoid(gate * self.alpha)
        return (up + 1) * glu""",
    "gated_0_(self, F.silu, gate, limit=self.limit)": f"""
        up, gate = self.packed(x).chunk(2, dim=-1)
        up = up.clamp(-self.limit, self.limit)
        {GATE_PART}
        return F.silu(gate) * up""",
    "gated_0_(self, None, gate, up, limit=0.25, alpha=1.5)": """
        gate = self.gate(x).clamp(max=0.25)
        up = self.up(x).clamp(min=-0.25, max=0.25)
        return gate * F.sigmoid(1.5 * gate) * up""",
    "gated_0_(self, self.act, gate, up, limit=self.limit, dropout=self.drop)": f"""
        {GATE}
        {UP}
        return self.drop(self.act(gate) * up)""",
}
"""By the call that takes their place."""
INTERLEAVED, HALVES, *_ = FORMS.values()


@pytest.mark.parametrize("call", FORMS)
def test_forms(call: str) -> None:
    model, (x,) = randomised(of(FORMS[call])()), inputs()
    expected = outcome(model, x)
    report = patch_model(model, patterns=("gated_mlp",))
    assert call in report.diff("") and "clamp" not in "".join(_added(report.diff("")))
    assert_agree(outcome(model, x), expected)
    assert report.calls() == {"": (1, 0)}
    assert_agree(outcome(torch.compile(model, backend="aot_eager", fullgraph=True), x), expected)
    unpatch_model(model)
    assert_equal(outcome(model, x), expected)


def _added(diff: str) -> list[str]:
    return [line for line in diff.splitlines() if line.startswith("+")]


@pytest.mark.parametrize("body", [INTERLEAVED, HALVES], ids=["interleaved", "halves"])
def test_limit_and_alpha_are_read_at_each_call(body: str) -> None:
    model, (x,) = randomised(of(body)()), inputs()
    report = patch_model(model, patterns=("gated_mlp",))
    original = unpatch_model(copy.deepcopy(model))
    for limit in (0.1, 3, torch.tensor(0.5), float("inf"), -0.5):
        for each in (model, original):
            each.limit, each.alpha = limit, 0.7
        assert_agree(outcome(model, x), outcome(original, x))
    assert report.calls() == {"": (3, 2)}  # what is no positive number is left to torch


def test_float64_is_left_to_torch() -> None:
    model, (x,) = randomised(of(INTERLEAVED)()), inputs()
    expected = outcome(copy.deepcopy(model).double(), x.double())
    report = patch_model(model, patterns=("gated_mlp",))
    model.double()
    assert_equal(outcome(model, x.double()), expected)
    assert report.calls() == {"": (0, 1)}


OF_SOMETHING_ELSE = {
    "another gate": f"{PARTS}; gate = (gate + 1.0).clamp(max=self.limit); {UP_PART}; {PRODUCT}",
    "another up": f"{PARTS}; {GATE_PART}; up = (2.0 * up).clamp(min=-self.limit, max=self.limit); {PRODUCT}",
    "converted columns": f"""
        {COLUMNS}
        gate = gate.float().clamp(max=self.limit)
        up = up.float().clamp(min=-self.limit, max=self.limit)
        {PRODUCT}""",
    "a layer of a half": f"{PARTS}; gate = self.gate(gate).clamp(max=self.limit); {UP_PART}; {PRODUCT}",
    "a layer of the input": f"{PARTS}; {UP_PART}; {GATE}; {PRODUCT}",
    "odd columns": f"h = self.packed(x); up, gate = h[..., ::2], h[..., 1::2]; {GATE_PART}; {UP_PART}; {PRODUCT}",
    "the same columns": f"h = self.packed(x); gate, up = h[..., ::2], h[..., ::2]; {GATE_PART}; {UP_PART}; {PRODUCT}",
    "a half that is read again": f"{PARTS}; raw = up; {GATE_PART}; {UP_PART}; {PRODUCT} + raw",
}


@pytest.mark.parametrize("name", OF_SOMETHING_ELSE)
def test_bounds_of_something_else_than_the_halves(name: str) -> None:
    """Fused, of two tensors."""
    model, (x,) = randomised(of(OF_SOMETHING_ELSE[name])()), inputs()
    report = patch_and_compare(model, lambda: outcome(model, x), patterns=("gated_mlp",))
    assert report.calls() == {"": (1, 0)}


OTHERS = {
    "gate is read again": f"{GATE}; {UP}; {PRODUCT} + gate",
    "up is read again": f"{GATE}; {UP}; return (up + 1.0) * (gate * torch.sigmoid(gate * self.alpha)) - up",
    "two limits": f"{GATE}; up = self.up(x).clamp(min=-self.alpha, max=self.limit); {PRODUCT}",
    "a lower bound of gate": f"gate = self.gate(x).clamp(min=-self.limit, max=self.limit); {UP}; {PRODUCT}",
    "no lower bound of up": f"{GATE}; up = self.up(x).clamp(max=self.limit); {PRODUCT}",
    "after the activation (Step-3.7)": f"gate = self.act(self.gate(x)).clamp(max=self.limit); {UP}; return gate * up",
    "changed between": f"raw = 2.0 * x.detach(); gate = raw.clamp(max=self.limit); {UP}; raw.mul_(2.0); {PRODUCT}",
    "limit set between": f"{GATE}; {UP}; self.limit = 0.25; y = self.act(gate) * up; self.limit = 0.5; return y",
    "a local number": f"""
        limit = 0.5 * self.limit
        gate = self.gate(x).clamp(max=limit)
        up = self.up(x).clamp(min=-limit, max=limit)
        {PRODUCT}""",
    "no bounds": "gate, up = self.gate(x), self.up(x); return gate * torch.sigmoid(gate * self.alpha) * up",
    "in a loop": f"""
        gate, up = self.gate(x), self.up(x)
        total = x
        for _ in range(2):
            total = total + gate
            {GATE_PART}
            {UP_PART}
            total = total + self.act(gate) * up
        return total""",
    "another activation": f"{GATE}; {UP}; {PRODUCT}",
    "limit in a buffer": f"{GATE}; {UP}; {PRODUCT}",
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_forms_keep_their_bounds(name: str) -> None:
    model, (x,) = randomised(of(OTHERS[name])()), inputs()
    if name == "another activation":
        model.act = nn.GELU()
    elif name == "limit in a buffer":
        del model.limit
        model.register_buffer("limit", torch.tensor(0.5))
    report = patch_and_compare(model, lambda: outcome(model, x), patterns=("gated_mlp",))
    if report.patched:
        removed = [line for line in report.diff("").splitlines() if line.startswith("-") and "clamp" in line]
        assert not removed
