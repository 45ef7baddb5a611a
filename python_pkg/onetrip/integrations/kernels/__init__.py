"""Layers for Hugging Face kernels: `kernelize` gives modules of a model the forward of a layer here.

This folder is a local kernel repository: metadata.json beside an __init__.py that has `layers`. Nothing is downloaded.
It is run twice: imported as a part of onetrip, and under the id in metadata.json by kernels' loader.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onetrip.integrations import needs
from onetrip.integrations.kernels import layers

__all__ = ["kernel_config", "kernel_mapping", "layers"]

REPOSITORY = Path(__file__).resolve().parent
LAYERS = {"RMSNorm": "RMSNorm", "rotary_pos_emb": "RotaryEmbedding", "SwiGLUMLP": "SwiGLUMLP"}
"""Name that a module or function was registered under (kernel_layer_name) -> layer."""
REGISTERED_BY_TRANSFORMERS = ("RMSNorm", "rotary_pos_emb")


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """What kernels.use_kernel_mapping and kernels.register_kernel_mapping take: every layer, on CPU and CUDA.

    RMSNorm: with weight and variance_epsilon. rotary_pos_emb: apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim), cos
    and sin as wide as q. What computes something else under these names gets an error at its first call. SwiGLUMLP:
    gate_proj, up_proj, down_proj with SiLU; no library registers it, kernels.replace_kernel_forward_from_hub(MyMLP,
    "SwiGLUMLP") does. Raises ImportError without kernels.
    """
    with needs("kernels"):
        from kernels.layer import LocalLayerRepository  # kernels alone may be the folder of onetrip's own repository
    return {
        name: {device: LocalLayerRepository(REPOSITORY, layer_name=layer) for device in ("cpu", "cuda")}
        for name, layer in LAYERS.items()
    }


def kernel_config(names: Iterable[str] = REGISTERED_BY_TRANSFORMERS) -> Any:
    """transformers' KernelConfig: from_pretrained(..., use_kernels=True, kernel_config=kernel_config()).

    names: of layers that the model registers. transformers accepts its own range of versions of kernels, and layers on
    accelerators only. Raises ImportError without transformers, ValueError for unknown names.
    """
    names = tuple(names)
    if unknown := sorted(set(names) - set(LAYERS)):
        raise ValueError(f"kernel_config: names must be among {', '.join(LAYERS)}, got {', '.join(unknown)}")
    with needs("transformers"):
        from transformers import KernelConfig
    return KernelConfig({name: f"{REPOSITORY}:{LAYERS[name]}" for name in names}, use_local_kernel=True)
