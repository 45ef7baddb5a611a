"""What every operator promises, whatever it computes: layouts, empty tensors, transforms, dropout, the same bits again.

The numbers are tested in the file of each family.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from cpu_cases import with_each_number_of_threads
from onetrip import use_backend
from operator_cases import (
    CPU,
    LAYOUTS,
    OPERATORS,
    Operator,
    Watching,
    assert_same,
    cotangents_of,
    each_operator,
    every_other,
    outputs_of,
    results_and_gradients,
)
from pairwise import pairwise
from targets import Target, needs
from tolerances import bits
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
META = Target("meta", "auto")


@pytest.mark.promise("B3, B4")
@pytest.mark.promise("N9")
@pytest.mark.promise("softmax B1, B3, B4")
@pairwise(cols=[40, 67], dtype=[F32, BF16], layout=LAYOUTS, operator=OPERATORS)
def test_layout_changes_no_bit(target, cols, dtype, layout, operator):
    """Of operands, of the gradients of results, and of both: the bits of contiguous copies."""

    def copied(tensor: Tensor) -> Tensor:
        return layout(tensor).clone(memory_format=torch.contiguous_format)

    leaves = operator.leaves(target, 4, cols, dtype)

    def found(of_leaves: Callable[[Tensor], Tensor], of_gradients: Callable[[Tensor], Tensor]) -> list[Tensor]:
        given = [of_leaves(leaf.detach()).requires_grad_() for leaf in leaves]
        return results_and_gradients(operator.call, given, of_gradients)

    # torch's sigmoid gives other bits in its scalar loop, for strided memory.
    is_torchs = operator is OPERATORS["activation-dropout"] and target.backend == "reference"
    expected = found(copied, copied)
    for ways in ((layout, copied), (copied, layout), (layout, layout)):
        assert_same(found(*ways), expected, torch.testing.assert_close if is_torchs else operator.compare)


def check_empty(target: Target, operator: Operator, rows: int, cols: int) -> None:
    """Results as of meta tensors, gradients of zeros."""
    leaves = operator.leaves(target, rows, cols)
    outputs = outputs_of(operator.call(*leaves))
    expected = outputs_of(operator.call(*operator.leaves(META, rows, cols)))
    assert [(y.shape, y.dtype) for y in outputs] == [(y.shape, y.dtype) for y in expected]
    assert not any(y.any() for y in outputs)  # a mean of nothing is 0
    for leaf, gradient in zip(leaves, torch.autograd.grad(outputs, leaves, cotangents_of(outputs)), strict=True):
        assert (gradient.shape, gradient.dtype) == (leaf.shape, leaf.dtype) and not gradient.any()


@pytest.mark.promise("B1, B2")
@pytest.mark.promise("softmax B1, B3, B4")
@each_operator()
def test_no_rows(target, operator):
    check_empty(target, operator, 0, 6)


@pytest.mark.promise("B1, B2")
@pytest.mark.promise("softmax B1, B3, B4")
@each_operator(but="rotary cross_entropy linear attention")
@pytest.mark.parametrize("rows", [4, 0])
def test_no_columns(target, operator, rows):
    check_empty(target, operator, rows, 0)


@each_operator(but="rotary cross_entropy linear attention")
def test_no_columns_under_torch_func(operator):
    leaves = [leaf.detach() for leaf in operator.leaves(CPU, 4, 0)]
    expected = outputs_of(operator.call(*leaves))
    found = torch.vmap(lambda *t: outputs_of(operator.call(*t)), randomness="same")(*(leaf[None] for leaf in leaves))
    assert_same([y[0] for y in found], expected, torch.testing.assert_close)
    gradients = torch.func.grad(lambda t: sum(y.sum() for y in outputs_of(operator.call(*t))))(leaves)
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]


@pytest.mark.promise("T4")
@pairwise(rows=[1, 3, 130], cols=[1, 5, 64, 1027], operator=OPERATORS)
def test_everything_allocated_is_written(target, rows, cols, operator, monkeypatch):
    """New memory holds NaN (all ones in float32 workspaces too), as memory used before might."""
    leaves, real = operator.leaves(target, rows, cols), torch.empty
    expected = results_and_gradients(operator.call, leaves)

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        tensor = real(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    monkeypatch.setattr(torch, "empty", empty)
    found = results_and_gradients(operator.call, leaves)
    assert not any(tensor.isnan().any() for tensor in found)
    assert_same(found, expected)


@pytest.mark.promise("B9")
@each_operator()
def test_the_default_device_and_dtype_change_nothing(target, operator):
    """What was allocated without a device lay on it: losses were meta tensors, or the process crashed."""
    leaves = operator.leaves(target)
    expected = results_and_gradients(operator.call, leaves)
    with torch.device("meta"):
        assert_same(results_and_gradients(operator.call, leaves), expected)
    for dtype in (BF16, F64):
        torch.set_default_dtype(dtype)
        try:
            found = results_and_gradients(operator.call, leaves)
        finally:
            torch.set_default_dtype(F32)
        assert_same(found, expected)


@pytest.mark.promise("B11")
@pytest.mark.promise("softmax B7, B8, B11")
@each_operator()
@pytest.mark.parametrize("layout", ["spread", "one_element_off"])
def test_nothing_that_is_given_is_modified(target, operator, layout):
    """Nor what lies around it in memory."""

    def memory(tensor: Tensor) -> Tensor:
        n = tensor.untyped_storage().nbytes() // tensor.element_size()
        return bits(tensor.detach().as_strided((n,), (1,), 0)).clone()

    def kept(tensor: Tensor) -> Tensor:
        given.append(LAYOUTS[layout](tensor))
        before.append(memory(given[-1]))
        return given[-1]

    given: list[Tensor] = []
    before: list[Tensor] = []
    leaves = [kept(leaf.detach()).requires_grad_() for leaf in operator.leaves(target)]
    results_and_gradients(operator.call, leaves, kept)
    assert len(given) > len(leaves) and all(map(torch.equal, map(memory, given), before))


class Wrapper(Tensor):
    """A tensor without memory of its own, as DTensor and quantised weights are."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapper) else value

        return function(*map(unwrap, args), **(kwargs or {}))


