"""torch.export, with its decompositions, and torch.onnx.export of patched models."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from patching_cases import COMMON, DECODER, compiles_transformers, tiny_model
from torch import Tensor, nn


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False)[0]


def build(name: str) -> Logits:
    options = DECODER if name == "LlamaModel" else COMMON
    return Logits(tiny_model(name, options | {"num_hidden_layers": 1, "attn_implementation": "eager"})).eval()


IDS = torch.arange(10).view(2, 5)


@compiles_transformers
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("BertModel", "eval"),
        ("LlamaModel", "train"),
        pytest.param("BertModel", "train", marks=pytest.mark.slow),
        pytest.param("LlamaModel", "eval", marks=pytest.mark.slow),
    ],
)
def test_export_with_decompositions(name: str, mode: str) -> None:
    model = build(name)
    expected = model(IDS)
    assert patch_model(model, strict=True).patched
    program = torch.export.export(model.train(mode == "train"), (IDS,))
    assert "onetrip.row_norm" in str(program.graph)
    for exported in (program, program.run_decompositions()):
        module = exported.module()
        actual = module(IDS)
        assert actual.shape == expected.shape
        if mode == "eval":
            torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_onnx_export_of_a_patched_model_says_to_unpatch_it(tmp_path: Any, dynamo: bool) -> None:
    if dynamo:
        pytest.importorskip("onnxscript")
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)).eval()
    x, file = torch.randn(2, 16), tmp_path / "model.onnx"
    patch_model(model)
    with pytest.raises(Exception, match=r"no ONNX form: call onetrip.unpatch_model\(model\) first"):
        torch.onnx.export(model, (x,), file, dynamo=dynamo)
    if find_spec("onnx") is not None:
        torch.onnx.export(unpatch_model(model), (x,), file, dynamo=dynamo)
        assert file.stat().st_size > 1024
