"""What slows training on a CPU beside the kernels: allocator, threads, bfloat16 instructions. See docs/cpu.md."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import torch

_ALLOCATORS = {"tcmalloc": r"/libtcmalloc", "jemalloc": r"/libjemalloc", "mimalloc": r"/libmimalloc"}
KEEPING_JEMALLOC = "oversize_threshold:0,dirty_decay_ms:-1,muzzy_decay_ms:-1"
"""MALLOC_CONF with which jemalloc keeps what is freed; by its defaults it returns large blocks, as glibc does."""
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # the last is Arm's


def _read(path: str) -> str:
    """The file's text, "" where there is none."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def allocator(maps: str, environment: dict[str, str]) -> str:
    """Which malloc large tensors come from. maps: of /proc/self/maps."""
    for name, library in _ALLOCATORS.items():
        if re.search(library, maps):
            returns = name == "jemalloc" and "dirty_decay_ms" not in environment.get("MALLOC_CONF", "")
            return (
                f"{name}, which returns large tensors too: MALLOC_CONF={KEEPING_JEMALLOC} keeps them"
                if returns
                else name
            )
    if not re.search(r"/libc\.so|/libc-2", maps):
        return "unknown: not glibc's"
    tunables = environment.get("GLIBC_TUNABLES", "")
    told = "MALLOC_MMAP_THRESHOLD_" in environment or environment.get("MALLOC_MMAP_MAX_") == "0"
    if told or re.search(r"glibc\.malloc\.mmap_(max=0\b|threshold=)", tunables):
        return "glibc, tuned to keep large blocks"
    return (
        "glibc, which returns every large tensor to the system and clears its pages again at the next one; "
        "tcmalloc or GLIBC_TUNABLES=glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184 keep it"
    )


def threads(n_threads: int, n_usable: int, environment: dict[str, str]) -> str:
    """How many threads torch uses of the processors that this process may run on."""
    told = f"{n_threads} on {n_usable} usable processors"
    if n_threads > n_usable:
        return f"{told}: set OMP_NUM_THREADS={n_usable}, or threads wait for each other"
    if environment.get("OMP_PROC_BIND", "").lower() not in ("", "false"):
        return f"{told}, bound"
    return told if n_threads == 1 else f"{told}, not bound to them (OMP_PROC_BIND=true binds them)"


def bfloat16_instructions(cpuinfo: str) -> list[str] | None:
    """Those for matrix products in bfloat16, None where the text does not tell."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return None if found is None else [name for name in _BF16 if name in found[1].split()]


@functools.cache
def multiplies_bfloat16_in_vectors() -> bool:
    """Whether oneDNN multiplies bfloat16 with AVX-512 here, and not with tiles (AMX), where nothing was measured."""
    if bfloat16_instructions(_read("/proc/cpuinfo")) != ["avx512_bf16"] or not torch.backends.mkldnn.is_available():
        return False
    supports: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # False too where ONEDNN_MAX_CPU_ISA forbids it
    return supports


def bfloat16(cpuinfo: str) -> str:
    """Whether matrix products in bfloat16 have instructions of their own. cpuinfo: of /proc/cpuinfo."""
    have = bfloat16_instructions(cpuinfo)
    if have is None:
        return "unknown"
    if have:
        return f"{', '.join(have)}: autocast to bfloat16 shortens matrix products"
    return "no instructions: matrix products in bfloat16 can be slower than in float32"


def facts() -> dict[str, str]:
    """One line each for `onetrip doctor`."""
    environment = dict(os.environ)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "CPU allocator": allocator(_read("/proc/self/maps"), environment),
        "CPU threads": threads(torch.get_num_threads(), usable, environment),
        "CPU bfloat16": bfloat16(_read("/proc/cpuinfo")),
    }
