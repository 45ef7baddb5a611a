"""AdamW8bit and Adam8bit as optimizers: what a step computes, on which parameters, and what each argument changes."""

from __future__ import annotations

import copy
import math
import pickle
import weakref

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit
from onetrip.reference.adam import BLOCK
from optim_cases import bits_of, give_grad, make_params, same, set_grads, snapshot, steps_taken, train
from torch import Tensor

BOTH = pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit], ids=["AdamW8bit", "Adam8bit"])
TORCH = {AdamW8bit: torch.optim.AdamW, Adam8bit: torch.optim.Adam}


def gap(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).detach().abs().max()) for x, y in zip(a, b, strict=True) if x.numel())


@pytest.mark.promise("Q9")
@BOTH
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_32_bit_mode_is_torchs(cls, maximize):
    """Q9: a hundred steps, weight decay included."""
    arguments = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "maximize": maximize}
    ours, theirs = make_params(), make_params()
    train(cls(ours, optim_bits=32, **arguments), range(100))
    train(TORCH[cls](theirs, **arguments), range(100))
    assert gap(ours, theirs) < 2e-6  # of parameters up to 4


def test_states_take_two_bytes_a_parameter():
    params = make_params([(512, 1000), (4096,), (100,)])
    optimizer = AdamW8bit(params)
    train(optimizer, range(1))
    large = optimizer.state[params[0]]
    assert sum(value.nbytes for value in large.values()) <= 2.07 * params[0].numel()
    assert {key: value.dtype for key, value in large.items()} == {
        "n_steps": torch.float32,
        "exp_avg_codes": torch.uint8,
        "exp_avg_sq_codes": torch.uint8,
        "exp_avg_scale": torch.float32,
        "exp_avg_sq_scale": torch.float32,
    }
    assert large["exp_avg_codes"].shape == params[0].shape and large["n_steps"].shape == ()
    assert large["exp_avg_scale"].shape == (math.ceil(512 * 1000 / BLOCK),)
    assert set(optimizer.state[params[2]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float32


def test_precision_is_chosen_by_size_and_group_once():
    params = make_params([(5000,), (5000,), (50,), (5000,)])
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "optim_bits": 32},
        {"params": params[2:3], "min_8bit_numel": 50},
        {"params": params[3:], "min_8bit_numel": 5001},
    ]
    optimizer = AdamW8bit(groups)
    train(optimizer, range(1))
    assert [bits_of(optimizer.state[p]) for p in params] == [8, 32, 8, 32]
    optimizer.param_groups[0]["optim_bits"] = 32  # too late
    train(optimizer, range(1, 3))
    assert [bits_of(optimizer.state[p]) for p in params] == [8, 32, 8, 32]


@pytest.mark.promise("Q12")
@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 2e-2},
        {"betas": (0.8, 0.999)},
        {"betas": (0.9, 0.9)},
        {"eps": 0.5},
        {"weight_decay": 0.3},
        {"optim_bits": 32},
        {"min_8bit_numel": 7000},
        {"maximize": True},
        {"master_weight_bits": 24},
        {"bf16_stochastic_round": True},
    ],
    ids=lambda changed: "-".join(f"{key}={value}" for key, value in changed.items()),
)
def test_every_argument_changes_the_result_also_as_a_key_of_a_group(changed):
    """Q12; capturable is in test_capturable_is_refused_on_the_cpu."""
    dtype = torch.bfloat16 if {"master_weight_bits", "bf16_stochastic_round"} & set(changed) else torch.float32
    plain, as_argument, as_key = (make_params([(64, 100)], dtype) for _ in range(3))
    train(AdamW8bit(plain, lr=1e-2), range(4))
    train(AdamW8bit(as_argument, **{"lr": 1e-2, **changed}), range(4))
    train(AdamW8bit([{"params": as_key, **changed}], lr=1e-2), range(4))
    assert not same(plain, as_argument) and same(as_argument, as_key)


@pytest.mark.promise("Q12")
def test_capturable_is_refused_on_the_cpu():
    params = make_params()
    set_grads(params, 0)
    before = copy.deepcopy(params)
    optimizer = AdamW8bit(params, capturable=True)
    with pytest.raises(ValueError, match="AdamW8bit: capturable must be False for parameters on the CPU, got True"):
        optimizer.step()
    assert same(params, before) and not optimizer.state


@pytest.mark.promise("Q13")
def test_many_tensors_at_once_are_each_alone():
    """Q13: bit for bit, blocks and chunks of every length."""
    shapes = [(1,), (127,), (129,), (4095,), (4097,), (0,)]
    together, alone = make_params(shapes), make_params(shapes)
    train(optimizer := AdamW8bit(together, min_8bit_numel=0), range(5))
    for p, q in zip(together, alone, strict=True):
        single = AdamW8bit([q], min_8bit_numel=0)
        for step in range(5):
            set_grads(every := make_params(shapes), step)
            q.grad = every[[r.shape for r in every].index(q.shape)].grad
            single.step()
        assert same(p, q) and same(optimizer.state[p], single.state[q])


