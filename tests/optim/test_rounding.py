"""Master weights of 24 and 32 bits, and stochastic rounding: what bfloat16 and float16 parameters lose without them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit, enable_gradient_release, sharding
from onetrip.reference.philox import random_bits
from onetrip.reference.rounding import RESIDUAL_DTYPES, join, round_stochastically, split
from optim_cases import make_params, same, set_grads, snapshot, train
from torch import Tensor, nn

F16, BF16 = torch.float16, torch.bfloat16
OPTIONS = {
    "32": {"master_weight_bits": 32},
    "24": {"master_weight_bits": 24},
    "stochastic": {"bf16_stochastic_round": True},
}
EACH = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
STATES = pytest.mark.parametrize("optim_bits", [8, 32], ids=["8bit", "32bit"])


def every_kind_of_float32() -> Tensor:
    """Random bits, and ties between two 16-bit numbers."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator).to(torch.int32)
    ordinary = torch.randn(100_000, generator=generator)
    ties = ((ordinary[:1000].view(torch.int32) >> 16 << 16) + 0x8000).view(torch.float32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 1e-45, 65519.0, 65520.0])
    return torch.cat((bits.view(torch.float32), ordinary, ties, special))


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("bits", RESIDUAL_DTYPES)
def test_a_master_weight_is_its_parameter_and_the_rest(bits: int, dtype: torch.dtype) -> None:
    """The parameter is the 16-bit number nearest to it. 32 bits hold all of it; 24 bits all but a unit of their last
    place."""
    master = every_kind_of_float32()
    weight, residual = split(master, dtype, RESIDUAL_DTYPES[bits])
    joined, nearest = join(weight, residual), master.to(dtype)
    assert residual.dtype == RESIDUAL_DTYPES[bits] and same(joined.isnan(), master.isnan())
    is_tie = (master - weight.float()).abs() == (master - nearest.float()).abs()
    assert ((weight == nearest) | weight.isnan() | is_tie | ~weight.isfinite()).all()
    held = weight.isfinite() & (master.abs() >= 2.0**-14)
    exact, given = joined[held], master[held]
    if bits == 32:
        assert same(exact, given)
    else:
        precision = 8 if dtype is BF16 else 11
        assert ((exact - given).abs() <= given.abs() * 2.0 ** -(precision - 1 + 8)).all()


def test_a_weight_set_to_0_is_0() -> None:
    """Of float16 less than a unit of the residual, which counts from the smallest number."""
    for dtype in (BF16, F16):
        for residual in (torch.tensor([-5, 5], dtype=torch.int16), torch.tensor([-5, 5], dtype=torch.int8)):
            for zero in (0.0, -0.0):
                assert (join(torch.full((2,), zero, dtype=dtype), residual).abs() < 1e-8).all()


def test_stochastic_rounding_has_the_right_expectation() -> None:
    """Within 5 standard deviations; bfloat16 numbers stay what they are."""
    n = 1_000_000
    for share in (0.1, 0.5, 0.75):
        value = 1.0 + share * 2**-7
        rounded = round_stochastically(torch.full((n,), value), key=3, step=1, first=0).float()
        assert set(rounded.unique().tolist()) == {1.0, 1.0 + 2**-7}
        deviation = 2**-7 * (share * (1 - share) / n) ** 0.5
        assert abs(float(rounded.double().mean()) - value) < 5 * deviation
    exact = every_kind_of_float32().to(BF16)
    assert same(round_stochastically(exact.float(), 3, 1, 0)[~exact.isnan()], exact[~exact.isnan()])
    bits = random_bits(n, (3, 1), "cpu")
    assert same(round_stochastically(torch.full((n,), 1.0 + 2**-8), 3, 1, 0) > 1.0, bits >= 2**15)


