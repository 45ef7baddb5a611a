"""Inputs of a tiny model, from the parameters of its forward."""

from __future__ import annotations

import inspect
import linecache
import random
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .tiny import VOCABULARY

Inputs = dict[str, Any]
N_TOKENS = 12


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _ids(n: int = N_TOKENS) -> Tensor:
    return torch.randint(5, VOCABULARY - 4, (2, n), generator=_generator())


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_generator())


def _first(config: Any, *names: str, default: Any = None) -> Any:
    found = (getattr(config, name, None) for name in names)
    value = next((value for value in found if value is not None), default)
    return value[0] if isinstance(value, list | tuple) else value


def _image(config: Any) -> tuple[int, int, int]:
    vision = getattr(config, "vision_config", None) or getattr(config, "backbone_config", None) or config
    size = getattr(vision, "image_size", None) or getattr(config, "image_size", None) or 32
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return _first(vision, "num_channels", "in_channels", "in_chans", default=3), height, width


def _usual(model: Any) -> Inputs:
    """What the names of the parameters say."""
    parameters = inspect.signature(model.forward).parameters
    config, inputs, main = model.config, {}, getattr(model, "main_input_name", "")
    if "input_ids" in parameters:
        inputs["input_ids"] = _ids()
        if "attention_mask" in parameters:
            inputs["attention_mask"] = torch.ones(2, N_TOKENS, dtype=torch.int64)
            if config.model_type not in ("mamba", "rwkv"):
                inputs["attention_mask"][1, 9:] = 0
    if "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _ids(9)
    if "pixel_values" in parameters and (main == "pixel_values" or hasattr(config, "vision_config")):
        has_text = "input_ids" in parameters and main == "input_ids" and "image_token_id" in config.to_dict()
        inputs |= {} if has_text else {"pixel_values": _randn(2, *_image(config))}
    if "input_values" in parameters:
        inputs["input_values"] = _randn(2, 2000)
    if "input_features" in parameters and (main == "input_features" or "input_ids" not in parameters):
        n = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_dim", default=16)
        inputs["input_features"] = _randn(2, 40, n)
    if "flattened_patches" in parameters:  # of Pix2Struct: row and column first
        n = _first(config, "patch_embed_hidden_size", default=768)
        inputs["flattened_patches"] = torch.cat([torch.ones(2, 16, 2), _randn(2, 16, n)], dim=-1)
    if "visual_feats" in parameters and hasattr(config, "visual_feat_dim"):
        inputs |= {"visual_feats": _randn(2, 8, config.visual_feat_dim), "visual_pos": _randn(2, 8, 4)}
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    if "bbox" in parameters:
        inputs["bbox"] = torch.zeros(2, N_TOKENS, 4, dtype=torch.int64)
    return inputs


