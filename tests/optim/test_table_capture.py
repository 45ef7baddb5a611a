"""StepTable's way to a CUDA device, on a machine that has none: what is allocated when, and what a graph reads."""

from __future__ import annotations

import torch
from adam_cases import StepTable
from onetrip.optim import table
from onetrip.reference.adam import Slot


def test_a_capture_pins_no_memory_and_its_table_stays(monkeypatch):
    """torch 2.6 and 2.7 cannot allocate pinned memory under the capture of a CUDA graph, in which gradients get new
    addresses; and at every replay the graph reads the table that it was given then."""
    slots = [Slot(torch.ones(n), torch.zeros(n), torch.zeros(n), None, None, torch.zeros(()), 0) for n in (5, 9)]
    is_capturing, allocations = False, []

    def allocated(tensor: torch.Tensor, pin_memory: bool = True) -> torch.Tensor:
        allocations.append(is_capturing)
        return tensor.clone()

    made = StepTable.of_slots(slots)
    captured: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(table, "_CAPTURED", captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(torch.Tensor, "pin_memory", allocated)
    monkeypatch.setattr(torch, "empty_like", allocated)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, device, non_blocking: tensor.clone())
    made.device = torch.device("cuda", 0)
    kept = []
    for is_capturing in (False, True, False, False, True, False):  # noqa: B007 (allocated reads it)
        grads = [torch.ones(5), torch.ones(9)]
        kept.append(grads)
        assert made.prepare(grads)
    assert allocations and not any(allocations)
    for (pinned,), step in zip(captured, (1, 4), strict=True):
        assert pinned[:, 1].tolist() == [grad.data_ptr() for grad in kept[step]]
