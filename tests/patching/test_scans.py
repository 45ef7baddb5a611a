"""Loops over the steps of a sequence, whose slices are made and joined at once."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from outcomes import (
    assert_agree,
    assert_compiles,
    assert_equal,
    loss_outcome,
    outcome,
    patch_and_compare,
    penalty_gradients,
)
from patching_cases import COMMON, WIDTH, compiles_transformers, module_of, randomised, tiny_model, token_ids
from torch import Tensor

SOURCE = """
import functools
import torch
from torch import nn

def other(x):
    return x.mul_(1)

{decorators}
def scan(x, decay, n, m=2):
{body}

def method(self, x, decay, n, m=2):
{body}

class Mixer(nn.Module):
    n_extra = 0

    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.dense(x)
        return self.out({call}(x, x.sigmoid(), x.shape[1] + self.n_extra))
"""
STATE = "state = torch.zeros_like(x[:, 0])"
NEW = f"{STATE}; y = torch.zeros_like(x)"
FOUND = {
    "read, appended": f"""
        {STATE}; outputs = []
        for i in range(n):
            state = decay[:, i] * state + x[:, i, :]
            outputs.append(state)
        return torch.stack(outputs, dim=1)""",
    "read and written": f"""
        {NEW}
        for i in range(n):
            x_i, d_i = x[:, i], decay[:, i]
            state = d_i * state + x_i
            y[:, i] = state
        return y""",
    "one tensor in two dimensions": """
        t = torch.nn.functional.pad(x, (0, n - x.shape[2])) if x.shape[2] < n else x[:, :, :n]
        y = torch.empty(x.shape[0], n, n)
        for i in range(n):
            y[:, :, i] = t[:, :, i] * t[:, i]
        return torch.nn.functional.pad(y, (0, x.shape[2] - n))""",
    "in a branch, in a loop": f"""
        {STATE}
        if n > 1:
            for j in range(m):
                y = torch.zeros_like(x)
                for i in range(n):
                    state = state * decay[:, i] + x[:, i] * x[:, i] + j
                    y[:, i] = state.sin()
        return y""",
    "a slice written before": f"""
        w = x * 1; w[:, 0] = 0.5; {STATE}
        for i in range(n):
            state = w[:, i].sin() + state
        return state[:, None] + x""",
    "two loops": f"""
        {NEW}; z = torch.zeros_like(x)
        for i in range(n):
            y[:, i] = x[:, i].sin()
        for k in range(n):
            z[:, k] = x[:, k] * decay[:, k]
        return y + z""",
    "written to elsewhere": f"""
        {STATE}; w = x * 2; w += 1; kept = [torch.zeros(3, 16)]
        for i in range(n):
            state = (w[:, i] + state).mul_(0.5)
        kept[0].copy_(state)
        return x + state[:, None]""",
    "the last step": f"""
        {STATE}
        for i in range(n):
            last = x[:, i]
            state = state + last
        return x + (state * last)[:, None]""",
}
NOT_JOINED = {
    "some steps": f"""
        {NEW}
        for i in range(1, n, 2):
            y[:, i] = x[:, i]
        return y + x""",
    "backwards": f"""
        {NEW}
        for i in range(n - 1, -1, -1):
            state = state + x[:, i]
            y[:, i] = state
        return y""",
    "broadcast": f"""
        {NEW}
        for i in range(n):
            y[:, i] = x[:, i].mean(dim=-1, keepdim=True)
        return y + x""",
    "a number": f"""
        {NEW}
        for i in range(n):
            y[:, i] = 0.5
        return y + x""",
    "another dtype": f"""
        {NEW}
        for i in range(n):
            y[:, i] = x[:, i].double()
        return y""",
    "other strides": """
        y = torch.zeros_like(x.transpose(0, 1).contiguous().transpose(0, 1))
        for i in range(n):
            y[:, i] = x[:, i].sin()
        return y.transpose(0, 1).contiguous().view(n, -1).view(n, -1, 16).transpose(0, 1)""",
}
"""Loops that are found, and write in another way than a stack does."""
LEFT = {
    "written in place": f"{NEW}\nfor i in range(n):\n    x_i = x[:, i]; x_i += 1\n    y[:, i] = x_i\nreturn y",
    "a method in place": f"{NEW}\nfor i in range(n):\n    y[:, i] = x[:, i].sin_()\nreturn y",
    "written after the loop": f"{NEW}\nfor i in range(n):\n    y[:, i] = x[:, i]\ny[:, 0] = 1.0\nreturn y",
    "an older tensor": f"{NEW}\nz = y\nfor i in range(n):\n    z[:, i] = x[:, i]\nreturn z + y",
    "read since": f"{NEW}\nz = y[:, 1:]\nfor i in range(n):\n    y[:, i] = x[:, i]\nreturn y + z.sum()",
    "no new tensor": "y = x * 1\nfor i in range(n):\n    y[:, i] = x[:, i] + 1\nreturn y",
    "read where it is written": f"{NEW}\nfor i in range(n):\n    y[:, i] = x[:, i] + y[:, i - 1]\nreturn y",
    "written twice": f"{NEW}\nfor i in range(n):\n    y[:, i] = x[:, i]\n    y[:, i] = decay[:, i]\nreturn y",
    "in a condition": f"{NEW}\nfor i in range(n):\n    if i % 2:\n        y[:, i] = x[:, i]\nreturn y",
    "left early": f"{STATE}\nfor i in range(n):\n    state = state + x[:, i]\n    if i > 3:\n        break\nreturn x",
    "another index": f"{STATE}\nfor i in range(n):\n    i = 0\n    state = state + x[:, i]\nreturn state + x[:, 1]",
    "of a list": f"{STATE}\nfor i in range(n):\n    state = state + x.unbind(1)[i]\nreturn state",
    "ranges": f"{STATE}\nfor i in range(n):\n    state = state + x[:, i : i + 1].sum(1)\nreturn state",
    "the tensor itself": f"{STATE}\nfor i in range(n):\n    state = state + x[:, i] + x[:, -1]\nreturn state",
    "another function": f"{STATE}\nfor i in range(n):\n    state = state + other(x[:, i])\nreturn state",
    "a lambda": f"{STATE}\nfor i in range(n):\n    state = (lambda: x[:, i])() + state\nreturn state",
    "no range": f"{STATE}\nfor i in [0, 1]:\n    state = state + x[:, i]\nreturn state",
    "an end": f"{STATE}\nfor i in range(n):\n    state = state + x[:, i]\nelse:\n    state = state * 2\nreturn state",
    "a name of ours": f"{STATE}; steps_of_ = 1\nfor i in range(n):\n    state = state + x[:, i]\nreturn state",
}


def mixer(body: str, folder: Path, decorators: str = "", call: str = "scan") -> Any:
    lines = []
    for line in textwrap.dedent(body).strip().splitlines():
        lines += [" " * (len(line) - len(line.lstrip())) + each for each in line.strip().split("; ")]
    source = SOURCE.format(decorators=decorators, body=textwrap.indent("\n".join(lines), "    "), call=call)
    return randomised(module_of(source, folder).Mixer())


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 9, WIDTH, generator=torch.Generator().manual_seed(0))


def patched(model: Any) -> Any:
    report = patch_model(model, patterns=("scan",))
    assert [site.pattern for site in report.patched] == ["scan"]
    return report


@pytest.mark.parametrize("name", FOUND)
def test_the_same_bits_with_one_gradient(name: str, x: Tensor, tmp_path: Path) -> None:
    model = mixer(FOUND[name], tmp_path)
    expected, before = outcome(model, x), traffic(lambda: outcome(model, x)).by_operator()
    report = patched(model)
    (assert_agree if "in a loop" in name else assert_equal)(outcome(model, x), expected)  # x[:, i] is read twice
    after = traffic(lambda: outcome(model, x)).by_operator()
    assert before["aten::select_backward"] > 0 and "aten::select_backward" not in after
    assert report.calls() == {"": (2, 0)}
    assert "steps_of_(" in report.diff("")
    unpatch_model(model)
    assert_equal(outcome(model, x), expected)


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_no_stack_writes(name: str, x: Tensor, tmp_path: Path) -> None:
    model = mixer(NOT_JOINED[name], tmp_path)
    expected = outcome(model, x)
    patched(model)
    assert_equal(outcome(model, x), expected)


@pytest.mark.parametrize("name", LEFT)
def test_other_loops_are_left(name: str, tmp_path: Path) -> None:
    assert not patch_model(mixer(LEFT[name], tmp_path), patterns=("scan",)).patched


def test_no_steps_and_too_many(x: Tensor, tmp_path: Path) -> None:
    model = mixer("y = torch.zeros_like(x)\nfor i in range(n):\n    y[:, i] = x[:, i].sin()\nreturn y + x", tmp_path)
    expected = outcome(model, x[:, :0])
    patched(model)
    assert_equal(outcome(model, x[:, :0]), expected)
    model.n_extra = 1
    with pytest.raises(IndexError):
        model(x)


def test_without_gradients_and_under_transforms_the_function_is_called(x: Tensor, tmp_path: Path) -> None:
    model = mixer(FOUND["read and written"], tmp_path)
    expected = outcome(model, x)
    report = patched(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected["y"])
    assert torch.allclose(torch.func.vmap(model)(x[:, None])[:, 0], expected["y"], atol=1e-6)
    assert report.calls() == {"": (0, 0)}


def test_gradients_of_gradients(x: Tensor, tmp_path: Path) -> None:
    model = mixer(FOUND["read and written"], tmp_path)
    expected = penalty_gradients(model, x)
    patched(model)
    assert_agree(penalty_gradients(model, x), expected)


def test_another_function_of_that_name(x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels of a package are put there."""
    model = mixer(FOUND["read and written"], tmp_path)
    report = patched(model)
    monkeypatch.setitem(type(model).forward.__globals__, "scan", lambda x, decay, n: x * 2)
    assert torch.equal(model(x), model.out(model.dense(x) * 2))
    assert report.calls() == {"": (0, 1)}


