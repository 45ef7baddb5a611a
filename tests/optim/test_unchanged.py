"""What a step takes from the step before it: the quick look says "unchanged" only where a plan made anew would do the
same."""

from __future__ import annotations

from functools import partial

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


def _parameter_of_another_dtype(optimizer: AdamW8bit) -> None:
    """At the same address."""
    p = _params(optimizer)[0]
    p.grad, values = None, p.data.bfloat16()
    p.data = p.data.view(-1).view(torch.bfloat16)[:7000].view(70, 100).copy_(values)
    p.grad = torch.ones_like(p)


def _state_exchanged(optimizer: AdamW8bit, i: int, key: str) -> None:
    """Another tensor; the one before no longer has its values."""
    state = optimizer.state[_params(optimizer)[i]]
    before = state[key]
    state[key] = before.clone()
    before.zero_()


def _state_elsewhere(optimizer: AdamW8bit, i: int, key: str) -> None:
    """The same tensor with another storage; the one before no longer has its values."""
    value = optimizer.state[_params(optimizer)[i]][key]
    before = value.detach()
    value.data = before.clone()
    before.zero_()


def _entries_exchanged(optimizer: AdamW8bit) -> None:
    for p, entry in list(optimizer.state.items()):
        optimizer.state[p] = {key: value.clone() for key, value in entry.items()}
        entry["exp_avg" if "exp_avg" in entry else "exp_avg_codes"].zero_()


def _entries_put_back(optimizer: AdamW8bit) -> None:
    entries = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update({p: dict(entry) for p, entry in entries.items()})


def _state_of_another_precision(optimizer: AdamW8bit) -> None:
    del optimizer.state[_params(optimizer)[0]]
    optimizer.param_groups[0]["optim_bits"] = 32


def _in_the_other_group(optimizer: AdamW8bit) -> None:
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


def _exchanged_in_its_list(optimizer: AdamW8bit) -> None:
    """As accelerate does for FSDP2."""
    old = optimizer.param_groups[1]["params"][1]
    new = torch.nn.Parameter(old.detach().clone())
    new.grad = old.grad
    optimizer.param_groups[1]["params"][1] = new


def _exchanged_with_its_list(optimizer: AdamW8bit) -> None:
    optimizer.param_groups[1]["params"] = list(optimizer.param_groups[1]["params"])
    _exchanged_in_its_list(optimizer)


STATES = [(0, "n_steps"), *[(0, f"{key}_{what}") for key in ("exp_avg", "exp_avg_sq") for what in ("codes", "scale")]]
SMALL_STATES = [(1, "step"), (1, "exp_avg"), (1, "exp_avg_sq")]
ELSEWHERE = {
    "new-gradients": _new_gradients,
    "strided-gradient": _strided_gradient,
    "parameter": _parameter_elsewhere,
    "strided-parameter": _parameter_strided,
    "entries": _entries_exchanged,
    "entries-put-back": _entries_put_back,
    **{f"{key}-exchanged": partial(_state_exchanged, i=i, key=key) for i, key in [*STATES, (1, "exp_avg")]},
    **{key: partial(_state_elsewhere, i=i, key=key) for i, key in [*STATES, *SMALL_STATES]},
}
"""Changes of no value: without them the steps are the same."""
OTHERS = {
    "gradient-dtype": _gradient_of_another_dtype,
    "no-gradient": _no_gradient,
    "parameter-dtype": _parameter_of_another_dtype,
    "precision": _state_of_another_precision,
    "other-group": _in_the_other_group,
    "other-parameter": _exchanged_in_its_list,
    "other-parameter-and-list": _exchanged_with_its_list,
}


@pytest.mark.promise("adam storage")
@pytest.mark.promise("adam varying")
@pytest.mark.parametrize(
    ("name", "resting"),
    [
        *((name, ()) for name in (*ELSEWHERE, *OTHERS)),
        *((name, (0, 3)) for name in ("parameter", "strided-parameter", "entries", "exp_avg_codes", "precision")),
    ],
)
def test_a_change_between_steps_does_what_a_new_plan_would(name: str, resting: tuple[int, ...]) -> None:
    """resting: parameters that have no gradient before, at and after the change."""
    ours, anew = _pair()
    for step in range(5):
        for optimizer in (ours, anew):
            set_grads(_params(optimizer), step)
            for i in resting if step in (1, 2, 3) else ():
                _params(optimizer)[i].grad = None
            if step == 2 and (optimizer is ours or name in OTHERS):
                (ELSEWHERE | OTHERS)[name](optimizer)
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


def test_storage_of_a_parameter_that_rests_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As offloaded experts do. It is looked at when it steps again."""
    optimizer, _ = _pair()
    resting = _params(optimizer)[1]
    for step in range(4):
        set_grads(_params(optimizer), step)
        rests = step in (1, 2)
        with monkeypatch.context() as patch:
            if rests:
                resting.grad = None
                patch.setattr(StepTable, "_rows", lambda *_: pytest.fail("the table was made anew"))
            resting.data = resting.data.clone()
            before = resting.clone()
            optimizer.step()
        assert torch.equal(resting, before) is rests
