"""What only a CUDA device can show of Adam: bits, graphs, streams, no synchronisation, more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch
from adam_cases import ROUNDINGS, StepTable
from onetrip import use_backend
from onetrip.optim import AdamW8bit
from onetrip.reference import adam as reference
from onetrip.reference.adam import BLOCK, Group, Slot
from simulators import ADAM, ADAMW, Parameter, Step, assert_same_bits
from targets import Target, after_a_slow_producer, needs, needs_memory, without_synchronising
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.promise("adam bits"), pytest.mark.promise("Q11, S2, S5")]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


@pytest.fixture(autouse=True)
def _cuda_backend():
    needs(Target("cuda", "cuda"))
    with use_backend("cuda"):
        yield


def _shifted(tensor: Tensor, shift: int) -> Tensor:
    """On the GPU, so many elements off an aligned address."""
    moved = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device="cuda")[shift:].view(tensor.shape)
    return moved.copy_(tensor)


def _on_card(step: Step) -> tuple[list[Slot], list[Tensor]]:
    """Copies of a step's tensors, parameter by parameter as far off an address as it says."""
    counters = {id(counter): counter.cuda() for counter in step.steps}
    slots, grads = [], []
    for parameter, slot, grad in zip(step.parameters, step.slots, step.grads, strict=True):
        moved = {
            name: _shifted(value, parameter.shift) if isinstance(value, Tensor) else value
            for name, value in slot._asdict().items()
            if name not in ("step", "group")
        }
        slots.append(Slot(**moved, step=counters[id(slot.step)], group=slot.group))
        grads.append(_shifted(grad, parameter.shift))
    return slots, grads


def _assert_same_slots(slots: list[Slot], expected: list[Slot]) -> None:
    for i, (slot, other) in enumerate(zip(slots, expected, strict=True)):
        for name, tensor in slot._asdict().items():
            if isinstance(tensor, Tensor):
                assert_same_bits(f"{name}.{i}", tensor.cpu().view(-1), getattr(other, name).cpu().view(-1))


@pytest.mark.parametrize("special", [(), NOT_FINITE], ids=["numbers", "not_finite"])
@pytest.mark.parametrize("group", [ADAMW, ADAM], ids=["decoupled", "l2"])
def test_bits_of_the_reference(group: Group, special: tuple[float, ...]) -> None:
    """Every kind in one call, aligned and not, several steps."""
    step = Step(
        [
            Parameter(numel, param, grad, is_8bit, special=special, shift=shift)
            for param in DTYPES.values()
            for grad in DTYPES.values()
            for is_8bit in (True, False)
            for numel, shift in ((1, 0), (129, 1), (4097, 0), (100_003, 0), (5000, 3))
        ],
        [group],
    )
    slots, grads = _on_card(step)
    table = StepTable.of_slots(slots)
    for _ in range(3):
        table.step(grads, step.groups, torch.tensor(8.0, device="cuda"))
        reference.step(step.slots, step.grads, step.groups, torch.tensor(8.0))
        _assert_same_slots(slots, step.slots)


@pytest.mark.parametrize("special", [(), NOT_FINITE], ids=["numbers", "not_finite"])
@pytest.mark.parametrize("group", [ADAMW, ADAM], ids=["decoupled", "l2"])
def test_roundings(group: Group, special: tuple[float, ...]) -> None:
    """Residuals and random bits of 16-bit parameters are the reference's."""
    step = Step(
        [
            Parameter(numel, param, grad, is_8bit, special=special, shift=shift, rounding=rounding)
            for param, rounding in ROUNDINGS
            for grad in (torch.float32, param)
            for is_8bit in (True, False)
            for numel, shift in ((129, 1), (4097, 0), (100_003, 0), (5000, 8))
        ],
        [group],
    )
    for slot in step.slots:
        if slot.residual is not None:  # of a weight set to 0 since
            slot.param[::50], slot.residual[::50] = 0.0, -1
    slots, grads = _on_card(step)
    table = StepTable.of_slots(slots)
    for _ in range(3):
        table.step(grads, step.groups)
        reference.step(step.slots, step.grads, step.groups)
        _assert_same_slots(slots, step.slots)


def test_found_inf_leaves_everything() -> None:
    step = Step([Parameter(5000, special=NOT_FINITE), Parameter(5000, is_8bit=False)])
    slots, grads = _on_card(step)
    StepTable.of_slots(slots).step(grads, step.groups, None, torch.ones((), device="cuda"))
    _assert_same_slots(slots, step.slots)


def test_ten_replays_are_ten_steps() -> None:
    """lr and the count of steps lie on the GPU: a captured step goes on counting, and follows a new lr."""
    lr = torch.tensor(1e-3, device="cuda")
    groups = [ADAMW._replace(lr=lr)]
    step = Step([Parameter(100_003), Parameter(300, torch.bfloat16, torch.bfloat16)], groups, steps_before=0.0)
    replayed, grads = _on_card(step)
    eager, _ = _on_card(step)
    table = StepTable.of_slots(replayed)
    table.prepare(grads)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.step(grads, groups)
    eager_table = StepTable.of_slots(eager)
    for i in range(10):
        lr.fill_(1e-3 * (i + 1))
        for grad in grads:
            grad.normal_()
        graph.replay()
        eager_table.step(grads, groups)
        _assert_same_slots(replayed, eager)
    assert replayed[0].step.item() == 10.0


