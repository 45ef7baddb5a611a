"""A fused call that does not compute what the module does is found and not kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from onetrip.patching.verify import VerificationError, check_autocast, check_function
from patching_cases import WIDTH, LlamaLike, OneExpression, randomised
from torch import Tensor, nn


def break_one(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operator, off by a thousandth."""

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        return operator(*args, **kwargs) * 1.001

    return broken


SITES = {"rms_norm": LlamaLike, "layer_norm": lambda: nn.LayerNorm(WIDTH), "norm_of_sum": OneExpression}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("operator", SITES)
def test_an_operator_that_is_off_by_a_thousandth_is_not_kept(
    operator: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onetrip.patching import classes, links

    monkeypatch.setattr(classes, "_patched_classes", {})
    owner: Any = links if hasattr(links, operator) else links.ops
    broken = break_one(getattr(owner, operator))
    monkeypatch.setitem(classes.GLOBAL_NAMES, operator, broken)
    monkeypatch.setattr(owner, operator, broken)
    model = randomised(SITES[operator]()).to(device)
    report = patch_model(model, patterns=["rms_norm", "layer_norm", "dropout_add_norm"])
    (failed,) = [site for site in report.skipped if site.reason == "verify_failed"]
    assert (
        failed.name == "" and type(model) is type(copy.deepcopy(model)) and "_onetrip_original" not in vars(type(model))
    )


@pytest.mark.parametrize(
    ("fused", "message"),
    [
        (lambda x, w: (x * w, x + 1.001 * w), "output 1 here: error"),
        (lambda x, w: (x * w, x + w.detach() + 0 * w), "gradient of w here: error"),
        (lambda x, w: (x * w, (x + w).bfloat16()), "output 1 here: bfloat16"),
        (lambda x, w: (x * w,), "3 outputs and gradients here for 4"),
    ],
    ids=["value", "gradient", "dtype", "number"],
)
def test_a_function_is_compared_in_every_respect(fused: Callable[..., Any], message: str) -> None:
    inputs = {name: torch.randn(3, 8) for name in ("x", "w")}

    def check(function: Callable[..., Any]) -> None:
        check_function(function, lambda x, w: (x * w, x + w), inputs, torch.device("cpu"), torch.float32, " here")

    check(lambda x, w: (w * x, w + x))
    with pytest.raises(VerificationError, match=message):
        check(fused)


def test_dtypes_under_autocast_are_compared() -> None:
    def unfused(x: Tensor) -> Tensor:
        return x @ x

    x = [torch.randn(4, 4)]
    check_autocast(lambda x: x.bfloat16(), unfused, x)
    with pytest.raises(VerificationError, match="output under autocast: float32 for bfloat16"):
        check_autocast(lambda x: x.float(), unfused, x)
    check_autocast(lambda x: x.float(), lambda x: torch.linalg.matmul(x, x[:3]), x)  # the original raises


def test_verification_checks_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dropout that is right in expectation but drops other elements is not what the operator promises."""
    from onetrip.patching import classes, links

    operator = links.norm_of_sum

    def other_mask(*args: Any, rng: Any = None, **kwargs: Any) -> Tensor:
        return operator(*args, rng=None if rng is None else (rng[0] + 1, rng[1]), **kwargs)

    monkeypatch.setattr(classes, "_patched_classes", {})
    monkeypatch.setattr(links, "norm_of_sum", other_mask)
    report = patch_model(OneExpression(), patterns=["dropout_add_norm"])
    assert [site.reason for site in report.skipped] == ["verify_failed"]
    assert "with dropout" in report.skipped[0].detail