def test_methods_and_attributes(x: Tensor, tmp_path: Path) -> None:
    """As in Mamba until transformers 5.2, and in Qwen3-Next."""
    for call in ("self.scan", "self.method"):
        model = mixer(FOUND["read and written"], tmp_path, call=call)
        names = vars(type(model))["forward"].__globals__
        model.scan = names["scan"]
        type(model).method = names["method"]
        expected = outcome(model, x)
        report = patched(model)
        assert_equal(outcome(model, x), expected)
        with torch.no_grad():
            assert torch.equal(model(x), expected["y"])
        assert report.calls() == {"": (1, 0)}
        model.scan = model.method = lambda x, decay, n: x
        model(x)
        assert report.calls() == {"": (1, 1)}


WRAPPER = """
def fallback(function):
    {kernel}
    implementation = {implementation}

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        return (implementation if {chosen} else function)(*args, **kwargs)

    return wrapped

@fallback
"""


def test_a_wrapper_is_kept_and_one_that_may_call_a_kernel_is_left(x: Tensor, tmp_path: Path) -> None:
    """As transformers' use_kernel_func_from_hub_with_fallback."""
    plain = WRAPPER.format(kernel="", implementation="function", chosen="args")
    model = mixer(FOUND["read and written"], tmp_path, plain)
    expected = outcome(model, x)
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (1, 0)}
    kernel = WRAPPER.format(kernel="kernel = lambda *args: args[0]", implementation="kernel", chosen="args")
    model = mixer(FOUND["read and written"], tmp_path, kernel)
    assert not patch_model(model, patterns=("scan",)).patched


SMALL = {
    **COMMON, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MODELS = {
    "MambaForCausalLM": COMMON,
    "FalconMambaForCausalLM": COMMON,
    "Qwen3NextForCausalLM": SMALL,
    "Qwen3_5ForCausalLM": SMALL,
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = tiny_model(name, MODELS[name]).train()
    ids = token_ids(1, 130)
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    before = traffic(lambda: loss_outcome(model, inputs)).outside()
    report = patch_and_compare(model, lambda: loss_outcome(model, inputs), 0, patterns=("scan",))
    assert {site.pattern for site in report.patched} == {"scan"}
    assert traffic(lambda: loss_outcome(model, inputs)).outside() < 0.9 * before


@compiles_transformers
def test_compiles(x: Tensor, tmp_path: Path) -> None:
    assert_compiles(mixer(FOUND["read and written"], tmp_path), x, patterns=("scan",))
