"""Inputs of the row_norm family, their float64 truth, and the unfused torch expression in the same dtypes.

Only call() uses onetrip; masks are handed in as bool tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from onetrip import ops
from onetrip.reference.philox import dropout_scale
from pairwise import short as short
from torch import Tensor
from torch.nn import functional as F

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("x", "residual", "bias", "weight", "norm_bias")


@dataclass
class Inputs:
    """Arguments of one call; None where the call has no such tensor."""

    x: Tensor
    residual: Tensor | None = None
    bias: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same call on changed tensors."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})

    def leaves(self) -> Inputs:
        """The same values as new leaves that want gradients."""
        return self.map(lambda tensor: tensor.detach().clone().requires_grad_())

    def double(self) -> Inputs:
        return self.map(lambda tensor: tensor.detach().double().requires_grad_())

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}


def make(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    parts: str = "weight norm_bias",
    *,
    device: str = "cpu",
    dtypes: dict[str, torch.dtype] | None = None,
    seed: int = 0,
    **options: Any,
) -> Inputs:
    """x and the named parts, normal values, weights near one. dtypes: of parts that differ from dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(name: str) -> Tensor | None:
        if name != "x" and name not in parts.split():
            return None
        size = shape if name in ("x", "residual") else shape[-1:]
        values = torch.randn(size, generator=generator, dtype=torch.float64)
        values = 1.0 + 0.2 * values if name == "weight" else values
        return values.to((dtypes or {}).get(name, dtype)).to(device)

    return Inputs(*(normal(name) for name in NAMES), options=options)  # type: ignore[arg-type]


def sublayer(inputs: Inputs, keep: Tensor | None, p: float) -> Tensor:
    """residual + dropout(x + bias), with a given mask, in the tensors' own dtypes."""
    z = inputs.x if inputs.bias is None else inputs.x + inputs.bias
    if keep is not None:
        z = torch.where(keep.to(z.device), z * dropout_scale(p), 0.0)
    return z if inputs.residual is None else inputs.residual + z


def normed(z: Tensor, inputs: Inputs) -> Tensor:
    """The norm of z by torch, parameters brought to z's dtype, as no cast order is asked for."""
    options = inputs.options
    weight = None if inputs.weight is None else inputs.weight.to(z.dtype)
    if options.get("norm", "layer") == "layer":
        norm_bias = None if inputs.norm_bias is None else inputs.norm_bias.to(z.dtype)
        return F.layer_norm(z, z.shape[-1:], weight, norm_bias, options.get("eps", 1e-5))
    weight = weight if weight is None else weight + options.get("weight_offset", 0.0)
    return F.rms_norm(z, z.shape[-1:], weight, options.get("eps", 1e-5))


def rounded(z: Tensor, dtype: torch.dtype) -> Tensor:
    """z at the values of dtype, in z's own dtype; gradients pass as through a cast."""
    return z + (z.detach().to(dtype).to(z.dtype) - z.detach())


def truth(inputs: Inputs, keep: Tensor | None = None, p: float = 0.0) -> tuple[Inputs, Tensor, Tensor]:
    """(float64 leaves, y, z): the only rounding is that of z to its dtype, which is part of the contract."""
    z_dtype = inputs.x.dtype
    for part in (inputs.bias, inputs.residual):
        z_dtype = z_dtype if part is None else torch.promote_types(z_dtype, part.dtype)
    leaves = inputs.double()
    z = rounded(sublayer(leaves, keep, p), z_dtype)
    return leaves, normed(z, leaves), z


def unfused(inputs: Inputs, keep: Tensor | None = None, p: float = 0.0) -> tuple[Inputs, Tensor, Tensor]:
    """(leaves, y, z) by torch's own operators in the dtypes of the inputs."""
    leaves = inputs.leaves()
    z = sublayer(leaves, keep, p)
    return leaves, normed(z, leaves), z


def gradients(leaves: Inputs, outputs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    """Gradient of every input, by name; a missing one raises."""
    tensors = leaves.tensors()
    grads = [g.to(o.dtype, copy=True) for g, o in zip(grads, outputs, strict=True)]
    found = torch.autograd.grad(outputs, list(tensors.values()), grads)
    return dict(zip(tensors, found, strict=True))


def call(inputs: Inputs, **options: Any) -> Any:
    """onetrip's bias_dropout_residual_norm on the inputs."""
    i, options = inputs, {**inputs.options, **options}
    return ops.bias_dropout_residual_norm(i.x, i.residual, i.weight, i.norm_bias, bias=i.bias, **options)


def torch_has_eps_in_float32() -> bool:
    """Not torch 2.6: there RMSNorm's eps is a number of the input's dtype, None that dtype's epsilon, and the weight
    comes after the cast."""
    tiny = torch.full((1,), 1e-4, dtype=torch.float16)
    return bool(F.rms_norm(tiny, (1,)) > 0.1)
