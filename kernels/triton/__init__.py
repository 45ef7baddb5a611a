"""Triton kernels, one module an operator family. Importing this package does not import Triton."""

from __future__ import annotations

import os

import torch

_MIN_CAPABILITY = (7, 0)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


def interpreter_fault() -> str:
    """Why Triton's interpreter cannot run the kernels, "" where it can. Needs an importable Triton.

    Before 3.7 it takes int() of arrays of one element for the ends of a range, which NumPy 2.4 rejects.
    """
    import triton

    try:
        import numpy
    except ImportError as error:
        return f"Triton's interpreter needs NumPy: {error}"

    if _version(triton.__version__) < (3, 7) and _version(numpy.__version__) >= (2, 4):
        return f"the interpreter of triton {triton.__version__} needs NumPy below 2.4, got {numpy.__version__}"
    return ""


def unavailable_reason(device: torch.device) -> str:
    """ "" where the kernels run on `device`, else why not, in plain words.

    They run on NVIDIA GPUs of compute capability 7.0 and up (Triton itself promises 8.0 and up), and on the CPU where
    Triton's interpreter was chosen by TRITON_INTERPRET=1 before Triton was imported: slow, and meant for tests.
    """
    try:
        import triton
    except ImportError as error:
        return f"triton cannot be imported: {error}"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "Triton compiles for GPUs only; on the CPU set TRITON_INTERPRET=1 to interpret the kernels"
        return interpreter_fault()
    if device.type != "cuda":
        return f"the Triton kernels run on CUDA devices, not on {device.type}"
    if torch.version.hip is not None:
        return "the Triton kernels are written and tested for NVIDIA GPUs; this torch is built for ROCm"
    if not torch.cuda.is_available():
        return "no usable CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 7.0"
    if capability < (8, 0) and _version(triton.__version__) < (3, 3):
        return f"triton {triton.__version__} compiles bfloat16 for compute capability 8.0 and up only, 3.3 for 7.0 too"
    return ""
