"""Models whose parameters are gathered for each call of their module: DeepSpeed's ZeRO-3 and FSDP1."""

from __future__ import annotations

from typing import Any

import optim_distributed
import pytest
import torch
from gathered_parameters import Zero3, deepspeed_zero3, fsdp1, losses_and_gradients
from onetrip.patching import calls, patch_model
from onetrip.patching.linear import tied_embedding
from tiny_models import MODELS, layers

pytest.importorskip("transformers")


@pytest.mark.parametrize("granularity", ["every_module", "layers"])
@pytest.mark.parametrize("patched", ["before", "after"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_zero3(make: Any, patched: str, granularity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients of the plain model; links across layers, shared inputs and tied matrices among them."""
    monkeypatch.setattr(calls, "SMALLEST", 0)
    monkeypatch.setattr(tied_embedding, "SMALLEST", 0)
    expected = losses_and_gradients(make(), None)
    model = make()
    if patched == "before":
        report = patch_model(model)
    zero = Zero3(model, (type(layers(model)[0]),) if granularity == "layers" else ())
    if patched == "after":
        report = patch_model(model)
        skipped = {site.name for site in report.skipped if site.reason == "unsupported_device"}
        norms = {name for name, module in model.named_modules() if "Norm" in type(module).__name__}
        assert norms <= skipped
    for (name, ours), (_, theirs) in zip(losses_and_gradients(model, zero), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert any(n_fused for n_fused, _ in report.calls().values()) or (patched, granularity) != ("before", "layers")


@pytest.mark.slow
def test_fsdp1() -> None:
    optim_distributed.run(2, fsdp1)


@pytest.mark.slow
def test_deepspeed() -> None:
    pytest.importorskip("deepspeed")
    optim_distributed.run(2, deepspeed_zero3)
