"""reference.adam: 32-bit states are torch's, codes are the nearest. tests/optim/test_quality.py: what 8 bits cost."""

from __future__ import annotations

import pytest
import torch
from adam_cases import ADAMW, F16, new_slot
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK

PLAIN = ADAMW._replace(lr=1.0, weight_decay=0.0)


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
def test_zero_gradients_change_nothing(decoupled):
    slot = new_slot(torch.randn(300))
    before = slot.param.clone()
    for _ in range(50):
        reference.step([slot], [torch.zeros(300)], [PLAIN._replace(decoupled=decoupled)])
    assert torch.equal(slot.param, before)
    assert (slot.exp_avg == reference.ZERO_CODE).all() and not slot.exp_avg_sq.any()
    assert not slot.exp_avg_scale.any() and not slot.exp_avg_sq_scale.any()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1], ids=["wd0", "wd0.1"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam], ids=["AdamW", "Adam_l2"])
def test_states_of_32_bits_are_those_of_torch(optimizer, maximize, weight_decay):
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(5000, generator=generator))
    slot = new_slot(param.detach(), is_8bit=False)
    theirs = optimizer([param], lr=1e-3, weight_decay=weight_decay, maximize=maximize, foreach=False)
    decoupled = optimizer is torch.optim.AdamW
    group = ADAMW._replace(lr=1e-3, weight_decay=weight_decay, decoupled=decoupled, maximize=maximize)
    for _ in range(100):
        grad = torch.randn(5000, generator=generator)
        param.grad = grad.clone()
        theirs.step()
        reference.step([slot], [grad], [group])
    assert slot.param.data_ptr() != param.data_ptr()
    torch.testing.assert_close(slot.param, param.detach(), rtol=1e-6, atol=1e-6)
    state = theirs.state[param]
    torch.testing.assert_close(slot.exp_avg, state["exp_avg"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slot.exp_avg_sq, state["exp_avg_sq"], rtol=1e-5, atol=1e-6)
    assert float(slot.step) == 100


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
def test_codes_are_the_nearest_and_stored_as_themselves(signed):
    entries = torch.tensor(reference.code_map(signed))
    assert entries.unique().numel() == 256 and entries[-1] == 1.0 and entries[reference.ZERO_CODE if signed else 0] == 0
    scales = torch.tensor([2.0**-120, 1e-20, 1.0, 3e30])
    rows = torch.nn.functional.pad(entries.view(-1, 64), (64, 0), value=1.0)  # each block has its scale
    for scale in scales:
        codes, stored = reference.quantize(rows * scale, signed)
        assert torch.equal(codes[:, 64:].flatten(), torch.arange(256, dtype=torch.uint8))
        assert (stored == scale).all()
    edges = torch.tensor(reference.thresholds(signed))
    for least, number in ((edges, 1), (torch.nextafter(edges, torch.tensor(0.0)), 0)):
        row = torch.nn.functional.pad(least, (0, -least.numel() % BLOCK), value=1.0)
        row = torch.cat((row.view(-1, BLOCK), torch.ones(row.numel() // BLOCK, BLOCK)), dim=1)
        row = torch.stack((row[:, :BLOCK].flatten(), row[:, BLOCK:].flatten()), dim=1)  # a 1 beside every value
        codes = reference.quantize(row, signed)[0][: edges.numel(), 0].int() - (reference.ZERO_CODE if signed else 0)
        wanted = torch.arange(edges.numel()) + number
        assert torch.equal(codes, (wanted if signed else wanted.clamp(min=1)).int())


def test_torchs_default_dtype_has_no_part_in_it():
    maps = reference.code_map(True), reference.thresholds(False)
    reference.code_map.cache_clear()
    reference.thresholds.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert (reference.code_map(True), reference.thresholds(False)) == maps
        codes, scale = reference.quantize(torch.ones(5, dtype=torch.float32), True)
        assert scale.dtype == torch.float32 and codes.tolist() == [255] * 5
    finally:
        torch.set_default_dtype(torch.float32)


def test_one_final_rounding():
    """A parameter in half precision is the rounded one of the same step in float32."""
    generator = torch.Generator().manual_seed(0)
    half, grad = torch.randn(2000, generator=generator).to(F16), torch.randn(2000, generator=generator)
    slots = [new_slot(half), new_slot(half.float())]
    reference.step(slots, [grad, grad], [ADAMW])
    assert torch.equal(slots[0].param, slots[1].param.to(F16))
    assert torch.equal(slots[0].exp_avg, slots[1].exp_avg)


def test_betas_whose_ratio_underflows():
    group = reference.Group(1e-3, 1e-170, 0.999, 1e-8, 0.0, True, False)
    assert reference.scalars(group, 1.0, 1.0).largest_update == pytest.approx(1.0)
