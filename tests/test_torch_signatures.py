"""Calls written for torch.nn.functional get a TypeError that names the right call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip import ops
from torch import Tensor

X, WEIGHT = torch.randn(4, 8), torch.ones(8)
CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "softmax-dim": (lambda: ops.softmax(X, dim=-1), "softmax: dim .* last dimension"),
    "softmax-dim-positional": (
        lambda: ops.softmax(X, -1),
        "softmax: mask must be a Tensor, got int; .* last dimension",
    ),
    "softmax-dtype": (lambda: ops.softmax(X, dtype=torch.float32), "softmax: dtype .* scores"),
    "softmax-p": (lambda: ops.softmax(X, p=0.1), "softmax: p .* dropout_p"),
    "layer_norm-shape": (lambda: ops.layer_norm(X, normalized_shape=(8,)), "layer_norm: normalized_shape .* last"),
    "layer_norm-shape-positional": (
        lambda: ops.layer_norm(X, (8,), WEIGHT, WEIGHT),
        "layer_norm: weight must be a Tensor, got tuple; .* last dimension",
    ),
    "layer_norm-size": (lambda: ops.layer_norm(X, X.shape[-1:]), "layer_norm: weight .* got Size; .* last dimension"),
    "rms_norm-shape": (lambda: ops.rms_norm(X, normalized_shape=[8]), "rms_norm: normalized_shape .* last dimension"),
    "rms_norm-shape-positional": (lambda: ops.rms_norm(X, [8], WEIGHT), "rms_norm: weight .* got list; .* last"),
    "dropout-p": (lambda: ops.bias_dropout_residual(X, X, p=0.1), "bias_dropout_residual: p .* dropout_p"),
    "dropout-training": (
        lambda: ops.bias_dropout_residual(X, X, dropout_p=0.1, training=False),
        r"bias_dropout_residual: training .* dropout_p=0\.0",
    ),
    "dropout-norm-p": (lambda: ops.bias_dropout_residual_norm(X, X, p=0.1), "residual_norm: p .* dropout_p"),
    "norm-shape": (
        lambda: ops.bias_dropout_residual_norm(X, X, normalized_shape=(8,)),
        "residual_norm: normalized_shape .* last dimension",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_torch_name_the_right_call(call: str) -> None:
    wrong, message = CALLS[call]
    with pytest.raises(TypeError, match=message):
        wrong()


@pytest.mark.parametrize("op", [ops.softmax, ops.layer_norm, ops.rms_norm])
def test_an_unknown_argument_is_named(op: Callable[..., Tensor]) -> None:
    with pytest.raises(TypeError, match=f"{op.__name__}: unknown argument 'axes'"):
        op(X, axes=1)
