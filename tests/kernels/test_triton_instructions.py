"""Instructions of Triton's element-wise kernels, counted in their machine code for an H100 or H200 (sm_90).

A kernel of few bytes an element is bound by them: see docs/tuning.md. The kernels have no loops here, so each line of
the code runs once.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from onetrip.reference.glu import GluPlan, Operands
from triton_budgets import compiled, recorded

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="under TRITON_INTERPRET=1 nothing is compiled"
)
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
MOST = {
    # (activation, with a factor, dropout): of an element, forward and backward. 1 to 2 more than counted.
    ("gelu", False, 0.0): (29, None),
    ("gelu", False, 0.1): (40, None),
    ("gelu_tanh", False, 0.0): (25, None),
    ("relu", False, 0.0): (13, None),
    ("silu", True, 0.0): (22, 47),
    ("gelu", True, 0.0): (30, 56),
}
"""Backward of a bias has a loop over rows."""


@pytest.mark.slow
@pytest.mark.skipif(not NVDISASM.exists(), reason="triton's wheel has no nvdisasm")
@pytest.mark.parametrize(("activation", "has_factor", "dropout_p"), MOST)
def test_instructions_of_an_element(
    activation: str, has_factor: bool, dropout_p: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from onetrip.kernels import glu, glu_kernels

    launches = recorded(monkeypatch, glu_kernels)
    matrix, row = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 4096), (4096,)))
    operands = Operands(matrix, matrix, None) if has_factor else Operands(matrix, None, row)
    plan, rng = GluPlan(activation, None, dropout_p), (1, 2) if dropout_p else None
    glu.forward(operands, plan, rng)
    if has_factor:
        glu.backward(matrix, operands, plan, (True, True, False), rng)
    for launch, most in zip(launches, MOST[activation, has_factor, dropout_p], strict=False):
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled(launch, 90).asm["cubin"])
        code = subprocess.run([str(NVDISASM), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
        opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", code)
        lanes = 32 * launch.options["num_warps"]
        elements = launch.arguments["BLOCK_ROWS"] * launch.arguments["BLOCK_COLS"]
        counted = sum(opcode != "NOP" for opcode in opcodes) * lanes / elements
        print(launch.kernel.__name__, f"{counted:.1f}")
        assert counted <= most, f"{launch.kernel.__name__}: {counted:.1f} instructions an element"
