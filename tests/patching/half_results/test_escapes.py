"""What may read a norm's result besides matrix products: under autocast it stays float32 then."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from patching_cases import WIDTH
from torch import Tensor, nn
from torch.nn import functional

product = torch.matmul
"""Some forwards have something else of this name."""


class Block(nn.Module):
    """What a block may do with y = norm(x): see the subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.drop, self.kept = nn.Dropout(0.0), None

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Direct(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Added(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + functional.linear(y, self.weight)


class Returned(Block):
    def forward(self, x: Tensor, output: bool = False) -> Any:
        y = self.norm(x)
        h = functional.linear(y, self.weight)
        return (h, y) if output else h


class AskedItsDtype(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return functional.linear(y, self.weight).to(y.dtype)


class Kept(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.norm(x)
        return functional.linear(self.kept, self.weight)


class KeptBesides(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.kept = self.norm(x)
        return functional.linear(y, self.weight)


class InList(Block):
    def forward(self, x: Tensor) -> Any:
        y, seen = self.norm(x), []
        seen.append(y)
        return functional.linear(y, self.weight)


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y *= 3.0
        return functional.linear(y, self.weight)


class ScaledInPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y.mul_(3.0)
        return functional.linear(y, self.weight)


class WrittenTo(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y[..., 0] = 0.3
        return functional.linear(y, self.weight)


class WrittenByAProduct(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).detach()
        torch.matmul(x.detach(), self.weight.detach(), out=y)
        return functional.linear(y, self.weight)


class Sliced(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return functional.linear(y, self.weight) * y[..., :1]


class InOneBranch(Block):
    """The name has another value in one branch only."""

    def forward(self, x: Tensor, doubled: bool = False) -> Tensor:
        y = self.norm(x)
        h = functional.linear(y, self.weight)
        if doubled:
            y = 2 * h
        return h + y


class NextTurn(Block):
    def forward(self, x: Tensor) -> Tensor:
        h, y = x, x
        for _ in range(2):
            h = h + y
            y = self.norm(h)
        return functional.linear(y, self.weight)


class WithoutAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        with torch.autocast("cpu", enabled=False):
            h = functional.linear(y.float(), self.weight)
        return h


class CalledWithoutAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = functional.linear(self.norm(x), self.weight)
        return h


class SwitchedOff(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        torch.set_autocast_enabled("cpu", False)
        h = functional.linear(y, self.weight)
        torch.set_autocast_enabled("cpu", True)
        return h


class ViewReturned(Block):
    def forward(self, x: Tensor) -> Any:
        view = self.norm(x).view(x.shape)
        return functional.linear(view, self.weight), view


class InAClosure(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        later = lambda: y.sum()  # noqa: E731
        return functional.linear(y, self.weight) + later()


class Dropped(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.drop(self.norm(x)), self.weight)


class Shadowed(Block):
    """Not torch's product."""

    def forward(self, x: Tensor) -> Tensor:
        product = torch.mul
        return product(self.norm(x), 3.0)


class TwoCalls(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.linear(self.norm(x), self.weight)
        return h + self.norm(h)


class OtherName(Block):
    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        return norm(x) + functional.linear(self.norm(x), self.weight)


class InAnotherMethod(Block):
    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x) + functional.linear(self.norm(x), self.weight)


class ByAMethod(Block):
    """What a method does with it is not followed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class NormOfNorm(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.other(self.norm(x)), self.weight)


class Spread(Block):
    def forward(self, x: Tensor) -> Tensor:
        ys = (self.norm(x),)
        return self.up(*ys)[..., :WIDTH]


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class HandedOn(Block):
    """To a child that returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class NotCalledHere(Block):
    """What a child's norm computes is read by the parent."""

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class AskedInAComparison(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return functional.linear(y, self.weight) if y.sum() > 0 else x


class LeftByBreak(Block):
    def forward(self, x: Tensor, stops: bool = True) -> Tensor:
        y = h = x
        for _ in range(2):
            y = self.norm(x)
            h = functional.linear(y, self.weight)
            if stops:
                break
            y = x
        return h + y


class InALoopsCondition(Block):
    def forward(self, x: Tensor) -> Tensor:
        n, y = 0, x
        while n < 2 and y.sum() > -1e9:
            y = self.norm(x)
            n = n + 1
        return functional.linear(y, self.weight)


class ShadowedByAParameter(Block):
    def forward(self, x: Tensor, product: Any = torch.mul) -> Tensor:
        return product(self.norm(x), 3.0)


class ShadowedByAnImport(Block):
    def forward(self, x: Tensor) -> Tensor:
        from torch import mul as product

        return product(self.norm(x), 3.0)


class InAnIndex(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        h[self.norm(x) > 0.001] = 0.0
        return h


class InAGenerator(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = x
        later = (2 * y for _ in range(1))
        y = self.norm(x)
        return next(later) + functional.linear(y, self.weight)


class AsAGlobal(Block):
    def forward(self, x: Tensor) -> Tensor:
        global kept
        kept = self.norm(x)
        return functional.linear(kept, self.weight)


class ByAName(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + getattr(self, "norm")(x)  # noqa: B009


def summed(block: Any, x: Tensor) -> Tensor:
    result: Tensor = block.norm(x).sum()
    return result


class ByAFunction(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + summed(self, x)


class InALambdaOfAMethod(Block):
    def other(self, x: Tensor) -> Tensor:
        return (lambda: self.norm(x))()

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.other(x)


class InAProperty(Block):
    @property
    def own(self) -> Any:
        return self.norm

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.own(x)


class InADecoratedMethod(Block):
    @torch.no_grad()
    def other(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.other(x)


class InAListOfChildren(Block):
    def __init__(self) -> None:
        super().__init__()
        self.all = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.all[0](x)


class InAnotherListOfChildren(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = norm = nn.LayerNorm(WIDTH)
        self.all = [norm]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.all[0](x)


class InACachedProperty(Block):
    @functools.cached_property
    def own(self) -> Any:
        return [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.own[0](x)


class ByANameInAMethod(Block):
    def other(self, x: Tensor) -> Tensor:
        return self.get_submodule("norm")(x)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight) + self.other(x)


class ReinterpretedAsAnother(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x).view(x.dtype), self.weight)


class OfAnotherKind(nn.Parameter):
    """As torchao's weights: their products are their own."""


class WithAnotherKindOfWeight(Block):
    def __init__(self) -> None:
        super().__init__()
        self.weight = OfAnotherKind(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.weight)


class WithAChildsWeight(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x), self.up.weight)


class ByAnOperator(Block):
    def __init__(self) -> None:
        super().__init__()
        self.operator = Sums()

    def forward(self, x: Tensor) -> Tensor:
        return self.operator @ self.norm(x)


class Sums:
    def __matmul__(self, x: Tensor) -> Tensor:
        return x.sum()


class Reinterpreted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.norm(x).view(torch.float32), self.weight)


class InnerWithMore(nn.Module):
    def forward(self, first: Tensor, *rest: Tensor, k: Any = None) -> Tensor:
        return first + rest[1] + (0 if k is None else functional.linear(first, k))


class ByPosition(Block):
    """Third of *rest, not k."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = InnerWithMore()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, self.norm(x))


class GivenLater(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.function = torch.sum
        return x + self.function(self.norm(x))


class AlsoOfAParent(nn.Module):
    """Calls the norm of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Direct()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.norm(x)


ESCAPES = tuple(kind for kind in Block.__subclasses__() if kind is not Direct)


@pytest.fixture(autouse=True)
def _autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("kind", ESCAPES)
def test_a_norm_keeps_float32_where_anything_else_may_read_it(kind: Any, x: Tensor) -> None:
    model = kind()
    patch_model(model, patterns=("layer_norm",))
    assert model.norm(x).dtype == torch.float32


class InALoopOfAParentsMethod(AlsoOfAParent):
    def run(self, x: Tensor) -> Tensor:
        for layer in (self.block,):
            x = layer.norm(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class OfADecoratedParent(AlsoOfAParent):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.norm(x)


@pytest.mark.parametrize("cls", [AlsoOfAParent, InALoopOfAParentsMethod, OfADecoratedParent])
def test_a_norm_that_a_parent_calls_too_keeps_float32(cls: Any, x: Tensor) -> None:
    model = cls()
    patch_model(model, patterns=("layer_norm",))
    assert model.block.norm(x).dtype == torch.float32


def test_a_norm_with_two_places_keeps_float32(x: Tensor) -> None:
    model = nn.Sequential(Direct(), Added())
    model[1].norm = model[0].norm
    patch_model(model, patterns=("layer_norm",))
    assert model[0].norm(x).dtype == torch.float32