@STATES
@pytest.mark.parametrize(
    ("cls", "dtype"), [(AdamW8bit, BF16), (Adam8bit, BF16), (AdamW8bit, F16)], ids=["AdamW8bit", "Adam8bit", "f16"]
)
def test_32_bit_master_weights_are_those_of_float32_training(cls: Any, dtype: torch.dtype, optim_bits: int) -> None:
    """Bit for bit, where the gradients are the same; the parameter is the 16-bit number nearest to them."""
    params = make_params(dtype=dtype)
    twins = [nn.Parameter(p.detach().float()) for p in params]
    arguments = {"lr": 1e-3, "weight_decay": 0.1, "optim_bits": optim_bits}
    ours, plain = cls(params, master_weight_bits=32, **arguments), cls(twins, **arguments)
    for step in range(20):
        set_grads(params, step)
        for p, twin in zip(params, twins, strict=True):
            twin.grad = p.grad.float()
        ours.step()
        plain.step()
    masters = ours.master_weights(nn.ParameterList(params))
    for i, (p, twin) in enumerate(zip(params, twins, strict=True)):
        normal = twin.detach().abs() >= 2.0**-14  # below, float16 with its residual counts in 2^-40
        assert same(masters[str(i)][normal], twin.detach()[normal]) and int((~normal).sum()) <= 3
        assert ((p == twin.to(dtype)) | ((twin - p).abs() == (twin - twin.to(dtype)).abs())).all()
        assert ours.state[p]["master_residual"].dtype == torch.int16


def test_24_bits_and_stochastic_rounding_are_nearer_than_none() -> None:
    """To float32 training, over 100 steps of 1e-4: half of bfloat16's last place at 1 is 4e-3, of 24 bits 1.5e-5."""
    errors = {}
    for name, options in {"none": {}, **OPTIONS}.items():
        p = nn.Parameter(torch.randn(10_000, generator=torch.Generator().manual_seed(0)).to(BF16))
        twin = nn.Parameter(p.detach().float())
        ours, plain = AdamW8bit([p], lr=1e-4, **options), AdamW8bit([twin], lr=1e-4)
        for step in range(100):
            set_grads([p], step)
            p.grad, twin.grad = p.grad.abs(), p.grad.abs().float()
            ours.step()
            plain.step()
        moved = ours.master_weights(nn.ParameterList([p]))["0"] - twin.detach()
        errors[name] = float(moved.double().mean().abs() / 100e-4)
    assert errors["none"] > 0.5 and errors["32"] == 0.0 and errors["24"] < 0.02 and errors["stochastic"] < 0.02, errors


@EACH
def test_pickled_copied_and_released(options: dict[str, Any]) -> None:
    """Copies go on with the same bits; so does gradient release, which steps a block's parameters alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 80), nn.Linear(80, 64)).to(BF16)
    optimizer = AdamW8bit(model.parameters(), lr=1e-3, **options)
    x = torch.randn(4, 64, dtype=BF16)
    model(x).sum().backward()
    optimizer.step()
    twin, released = copy.deepcopy((model, optimizer)), copy.deepcopy((model, optimizer))
    enable_gradient_release(*released)
    for each, its_optimizer in ((model, optimizer), twin, released):
        for step in range(3):
            its_optimizer.zero_grad()
            (each(x) * (step + 1)).sum().backward()
            its_optimizer.step()
    assert same(snapshot(twin[1]), snapshot(optimizer)) and same(snapshot(released[1]), snapshot(optimizer))


def test_random_bits_of_a_run_that_starts_inside_a_block_are_not_those_of_the_block() -> None:
    """Which the rank before has begun; kernels count from multiples of 128."""
    assert sharding.random_bits_of_run(5, 256, 128) == (5, 384)
    key, first = sharding.random_bits_of_run(5, 256, 200)
    assert key not in range(2**32) and first == 384


def test_float32_parameters_are_left_alone() -> None:
    for options in OPTIONS.values():
        plain, ours = AdamW8bit(make_params()), AdamW8bit(make_params(), **options)
        for optimizer in (plain, ours):
            train(optimizer, range(3))
        assert same(snapshot(ours)[0], snapshot(plain)[0])
        assert all("master_residual" not in entry for entry in ours.state.values())


def test_random_bits_differ_by_parameter_and_step_and_can_be_turned_off() -> None:
    params = [nn.Parameter(torch.full((5000,), 1.0, dtype=BF16)) for _ in range(2)]
    optimizer = AdamW8bit(params, lr=1e-3, weight_decay=0.0, bf16_stochastic_round=True)
    seen = []
    for _ in range(2):
        for p in params:
            p.grad = torch.full_like(p, 1.0)
            p.data.fill_(1.0)
        optimizer.step()
        seen += [p.detach().clone() for p in params]
    assert all(not same(seen[i], seen[j]) for i in range(4) for j in range(i))
    optimizer.param_groups[0]["bf16_stochastic_round"] = False
    for p in params:
        p.data.fill_(1.0)
    optimizer.step()
    assert all(len(p.unique()) == 1 for p in params)


class Counted(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"calls": 3}


def test_master_weights_of_a_model() -> None:
    """Names of its state_dict, all in float32: tied weights, buffers, parameters without a master weight. A module's
    extra state is left alone."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), Counted(64, 64)).to(BF16)
    model[2].weight = model[0].weight
    optimizer = AdamW8bit([model[0].weight], lr=1e-4, master_weight_bits=32)
    model(torch.randn(8, 64, dtype=BF16)).sum().backward()
    optimizer.step()
    masters = optimizer.master_weights(model)
    assert list(masters) == list(model.state_dict()) and masters["1.num_batches_tracked"].dtype == torch.int64
    tensors = [value for value in masters.values() if isinstance(value, Tensor)]
    assert all(value.dtype == torch.float32 for value in tensors if value.is_floating_point())
    assert same(masters["0.weight"], masters["2.weight"])
    assert not same(masters["0.weight"], model[0].weight.detach().float())
    assert same(masters["0.bias"], model[0].bias.detach().float())
    copied = copy.deepcopy(model).float()
    copied.load_state_dict(masters)


