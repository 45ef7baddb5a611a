"""The memory of a training step by hand: bytes a parameter, and batch x sequence x depth x hidden for activations.

What it is for: seeing where the bytes come from. Eager models of three families; predict.py knows every model and every
column. T = batch x sequence tokens, h hidden, f intermediate, A = batch x heads x sequence^2 scores:

    a layer keeps  T (2 norms: n h, n = 1 LayerNorm, 2 RMSNorm; their outputs 2 h; query, key, value, output 4 h
                      (of fewer key heads 2 h + 2 h kv/q, by a kernel that takes them as they are);
                      MLP m f, m = 2 erf-GELU (its input and output), 4 gated, 5 tanh-GELU written out;
                      2 dropouts: h each, of numbers on the CPU, of bytes on CUDA)
                   + A (scores kept: 0 by a flash kernel; 1 without, 3 with dropout of the weights: P, mask, dropped P)

Sources of the layers: Vaswani et al. 2017; Devlin et al. 2019; Radford et al. 2019; Touvron et al. 2023. Korthikanti et
al. 2022 count the same for Megatron's layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_STATES_OF_OPTIMIZER = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}  # tensors like the parameter
_STATE_BYTES_8BIT = 2 * (1 + 4 / 128)  # two codes, and a float32 scale each for 128 elements
_SIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class FormulaBytes:
    weights: int
    gradients: int
    optimizer_states: int
    saved_activations: int | None
    """None where there is no formula for the model's kind."""
    terms: dict[str, int]
    """What saved_activations is the sum of."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Shape:
    """Of an encoder or decoder, by the names of its family's config."""

    tokens: int
    sequence: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    mlp_tensors: int
    """Of the intermediate width that a layer's MLP keeps."""
    rms_norm: bool
    hidden_dropout: float
    embedding_dropout: float
    attention_dropout: float
    embedding_norm: bool
    head_tensors: int
    """Of the hidden width that the head keeps besides its logits."""
    logits: int
    logits_in_float32: bool
    fused_qkv: bool = False
    """Query, key and value are views of one tensor, which their saved views keep beside the copies in the KV cache."""
    key_share: float = 1.0
    """Key heads beside query heads."""
    softmax_in_float32: bool = False
    """Of the eager attention function; its result is cast."""


def formula(config: Any, n_parameters: int, batch: int, sequence: int, dtype: str, optimizer: str, device: str) -> Any:
    """FormulaBytes of an eager model with this config; optimizer: a name of compare.OPTIMIZERS."""
    size = _SIZE[dtype]
    if optimizer in _STATES_OF_OPTIMIZER:
        states = n_parameters * size * _STATES_OF_OPTIMIZER[optimizer]
    else:
        states = round(n_parameters * _STATE_BYTES_8BIT)
    shape = _shape(config, batch, sequence)
    terms = {} if shape is None else _activations(shape, config._attn_implementation, size, device)
    total = None if shape is None else sum(terms.values())
    return FormulaBytes(n_parameters * size, n_parameters * size, states, total, terms)


def _activations(shape: _Shape, attention: str, size: int, device: str) -> dict[str, int]:
    wide, layers = shape.tokens * shape.hidden, shape.layers
    mask = size if device == "cpu" else 1
    # RMSNorm is written out in float32: its input in float32, and the normalised row.
    norm = 4 + size if shape.rms_norm else size
    n_scores = layers * shape.heads * shape.tokens * shape.sequence
    # The flash kernel of the CPU knows no dropout, those of CUDA do; neither keeps scores. What stands in for it,
    # torch's composition, computes in float32.
    composed = attention != "eager" and device == "cpu" and shape.attention_dropout > 0.0
    scores = 0
    if composed:
        scores = n_scores * 3 * 4
    elif attention == "eager":
        softmax = size if size == 4 or not shape.softmax_in_float32 else size + 4
        scores = n_scores * (softmax if shape.attention_dropout == 0.0 else softmax + size + mask)
    views = 0 if not shape.fused_qkv else 1 if attention == "eager" else 2
    # Flash kernels take fewer key heads as they are; before all else key and value are repeated for each query head.
    flash = attention != "eager" and not composed and (device == "cpu" or size == 2)
    key = shape.key_share if flash else 1.0
    qkv = 3 * 4 if composed else (1 + 2 * key + views) * size
    return {
        "norms": wide * norm * (2 * layers + 1 + shape.embedding_norm),
        "attention": round(wide * (2 * size + qkv) * layers),
        "attention scores": scores,
        "MLP": layers * size * (wide + shape.mlp_tensors * shape.tokens * shape.intermediate),
        "dropout": wide * mask * (2 * layers * (shape.hidden_dropout > 0.0) + (shape.embedding_dropout > 0.0)),
        "head": wide * size * shape.head_tensors,
        "logits": shape.logits * (4 if shape.logits_in_float32 else size),
    }


def _shape(config: Any, batch: int, sequence: int) -> _Shape | None:
    """None where the family is not known."""
    kind = config.model_type
    if kind in ("bert", "roberta"):
        return _Shape(
            batch * sequence, sequence, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            config.num_attention_heads, 2, False, config.hidden_dropout_prob, config.hidden_dropout_prob,
            config.attention_probs_dropout_prob, True, 3, batch * sequence * config.vocab_size, False,
        )  # fmt: skip
    if kind == "vit":
        tokens = (config.image_size // config.patch_size) ** 2 + 1
        return _Shape(
            batch * tokens, tokens, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            config.num_attention_heads, 2, False, config.hidden_dropout_prob, config.hidden_dropout_prob,
            config.attention_probs_dropout_prob, False, 1, batch * config.num_labels, False,
            softmax_in_float32=True,
        )  # fmt: skip
    if kind == "gpt2":
        return _Shape(
            batch * sequence, sequence, config.n_layer, config.n_embd, config.n_inner or 4 * config.n_embd,
            config.n_head, 5, False, config.resid_pdrop, config.embd_pdrop, config.attn_pdrop, False, 1,
            batch * sequence * config.vocab_size, True, fused_qkv=True,
        )  # fmt: skip
    if kind in ("llama", "mistral"):
        return _Shape(
            batch * sequence, sequence, config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            config.num_attention_heads, 4, True, 0.0, 0.0, config.attention_dropout, False, 1,
            batch * sequence * config.vocab_size, True, softmax_in_float32=True,
            key_share=config.num_key_value_heads / config.num_attention_heads,
        )  # fmt: skip
    return None
