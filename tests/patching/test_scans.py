"""Loops over the steps of a sequence, whose slices are made and joined at once."""

from __future__ import annotations

import dataclasses
import gc
import textwrap
import weakref
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.scans import steps_of
from outcomes import (
    assert_agree,
    assert_compiles,
    assert_equal,
    loss_outcome,
    outcome,
    patch_and_compare,
    penalty_gradients,
)
from patching_cases import (
    COMMON,
    WIDTH,
    compiles_transformers,
    function_module,
    module_of,
    randomised,
    tiny_model,
    token_ids,
)
from torch import Tensor

SOURCE = """
import functools
import torch
from torch import nn

def other(x):
    return x.mul_(1)

class Counter:
    pass

@torch.jit.script
def scripted(state, x):
    return state.mul_(0.5).add_(x)

activation = nn.SiLU()

{decorators}
def scan(x, decay, n, module=None):
{body}

def method(self, x, decay, n, module=None):
{body}

class Mixer(nn.Module):
    n_extra = 0

    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.dense(x)
        return self.out({call}(x, x.sigmoid(), x.shape[1] + self.n_extra, module=self))
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
    "in a branch": f"""
        {STATE}; y = x
        if n > 1:
            y = torch.zeros_like(x)
            for i in range(n):
                state = state * decay[:, i] + x[:, i] * x[:, i]
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
    "few steps": f"""
        {STATE}
        for i in range(3):
            state = state + x[:, i]
        return x + state[:, None]""",
    "other strides": """
        y = torch.zeros_like(x.transpose(0, 1).contiguous().transpose(0, 1))
        for i in range(n):
            y[:, i] = x[:, i].sin()
        return y.transpose(0, 1).view(n, -1).view(n, -1, 16).transpose(0, 1)""",
}
"""Loops that are found, and write in another way than a stack does."""
IN_LOOP = {
    "written in place": "x_i = x[:, i]; x_i += 1; y[:, i] = x_i",
    "a method in place": "y[:, i] = x[:, i].sin_()",
    "a state in place": "state.mul_(0.9).add_(x[:, i]); y[:, i] = state",
    "a state in place, by the way": "s = state.add_(x[:, i]); y[:, i] = s",
    "a result in place": "torch.mul(x[:, i], 2.0, out=state); y[:, i] = state",
    "an attribute": "counter.state = counter.state + x[:, i]; y[:, i] = counter.state",
    "an attribute in place": "counter.state += x[:, i].detach(); y[:, i] = counter.state",
    "a method of another": "y[:, i] = counter.add(x[:, i])",
    "a method of one in a list": "y[:, i] = steps[0].add(x[:, i])",
    "a method of a result": "counter = counter.add(x[:, i]); y[:, i] = counter",
    "another list": "counter.append(x[:, i] * 2)",
    "into another": "y[:, i] = torch.mul(x[:, i], 2.0, out=state)",
    "a function in place": "y[:, i] = torch.relu_(state)",
    "a scripted function": "s = scripted(state, x[:, i]); y[:, i] = s",
    "a function that may work in place": "y[:, i] = torch.nn.functional.threshold(state, 0.1, 0.0, True)",
    "running numbers": "y[:, i] = torch.batch_norm(x[:, i], None, None, state[0], state[1], True, 0.1, 1e-5, False)",
    "a module": "y[:, i] = activation(x[:, i])",
    "read where it is written": "y[:, i] = x[:, i] + y[:, i - 1]",
    "written twice": "y[:, i] = x[:, i]; y[:, i] = decay[:, i]",
    "in a condition": "if i % 2: y[:, i] = x[:, i]",
    "read in a condition": "state = state + (x[:, i] if i else 0.0)",
    "without gradients": "with torch.no_grad(): target = x[:, i]\n    state = state + target * decay[:, i]",
    "other gradients": "mode = torch.set_grad_enabled(i > 4); y[:, i] = x[:, i]",
    "left early": "state = state + x[:, i]\n    if i > 3: break",
    "another index": "i = 0; state = state + x[:, i]",
    "of a list": "state = state + x.unbind(1)[i]",
    "ranges": "state = state + x[:, i : i + 1].sum(1)",
    "the tensor itself": "state = state + x[:, i] + x[:, -1]",
    "another function": "state = state + other(x[:, i])",
    "a lambda": "state = (lambda: x[:, i])() + state",
    "a step that leaves": "state = x[:, i]",
    "a view that leaves": "a, state = 1, x[:, i].transpose(0, 1).transpose(0, 1)",
    "steps in a list": "steps.append(x[:, i].view_as(state))",
    "steps in a list by name": "last = x[:, i]; steps.append(last)",
    "a loop in it": "for j in range(2): state = state + x[:, j]\n    state = state + x[:, i]",
}
_AROUND = NEW + "; steps, counter = [], Counter()\nfor i in range(n):\n    {}\nreturn y + state[:, None]"
LEFT = {
    **{name: _AROUND.format(body) for name, body in IN_LOOP.items()},
    "in a loop": f"{NEW}\nfor j in range(2):\n    for i in range(n):\n        state = state + x[:, i]\nreturn state",
    "written after the loop": f"{NEW}\nfor i in range(n):\n    y[:, i] = x[:, i]\ny[:, 0] = 1.0\nreturn y",
    "an older tensor": f"{NEW}\nz = y\nfor i in range(n):\n    z[:, i] = x[:, i]\nreturn z + y",
    "read since": f"{NEW}\nz = y[:, 1:]\nfor i in range(n):\n    y[:, i] = x[:, i]\nreturn y + z.sum()",
    "no new tensor": "y = x * 1\nfor i in range(n):\n    y[:, i] = x[:, i] + 1\nreturn y",
    "no range": f"{STATE}\nfor i in [0, 1]:\n    state = state + x[:, i]\nreturn state",
    "an end": f"{STATE}\nfor i in range(n):\n    state = state + x[:, i]\nelse:\n    state = state * 2\nreturn state",
    "a name of ours": f"{STATE}; steps_of_ = 1\nfor i in range(n):\n    state = state + x[:, i]\nreturn state",
    "its name": f"{STATE}; forward = 1\nfor i in range(n):\n    state = state + x[:, i]\nreturn state",
    "a head that binds": f"{STATE}\nfor i in range((x := x * 2).shape[1]):\n    state = state + x[:, i]\nreturn state",
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
    (assert_agree if name == "in a branch" else assert_equal)(outcome(model, x), expected)  # x[:, i] is read twice
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


def test_few_steps_of_many_are_read_one_by_one(x: Tensor) -> None:
    assert isinstance(steps_of(x, 1, range(9)), tuple) and not isinstance(steps_of(x, 1, range(3)), tuple)


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
    monkeypatch.setitem(type(model).forward.__globals__, "scan", lambda x, decay, n, module: x * 2)
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
        model.scan = model.method = lambda x, decay, n, module: x
        model(x)
        assert report.calls() == {"": (1, 1)}


@dataclasses.dataclass
class Unhashable:
    def __call__(self, x: Tensor, decay: Tensor, n: int, module: Any) -> Tensor:
        return x


def test_what_is_called_may_be_anything_and_is_not_kept(x: Tensor, tmp_path: Path) -> None:
    model = mixer(FOUND["read and written"], tmp_path, call="self.scan")
    model.scan = Unhashable()
    assert not patch_model(model, patterns=("scan",)).patched
    model.scan = model.bound = MethodType(vars(type(model))["forward"].__globals__["method"], model)
    weight = weakref.ref(model.dense.weight)
    patch_model(model)
    unpatch_model(model)
    del model
    gc.collect()
    assert weight() is None


def test_a_module_of_the_package_kernels(x: Tensor, tmp_path: Path) -> None:
    """What its decorators make of a function, until a kernel takes its place."""
    model = mixer(FOUND["read and written"], tmp_path)
    expected, names = outcome(model, x), vars(type(model))["forward"].__globals__
    names["scan"] = function_module(names["scan"])
    report = patched(model)
    assert_equal(outcome(model, x), expected)
    assert report.calls() == {"": (1, 0)}
    names["scan"].forward = lambda x, decay, n, module: x
    model(x)
    assert report.calls() == {"": (1, 1)}


WRAPPER = """
__name__ = "transformers.integrations.hub_kernels"

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
    kernel = WRAPPER.format(kernel="kernel = lambda *args, **kwargs: args[0]", implementation="kernel", chosen="args")
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
    assert traffic(lambda: loss_outcome(model, inputs)).outside() < 0.99 * before  # until 5.2 another loop moves most


@compiles_transformers
def test_compiles(x: Tensor, tmp_path: Path) -> None:
    assert_compiles(mixer(FOUND["read and written"], tmp_path), x, patterns=("scan",))
