"""What doctor says of the allocator, threads and bfloat16."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from onetrip import cpu_advice, doctor

GLIBC = "7f0 r-xp /usr/lib/x86_64-linux-gnu/libc.so.6\n"


@pytest.mark.parametrize(
    ("maps", "environment", "told"),
    [
        (GLIBC, {}, "glibc, which returns every large tensor"),
        (GLIBC, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.top_pad=1"}, "glibc, tuned"),
        (GLIBC, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296"}, "glibc, tuned"),
        (GLIBC, {"MALLOC_MMAP_THRESHOLD_": "4294967296"}, "glibc, tuned"),
        (GLIBC, {"MALLOC_MMAP_MAX_": "0"}, "glibc, tuned"),
        (GLIBC, {"MALLOC_MMAP_MAX_": "8"}, "glibc, which returns every large tensor"),
        (GLIBC + "7f1 /usr/lib/libtcmalloc_minimal.so.4\n", {}, "tcmalloc"),
        (GLIBC + "7f1 /usr/lib/libjemalloc.so.2\n", {}, "jemalloc, which returns"),
        (GLIBC + "7f1 /usr/lib/libjemalloc.so.2\n", {"MALLOC_CONF": cpu_advice.KEEPING_JEMALLOC}, "jemalloc"),
        ("7f0 /lib/ld-musl-x86_64.so.1\n", {}, "unknown"),
    ],
)
def test_the_allocator_in_use_is_named(maps: str, environment: dict[str, str], told: str) -> None:
    assert cpu_advice.allocator(maps, environment).startswith(told)


@pytest.mark.parametrize(
    ("n_threads", "n_usable", "environment", "told"),
    [
        (4, 2, {}, "4 on 2 usable processors: set OMP_NUM_THREADS=2, or threads wait for each other"),
        (2, 2, {}, "2 on 2 usable processors, not bound to them (OMP_PROC_BIND=true binds them)"),
        (2, 2, {"OMP_PROC_BIND": "close"}, "2 on 2 usable processors, bound"),
        (1, 2, {}, "1 on 2 usable processors"),
    ],
)
def test_threads_are_compared_with_processors(
    n_threads: int, n_usable: int, environment: dict[str, str], told: str
) -> None:
    assert cpu_advice.threads(n_threads, n_usable, environment) == told


@pytest.mark.parametrize(
    ("cpuinfo", "told"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", "avx512_bf16: "),
        ("flags\t\t: fpu amx_bf16 avx512_bf16\n", "avx512_bf16, amx_bf16: "),
        ("Features\t: asimd bf16 sve\n", "bf16: "),
        ("flags\t\t: fpu avx2\n", "no instructions: "),
        ("", "unknown"),
    ],
)
def test_bfloat16_instructions_are_named(cpuinfo: str, told: str) -> None:
    assert cpu_advice.bfloat16(cpuinfo).startswith(told)


def test_doctor_prints_the_advice() -> None:
    facts = doctor._facts()
    assert set(cpu_advice.facts()) <= set(facts) and all(facts[name] for name in cpu_advice.facts())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_the_environment_of_the_process_is_read() -> None:
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0", "LD_PRELOAD": ""}
    code = "from onetrip import cpu_advice; print(cpu_advice.facts()['CPU allocator'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "glibc, tuned to keep large blocks\n"
