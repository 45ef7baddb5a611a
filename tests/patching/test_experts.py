"""Mixtures of experts by grouped matrix products: rows are sorted by expert and added up by fused operators."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip import ops
from onetrip.measure.traffic import traffic
from onetrip.patching import PatchReport, calls, patch_model, unpatch_model
from outcomes import assert_agree, assert_equal, outcome, patch_and_compare
from patching_cases import module_of, tiny_mixture
from torch import Tensor

transformers = pytest.importorskip("transformers")
moe = pytest.importorskip("transformers.integrations.moe")

MODELS = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def tiny(model_type: str = "qwen3_moe", implementation: str = "grouped_mm") -> Any:
    return tiny_mixture(model_type, implementation)


def experts_of(report: PatchReport) -> list[str]:
    return [site.name for site in report.patched if site.name.endswith("experts")]


def operators(model: Any) -> set[str]:
    """What runs of the family."""
    found = traffic(lambda: model(IDS, use_cache=False)[0].sum().backward()).by_operator()
    return {name for name in found if "::moe" in name}


FUSED = {"onetrip::moe_combine", "onetrip::moe_combine_backward", "onetrip::moe_dispatch"}


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("model_type", MODELS)
def test_models_of_transformers(model_type: str, implementation: str) -> None:
    model = tiny(model_type, implementation)
    expected = outcome(model, IDS, use_cache=False)
    report = patch_model(model)
    names = experts_of(report)
    assert len(names) == 2
    assert all(site.detail.endswith("and experts") for site in report.patched if site.name in names)
    assert_agree(outcome(model, IDS, use_cache=False), expected)
    assert all(report.calls()[name][0] > 0 and report.calls()[name][1] == 0 for name in names)
    assert operators(model) == (FUSED if implementation == "grouped_mm" else set())
    unpatch_model(model)
    assert_equal(outcome(model, IDS, use_cache=False), expected)
    assert operators(model) == set()


def test_the_diff_shows_the_function_of_the_library() -> None:
    report = patch_model(tiny(), patterns=["experts"])
    (name, *_) = experts_of(report)
    assert {(site.pattern, site.detail) for site in report.patched} == {("experts", "")}
    lines = report.diff(name).splitlines()
    removed, added = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    assert "selected_hidden_states_g = hidden_states[perm // num_top_k]" in removed
    assert "weighted_out = weighted_out[inv_perm]" in removed
    assert any(line.startswith("selected_hidden_states_g = dispatch_(hidden_states, ") for line in added)
    assert any(line.startswith("final_hidden_states = combine_(proj_out, ") for line in added)


def test_the_choice_of_an_implementation_stays_the_wrapper_s() -> None:
    model = tiny(implementation="eager")
    patch_model(model)
    for implementation, expected in (("grouped_mm", FUSED), ("batched_mm", set()), ("eager", set())):
        model.set_experts_implementation(implementation)
        assert operators(model) == expected


def test_another_function_of_that_name_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    patch_model(model)
    library, called = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"], []

    def other(self: Any, *args: Any) -> Tensor:
        called.append(self)
        return library(self, *args)

    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "grouped_mm", other)
    assert operators(model) == set() and len(called) == 2


def test_expert_parallelism_and_small_tensors_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    report = patch_model(model, patterns=["experts"])
    (name, *_) = experts_of(report)
    experts = model.get_submodule(name)
    experts._is_expert_parallel = True
    expected = outcome(unpatch_model(copy.deepcopy(model)), IDS, use_cache=False)
    assert_agree(outcome(model, IDS, use_cache=False), expected)
    assert report.calls()[name] == (0, 1)
    experts._is_expert_parallel = False
    monkeypatch.setattr(calls, "SMALLEST", IDS.numel() * 2 * 32 + 1)
    assert operators(model) == set()
    monkeypatch.setattr(calls, "SMALLEST", IDS.numel() * 2 * 32)
    assert operators(model) == FUSED


@pytest.mark.parametrize("model_type", MODELS)
def test_in_bfloat16_no_less_accurate(model_type: str) -> None:
    model = tiny(model_type)
    exact = outcome(model, IDS, use_cache=False)
    model.bfloat16()
    expected = outcome(model, IDS, use_cache=False)
    report = patch_model(model, patterns=["experts"])
    ours = outcome(model, IDS, use_cache=False)
    assert all(report.calls()[name] == (1, 0) for name in experts_of(report))
    for name, theirs in expected.items():
        assert ours[name].dtype == theirs.dtype
        error, original = ((each[name].float() - exact[name]).norm() for each in (ours, expected))
        assert error <= 1.5 * original + 1e-3 * exact[name].norm(), name


def test_under_autocast() -> None:
    model = tiny()

    def run() -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return outcome(model, IDS, use_cache=False)

    report = patch_and_compare(model, run, relative=3e-2, patterns=["experts"])
    assert all(report.calls()[name] == (1, 0) for name in experts_of(report))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model = tiny()
    expected = outcome(model, IDS, use_cache=False)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    patch_model(model)
    assert_agree(outcome(model, IDS, use_cache=False), expected)


@pytest.mark.slow
def test_compiled_without_a_break() -> None:
    model = tiny()
    experts = model.get_submodule("layers.0.mlp.experts")
    x = torch.randn(18, 32, requires_grad=True)
    index, weights = torch.randint(4, (18, 2)), torch.rand(18, 2, requires_grad=True)

    def run(module: Any) -> tuple[Tensor, ...]:
        y = module(x, index, weights)
        return (y, *torch.autograd.grad(y.square().sum(), (x, weights)))

    expected = run(experts)
    patch_model(model)
    torch._dynamo.reset()
    assert_agree(run(torch.compile(experts, backend="aot_eager", fullgraph=True)), expected)


def changed(before: str, after: str, folder: Path) -> Any:
    """The library's function with another text in its source."""
    source = inspect.getsource(moe.grouped_mm_experts_forward)
    assert before in source
    imports = "import torch\nfrom transformers.integrations.moe import _grouped_linear\n\n\n"
    return module_of(imports + source.replace(before, after), folder).grouped_mm_experts_forward