@pytest.mark.promise("B12")
@each_operator()
def test_wrapped_tensors_reach_their_own_dispatch_in_any_role(target, operator):
    """A kernel that took such a tensor's address would read null."""
    leaves = [leaf.detach() for leaf in operator.leaves(target)]
    expected = outputs_of(operator.call(*leaves))
    for i, leaf in enumerate(leaves):
        found = outputs_of(operator.call(*leaves[:i], Wrapper(leaf), *leaves[i + 1 :]))
        assert_same(found, expected, operator.compare)


@each_operator()
@pytest.mark.parametrize("layout", ["one_element_off", "permuted"])
def test_results_may_be_written_to(target, operator, layout):
    """As torch's; autograd forbids it of views that a Function returns. Where backward reads the result, it raises."""
    leaves = [LAYOUTS[layout](leaf.detach()).requires_grad_() for leaf in operator.leaves(target)]
    for i in range(len(outputs_of(operator.call(*leaves)))):
        outputs = outputs_of(operator.call(*leaves))
        factors = [torch.full_like(y, 3.0 if i == j else 1.0) for j, y in enumerate(outputs)]
        expected = torch.autograd.grad(outputs, leaves, factors)
        outputs = outputs_of(operator.call(*leaves))
        outputs[i].mul_(3.0)
        if i == operator.saves:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(sum(y.sum() for y in outputs), leaves)
        else:
            assert_same(torch.autograd.grad(sum(y.sum() for y in outputs), leaves), expected)


@each_operator()
def test_each_gradient_alone_has_the_bits_that_it_has_beside_the_others(target, operator):
    leaves = operator.leaves(target)
    for i, whole in enumerate(results_and_gradients(operator.call, leaves)[-len(leaves) :]):
        given = [leaf.detach().requires_grad_(i == j) for j, leaf in enumerate(leaves)]
        outputs = outputs_of(operator.call(*given))
        pairs = [(y, c) for y, c in zip(outputs, cotangents_of(outputs), strict=True) if y.requires_grad]
        used, cotangents = zip(*pairs, strict=True)
        assert_same(torch.autograd.grad(used, given[i], cotangents), [whole])


def check_hooks(target: Target, operator: Operator, unpacked: Callable[[Tensor], Tensor], compare: Any) -> None:
    """They are asked for each saved tensor once: non-reentrant checkpointing raises at a second time."""
    leaves, packed, asked = operator.leaves(target), [], []

    def unpack(tensor: Tensor) -> Tensor:
        asked.append(tensor)
        return unpacked(tensor)

    expected = results_and_gradients(operator.call, leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: packed.append(tensor) or tensor, unpack):
        found = results_and_gradients(operator.call, leaves)
    assert len(asked) in (0, len(packed))
    assert_same(found, expected, compare)


@each_operator()
def test_hooks_may_give_saved_tensors_of_other_strides(target, operator):
    check_hooks(target, operator, every_other, operator.compare)


