"""What `onetrip anatomy MODEL` can take apart: presets, local folders and hub ids; and a batch to feed them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class UsageError(ValueError):
    """What the caller asked for cannot be done; the message is one line and says what can."""


def _sizes(hidden_size: int, num_hidden_layers: int, num_attention_heads: int, **more: Any) -> dict[str, Any]:
    """Arguments that the configs of most transformers models share."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "intermediate_size": 4 * hidden_size,
        **more,
    }


_SMALL_VOCABULARY = {"vocab_size": 4096}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_TINY_T5 = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_heads": 4}
_TINY_MIXTRAL = {"num_key_value_heads": 2, "num_local_experts": 4}  # a mixture of experts, two for each token
_LLAMA_3 = {"vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "max_position_embeddings": 8192}
_LLAMA_3_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, **_LLAMA_3}
_LLAMA_3_2_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
    **_LLAMA_3,
}

# name: (model_type, head, arguments of its transformers config): small ones, and the sizes of published models.
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tiny-bert": ("bert", "MaskedLM", _sizes(128, 2, 2, **_SMALL_VOCABULARY)),
    "tiny-gpt2": ("gpt2", "CausalLM", {"n_embd": 128, "n_layer": 2, "n_head": 2, **_SMALL_VOCABULARY}),
    "tiny-llama": ("llama", "CausalLM", _sizes(256, 4, 4, **_SMALL_VOCABULARY)),
    "tiny-gemma": ("gemma", "CausalLM", _sizes(256, 4, 4, num_key_value_heads=1, head_dim=64, **_SMALL_VOCABULARY)),
    "tiny-mixtral": ("mixtral", "CausalLM", _sizes(128, 2, 4, **_TINY_MIXTRAL, **_SMALL_VOCABULARY)),
    "tiny-t5": ("t5", "Seq2SeqLM", {**_TINY_T5, "decoder_start_token_id": 0, **_SMALL_VOCABULARY}),
    "tiny-vit": ("vit", "ImageClassification", _sizes(128, 2, 2)),
    "minilm": ("bert", "MaskedLM", _sizes(384, 6, 12)),
    "distilbert-base": ("distilbert", "MaskedLM", {}),
    "bert-base": ("bert", "MaskedLM", _sizes(768, 12, 12)),
    "bert-large": ("bert", "MaskedLM", _sizes(1024, 24, 16)),
    "roberta-base": ("roberta", "MaskedLM", _sizes(768, 12, 12, **_ROBERTA)),
    "gpt2": ("gpt2", "CausalLM", {}),
    "gpt2-medium": ("gpt2", "CausalLM", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", "CausalLM", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", "CausalLM", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "llama-1b": ("llama", "CausalLM", _LLAMA_3_2_1B),
    "llama-7b": ("llama", "CausalLM", {}),
    "llama-8b": ("llama", "CausalLM", _LLAMA_3_8B),
    "mixtral-8x7b": ("mixtral", "CausalLM", {}),
    "mistral-7b": ("mistral", "CausalLM", {}),
    "t5-small": ("t5", "Seq2SeqLM", {"decoder_start_token_id": 0}),
    "vit-base": ("vit", "ImageClassification", {}),
}

# A name without an owner is asked of nobody: a misspelt preset should not wait for the network.
_HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
MASKED_FRACTION = 0.15
IGNORED_LABEL = -100


def load_model(name: str, *, weights: bool = True) -> nn.Module:
    """A transformers model in float32 on the CPU. A preset's weights are random, drawn from torch's generator.

    weights: False gives the model on the meta device, whatever its size; of a hub id only the config is fetched.
    Raises UsageError where there is no such model, or its kind has no head with a loss to train.
    """
    try:
        import transformers
    except ImportError as error:
        if error.name == "transformers":
            raise UsageError("needs transformers: pip install 'onetrip[transformers]'") from error
        raise UsageError(f"transformers cannot be imported: {first_line(error)}") from error
    is_preset = name in PRESETS
    if is_preset:
        model_type, head, arguments = PRESETS[name]
        config = transformers.AutoConfig.for_model(model_type, **arguments)
    elif Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise UsageError(f"{name} is a folder without a config.json; a model's folder has one")
    elif not _HUB_ID.fullmatch(name):
        raise UsageError(
            f"{name} is neither a preset ({', '.join(PRESETS)}), nor a folder, nor a hub id (owner/name, as "
            "google-bert/bert-base-uncased)"
        )
    try:
        if not is_preset:
            config = transformers.AutoConfig.from_pretrained(name)
            head = _head_of(config)
        auto_class = getattr(transformers, f"AutoModelFor{head}")
        if weights and not is_preset:
            return auto_class.from_pretrained(name, dtype=torch.float32)
        with torch.device("cpu" if weights else "meta"):
            return auto_class.from_config(config)
    except UsageError:
        raise
    except (OSError, ValueError, KeyError) as error:
        why = first_line(error)
        if "couldn't connect" in why and "HF_HUB_OFFLINE" not in os.environ:
            why += " With HF_HUB_OFFLINE=1 the cache alone is asked, at once."
        raise UsageError(f"{name} cannot be loaded: {why}") from error