GATHER, PROJECTION = "    weighted_out = weighted_out[inv_perm]", "    # --- Up projection"
NO_SUM = "grouped_mm: no statement FINAL = WEIGHTED.view(TOKENS, TOP_K, COLUMNS).sum(dim=1)"
ELSEWHERE = "grouped_mm: what it sorts is used elsewhere"


@pytest.mark.parametrize(
    ("before", "after", "detail"),
    [
        (GATHER, f"    weighted_out = weighted_out.half().float()\n{GATHER}", ELSEWHERE),
        (PROJECTION, f"    if device.type == 'cuda':\n        sample_weights.zero_()\n{PROJECTION}", ELSEWHERE),
        (PROJECTION, f"    top_k_weights.mul_(2)\n{PROJECTION}", ELSEWHERE),
        (".sum(dim=1)", ".amax(dim=1)", NO_SUM),
        ("top_k_weights: torch.Tensor,", "top_k_weights: torch.Tensor, **options,", "grouped_mm: other parameters"),
        ("top_k_weights: torch.Tensor,", "top_k_weights: torch.Tensor, *, s=1.0,", "grouped_mm: other parameters"),
        ("", "", "grouped_mm: not a plain Python function"),
    ],
    ids=["one-more", "weights-changed", "routing-changed", "another", "options", "keyword-only", "unreadable"],
)
def test_a_function_of_other_statements_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, detail: str
) -> None:
    function = changed(before, after, tmp_path) if before else torch.add
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "grouped_mm", function)
    report = patch_model(tiny(), patterns=["experts"])
    assert report.patched == ()
    found = {(site.reason, site.detail) for site in report.skipped if site.name.endswith("experts")}
    assert found == {("unknown_forward", detail)}


def test_a_wrong_operator_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.moe_dispatch
    monkeypatch.setattr(ops, "moe_dispatch", lambda x, places: right(x, places.flip(0)))
    report = patch_model(tiny(), patterns=["experts"])
    assert report.patched == ()
    assert {site.reason for site in report.skipped if site.name.endswith("experts")} == {"verify_failed"}
