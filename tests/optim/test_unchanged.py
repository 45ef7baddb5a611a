"""What a step takes from the step before it: the quick look says "unchanged" only where a plan made anew would do the
same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from onetrip.ops.common.native import read
from onetrip.optim import AdamW8bit
from onetrip.optim.table import StepTable
from optim_cases import set_grads
from torch import Tensor

SHAPES = [(70, 100), (100,), (1,), (8, 8)]


def _pair() -> tuple[AdamW8bit, AdamW8bit]:
    """The same parameters twice, in two groups; the small one steps four times as far."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        made.append(AdamW8bit([{"params": params[:2]}, {"params": params[2:], "lr": 4e-3}]))
    return made[0], made[1]


def _params(optimizer: AdamW8bit) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _new_gradients(optimizer: AdamW8bit) -> None:
    for p in _params(optimizer):
        p.grad = p.grad.clone()


def _strided_gradient(optimizer: AdamW8bit) -> None:
    p = _params(optimizer)[0]
    p.grad = p.grad.t().contiguous().t()


def _negated_gradient(optimizer: AdamW8bit) -> None:
    p = _params(optimizer)[2]
    p.grad = torch.complex(torch.zeros(1), p.grad).conj().imag
    assert p.grad.is_neg() and p.grad.is_contiguous()


def _gradient_of_another_dtype(optimizer: AdamW8bit) -> None:
    """For one step: the next one's is float32 again."""
    p = _params(optimizer)[0]
    p.grad.data = p.grad.to(torch.bfloat16)


def _no_gradient(optimizer: AdamW8bit) -> None:
    _params(optimizer)[1].grad = None


def _parameter_elsewhere(optimizer: AdamW8bit) -> None:
    p = _params(optimizer)[3]
    p.data = p.data.clone()


def _parameter_strided(optimizer: AdamW8bit) -> None:
    p = _params(optimizer)[3]
    p.data.copy_(p.data.t().clone())
    p.data = p.data.t()


def _state_exchanged(optimizer: AdamW8bit) -> None:
    state = optimizer.state[_params(optimizer)[1]]
    state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def _state_of_another_precision(optimizer: AdamW8bit) -> None:
    del optimizer.state[_params(optimizer)[0]]
    optimizer.param_groups[0]["optim_bits"] = 32


def _large_state_elsewhere(optimizer: AdamW8bit) -> None:
    codes = optimizer.state[_params(optimizer)[0]]["exp_avg_codes"]
    codes.data = codes.data.roll(1)


def _in_the_other_group(optimizer: AdamW8bit) -> None:
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


def _exchanged_in_its_list(optimizer: AdamW8bit) -> None:
    old = optimizer.param_groups[1]["params"][1]
    new = torch.nn.Parameter(old.detach().clone())
    new.grad = old.grad
    optimizer.param_groups[1]["params"][1] = new


CHANGES = [
    _new_gradients,
    _strided_gradient,
    _negated_gradient,
    _gradient_of_another_dtype,
    _no_gradient,
    _parameter_elsewhere,
    _parameter_strided,
    _state_exchanged,
    _state_of_another_precision,
    _large_state_elsewhere,
    _in_the_other_group,
    _exchanged_in_its_list,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_between_steps_does_what_a_new_plan_would(change: Callable[[AdamW8bit], None]) -> None:
    ours, anew = _pair()
    for step in range(5):
        for optimizer in (ours, anew):
            set_grads(_params(optimizer), step)
            if step == 2:
                change(optimizer)
            optimizer.step()
        anew._grouping = []
        for p, q in zip(_params(ours), _params(anew), strict=True):
            assert torch.equal(p, q), step
            assert all(torch.equal(ours.state[p][key], anew.state[q][key]) for key in anew.state[q]), step


@pytest.mark.parametrize("moved", [False, True], ids=["same-gradients", "new-gradients"])
def test_nothing_is_read_twice_where_nothing_changed(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, 2)
    if read.operands((x,)) < 0:
        pytest.skip("tensors do not tell this build what they are: torch before 2.10, or no native library")
    optimizer, _ = _pair()
    set_grads(_params(optimizer), 0)
    optimizer.step()
    for name in ("_checked", "_select", "_sort"):
        monkeypatch.setattr(StepTable, name, lambda *_: pytest.fail("the table was made anew"))
    for _ in range(2):
        if moved:
            _new_gradients(optimizer)
        optimizer.step()
