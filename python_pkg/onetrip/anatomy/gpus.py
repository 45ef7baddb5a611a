"""What NVIDIA publishes about its GPUs: memory, and for some their bandwidth and peak rates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..measure.traffic import ATTENTION, LOSS, OPTIMIZER, OUTSIDE, PRODUCT, Traffic
from .models import UsageError

_MEMORY = {
    "P100-16GB": 16,
    "V100-16GB": 16,
    "V100-32GB": 32,
    "T4": 16,
    "A10": 24,
    "A10G": 24,
    "A30": 24,
    "A40": 48,
    "A100-40GB": 40,
    "A100-80GB": 80,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "H100-80GB": 80,
    "H100-NVL": 94,
    "H200": 141,
    "RTX-2080-Ti": 11,
    "RTX-3060": 12,
    "RTX-3080": 10,
    "RTX-3090": 24,
    "RTX-4070": 12,
    "RTX-4080": 16,
    "RTX-4090": 24,
    "RTX-5080": 16,
    "RTX-5090": 32,
    "RTX-A6000": 48,
    "RTX-6000-Ada": 48,
}
"""Nominal memory in GB, from the data sheets."""

_ECC_IN_MEMORY = {"T4", "A10", "A10G", "A40", "L4", "L40", "L40S"}
"""GDDR6 with ECC enabled by default. The ECC bits take 6.25% (CUDA C++ Best Practices Guide, "Device Memory"). HBM has
extra memory for them, and workstation GPUs come with ECC disabled."""
_DRIVER_AND_CONTEXT = 1 << 30
"""Bytes of those GPUs that a step cannot have: the driver keeps 0.4 to 0.6 GiB (torch reports 14.56 GiB of 15 on a T4,
44.40 of 45 on an L40); the rest is for a CUDA context."""


@dataclass(frozen=True)
class Speed:
    """Published peaks; no kernel exceeds them."""

    bandwidth: float
    """Bytes of memory traffic a second."""
    flops: dict[str, float]
    """FLOPs of dense matrix products, a second, by dtype. float32: without TF32, torch's default."""
    source: str


_V100 = Speed(900e9, {"float32": 15.7e12, "float16": 125e12}, "NVIDIA V100 data sheet (SXM2), 2020")
_HOPPER = {"float32": 66.9e12, "float16": 989.4e12, "bfloat16": 989.4e12}
_AMPERE = {"float32": 19.5e12, "float16": 312e12, "bfloat16": 312e12}
SPEEDS = {
    "V100-16GB": _V100,
    "V100-32GB": _V100,
    "A100-40GB": Speed(1555e9, _AMPERE, "NVIDIA A100 data sheet (SXM4 40 GB), 2020"),
    "A100-80GB": Speed(2039e9, _AMPERE, "NVIDIA A100 data sheet (SXM4 80 GB), 2021"),
    "H100-80GB": Speed(3.35e12, _HOPPER, "NVIDIA H100 data sheet and Hopper white paper (SXM5), 2023"),
    "H200": Speed(4.8e12, _HOPPER, "NVIDIA H200 data sheet (SXM), 2024"),
}
"""By name of GPU. A V100 has no matrix units for bfloat16."""


BOUND_PARTS = ("outside", "loss", "products", "attention", "optimizer", "step")


@dataclass(frozen=True)
class Bound:
    """Milliseconds that a step takes at least on a GPU, each part by itself. None where no peak is published."""

    outside: float
    """Forward and backward: all but products, attention kernels and the loss."""
    loss: float
    products: float | None
    attention: float | None
    optimizer: float

    @property
    def step(self) -> float | None:
        parts = (self.outside, self.loss, self.products, self.attention, self.optimizer)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"step": self.step}


def known(name: str) -> str:
    """The name as it stands in the table; raises UsageError where it does not."""
    by_name = {each.lower(): each for each in _MEMORY}
    found = by_name.get(name.lower().replace(" ", "-"))
    if found is None:
        raise UsageError(f"--gpu: unknown GPU {name!r}; choose from {', '.join(_MEMORY)}")
    return found


def usable_bytes(name: str) -> int:
    """What a training step can have of the GPU's memory.

    The nominal size in 10^9 bytes. GPUs count in 2^30, which is 7% more: about what the driver and a CUDA context
    take. Less where ECC takes a part of the memory itself.
    """
    if name in _ECC_IN_MEMORY:
        return _MEMORY[name] * (1 << 30) * 15 // 16 - _DRIVER_AND_CONTEXT
    return _MEMORY[name] * 10**9


def lower_bound(traffic: Traffic, speed: Speed, dtype: str) -> Bound:
    """Every operator moves its bytes at the peak bandwidth or computes at the peak rate, whichever takes longer."""

    def moved(kind: str) -> float:
        of_kind = [each for each in traffic.operators.values() if each.kind == kind and each.phase != OPTIMIZER]
        return 1e3 * sum(each.bytes for each in of_kind) / speed.bandwidth

    def computed(kind: str) -> float | None:
        rate = speed.flops.get(dtype)
        of_kind = [each for each in traffic.operators.values() if each.kind == kind]
        if not of_kind:
            return 0.0
        if rate is None:
            return None
        return 1e3 * sum(max(each.bytes / speed.bandwidth, each.flops / rate) for each in of_kind)

    return Bound(
        outside=moved(OUTSIDE),
        loss=moved(LOSS),
        products=computed(PRODUCT),
        attention=computed(ATTENTION),
        optimizer=1e3 * traffic.bytes(phase=OPTIMIZER) / speed.bandwidth,
    )
