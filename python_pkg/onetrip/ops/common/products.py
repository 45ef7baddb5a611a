"""Matrix products in half precision whose sums stay in float32.

On a GPU torch (from 2.8 on) adds such a product to a float32 tensor, or returns it in float32, within the product.
Elsewhere it is rounded to its operands' dtype first, and added or cast by another pass.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .backends import HALF
from .tracing import have_storage, watched_as

_IN_TORCH = hasattr(torch.ops.aten.addmm, "dtype_out") and hasattr(torch.ops.aten.mm, "dtype")
_FAKE_TENSORS_WIDEN = torch.__version__ >= "2.13"
"""Whether fake tensors can be added such a product, too: they count a step where no GPU is."""


def widens(a: Tensor, dtype: torch.dtype, half: torch.dtype | None = None) -> bool:
    """Whether one operator multiplies a into dtype. half: dtype that a is cast to first."""
    is_half = (a.dtype if half is None else half) in HALF
    if not (_IN_TORCH and is_half and dtype == torch.float32 and have_storage(a)):
        return False
    return a.is_cuda or (_FAKE_TENSORS_WIDEN and watched_as() == "cuda")


def widens_now(a: Tensor, dtype: torch.dtype) -> bool:
    """Whether it may do so in this call: it cannot be differentiated, and torch's FlopCounterMode fails for it."""
    is_seen = is_in_torch_dispatch_mode() and watched_as() is None
    return widens(a, dtype) and not torch.is_grad_enabled() and not is_seen


def product(a: Tensor, b: Tensor, dtype: torch.dtype, alpha: float = 1.0) -> Tensor:
    """alpha * (a @ b) in dtype, or in the operands' dtype where the product cannot be had in dtype. a, b: matrices."""
    if alpha != 1.0 and not have_storage(a, b):  # functorch's addmm reads what beta = 0 leaves out
        return (a @ b) * alpha
    if not widens_now(a, dtype):
        return a @ b if alpha == 1.0 else torch.addmm(a.new_empty(()), a, b, beta=0, alpha=alpha)
    if alpha == 1.0:
        return torch.mm(a, b, out_dtype=dtype)
    total = a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)
    add_product_(total, a, b, alpha=alpha, is_first=True)
    return total


def affine(x: Tensor, weight: Tensor, bias: Tensor | None, alpha: float = 1.0) -> Tensor:
    """alpha * (x @ weight.T + bias). alpha is part of the product."""
    if alpha == 1.0:
        return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        y = product(rows, weight.t(), x.dtype, alpha)
    else:
        y = torch.addmm(bias * alpha, rows, weight.t(), alpha=alpha)
    return y.view(*x.shape[:-1], weight.shape[0])


def column_sums(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """rows.sum(dim=0) in dtype, or in that of rows. On a GPU a product with ones, in 0.6 to 1.0 of the time; a count of
    traffic sees a sum."""
    if rows.is_cuda and widens_now(rows, torch.float32):
        return torch.mm(rows.new_ones((1, rows.shape[0])), rows, out_dtype=torch.float32)[0].to(dtype)
    return rows.sum(dim=0)


def add_product_(total: Tensor, a: Tensor, b: Tensor, *, alpha: float = 1.0, is_first: bool = False) -> None:
    """total += alpha * (a @ b). total: a contiguous matrix of the operands' dtype, or wider; is_first: it is not read,
    but written to."""
    beta = 0 if is_first else 1
    if total.dtype == a.dtype:
        total.addmm_(a, b, beta=beta, alpha=alpha)
    elif widens_now(a, total.dtype):
        torch.addmm(total, a, b, beta=beta, alpha=alpha, out_dtype=total.dtype, out=total)
    else:
        product = a.new_empty(total.shape).addmm_(a, b, beta=0, alpha=alpha)
        total.copy_(product) if is_first else total.add_(product)
