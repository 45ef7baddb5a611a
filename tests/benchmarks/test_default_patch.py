"""The suite of default arguments of patch_model."""

from __future__ import annotations

from typing import Any

import onetrip
import pytest
import torch
from onetrip.benchmarks.measure.cases import Session, Skip
from onetrip.benchmarks.show import run_tables, targets
from onetrip.benchmarks.suites import default_patch
from onetrip.benchmarks.suites.default_patch import PatchCase, cases, measure
from onetrip.measure import saved_bytes

pytest.importorskip("transformers")
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

SESSION = Session(torch.device("cpu"), quick=True)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    shapes = {
        "BERT": ("bert", "MaskedLM", sizes | {"vocab_size": 8192}),
        "ViT": ("vit", "ImageClassification", sizes | {"image_size": 32}),
    }
    monkeypatch.setattr(default_patch, "SHAPES", shapes)


def test_every_shape_in_both_dtypes_and_modes() -> None:
    assert len({case.id for case in cases()}) == len(cases()) == 2 * 2 * len(default_patch.SHAPES)


@pytest.mark.parametrize(("shape", "training"), [("BERT", True), ("BERT", False), ("ViT", True)])
def test_a_case_compares_one_model_with_itself_patched(shape: str, training: bool) -> None:
    record = measure(PatchCase(shape, torch.float32, training), SESSION)
    losses = record["loss_without_dropout"]
    assert losses["patched"] == pytest.approx(losses["unpatched"], rel=1e-4) and record["patched_sites"] > 2
    saved = [record["steps"][name]["saved_bytes"] for name in ("unpatched", "patched")]
    assert 0 < saved[1] <= saved[0] if training else saved == [0, 0]
    (table,) = run_tables.default_patch([record])
    assert (
        table.rows[0][:3] == (shape, "fp32", "train" if training else "eval")
        and targets.speed_up(record, *targets.PATCHING) > 0.0
    )


def test_a_model_that_computes_something_else_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: torch.nn.Module) -> Any:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        return onetrip.patching.patch_model(model)

    monkeypatch.setattr(default_patch.onetrip, "patch_model", broken)
    with pytest.raises(AssertionError, match="no number"):
        measure(PatchCase("BERT", torch.float32, True), SESSION)


def test_a_dtype_that_the_cpu_emulates_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_patch, "_times_float32", lambda *_: 100.0)
    with pytest.raises(Skip, match="in bf16 takes 100 times"):
        measure(PatchCase("BERT", torch.bfloat16, True), SESSION)


def test_patched_output_blocks_of_bert_save_half_of_what_eager_ones_save() -> None:
    """BertSelfOutput and BertOutput; the inputs of their Linears apart, which autograd keeps whatever follows."""
    layer = BertLayer(BertConfig(hidden_size=256, num_attention_heads=4, intermediate_size=1024)).train()
    hidden, residual, wide = (torch.randn(2, 16, n, requires_grad=True) for n in (256, 256, 1024))

    def blocks() -> tuple[torch.Tensor, torch.Tensor]:
        return layer.attention.output(hidden, residual), layer.output(wide, residual)

    not_counted = [*layer.parameters(), hidden, wide]
    eager = saved_bytes(blocks, not_counted)
    with onetrip.patched(layer):
        assert 0 < 2 * saved_bytes(blocks, not_counted) <= eager