def _by_name(config: Any) -> Inputs:
    """Values of parameters by their names."""
    width = _first(config, "hidden_size", "d_model", "embed_dim", "dim", "n_embd", "hidden_sizes", default=32)
    channels, height, image_width = _image(config)
    patch = _first(config, "patch_size", default=8)
    temporal = _first(config, "temporal_patch_size", default=1)
    mels = _first(config, "num_mel_bins", "feature_size", "input_feat_per_channel", "input_size", default=16)
    height_in_patches, width_in_patches = (max(1, size // patch) for size in (height, image_width))
    return {
        "patch_features": _randn(16, channels * temporal * patch * patch),
        "target_sizes": torch.tensor([[height_in_patches, width_in_patches]] * 2),
        "input_ids": _ids(), "decoder_input_ids": _ids(), "inputs_embeds": _randn(2, N_TOKENS, width),
        "query_embeds": _randn(2, 8, width), "hidden_states": _randn(2, N_TOKENS, width),
        "encoder_hidden_states": _randn(2, N_TOKENS, width), "attention_mask": torch.ones(2, N_TOKENS).long(),
        "grid_thw": torch.tensor([[1, 4, 4]]), "image_grid_thw": torch.tensor([[1, 4, 4]]),
        **dict.fromkeys(("position_ids", "timesteps"), torch.arange(N_TOKENS)[None].expand(2, -1)),
        **dict.fromkeys(("pixel_values", "image"), _randn(2, channels, height, image_width)),
        "masks": _randn(2, 1, 32, 32),
        "input_features": _randn(2, 40, mels), "input_values": _randn(2, 2000),
        "input_features_mask": torch.ones(2, 40).long(), "pixel_position_ids": torch.zeros(2, 16, 2).long(),
        "pixel_values_videos": _randn(2, 4, channels, height, image_width),
        "feature_lens": torch.tensor([40]), "aftercnn_lens": torch.tensor([20]),
        "pixel_attention_mask": torch.ones(2, 16).long(), "spatial_shapes": torch.tensor([[4, 4]] * 2),
        "input_points": 30.0 * torch.rand(2, 1, 3, 2, generator=_generator()), "input_masks": None,
        "input_labels": torch.ones(2, 1, 3).long(), "input_boxes": torch.tensor([[[2.0, 3.0, 20.0, 24.0]]] * 2),
        "sparse_prompt_embeddings": _randn(2, 1, 3, width), "multimask_output": True, "hq_token_only": False,
        "high_resolution_features": [_randn(2, width // 8, 32, 32), _randn(2, width // 4, 16, 16)],
        **{
            name: _randn(2, width, 8, 8)
            for name in ("image_embeddings", "image_positional_embeddings", "dense_prompt_embeddings")
        },
    }  # fmt: skip


def _required(model: Any) -> Inputs:
    """A value for every parameter without a default, by its name; a flat hidden state where nothing else fits."""
    values = _by_name(model.config)
    inputs = {
        name: values.get(name, values["hidden_states"])
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }
    if {"grid_thw", "image_grid_thw"} & inputs.keys():
        inputs |= {name: values["patch_features"] for name in ("hidden_states", "pixel_values") if name in inputs}
    return inputs


_OF_IMAGES = ("pixel_values", "target_sizes", "spatial_shapes", "pixel_attention_mask", "pixel_position_ids")


def candidates(model: Any) -> Iterator[Inputs]:
    """Inputs to try, the fullest first."""
    parameters = inspect.signature(model.forward).parameters
    usual, required = _usual(model), _required(model)
    merged = required | usual
    always = {"use_cache": False} if "use_cache" in parameters else {}
    yield merged
    if "pixel_values" in merged and len(merged) > 1:
        yield {name: x for name, x in merged.items() if name != "pixel_values"}
    if "input_values" in merged:
        for shape in ((2, 1, 2000), (2, 1024, 128), (2, 80, 16)):
            yield merged | {"input_values": _randn(*shape)}
    if "input_features" in merged:
        n = merged["input_features"].shape[-1]
        frames = 2 * (_first(model.config, "max_source_positions", default=33))
        for shape in ((2, n, frames), (2, 3000, n), (2, n, 3000), (n, 40), (2, 1, 1001, n)):
            yield merged | {"input_features": _randn(*shape)}
    if "attention_mask" in merged:
        yield {name: x for name, x in merged.items() if name != "attention_mask"}
    yield always | required
    config = model.config
    width = _first(config, "hidden_size", "d_model", "embed_dim", "dim", "n_embd", default=32)
    if "inputs_embeds" in parameters:
        yield always | {"inputs_embeds": _randn(2, N_TOKENS, width)}
    if "hidden_states" in required:  # some take an image by this name
        yield merged | {"hidden_states": _randn(2, *_image(config))}
    if "pixel_values" in parameters:
        channels, height, image_width = _image(config)
        for size in ((height, image_width), (64, 64), (224, 224)):
            yield {"pixel_values": _randn(2, channels, *size)}
        yield {"pixel_values": _randn(2, 2, channels, height, image_width)}
    if "past_values" in parameters:
        yield _time_series(config)
    yield from _videos(model, merged)
    images = {name: x for name, x in _by_name(config).items() if name in parameters and name in _OF_IMAGES}
    if images:
        yield {name: x[:1] for name, x in images.items()}


def _videos(model: Any, merged: Inputs) -> Iterator[Inputs]:
    """Several images or frames for each example."""
    parameters = inspect.signature(model.forward).parameters
    vision = getattr(model.config, "vision_config", None) or model.config
    n = _first(vision, "num_frames", "frames", default=2)
    for name in ("pixel_values", "pixel_values_videos"):
        if name in parameters:
            images = {name: _randn(2, n, *_image(model.config))}
            if "image_attention_mask" in parameters:
                images["image_attention_mask"] = torch.ones(2, N_TOKENS, n).long()
            yield {key: x for key, x in merged.items() if not key.startswith("pixel_values")} | images


def repaired(inputs: Inputs, error: Exception) -> Inputs | None:
    """The inputs with another last dimension, where the message of an error says which, or with as many channels as a
    convolution needs; else None."""
    message = str(error)
    if (found := re.search(r"expected input\[([\d, ]+)\] to have (\d+) channels", message)) is not None:
        shape, channels = tuple(map(int, found[1].split(","))), int(found[2])
        of_shape = [name for name, x in inputs.items() if isinstance(x, Tensor) and tuple(x.shape) == shape]
        return inputs | {name: _randn(shape[0], channels, *shape[2:]) for name in of_shape} if of_shape else None
    patterns = (
        r"cannot be multiplied \(\d+x(?P<is>\d+) and (?P<wanted>\d+)x\d+\)",
        r"normalized_shape=\[(?P<wanted>\d+)\].*, (?P<is>\d+)\]$",
        r"tensor a \((?P<is>\d+)\) must match the size of tensor b \((?P<wanted>\d+)\) at non-singleton dimension [23]",
    )
    found = next((match for pattern in patterns if (match := re.search(pattern, message))), None)
    if found is None:
        return None
    width, wanted = int(found["is"]), int(found["wanted"])
    pixels = inputs.get("pixel_values")
    if isinstance(pixels, Tensor) and pixels.dim() == 4 and pixels.shape[-1] == width:  # as patches
        n_images, channels, height, _ = pixels.shape
        side = round((wanted / channels) ** 0.5)
        if channels * side**2 == wanted:
            return inputs | {"pixel_values": _randn(n_images, max(1, height // side) * max(1, width // side), wanted)}
    changed = {
        name: _randn(*x.shape[:-1], wanted)
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape[-1] == width
    }
    return inputs | changed if changed else None


def supplied(model: Any, inputs: Inputs, error: Exception) -> Inputs | None:
    """The inputs with one more parameter of the forward: the first that an error's message or the line that raised it
    names; else None."""
    parameters, values = inspect.signature(model.forward).parameters, _by_name(model.config)
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        for name in re.findall(r"\w+", linecache.getline(frame.f_code.co_filename, line) + str(error)):
            if name in parameters and name not in inputs and frame.f_locals.get(name) is None:
                return inputs | {name: values.get(name, values["hidden_states"])}
    return None


def _time_series(config: Any) -> Inputs:
    history = (getattr(config, "context_length", 8) or 8) + max(getattr(config, "lags_sequence", None) or [0])
    n_features = getattr(config, "num_time_features", 0) or 0
    horizon = getattr(config, "prediction_length", 4) or 4
    inputs: Inputs = {"past_values": _randn(2, history), "past_observed_mask": torch.ones(2, history)}
    if n_features or hasattr(config, "lags_sequence"):
        inputs |= {
            "past_time_features": _randn(2, history, n_features),
            "future_values": _randn(2, horizon),
            "future_time_features": _randn(2, horizon, n_features),
        }
    else:
        channels = getattr(config, "num_input_channels", 1) or 1
        inputs = {"past_values": _randn(2, getattr(config, "context_length", 32) or 32, channels)}
    return inputs


def seed() -> None:
    """Before each run: models draw from torch, numpy (masks of speech models) and random (layer drop)."""
    import numpy

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


def run(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and all gradients of one forward and backward."""
    model.zero_grad(set_to_none=True)
    seed()
    copies = {name: x.clone() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    leaves = tree_leaves(model(**copies))
    outputs = [each for each in leaves if isinstance(each, Tensor) and each.is_floating_point()]
    loss = sum(
        (each * torch.cos(torch.arange(each.numel(), dtype=each.dtype)).view(each.shape)).sum()
        for each in outputs
        if each.requires_grad
    )
    if not isinstance(loss, Tensor):
        raise ValueError("no output requires a gradient")
    loss.backward()
    found = {f"output {i}": each.detach().clone() for i, each in enumerate(outputs)}
    return found | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
