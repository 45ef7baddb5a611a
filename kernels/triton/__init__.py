"""Triton kernels, one module an operator family. Importing this package does not import Triton."""

from __future__ import annotations

import os

import torch

_MIN_CAPABILITY = (7, 0)


def unavailable_reason(device: torch.device) -> str:
    """ "" where the kernels run on `device`, else why not, in plain words.

    They run on NVIDIA GPUs of compute capability 7.0 and up (Triton itself promises 8.0 and up), and on the CPU where
    Triton's interpreter was chosen by TRITON_INTERPRET=1 before Triton was imported: slow, and meant for tests.
    """
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton compiles for GPUs only; on the CPU set TRITON_INTERPRET=1 to interpret the kernels"
        return ""
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA devices, not on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are written and tested for NVIDIA GPUs; this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "no usable CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    return ""
