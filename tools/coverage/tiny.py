"""Tiny models of a registered model type, from its config class's defaults made small.

No table of sizes fits every type, so there are several ways to make a config small. The first one that a model can be
built from and run with is used: sizes by the names of the keys; every width divided by one number, which keeps the
ratios that a type may rely on; the default widths with fewer layers; every number capped.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

HIDDEN, HEADS, VOCABULARY, POSITIONS, LAYERS = 32, 4, 64, 66, 2
P = 0.1
"""Probability of every dropout of a config: at 0 some models build no dropout at all."""
MAX_PARAMETERS = 45_000_000

_LAYER_KEYS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "layers", "depth", "num_blocks", "num_hidden_groups",
    "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers", "decoder_num_layers",
)  # fmt: skip
_POSITION_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions",
    "max_source_positions", "max_encoder_position_embeddings", "max_decoder_position_embeddings", "context_length",
)  # fmt: skip
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_size", "projection_dim",
         "attention_hidden_size", "hidden_dim", "encoder_hidden_size", "decoder_hidden_size", "word_embed_proj_dim",
         "cross_attention_hidden_size", "output_dim", "decoder_hidden_dim", "encoder_hidden_dim",
         "projection_hidden_size", "out_hidden_size", "vision_hidden_size"), HIDDEN),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "d_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
         "moe_intermediate_size", "shared_expert_intermediate_size", "dim_feedforward", "n_inner"), 48),
    **dict.fromkeys(_LAYER_KEYS, LAYERS),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
         "num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size", "kv_channels"), 8),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(_POSITION_KEYS, POSITIONS),
    "image_size": 32, "patch_size": 8, "rotary_dim": 4, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8, "num_mel_bins": 16, "num_buckets": 8,
    "attention_window": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "qk_head_dim": 8,
    "index_topk": 4, "moe_num_experts": 4, "hidden_size_per_layer_input": 8, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "sliding_window": 8, "mask_time_length": 2, "mask_feature_length": 2,
    "window_size": 4, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_num_heads": 8,
    "mamba_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "entity_vocab_size": 32, "upsample_groups": HIDDEN,
}  # fmt: skip
_WHERE_NONE = {
    "vocab_size": VOCABULARY,
    "head_dim": 8,
    "ffn_dim": 48,
    "num_experts_per_tok": 2,
    "num_key_value_heads": HEADS,
}
_WHERE_OPEN = {
    "top_k_experts": 2,
    "layer_types": ["full_attention"] * LAYERS,
    "mlp_layer_types": ["dense", "sparse"],
    "n_shared_experts": 1,
    "vocabulary_map": {"<image>": 4},
    "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_WHERE_ABSENT = {"initializer_range": 0.02, "num_key_value_heads": HEADS, "rope_theta": 10000.0}
_BY_TYPE: dict[str, dict[str, Any]] = {
    "longformer": {"attention_window": 4},
    "led": {"attention_window": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "block_repeats": [1, 1]},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2, "num_self_attention_heads": 4,
                  "num_cross_attention_heads": 4},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
    "autoformer": {"prediction_length": 4}, "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "bit": {"num_groups": 8, "embedding_size": 32, "hidden_sizes": [32, 32, 64, 64]},
    "diffllama": {"attention_dropout": 0.0},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "align_vision_model": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "axk1": {"head_dim": 4}, "luke": {"entity_emb_size": 16}, "xmod": {"default_language": "en_XX"},
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 4], "num_buckets": 4},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0}},
    "ernie4_5_vl_moe_text": {"moe_k": 2}, "gemma3n_text": {"num_kv_shared_layers": 0},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 16},
    "llama4_vision_model": {"intermediate_size": 128, "projector_input_dim": 64, "projector_output_dim": 64,
                            "vision_output_dim": 64},
}  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _common(key: str, value: Any, taken: int) -> Any:
    """What all ways do to a key of a config; None for a key that none changes."""
    if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
        return 0.0 if "path" in key or "layer" in key else P
    if key.endswith("_token_id") and _is_number(value) and value >= VOCABULARY:
        return 4 + taken % 40
    if key in _LAYER_KEYS and _is_number(value):
        return min(value, LAYERS)
    if key == "vocab_size" and _is_number(value):
        return VOCABULARY
    return None


def _layer_lists(default: dict[str, Any]) -> dict[str, Any]:
    """Two layers of different types, where there are two."""
    found = {}
    for key in ("layer_types", "layers_block_type"):
        types = default.get(key)
        if isinstance(types, list) and types:
            kinds = list(dict.fromkeys(types))
            found[key] = [kinds[0], kinds[min(1, len(kinds) - 1)]]
    return found


def by_name(default: dict[str, Any]) -> dict[str, Any]:
    """Sizes by the names of the keys."""
    small: dict[str, Any] = {}
    for key, value in default.items():
        if isinstance(value, bool) or (common := _common(key, value, len(small))) is not None:
            small |= {} if isinstance(value, bool) else {key: common}
        elif key in ("num_key_value_heads", "num_kv_heads") and _is_number(value):
            heads = default.get("num_attention_heads", default.get("num_heads", default.get("n_heads")))
            small[key] = HEADS if value == heads else min(value, 2)
        elif _is_number(value) and key in SIZES:
            small[key] = min(value, SIZES[key])
        elif key == "conv_dim" and isinstance(value, list | tuple):
            small[key] = [HIDDEN] * len(value)
    for key in ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "embed_dim"):
        if isinstance(default.get(key), list | tuple) and default[key] and _is_number(default[key][0]):
            small[key] = [HIDDEN * (1 + i) for i in range(len(default[key]))]
    if isinstance(default.get("depths"), list | tuple):
        small["depths"] = [2 if i == 0 else 1 for i in range(len(default["depths"]))]
        if "image_size" in default:
            small["image_size"], small["patch_size"] = 64, default.get("patch_size", 4)
    if isinstance(default.get("num_heads"), list | tuple):
        small["num_heads"] = [2 for _ in default["num_heads"]]
    small |= {key: value for key, value in _WHERE_NONE.items() if key in default and default[key] is None}
    return small | _layer_lists(default)


def filled(default: dict[str, Any]) -> dict[str, Any]:
    """As by_name, and every size and kind of layer that the default leaves open."""
    known = SIZES | _WHERE_OPEN
    small = {key: size for key, size in known.items() if key in default and default[key] is None}
    if default.get("rope_parameters") == {}:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        small["rope_parameters"] = dict.fromkeys(default["layer_types"], rope)
    return by_name(default) | small


_WIDTH_WORDS = (
    "size", "dim", "d_model", "ffn", "width", "rank", "embd", "inner", "hidden", "intermediate", "channels", "d_ff",
    "d_kv", "features", "section", "latents",
)  # fmt: skip
_NOT_WIDTHS = (
    "image", "patch", "kernel", "stride", "vocab", "window", "position", "token", "num_", "layers", "block", "chunk",
    "crop", "batch", "n_head", "pool", "codebook_size", "bins", "max_", "merge", "grid", "num", "in_channels",
)  # fmt: skip


def divided(default: dict[str, Any], by: int = 8) -> dict[str, Any]:
    """Every width divided by one number; heads and experts stay."""
    small: dict[str, Any] = {}
    for key, value in default.items():
        if isinstance(value, bool):
            continue
        if (common := _common(key, value, len(small))) is not None:
            small[key] = common
        elif key in _POSITION_KEYS and _is_number(value):
            small[key] = min(value, 512)
        elif key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") and _is_number(value):
            small[key] = min(value, 8)
        elif any(word in key for word in _WIDTH_WORDS) and not any(word in key for word in _NOT_WIDTHS):
            if _is_number(value) and value >= 32 and value % by == 0:
                small[key] = value // by
            elif isinstance(value, list | tuple) and value and all(_is_number(v) and v % by == 0 for v in value):
                small[key] = [v // by for v in value]
    return small | _layer_lists(default)


def fewer_layers(default: dict[str, Any]) -> dict[str, Any]:
    """The default widths."""
    small: dict[str, Any] = {}
    for key, value in default.items():
        if not isinstance(value, bool) and (common := _common(key, value, len(small))) is not None:
            small[key] = common
    return small | _layer_lists(default)


def capped(default: dict[str, Any], largest: int = 32) -> dict[str, Any]:
    """As by_name, and no other number is large: channels, hash tables, queries, experts."""

    def cap(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [cap(each) for each in value]
        return min(value, largest) if _is_number(value) else value

    named = by_name(default)
    small = {key: cap(value) for key, value in default.items() if _is_number(value) or isinstance(value, list)}
    return small | {key: cap(value) if isinstance(value, list) else value for key, value in named.items()}


def _whole(part: dict[str, Any], way: Way) -> dict[str, Any]:
    """A config within another: small, and otherwise as it is. A transformer's feature maps are of its first layers."""
    kept = {key: value for key, value in part.items() if key not in ("out_features", "stage_names")}
    if (n := len(part.get("out_indices") or [])) and "num_hidden_layers" in part and "depths" not in part:
        return kept | _nested(kept, way) | {"num_hidden_layers": n, "out_indices": list(range(1, n + 1))}
    return kept | _nested(kept, way)


