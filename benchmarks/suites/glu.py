"""The glu family: gated linear units, separate and packed, bias + GELU, and with dropout, over the widths of MLPs."""

from __future__ import annotations

from onetrip import ops
from torch import Tensor
from torch.nn import functional as F

from ..measure.cases import Case, Dropout, LeastBytes, Operator, Outputs, dtypes, gpu_cases, matrices
from ..measure.side_by_side import measure as measure

ROWS = 2048
WIDTHS = (2816, 1024, 4096, 14336)


# Forward: gate and up read, y written. Backward: dy, gate and up read, both gradients written.
_glu_bytes = matrices(3, 5)
# The same of halves: n_cols are those of both.
_packed_bytes = matrices(1.5, 2.5)


def _bias_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
    # Forward: x and bias read, y written. Backward: dy, x and bias read, dx and dbias written.
    matrix, vector = n_rows * n_cols * itemsize, n_cols * itemsize
    return LeastBytes(2 * matrix + vector, 3 * matrix + 2 * vector)


def _swiglu(dropout: Dropout, gate: Tensor, up: Tensor) -> Outputs:
    return F.silu(gate) * up


def _packed_swiglu(dropout: Dropout, gate_up: Tensor) -> Outputs:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _bias_gelu(name: str, dropout_p: float) -> Operator:
    def formula(dropout: Dropout, x: Tensor, bias: Tensor) -> Outputs:
        y = F.gelu(x + bias)
        return dropout(y) if dropout_p > 0.0 else y

    def fused(x: Tensor, bias: Tensor) -> Outputs:
        return ops.bias_activation(x, bias, "gelu", dropout_p=dropout_p)

    return Operator(name, ("x",), ("bias",), formula, fused, _bias_bytes, dropout_p, family="glu")


GLU = Operator("glu-silu", ("gate", "up"), (), _swiglu, ops.glu, _glu_bytes, family="glu")
PACKED = Operator(
    "glu_packed-silu",
    ("gate_up",),
    (),
    _packed_swiglu,
    ops.glu_packed,
    _packed_bytes,
    between=lambda n_rows, n_cols: n_rows * n_cols // 2,
    family="glu",
)
BIAS_GELU = _bias_gelu("bias_activation-gelu", 0.0), _bias_gelu("bias_activation-gelu-p0.1", 0.1)
OPERATORS = (GLU, PACKED, *BIAS_GELU)


def cases(quick: bool = False) -> list[Case]:
    found, n_rows = [], ROWS // 4 if quick else ROWS
    for width in WIDTHS[:1] if quick else WIDTHS:
        full = width == WIDTHS[0]
        found += [Case(operator, n_rows, width, dtype, full) for dtype in dtypes(quick) for operator in OPERATORS]
    if not quick:
        found += gpu_cases(OPERATORS)
    return found
