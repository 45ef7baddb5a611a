"""linear_cross_entropy over a vocabulary that is cut over gloo processes: the loss and gradients of one process."""

from __future__ import annotations

import optim_distributed
import pytest
import vocab_parallel
from onetrip.ops.common.backends import available_backends


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_like_one_process(world: int) -> None:
    """Options, dtypes, chunks, special values, wrong calls, torch.compile; torch's loss_parallel."""
    backends = available_backends("cpu")
    optim_distributed.run(world, vocab_parallel.everything, backends if world == 2 else backends[:1])
