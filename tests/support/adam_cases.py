"""Slots for tests of one step of Adam: how they are made, copied and compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from onetrip.optim import table
from onetrip.optim.state import RESIDUAL
from onetrip.reference.adam import BLOCK, ZERO_CODE, Group, Slot
from onetrip.reference.rounding import RESIDUALS, Rounding
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPE_IDS = {F32: "f32", F16: "f16", BF16: "bf16"}
ROUNDINGS = [
    (dtype, rounding)
    for dtype in (F16, BF16)
    for rounding in (*RESIDUALS, Rounding.STOCHASTIC)
    if (dtype, rounding) != (F16, Rounding.STOCHASTIC)
]
"""The dtypes of parameters, and how they are rounded if not to nearest."""
ADAMW = Group(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, maximize=False)
GROUPS = {
    "l2": ADAMW._replace(decoupled=False),
    "l2_of_0": ADAMW._replace(decoupled=False, weight_decay=0.0),
    "no_decay": ADAMW._replace(weight_decay=0.0),
    "maximize": ADAMW._replace(maximize=True),
    "l2_maximize": ADAMW._replace(decoupled=False, maximize=True),
    "no_momentum": ADAMW._replace(beta1=0.0),
    "no_memory": ADAMW._replace(beta2=0.0),
    "beta1_near_1": ADAMW._replace(beta1=0.999, beta2=0.9),
    "beta2_is_beta1_squared": ADAMW._replace(beta1=0.5, beta2=0.25),
    "no_eps": ADAMW._replace(eps=0.0),
    "large_eps": ADAMW._replace(eps=1.0),
    "lr_tensor": ADAMW._replace(lr=torch.tensor(0.3)),
    "no_lr": ADAMW._replace(lr=0.0),
}


class StepTable(table.StepTable):
    """Steps of slots without an optimizer: each is a parameter of its own."""

    @classmethod
    def of_slots(cls, slots: Sequence[Slot]) -> StepTable:
        members = []
        for i, slot in enumerate(slots):
            state = {"exp_avg_codes": slot.exp_avg, "exp_avg_scale": slot.exp_avg_scale} | {
                "exp_avg_sq_codes": slot.exp_avg_sq, "exp_avg_sq_scale": slot.exp_avg_sq_scale, "n_steps": slot.step
            }  # fmt: skip
            if slot.exp_avg_scale is None:
                state = {"step": slot.step, "exp_avg": slot.exp_avg, "exp_avg_sq": slot.exp_avg_sq}
            if slot.residual is not None:
                state[RESIDUAL] = slot.residual
            members.append(table.Member(slot.param, state, slot.group, str(i), slot.random_bits))
        return cls(members, "adam")

    def step(self, grads: list[Tensor], groups: Sequence[Group], *numbers: Tensor | None) -> None:
        """numbers: grad_scale and found_inf."""
        if not self.prepare(grads):
            raise ValueError("parameters and states must lie where they lay when the table was made")
        self.launch(groups, *numbers)


def placed(tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy whose address is `shift` elements past an aligned one."""
    memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)
    return memory[shift:].copy_(tensor)


def new_slot(
    param: Tensor,
    is_8bit: bool = True,
    group: int = 0,
    step: Tensor | None = None,
    shift: int = 0,
    rounding: Rounding = Rounding.NEAREST,
) -> Slot:
    """A flat parameter with the states of step 0, all arrays `shift` elements past an aligned address."""
    n = param.numel()
    if is_8bit:
        states = (torch.full((n,), ZERO_CODE, dtype=torch.uint8), torch.zeros(n, dtype=torch.uint8))
        scales = [placed(torch.zeros(-(-n // BLOCK)), shift) for _ in range(2)]
    else:
        states, scales = (torch.zeros(n), torch.zeros(n)), [None, None]
    exp_avg, exp_avg_sq = (placed(state, shift) for state in states)
    residual = None
    if rounding in RESIDUALS:
        residual = placed(torch.zeros(n, dtype=RESIDUALS[rounding]), shift)
    return Slot(
        placed(param, shift),
        exp_avg,
        exp_avg_sq,
        *scales,
        torch.tensor(0.0) if step is None else step,
        group,
        residual,
        (n, 0) if rounding is Rounding.STOCHASTIC else None,
    )


def new_slots(
    sizes: Sequence[int],
    dtype: torch.dtype = F32,
    is_8bit: bool = True,
    shift: int = 0,
    rounding: Rounding = Rounding.NEAREST,
) -> list[Slot]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [
        new_slot(torch.randn(n, generator=generator).to(dtype), is_8bit, shift=shift, rounding=rounding) for n in sizes
    ]


def copied(slots: Sequence[Slot]) -> list[Slot]:
    """Copies on the CPU; what slots share stays shared."""
    copies: dict[int, Tensor] = {}

    def copy(field: object) -> object:
        return copies.setdefault(id(field), field.detach().cpu().clone()) if isinstance(field, Tensor) else field

    return [Slot(*map(copy, slot)) for slot in slots]


def gradients(sizes: Sequence[int], dtype: torch.dtype = F32, seed: int = 0, shift: int = 0) -> list[Tensor]:
    """Gradients whose magnitudes differ by some decades within a block."""
    generator = torch.Generator().manual_seed(1000 + seed)
    grads = (torch.randn(n, generator=generator) * torch.randn(n, generator=generator).mul(2).exp() for n in sizes)
    return [placed((grad * 1e-2).to(dtype), shift) for grad in grads]


def assert_same_bits(ours: Sequence[Slot], expected: Sequence[Slot]) -> None:
    """Every array of every slot, bit for bit; which NaN it is is left open."""
    for i, (slot, other) in enumerate(zip(ours, expected, strict=True)):
        for name, tensor, wanted in zip(Slot._fields, slot, other, strict=True):
            if not isinstance(tensor, Tensor):
                assert tensor == wanted
                continue
            assert tensor.data_ptr() != wanted.data_ptr() or not tensor.numel()
            same = tensor == wanted
            if tensor.is_floating_point():
                same = (same & (tensor.signbit() == wanted.signbit())) | (tensor.isnan() & wanted.isnan())
            assert same.all(), f"slot {i}, {name}: differs at {(~same).nonzero()[:4].flatten().tolist()}"