def test_clipping_is_captured_and_does_not_synchronise() -> None:
    replayed, eager = ([torch.nn.Parameter(torch.ones(n, device="cuda")) for n in (5000, 70)] for _ in range(2))
    grads = [torch.randn_like(p) for p in eager]
    optimizers = []
    for params in (replayed, eager):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizers.append(AdamW8bit(params, max_grad_norm=1.0, capturable=True))
        optimizers[-1].step()
    with without_synchronising():
        for optimizer in optimizers:
            optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for scale in (0.001, 10.0):
        for grad in grads:
            grad.normal_().mul_(scale)
        graph.replay()
        optimizers[1].step()
        norm = torch.cat([grad.double().view(-1) for grad in grads]).norm().float()
        assert_same_bits("norm", optimizers[0].last_grad_norm.cpu().view(1), norm.cpu().view(1))
        for p, q in zip(replayed, eager, strict=True):
            assert_same_bits("param", p.detach().cpu(), q.detach().cpu())


def test_a_step_does_not_synchronise() -> None:
    step = Step([Parameter(5000), Parameter(300, torch.float16), Parameter(7, is_8bit=False)])
    slots, grads = _on_card(step)
    table = StepTable.of_slots(slots)
    table.step(grads, step.groups)
    moved = [grad.clone() for grad in grads]
    with without_synchronising():
        table.step(grads, step.groups)
        table.step(moved, step.groups)  # new addresses: the table goes to the GPU again


def test_runs_on_the_current_stream() -> None:
    """After a slow producer of the gradients on the same stream."""
    step = Step([Parameter(1 << 20)])
    slots, grads = _on_card(step)
    after_a_slow_producer(grads[0], lambda pending: StepTable.of_slots(slots).step([pending], step.groups))
    reference.step(step.slots, step.grads, step.groups)
    _assert_same_slots(slots, step.slots)


def test_more_than_two_to_the_31_elements() -> None:
    """The last elements, of an odd number of them, in a block of their own."""
    needs_memory(30)
    numel = (1 << 31) + 257
    n_blocks = -(-numel // 128)
    small = Step([Parameter(257, torch.bfloat16, torch.bfloat16)])
    source, grads = small.slots[0], small.grads
    param, grad = (torch.zeros(numel, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    codes = [torch.full((numel,), code, dtype=torch.uint8, device="cuda") for code in (reference.ZERO_CODE, 0)]
    scales = [torch.zeros(n_blocks, device="cuda") for _ in range(2)]
    whole = Slot(param, *codes, *scales, source.step.cuda(), 0)
    for big, little in zip(whole[:5], source[:5], strict=True):
        assert isinstance(big, Tensor) and isinstance(little, Tensor)
        big[-little.numel() :].copy_(little)
    grad[-257:].copy_(grads[0])
    StepTable.of_slots([whole]).step([grad], small.groups)
    reference.step(small.slots, grads, small.groups)
    for big, little in zip(whole[:5], source[:5], strict=True):
        assert isinstance(big, Tensor) and isinstance(little, Tensor)
        assert_same_bits("last block", big[-little.numel() :].cpu(), little)
    assert not param[:-257].any()


def _new_slots(dtype: torch.dtype) -> list[Slot]:
    """The same on every call. A large 8-bit parameter, a part of a block, and a small one with float32 states."""
    generator = torch.Generator("cuda").manual_seed(1)
    slots = []
    for n, is_8bit in ((1 << 20, True), (5000, True), (300, False)):
        state = {"device": "cuda", "dtype": torch.uint8 if is_8bit else torch.float32}
        scales = [torch.zeros(-(-n // BLOCK), device="cuda") if is_8bit else None for _ in range(2)]
        param = torch.randn(n, device="cuda", generator=generator).to(dtype)
        zeros = [torch.full((n,), 127 if is_8bit else 0, **state), torch.zeros(n, **state)]
        slots.append(Slot(param, *zeros, *scales, torch.zeros((), device="cuda"), 0))
    return slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_triton_agrees_with_cuda(dtype: torch.dtype) -> None:
    """After a step from zero the codes are at most one apart; after ten more, almost all are."""
    for backend in ("cuda", "triton"):
        needs(Target("cuda", backend))
    group = Group(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, maximize=False)
    ours = {backend: _new_slots(dtype) for backend in ("cuda", "triton")}
    tables = {backend: StepTable.of_slots(slots) for backend, slots in ours.items()}
    generator = torch.Generator("cuda").manual_seed(2)
    for step in range(11):
        grads = [torch.randn(slot.param.numel(), device="cuda", generator=generator) for slot in ours["cuda"]]
        for backend, table in tables.items():
            with use_backend(backend):
                table.step([grad.to(dtype) for grad in grads], [group])
        for one, other in zip(ours["cuda"], ours["triton"], strict=True):
            assert one.step.item() == other.step.item() == step + 1
            torch.testing.assert_close(one.param, other.param, rtol=1e-2 if dtype != torch.float32 else 1e-4, atol=1e-4)
            if one.exp_avg_scale is None:
                torch.testing.assert_close(one.exp_avg_sq, other.exp_avg_sq, rtol=1e-5, atol=0.0)
                continue
            for name in ("exp_avg", "exp_avg_sq"):
                apart = (getattr(one, name).int() - getattr(other, name).int()).abs()
                assert apart.max() <= 1 if step == 0 else (apart > 1).double().mean() <= 1e-3, (name, step)
