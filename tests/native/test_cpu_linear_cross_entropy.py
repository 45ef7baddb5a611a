"""How linear_cross_entropy gets its gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from onetrip import ops
from tolerances import assert_ulps


def test_sums_of_many_chunks_of_bfloat16_lose_nothing():
    """64 chunks of which the first gives the gradient of weight most of its size, the others a 256th each."""
    hidden, weight = torch.ones(64, 3).bfloat16(), torch.zeros(5, 3).bfloat16().requires_grad_()
    hidden[1:] /= 256.0
    labels = torch.zeros(64, dtype=torch.int64)
    leaf = weight.detach().double().requires_grad_()
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden.double(), leaf), labels, reduction="sum"), leaf)
    loss = ops.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_rows=1)
    assert_ulps(torch.autograd.grad(loss, weight)[0], exact[0])