def _resnet(timm: dict[str, Any]) -> dict[str, Any]:
    """A backbone without timm, with as many feature maps."""
    stages = ["stage1", "stage2", "stage3", "stage4"]
    n_maps = len(timm.get("out_indices") or [0])
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
    return {"model_type": "resnet", **sizes, "out_features": stages[-n_maps:]}


class Way(NamedTuple):
    """How a config is made small."""

    name: str
    sizes: Callable[[dict[str, Any]], dict[str, Any]]
    sections: list[int] | None = None
    """mrope_section of every rotary embedding; None divides the default's."""
    whole: bool = False
    """Whether the configs in it keep what is not made small; else their own classes' defaults take its place."""


SMALLEST = (
    Way("capped", capped, whole=True),
    Way("capped at 64", partial(capped, largest=64), whole=True),
)
WAYS = (
    Way("by name", by_name),
    Way("by name, sections of 8 columns", by_name, [1, 1, 2]),
    Way("by name, sections of 4 columns", by_name, [1, 1, 0]),
    Way("by name, none left open", filled),
    Way("divided", divided),
    Way("fewer layers", fewer_layers),
    Way("divided by 32", partial(divided, by=32)),
    Way("by name, parts whole", by_name, whole=True),
    *SMALLEST,
)


def _nested(default: dict[str, Any], way: Way) -> dict[str, Any]:
    """The small values of a config and of the configs in it."""
    small = way.sizes(default)
    for key, value in default.items():
        if not isinstance(value, dict) or not value:
            continue
        if value.get("model_type") == "timm_backbone":
            small[key] = _resnet(value)
        elif key in ("rope_parameters", "rope_scaling"):
            small[key] = value | _sections(value, way)
        elif "layer" in key and all(str(layer).isdigit() for layer in value):
            small[key] = {layer: each for layer, each in value.items() if int(layer) < LAYERS}
        elif "model_type" in value:
            alone = {"model_type": value["model_type"]}
            small[key] = _whole(value, way) if way.whole else alone | _nested(value, way)
        elif key.endswith("_config"):
            small[key] = value | _nested(value, way)
    return small | _BY_TYPE.get(default.get("model_type", ""), {})


