"""Activations that a BERT-large encoder layer keeps for backward in its two output blocks, eager beside patched.

BertSelfOutput and BertOutput of transformers: LayerNorm(dropout(dense(x)) + input), dropout 0.1, training mode.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import onetrip
import torch
from onetrip.measure import saved_bytes
from torch import Tensor

from ..measure.cases import Record, Session, needed

BATCH_SIZE, SEQUENCE_LENGTH, HIDDEN, INTERMEDIATE, HEADS = 4, 128, 1024, 4096, 16


@dataclass(frozen=True)
class BertCase:
    id: str


def cases(quick: bool = False) -> list[BertCase]:
    return [BertCase("saved_bytes-bert_large_output_blocks")]


def _measure(layer: torch.nn.Module, device: torch.device) -> dict[str, int]:
    """Bytes saved for backward, parameters never counted.

    blocks: both output blocks, less the inputs of their Linears: those are the outputs of attention and of the
    activation function, which autograd keeps for the Linear's weight whatever follows it.
    blocks_with_linear_inputs: the same with them. layer: the whole encoder layer.
    """
    hidden = torch.randn(BATCH_SIZE, SEQUENCE_LENGTH, HIDDEN, device=device, requires_grad=True)
    wide = torch.randn(BATCH_SIZE, SEQUENCE_LENGTH, INTERMEDIATE, device=device, requires_grad=True)
    residual = torch.randn(BATCH_SIZE, SEQUENCE_LENGTH, HIDDEN, device=device, requires_grad=True)
    parameters = list(layer.parameters())

    def blocks() -> tuple[Tensor, Tensor]:
        return layer.attention.output(hidden, residual), layer.output(wide, residual)

    return {
        "blocks": saved_bytes(blocks, excluded=[*parameters, hidden, wide]),
        "blocks_with_linear_inputs": saved_bytes(blocks, excluded=parameters),
        "layer": saved_bytes(lambda: layer(hidden), excluded=parameters),
    }


def _largest_difference(eager: torch.nn.Module, patched: torch.nn.Module, device: torch.device) -> float:
    """Largest difference between the outputs of the two layers, with dropout off."""
    hidden = torch.randn(BATCH_SIZE, SEQUENCE_LENGTH, HIDDEN, device=device)

    def output(layer: torch.nn.Module) -> Tensor:
        layer.eval()
        with torch.no_grad():
            result = layer(hidden)
        layer.train()
        return result[0] if isinstance(result, tuple) else result

    return (output(eager) - output(patched)).abs().max().item()


def measure(case: BertCase, session: Session) -> Record:
    bert = needed("transformers.models.bert.modeling_bert")
    device = session.device
    config = bert.BertConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    eager = bert.BertLayer(config).to(device).train()
    patched = copy.deepcopy(eager)
    report = onetrip.patch_model(patched)
    difference = _largest_difference(eager, patched, device)
    assert difference < 1e-4, f"the patched layer differs by {difference}: no number"
    figures = session.rounds(
        lambda: {name: _measure(layer, device) for name, layer in (("eager", eager), ("patched", patched))}, 1
    )
    return {
        "case": case.id,
        "batch_size": BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "dropout_p": config.hidden_dropout_prob,
        "patched_sites": [site.name for site in report.patched],
        "largest_difference": difference,
        "saved_bytes": figures,
    }
