"""FSDP2, DTensor and DDP on gloo; and, in one process, how scales follow rows to another number of ranks."""

from __future__ import annotations

from itertools import pairwise

import optim_distributed
import pytest
import torch
from onetrip.optim import sharding
from onetrip.reference.adam import BLOCK, dequantize, quantize
from optim_cases import same
from optim_distributed import near, reshard, two_ranks

SHAPES = [(10, 100), (7, 256), (5, 90), (1001, 1), (3, 1000), (40, 3), (9, 128), (6, 192)]
IDS = ["x".join(map(str, shape)) for shape in SHAPES]
fsdp2_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="FSDP2 of this torch (2.6) runs on accelerators only"
)


def local_states(values: torch.Tensor, borders: list[int], signed: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(codes, scales) of each range of rows, quantised in blocks counted in the whole."""
    states = []
    for first_row, end_row in pairwise(borders):
        flat = values[first_row:end_row].reshape(-1)
        runs = sharding.parts(flat.numel(), first_row * values.shape[1])
        parts = [quantize(flat[begin:end], signed) for begin, end in runs]
        codes = torch.cat([codes for codes, _ in parts]) if parts else torch.zeros(0, dtype=torch.uint8)
        states.append((codes, torch.cat([scale for _, scale in parts]) if parts else torch.zeros(0)))
    return states


def as_rows(states: list[tuple[torch.Tensor, torch.Tensor]], borders: list[int], length: int) -> torch.Tensor:
    rows = [
        sharding.rows_of_scales(scale, first, end - first, length)
        for (_, scale), first, end in zip(states, borders, borders[1:], strict=False)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_scales_by_rows_come_back_at_the_same_borders(shape, signed):
    n_rows, length = shape
    values = torch.randn(shape) if signed else torch.rand(shape)
    borders = [0, n_rows // 3, n_rows // 3, n_rows // 2, n_rows]
    states = local_states(values, borders, signed)
    rows = as_rows(states, borders, length)
    assert rows.shape == (n_rows, sharding.scale_columns(length))
    for (codes, scale), first, end in zip(states, borders, borders[1:], strict=False):
        assert scale.numel() == sharding.n_blocks(codes.numel(), first * length)
        got = sharding.scales_of_rows(rows[first:end], codes, first, length, signed)
        assert same(got, (scale, codes))


@pytest.mark.promise("C7")
@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_scales_by_rows_go_to_other_borders(shape, signed):
    """To one rank: blocks that no border cut keep their bits, the others take the largest scale of their parts, and
    the part that had it keeps its codes."""
    n_rows, length = shape
    values = (torch.randn(shape) if signed else torch.rand(shape)) * torch.logspace(0, -2, n_rows)[:, None]
    borders = [0, n_rows // 4, n_rows // 2, n_rows]
    states = local_states(values, borders, signed)
    codes = torch.cat([codes for codes, _ in states])
    scale, new_codes = sharding.scales_of_rows(as_rows(states, borders, length), codes, 0, length, signed)
    cut = {border * length // BLOCK for border in borders if border * length % BLOCK}
    whole_codes, whole_scale = quantize(values.view(-1), signed)
    kept = torch.tensor([block not in cut for block in range(len(scale))])
    assert same(scale[kept], whole_scale[kept])
    assert torch.equal(scale, whole_scale)  # a part's scale is its largest magnitude, so the largest is the whole's
    of_block = torch.arange(codes.numel()) // BLOCK
    assert same(new_codes[kept[of_block]], whole_codes[kept[of_block]])
    error = (dequantize(new_codes, scale, signed) - values.view(-1)).abs()
    once = (dequantize(whole_codes, whole_scale, signed) - values.view(-1)).abs()
    assert bool((error <= 2 * once.max() + 1e-7).all())
    if cut and not signed:
        assert bool((new_codes[values.view(-1) > 0] > 0).all())


@pytest.mark.slow
@pytest.mark.promise("C8")
@fsdp2_on_cpu
def test_two_ranks():
    """C8: one process, DDP and FSDP2 agree. State dicts gathered and spread; tensors sharded by columns, and
    replicas."""
    optim_distributed.run(2, two_ranks)


@pytest.mark.promise("C7")
@pytest.mark.promise("C8")
@fsdp2_on_cpu
@pytest.mark.slow
def test_four_ranks_then_two_then_one(tmp_path):
    """C8: resuming FSDP2 from torch.distributed.checkpoint with as many ranks is training on, bit for bit. C7: shards
    that are uneven at every world size; parameters bit for bit, states but for blocks that were cut."""
    results = []
    previous = None
    for i, world in enumerate((4, 4, 2, 1)):
        folder, result = str(tmp_path / f"checkpoint-{i}"), str(tmp_path / f"result-{i}")
        optim_distributed.run(world, reshard, previous, folder, result)
        results.append(torch.load(result))
        previous = folder
    assert same(results[1], results[0])
    for values, after in results[2:]:
        near(values, results[0][0])
        for name in optim_distributed.SHAPES:
            assert float((after[name] - results[0][1][name]).abs().max()) < 2 * 1e-2 * 0.1