def _sections(rope: dict[str, Any], way: Way) -> dict[str, Any]:
    """How a rotary embedding's columns are divided among time, height and width."""
    if way.sections is not None:
        return {"mrope_section": way.sections}
    default = rope.get("mrope_section")
    if not isinstance(default, list) or way.sizes is fewer_layers:
        return {}
    return {"mrope_section": [1, 1, 2] if way.sizes is by_name else [v // 8 for v in default]}


def _base_class(model_type: str) -> type[nn.Module]:
    """The model class of a type: AutoModel's, else one whose config_class is the type's, preferring a base model, else
    a part of a model that takes this config, else what a parent of the config class has."""
    import transformers

    config_class: Any = transformers.CONFIG_MAPPING[model_type]
    while config_class is not transformers.PretrainedConfig:
        with contextlib.suppress(KeyError, ValueError):
            cls = transformers.MODEL_MAPPING[config_class]
            return cls[0] if isinstance(cls, tuple) else cls
        classes = list(_defined_beside(config_class))
        if found := [cls for cls in classes if getattr(cls, "config_class", None) is config_class]:
            return min(found, key=lambda cls: ("For" in cls.__name__, cls.__name__[-5:] != "Model", len(cls.__name__)))
        if parts := [cls for cls in classes if _is_annotated(cls, config_class)]:
            name = config_class.__name__.removesuffix("Config")
            return next((cls for cls in parts if cls.__name__ == name), parts[-1])
        config_class = config_class.__base__
    raise ValueError("no model class has this config class")


def _defined_beside(config_class: type) -> Iterator[type[nn.Module]]:
    """The modules that the folder of a config class defines, base classes of models apart."""
    folder = importlib.import_module(config_class.__module__.rpartition(".")[0])
    for path in sorted(Path(next(iter(folder.__path__))).glob("*.py")):
        if path.stem == "__init__" or path.stem.startswith(("configuration", "modular", "convert", "tokenization")):
            continue
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"{folder.__name__}.{path.stem}")
            for cls in vars(module).values():
                is_own = inspect.isclass(cls) and cls.__module__ == module.__name__
                if is_own and issubclass(cls, nn.Module) and "PreTrainedModel" not in cls.__name__:
                    yield cls


def _is_annotated(cls: type[nn.Module], config_class: type) -> bool:
    """Whether the constructor takes a config of this class, and nothing else that must be given."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    return len(needed) == 1 and needed[0].annotation in (config_class, config_class.__name__)


def configs(model_type: str, smallest: bool = False) -> Iterator[tuple[str, Any]]:
    """(way, config), for each way, or of those with the smallest models alone. Raises the first error if none gives a
    config."""
    import transformers

    cls = transformers.CONFIG_MAPPING[model_type]
    error: Exception | None = None
    default = cls().to_dict()
    found = False
    for way in SMALLEST if smallest else WAYS:
        if way.sections is not None and "rope_parameters" not in repr(default):
            continue
        small = _nested(default, way)
        small.pop("model_type", None)
        try:
            config = cls(**small)
        except Exception as e:  # a validator of the config class
            error = error or e
            continue
        found = True
        yield way.name, config
    if not found and error is not None:
        raise error


@cache
def model_class(model_type: str) -> type[nn.Module]:
    return _base_class(model_type)


def build(model_type: str, config: Any) -> nn.Module:
    """The model, with random weights, biases and norm weights, also where transformers leaves them uninitialized.
    Raises ValueError for a model that is too large."""
    cls: Any = model_class(model_type)
    make = getattr(cls, "_from_config", cls)
    try:
        with torch.device("meta"):
            n = sum(parameter.numel() for parameter in make(config).parameters())
    except Exception:  # reads values while it is built
        n = 0
    if n > MAX_PARAMETERS:
        raise ValueError(f"{n / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # what is uninitialized is NaN then
    try:
        model: nn.Module = make(config)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    if not hasattr(model, "config"):  # a part of a model
        model.config = config
    n = sum(parameter.numel() for parameter in model.parameters())
    if n > MAX_PARAMETERS:
        raise ValueError(f"{n / 1e6:.0f} million parameters")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.nan_to_num_(0.0, torch.inf, -torch.inf).add_(
                torch.randn(parameter.shape, generator=generator), alpha=0.05
            )
    return model


def completed(config: Any, error: Exception) -> bool:
    """Whether the config has got an attribute now that an error says it lacks: transformers' defaults lack some."""
    found = re.search(r"^'(\w+)' object has no attribute '(\w+)'$", str(error))
    if not isinstance(error, AttributeError) or found is None:
        return False
    owner, name = found.groups()
    value = P if "drop" in name else _WHERE_ABSENT.get(name, SIZES.get(name))
    owners = [each for each in configs_in(config) if type(each).__name__ == owner and not hasattr(each, name)]
    for each in owners if value is not None else []:
        setattr(each, name, value)
    return value is not None and bool(owners)


def configs_in(config: Any) -> list[Any]:
    """A config and all configs in it."""
    found: dict[int, Any] = {}
    waiting = [config]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found and hasattr(each, "__dict__"):
            found[id(each)] = each
            waiting += [value for name, value in vars(each).items() if name.endswith("config")]
    return list(found.values())


class Dropouts:
    """The dropout probabilities of a model: modules', attributes of modules, and those of its configs."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[Any, str, float]] = []
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                self.places.append((module, "p", module.p))
            self._floats(module)
        configs = (each for module in model.modules() for each in configs_in(getattr(module, "config", None)))
        for config in {id(each): each for each in configs}.values():
            self._floats(config)

    def _floats(self, owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, float) and "drop" in name:
                self.places.append((owner, name, value))

    def set(self, on: bool) -> None:
        """Every probability to what it was, or to 0."""
        for owner, name, value in self.places:
            setattr(owner, name, value if on else 0.0)
