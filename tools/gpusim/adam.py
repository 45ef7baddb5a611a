"""Steps of Adam as simulator cases, and what the reference makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from onetrip.ops.adam import CHUNK
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK, Group, Slot
from onetrip.reference.rounding import RESIDUALS, Rounding, split
from torch import Tensor

from tools.gpusim.harness import DTYPE_CODES, ORDERS, Case, assert_same_bits

STREAM = (0x1234_5678_9ABC_DEF0, (1 << 35) + 1280)
"""Key and first element of parameters that are rounded stochastically."""
ADAMW = Group(1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled=True, maximize=False)
ADAM = Group(1e-2, 0.8, 0.99, 1e-6, 0.2, decoupled=False, maximize=False)


@dataclass(frozen=True)
class Parameter:
    """One slot. What its tensors hold is a function of these fields, but for the shift."""

    numel: int
    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    is_8bit: bool = True
    counter: int = 0
    special: tuple[float, ...] = ()
    """Put into the gradient here and there."""
    grads: tuple[float, ...] = ()
    """All of the gradient, instead of random numbers; the states are zeros then."""
    shift: int = 0
    """Elements by which every tensor is off a 64-byte boundary."""
    rounding: Rounding = Rounding.NEAREST


@dataclass
class Step:
    """One step over the parameters; counter i belongs to group counters[i]."""

    parameters: Sequence[Parameter]
    groups: Sequence[Group] = (ADAMW,)
    counters: Sequence[int] = (0,)
    steps_before: float = 3.0
    grad_scale: float | None = None
    found_inf: float | None = None
    orders: tuple[int, ...] = ORDERS
    clips: bool = True
    """Whether the squares of the gradients are summed as well."""
    steps: list[Tensor] = field(init=False)
    slots: list[Slot] = field(init=False)
    grads: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = [torch.tensor(self.steps_before) for _ in self.counters]
        self.slots, self.grads = [], []
        for i, parameter in enumerate(self.parameters):
            slot, grad = self._draw(i, parameter)
            self.slots.append(slot)
            self.grads.append(grad)

    def _draw(self, i: int, parameter: Parameter) -> tuple[Slot, Tensor]:
        generator = torch.Generator().manual_seed(1000 * i + parameter.numel)

        def random(decades: float) -> Tensor:
            """Normal numbers, of scales that differ from block to block."""
            n_blocks = -(-parameter.numel // BLOCK)
            scale = 10.0 ** (decades * (torch.rand(n_blocks, 1, generator=generator) - 0.5))
            return (torch.randn(n_blocks, BLOCK, generator=generator) * scale).view(-1)[: parameter.numel]

        p, g, m, root = random(2), random(4), random(4), random(4).abs()
        if parameter.grads:
            g, m, root = torch.tensor(parameter.grads), torch.zeros_like(m), torch.zeros_like(root)
        for k, value in enumerate(parameter.special):
            g[k * 37 % parameter.numel] = value
        step, group = self.steps[parameter.counter], self.counters[parameter.counter]
        rest: dict[str, Tensor | tuple[int, int]] = {}
        if parameter.rounding in RESIDUALS:
            p, rest["residual"] = split(p, parameter.param, RESIDUALS[parameter.rounding])
        elif parameter.rounding is Rounding.STOCHASTIC:
            rest["random_bits"] = STREAM
        if parameter.is_8bit:
            (m_codes, m_scale), (root_codes, root_scale) = reference.quantize(m, True), reference.quantize(root, False)
            slot = Slot(p.to(parameter.param), m_codes, root_codes, m_scale, root_scale, step, group, **rest)
        else:
            slot = Slot(p.to(parameter.param), m, root * root, None, None, step, group, **rest)
        return slot, g.to(parameter.grad)

    def updated(self) -> dict[str, tuple[Tensor, int]]:
        """Everything that a step changes: name -> (tensor, elements off a boundary)."""
        found: dict[str, tuple[Tensor, int]] = {}
        for i, (parameter, slot) in enumerate(zip(self.parameters, self.slots, strict=True)):
            for name in ("param", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale", "residual"):
                tensor = getattr(slot, name)
                if tensor is not None:
                    found[f"{name}.{i}"] = (tensor, parameter.shift)
        return found | {f"step.{i}": (step, 0) for i, step in enumerate(self.steps)}

    def case(self) -> Case:
        numbers: dict[str, float] = {
            "n_tensors": len(self.parameters),
            "n_counters": len(self.counters),
            "n_groups": len(self.groups),
        }
        inputs: dict[str, tuple[Tensor, int]] = {}
        for i, (parameter, grad) in enumerate(zip(self.parameters, self.grads, strict=True)):
            numbers[f"param_dtype.{i}"], numbers[f"grad_dtype.{i}"] = (
                DTYPE_CODES[dtype] for dtype in (parameter.param, parameter.grad)
            )
            numbers[f"rounding.{i}"] = int(parameter.rounding)
            numbers[f"key.{i}"], numbers[f"first.{i}"] = self.slots[i].random_bits or (0, 0)
            numbers[f"numel.{i}"], numbers[f"counter.{i}"] = parameter.numel, parameter.counter
            inputs[f"grad.{i}"] = (grad, parameter.shift * grad.itemsize)
        for i, group in enumerate(self.counters):
            numbers[f"group_of_counter.{i}"] = group
        for i, group in enumerate(self.groups):
            if isinstance(group.lr, Tensor):
                inputs[f"lr.{i}"] = (group.lr.view(1), 0)
            numbers |= {f"group.{i}.{name}": float(value) for name, value in group._asdict().items()}
        for name in ("grad_scale", "found_inf"):
            if getattr(self, name) is not None:
                inputs[name] = (torch.tensor([getattr(self, name)]), 0)
        outputs: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {}
        for name, (tensor, shift) in self.updated().items():
            inputs[f"old.{name}"] = (tensor.view(-1), 0)
            outputs[name] = (tuple(tensor.shape), tensor.dtype, shift * tensor.itemsize)
        if self.clips:
            outputs["squares"] = (tuple(self._squares().shape), torch.float64, 0)
        return Case("step", numbers, inputs, outputs, self.orders)

    def _squares(self) -> Tensor:
        """Sums of squares of the gradients' chunks: those of a kind next to each other, as the driver sorts them."""
        of_kind: dict[object, list[float]] = {}
        for parameter, grad in zip(self.parameters, self.grads, strict=True):
            kind = parameter.param, parameter.grad, parameter.is_8bit, parameter.rounding
            squares = grad.double().square()
            chunks = [squares[first : first + CHUNK].sum().item() for first in range(0, len(squares), CHUNK)]
            of_kind.setdefault(kind, []).extend(chunks)
        return torch.tensor([chunk for chunks in of_kind.values() for chunk in chunks], dtype=torch.float64)

    def check(self, outputs: dict[str, Tensor]) -> None:
        """Every bit is the reference's, which takes its step now; NaN is NaN. Sums of squares are those of float64."""
        outputs = dict(outputs)
        if self.clips:
            torch.testing.assert_close(outputs.pop("squares"), self._squares(), rtol=1e-13, atol=0.0, equal_nan=True)
        scale, found_inf = (
            None if value is None else torch.tensor(value) for value in (self.grad_scale, self.found_inf)
        )
        reference.step(self.slots, self.grads, self.groups, scale, found_inf)
        expected = self.updated()
        assert set(outputs) == set(expected)
        for name, (tensor, _) in expected.items():
            assert_same_bits(name, outputs[name], tensor)