@STATES
def test_to_and_from_torch(optim_bits: int) -> None:
    """torch's states have no residual: it begins with the first step, and is left out of what torch gets."""
    theirs = torch.optim.AdamW(make_params(dtype=BF16))
    train(theirs, range(3))
    ours = AdamW8bit(make_params(dtype=BF16), optim_bits=optim_bits, master_weight_bits=24)
    ours.load_state_dict(theirs.state_dict())
    train(ours, range(3, 5))
    assert any(entry["master_residual"].any() for entry in ours.state.values())
    theirs.load_state_dict(ours.state_dict_for_torch())
    train(theirs, range(5, 6))
    assert "master_weight_bits" not in theirs.param_groups[0]


def test_files_hold_residuals(tmp_path: Any) -> None:
    source = AdamW8bit(make_params(dtype=BF16), master_weight_bits=32)
    train(source, range(3))
    source.save_safetensors(tmp_path / "state.safetensors")
    target = AdamW8bit(make_params(dtype=BF16))
    target.load_safetensors(tmp_path / "state.safetensors")
    assert same(target.state_dict(), source.state_dict())


def test_options_and_dtypes_that_change_between_steps() -> None:
    """Master weights begin where the option is set later, or a checkpoint has none; float32 parameters drop them."""
    for loads in (False, True):
        params = make_params(dtype=BF16)
        optimizer = AdamW8bit(params)
        train(optimizer, range(2))
        if loads:
            state, params = optimizer.state_dict(), [nn.Parameter(p.detach()) for p in params]
            optimizer = AdamW8bit(params, master_weight_bits=32)
            state["param_groups"][0]["master_weight_bits"] = 32
            optimizer.load_state_dict(state)
        else:
            optimizer.param_groups[0]["master_weight_bits"] = 32
        train(optimizer, range(2, 4))
        assert all(entry["master_residual"].dtype == torch.int16 for entry in optimizer.state.values())
        for p in params:
            p.data = p.data.float()
            p.grad = None
        train(optimizer, range(4, 6))
        assert all("master_residual" not in entry for entry in optimizer.state.values())
        assert all(p.isfinite().all() for p in params)


def test_wrong_residuals_raise_ValueError() -> None:
    source = AdamW8bit(make_params(dtype=BF16), master_weight_bits=32)
    train(source, range(1))
    state = source.state_dict()
    AdamW8bit(make_params()).load_state_dict(state)  # of float32 parameters it is dropped
    for change, message in (
        (torch.Tensor.float, "master_residual must be int8 or int16"),
        (lambda residual: residual[:-1], r"master_residual must be shaped like its parameter, \(64, 100\)"),
    ):
        target, damaged = AdamW8bit(make_params(dtype=BF16)), copy.deepcopy(state)
        damaged["state"][0]["master_residual"] = change(damaged["state"][0]["master_residual"])
        with pytest.raises(ValueError, match=message):
            target.load_state_dict(damaged)
        assert not target.state
    p = source.param_groups[0]["params"][0]
    source.state[p]["master_residual"] = torch.zeros(3, dtype=torch.int16)
    with pytest.raises(ValueError, match="AdamW8bit: state of parameter 0: master_residual must be int8 or int16"):
        train(source, range(1, 2))


def test_one_or_the_other() -> None:
    with pytest.raises(ValueError, match=r"bf16_stochastic_round must be False .*got master_weight_bits=32"):
        AdamW8bit(make_params(), master_weight_bits=32, bf16_stochastic_round=True)