@each_operator(but="rotary cross_entropy linear attention")
def test_hooks_may_give_saved_rows_in_float64(target, operator):
    of_any_shape = "cuda" in operator.traits  # statistics and weights, too

    def widened(tensor: Tensor) -> Tensor:
        return tensor.double() if tensor.is_floating_point() and (of_any_shape or tensor.dim() > 1) else tensor

    check_hooks(target, operator, widened, torch.testing.assert_close)


@pytest.mark.promise("D2")
@pytest.mark.promise("softmax D2, D9")
@each_operator()
def test_a_hundred_repeats_are_bitwise_equal(target, operator):
    leaves = operator.leaves(target, 30, 66)
    expected = results_and_gradients(operator.call, leaves)
    for _ in range(99):
        assert_same(results_and_gradients(operator.call, leaves), expected)


@pytest.mark.promise("D9")
@pytest.mark.promise("softmax D2, D9")
@each_operator(but="linear attention moe_combine")  # whose sums are torch's
@pytest.mark.parametrize("size", [(7, 33), (1000, 100), (77, 3000), (3, 70_000)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_no_bit_depends_on_the_number_of_threads(operator, size, dtype):
    needs(Target("cpu", "cpu"))
    leaves = operator.leaves(CPU, *size, dtype)
    with use_backend("cpu"):
        first, *others = with_each_number_of_threads(lambda: results_and_gradients(operator.call, leaves))
    for other in others:
        assert_same(other, first)


@each_operator(but="attention")  # composed of torch's operators and of softmax, which says so
def test_a_backend_asked_for_by_name_takes_neither_torch_func_nor_float64(operator):
    needs(Target("cpu", "cpu"))
    x, *others = operator.leaves(CPU, 3, 4, F32)
    with use_backend("cpu"), pytest.raises((TypeError, RuntimeError), match="backend 'cpu'"):
        torch.func.grad(lambda x: sum(y.sum() for y in outputs_of(operator.call(x, *others))))(x.detach())
    with use_backend("cpu"), pytest.raises(TypeError, match="backend 'cpu' was asked for and computes float32"):
        operator.call(*operator.leaves(CPU, 3, 4, F64))


@pytest.mark.promise("N5")
@pytest.mark.promise("softmax N5")
@each_operator()
def test_gradcheck_in_float64(operator):
    leaves = operator.leaves(CPU, 3, 4, F64)
    assert torch.autograd.gradcheck(operator.call, leaves)
    if "drops" in operator.traits:
        assert torch.autograd.gradcheck(partial(operator.call, dropout_p=0.0), leaves)


@pytest.mark.promise("N5")
@pytest.mark.promise("softmax N5")
@each_operator(but="rotary")  # which may be differentiated twice
@pytest.mark.parametrize("watched", [False, True], ids=["", "traced"])
def test_double_backward_raises(target, operator, watched):
    leaves = operator.leaves(target)
    with Watching() if watched else nullcontext():
        outputs = outputs_of(operator.call(*leaves))
    with pytest.raises(RuntimeError, match=r"differentiated again|create_graph"):
        gradients = torch.autograd.grad(outputs, leaves, cotangents_of(outputs), create_graph=True)
        # With a first-order term beside it, the engine would leave a raising node without inputs out.
        torch.autograd.grad(sum(each.square().sum() for each in (*gradients, *leaves)), leaves)


@each_operator(but="linear_cross_entropy-rows linear_logprobs attention-softcap")  # which say so
def test_batched_gradients(target, operator):
    """Computed by the reference, from what another backend saved."""
    leaves = operator.leaves(target)
    outputs = outputs_of(operator.call(*leaves))
    batches = [torch.randn(4, *y.shape, device=y.device).to(y.dtype) for y in outputs]
    batched = torch.autograd.grad(outputs, leaves, batches, is_grads_batched=True, retain_graph=True)
    for i, each in enumerate(zip(*batches, strict=True)):
        alone = torch.autograd.grad(outputs, leaves, each, retain_graph=True)
        torch.testing.assert_close([gradient[i] for gradient in batched], [*alone])


@pytest.mark.promise("I6")
@pytest.mark.promise("softmax I6")
@each_operator()
def test_vmap(operator):
    """Over every operand whose size depends on the number of rows."""
    leaves = [leaf.detach() for leaf in operator.leaves()]
    mapped = [0 if a != b else None for a, b in zip(operator.shapes(4, 6), operator.shapes(5, 6), strict=True)]
    given = [x if dim is None else torch.stack([x, -x, 2.0 * x]) for x, dim in zip(leaves, mapped, strict=True)]
    found = torch.vmap(lambda *t: outputs_of(operator.call(*t)), tuple(mapped))(*given)
    for i in range(3):
        alone = outputs_of(operator.call(*(x if d is None else x[i] for x, d in zip(given, mapped, strict=True))))
        torch.testing.assert_close([y[i] for y in found], [*alone])


@pytest.mark.promise("I6")
@pytest.mark.promise("softmax I6")
@each_operator()
@pytest.mark.parametrize("watched", [False, True], ids=["", "traced"])
def test_gradients_of_torch_func(operator, watched):
    """grad is autograd's, and jvp is its transpose: a kernel under jvp gave a tangent of zero without an error, and so
    did the operator of torch.library under a dispatch mode, which raised under grad."""
    leaves = operator.leaves(dtype=F64)
    tangents = [torch.randn_like(leaf) for leaf in leaves]
    outputs = outputs_of(operator.call(*leaves))
    cotangents = cotangents_of(outputs)
    expected = torch.autograd.grad(outputs, leaves, cotangents)
    values = tuple(leaf.detach() for leaf in leaves)

    def scalar(*leaves: Tensor) -> Tensor:
        return sum((y * c).sum() for y, c in zip(outputs_of(operator.call(*leaves)), cotangents, strict=True))

    with Watching() if watched else nullcontext():
        found = torch.func.grad(scalar, tuple(range(len(values))))(*values)
        with forward_ad.dual_level():
            slope = forward_ad.unpack_dual(scalar(*map(forward_ad.make_dual, values, tangents))).tangent
        pushed = torch.func.jvp(scalar, values, tuple(tangents))[1]
    torch.testing.assert_close(found, expected)
    for tangent in (slope, pushed):
        torch.testing.assert_close(tangent, sum((t * g).sum() for t, g in zip(tangents, expected, strict=True)))


@pytest.mark.promise("I6")
@pytest.mark.promise("softmax I6")
@each_operator(trait="drops")
def test_each_sample_under_torch_func_has_its_own_mask(operator):
    """A call drew its seed into a tensor that it kept, which torch.func forbids."""
    leaves = [leaf.detach() for leaf in operator.leaves(rows=32, cols=34)]

    def loss(*leaves: Tensor) -> Tensor:
        return sum(y.square().sum() for y in outputs_of(operator.call(*leaves, dropout_p=0.5, rng=None)))

    for transform in (torch.func.grad(loss), lambda *leaves: torch.func.jvp(loss, leaves, leaves)[1]):
        batched = torch.vmap(transform, randomness="different")(*(torch.stack([leaf, leaf]) for leaf in leaves))
        assert not torch.equal(batched[0], batched[1])


def generator_state(device: str) -> Tensor:
    return torch.cuda.get_rng_state() if device == "cuda" else torch.random.get_rng_state()


@pytest.mark.promise("D1")
@pytest.mark.promise("D5")
@pytest.mark.promise("softmax D1, D5")
@each_operator(trait="drops")
def test_dropout_draws_from_torchs_generator_only_where_it_drops(target, operator):
    """Once a call: the mask of the same seed comes again, and backward draws none."""
    leaves = operator.leaves(target, 32, 34)

    def step(**options: Any) -> tuple[Tensor, ...]:
        return outputs_of(operator.call(*leaves, **{"dropout_p": 0.5, "rng": None, **options}))

    torch.manual_seed(5)
    first, second = step(), step()
    torch.manual_seed(5)
    again = step()
    assert_same(again, first)
    assert not torch.equal(second[0], first[0])
    torch.manual_seed(6)
    assert not torch.equal(step()[0], first[0])
    before = generator_state(target.device)
    for options in ({"dropout_p": 0.0}, {"dropout_p": 1.0}, {"rng": (1, 2)}):
        step(**options)
    torch.autograd.grad(again, leaves, cotangents_of(again))
    assert torch.equal(generator_state(target.device), before)
    with torch.no_grad():
        step()
    assert not torch.equal(generator_state(target.device), before)


@pytest.mark.promise("D8")
@pytest.mark.promise("softmax D8")
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@each_operator(trait="drops")
def test_checkpoint_recomputes_the_same_mask(target, operator, use_reentrant):
    def step(*leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.sin() for y in outputs_of(operator.call(*leaves, dropout_p=0.3, rng=None)))

    found = []
    for checkpointed in (False, True):
        leaves = operator.leaves(target, 6, 40)
        torch.manual_seed(5)
        outputs = checkpoint(step, *leaves, use_reentrant=use_reentrant) if checkpointed else step(*leaves)
        torch.rand(100, device=target.device)  # recomputation must not depend on where the generator is by then
        torch.autograd.backward(outputs, cotangents_of(outputs))
        found.append([*outputs, *(leaf.grad for leaf in leaves)])
    assert_same(*found)