def first_line(error: BaseException) -> str:
    """The first line of its message; the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reason_of(error: BaseException) -> str:
    """One line that says what an exception was about."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def _head_of(config: Any) -> str:
    """The head that gives config's model a loss: the one it was saved with; of a config without a class, and of a model
    saved without a head, the first that its type has."""
    from transformers.models.auto import modeling_auto

    mappings = {
        "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "Seq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        "SequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }

    def classes(mapping: Any) -> set[str]:
        found = mapping.get(type(config), ())
        return {each.__name__ for each in (found if isinstance(found, tuple) else (found,))}

    available = {head: found for head, mapping in mappings.items() if (found := classes(mapping))}
    if not available:
        raise UsageError(
            f"{config.model_type} models have none of the heads that anatomy can train: {', '.join(mappings)}"
        )
    saved_as = set(config.architectures or ())
    for head in available:
        if available[head] & saved_as:
            return head
    if saved_as - classes(modeling_auto.MODEL_MAPPING):
        raise UsageError(
            f"saved as {', '.join(sorted(saved_as))}, which anatomy cannot train; with another class under "
            f'"architectures" in its config.json it can: {", ".join(sorted(set().union(*available.values())))}'
        )
    return next(iter(available))


def reads_images(model: nn.Module) -> bool:
    """Whether a batch of it is images, and no text."""
    return model.main_input_name == "pixel_values"


def classifies_text(model: nn.Module) -> bool:
    """Whether a batch of it has one label a sequence."""
    return type(model).__name__.endswith("ForSequenceClassification")


def _class_labels(config: Any, n: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """One class a row; numbers where the config asks for a regression, as it does with one label, or for several
    classes a row."""
    n_labels, kind = config.num_labels, getattr(config, "problem_type", None)
    if n_labels == 1 or kind not in (None, "single_label_classification"):
        return torch.rand(n, n_labels, generator=generator, device="cpu").to(dtype)
    return torch.randint(n_labels, (n,), generator=generator, device="cpu")


def image_shape(config: Any) -> tuple[int, int, int]:
    """(channels, height, width) of the images that a model takes."""
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", 224)  # ResNet takes any
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return config.num_channels, height, width


def first_word_id(vocab_size: int) -> int:
    """Ids below are left to padding, masks and the like."""
    return min(1000, vocab_size // 2)


def make_batch(model: nn.Module, batch_size: int, sequence_length: int, seed: int = 0) -> dict[str, Tensor]:
    """Random input and labels for one step, on the model's device: token ids [batch_size, sequence_length], or images.

    A masked language model has 15% of its positions to predict, other language models every one; a classifier has one
    label a row. Images have the size that the config gives, and pixels of the weights' dtype: sequence_length says
    nothing there.
    """
    config: Any = model.config
    weight = next(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    if reads_images(model):
        pixels = torch.randn(batch_size, *image_shape(config), generator=generator, device="cpu")
        labels = _class_labels(config, batch_size, generator, weight.dtype)
        return {"pixel_values": pixels.to(weight.device, weight.dtype), "labels": labels.to(weight.device)}
    config = config.get_text_config()  # of Gemma 3, which takes images too
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or -1
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        longest -= 2  # their position ids begin after the padding index
    if 0 < longest < sequence_length and not getattr(config, "is_encoder_decoder", False):  # XLNet's -1: no limit
        raise UsageError(f"--sequence-length must be at most {longest} for this model, got {sequence_length}")
    first, shape = first_word_id(config.vocab_size), (batch_size, sequence_length)
    ids = torch.randint(first, config.vocab_size, shape, generator=generator, device="cpu")
    labels = ids
    if type(model).__name__.endswith("ForMaskedLM"):
        masked = torch.rand(ids.shape, generator=generator, device="cpu") < MASKED_FRACTION
        masked[:, 0] = True  # at least one position a row, so that the loss is a number
        labels = torch.where(masked, ids, IGNORED_LABEL)
    elif classifies_text(model):
        if batch_size > 1 and config.pad_token_id is None:
            raise UsageError(f"{type(model).__name__} classifies batches only with a pad_token_id in its config")
        labels = _class_labels(model.config, batch_size, generator, weight.dtype)
        if getattr(config, "is_encoder_decoder", False):
            ids[:, -1] = config.eos_token_id  # whose hidden state it reads
    return {"input_ids": ids.to(weight.device), "labels": labels.to(weight.device)}