@pytest.mark.promise("adam B5, B6, B12")
def test_dtypes_of_parameters_and_gradients_mix():
    """B6: the nine pairs, each as if computed in float32 and rounded once."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    values, grads = torch.randn(9, 4096), torch.randn(9, 4096)
    pairs = [(p, g) for p in dtypes for g in dtypes]
    mixed, single = [], []
    for i, (param_dtype, grad_dtype) in enumerate(pairs):
        p = torch.nn.Parameter(values[i].to(param_dtype))
        give_grad(p, grads[i].to(grad_dtype))
        mixed.append(p)
        q = torch.nn.Parameter(values[i].to(param_dtype).float())
        q.grad = grads[i].to(grad_dtype).float()
        single.append(q)
    AdamW8bit(mixed, lr=0.1).step()
    AdamW8bit(single, lr=0.1).step()
    for (param_dtype, _), p, q in zip(pairs, mixed, single, strict=True):
        assert p.dtype == param_dtype and same(p.detach(), q.detach().to(param_dtype))


def strided_pairs() -> dict[str, Tensor]:
    base = torch.randn(70, 64)
    return {
        "transposed": base.t(),
        "sliced": torch.randn(70, 128)[:, ::2],
        "channels-last": torch.randn(4, 8, 10, 16).to(memory_format=torch.channels_last),
        "offset": torch.randn(4481)[1:],
    }


@pytest.mark.promise("adam B3, B4")
@pytest.mark.parametrize("layout", strided_pairs())
@pytest.mark.parametrize("which", ["param", "grad", "both"])
def test_layout_changes_no_bit(layout, which):
    """B3, B4: states are in the logical order whatever the layout of parameter and gradient."""
    torch.manual_seed(3)
    value, grads = strided_pairs()[layout], [strided_pairs()[layout] for _ in range(3)]
    p = torch.nn.Parameter(value.contiguous() if which == "grad" else value)
    q = torch.nn.Parameter(value.contiguous().clone())
    ours, plain = AdamW8bit([p], lr=0.1), AdamW8bit([q], lr=0.1)
    strides = p.stride()
    for grad in grads:
        p.grad = grad if which != "param" else grad.contiguous()
        q.grad = grad.contiguous()
        ours.step()
        plain.step()
    assert p.stride() == strides and same(p, q) and same(ours.state[p], plain.state[q])


@pytest.mark.promise("Q10")
def test_groups_added_later_step_with_their_own_numbers():
    params, expected = make_params([(4096,), (5000,)]), make_params([(4096,), (5000,)])
    optimizer = AdamW8bit(params[:1], lr=0.1)
    train(optimizer, range(2))
    optimizer.add_param_group({"params": params[1], "lr": 0.01, "betas": (0.5, 0.9)})
    train(optimizer, range(2, 4))
    first, second = AdamW8bit(expected[:1], lr=0.1), AdamW8bit(expected[1:], lr=0.01, betas=(0.5, 0.9))
    train(first, range(2))
    for step in (2, 3):
        set_grads(expected, step)
        first.step()
        second.step()
    assert same(params, expected)


@pytest.mark.promise("Q10")
@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_schedulers_move_the_learning_rate(tensor_lr):
    """Q10: as torch's AdamW under the same schedule."""
    ours, theirs = make_params(), make_params()
    lr = torch.tensor(1e-2) if tensor_lr else 1e-2
    optimizers = AdamW8bit(ours, lr=lr, optim_bits=32), torch.optim.AdamW(theirs, lr=1e-2)
    for optimizer in optimizers:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=12, cycle_momentum=True)
        for step in range(10):
            train(optimizer, [step])
            scheduler.step()
    assert gap(ours, theirs) < 2e-6


def test_closure_and_hooks():
    params = make_params()
    optimizer = AdamW8bit(params, lr=0.1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))

    def closure() -> Tensor:
        calls.append("closure")
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0 and calls == ["pre", "closure", "post"]
    assert all(steps_taken(optimizer.state[p]) == 1.0 for p in params)


def test_a_parameter_listed_twice_steps_once():
    p, q = make_params([(4096,)]), make_params([(4096,)])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = AdamW8bit([p[0], p[0]])
    set_grads(p, 0)
    optimizer.step()
    train(AdamW8bit(q), range(1))
    assert same(p, q)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_alone(how):
    params = make_params()
    optimizer = AdamW8bit(params, lr=0.1)
    train(optimizer, range(3))
    twin = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    middle = snapshot(optimizer)
    train(twin, range(3, 6))
    assert same(snapshot(optimizer), middle)
    train(optimizer, range(3, 6))
    assert same(snapshot(twin), snapshot(optimizer))


def test_dequantized_state_of_a_parameter_without_one_raises():
    with pytest.raises(ValueError, match="dequantized_state: p must be a parameter that has taken a step"):
        AdamW8bit(make_params()).dequantized_state(make_params()[0])


def test_compiled_training_step_falls_back_to_eager_for_the_optimizer():
    params, expected = make_params([(4096,)]), make_params([(4096,)])
    optimizer, plain = AdamW8bit(params), AdamW8bit(expected)
    set_grads(params, 0)
    set_grads(expected, 0)
    torch.compile(lambda: optimizer.step(), backend="eager")()
    plain.step()
    assert same(params, expected)


def test_a_gradient_lives_no_longer_than_its_parameters():
    params = make_params()
    optimizer = AdamW8bit(params)
    for step in range(3):
        set_grads(params, step)
        grads = [weakref.ref(p.grad) for p in params]
        optimizer.step()
        optimizer.zero_grad()
        assert not any(grad() is not None for grad in grads)
