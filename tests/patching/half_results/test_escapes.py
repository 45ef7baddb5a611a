"""What may read a norm's result besides matrix products: under autocast it stays float32 then."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model
from patching_cases import WIDTH, Direct, NormBlock, written
from torch import Tensor, nn
from torch.nn.functional import linear

product = torch.matmul
"""Some forwards have something else of this name."""


def summed(block: Any, x: Tensor) -> Tensor:
    result: Tensor = block.norm(x).sum()
    return result


ALONE = "y = self.norm(x); return linear(y, self.weight)"
FORWARDS = {
    "added": "y = self.norm(x); return y + linear(y, self.weight)",
    "returned": "y = self.norm(x); h = linear(y, self.weight); return (h, y) if flag else h",
    "asked its dtype": "y = self.norm(x); return linear(y, self.weight).to(y.dtype)",
    "kept": "self.kept = self.norm(x); return linear(self.kept, self.weight)",
    "kept besides": "y = self.kept = self.norm(x); return linear(y, self.weight)",
    "in a list": "y, seen = self.norm(x), []; seen.append(y); return linear(y, self.weight)",
    "scaled": "y = self.norm(x); y *= 3.0; return linear(y, self.weight)",
    "scaled in place": "y = self.norm(x); y.mul_(3.0); return linear(y, self.weight)",
    "written to": "y = self.norm(x); y[..., 0] = 0.3; return linear(y, self.weight)",
    "written to by a product": """
        y = self.norm(x).detach()
        torch.matmul(x.detach(), self.weight.detach(), out=y)
        return linear(y, self.weight)""",
    "sliced": "y = self.norm(x); return linear(y, self.weight) * y[..., :1]",
    "another value in one branch": "y = self.norm(x); h = linear(y, self.weight); if flag: y = 2 * h; return h + y",
    "in the next turn": """
        h, y = x, x
        for _ in range(2):
            h = h + y
            y = self.norm(h)
        return linear(y, self.weight)""",
    "after a break": """
        y = h = x
        for _ in range(2):
            y = self.norm(x)
            h = linear(y, self.weight)
            if not flag:
                break
            y = x
        return h + y""",
    "in a loop's condition": """
        n, y = 0, x
        while n < 2 and y.sum() > -1e9:
            y = self.norm(x)
            n = n + 1
        return linear(y, self.weight)""",
    "in a comparison": "y = self.norm(x); return linear(y, self.weight) if y.sum() > 0 else x",
    "without autocast": """
        y = self.norm(x)
        with torch.autocast("cpu", enabled=False):
            h = linear(y.float(), self.weight)
        return h""",
    "called without autocast": """
        with torch.autocast("cpu", enabled=False):
            h = linear(self.norm(x), self.weight)
        return h""",
    "autocast switched off": """
        y = self.norm(x)
        torch.set_autocast_enabled("cpu", False)
        h = linear(y, self.weight)
        torch.set_autocast_enabled("cpu", True)
        return h""",
    "a view is returned": "view = self.norm(x).view(x.shape); return linear(view, self.weight), view",
    "in a closure": "y = self.norm(x); later = lambda: y.sum(); return linear(y, self.weight) + later()",
    "in a generator": """
        y = x
        later = (2 * y for _ in range(1))
        y = self.norm(x)
        return next(later) + linear(y, self.weight)""",
    "in an index": "h = x.clone(); h[self.norm(x) > 0.001] = 0.0; return h",
    "as a global": "global kept; kept = self.norm(x); return linear(kept, self.weight)",
    "dropped": "return linear(self.drop(self.norm(x)), self.weight)",
    "another function of a product's name": "product = torch.mul; return product(self.norm(x), 3.0)",
    "another by an import": "from torch import mul as product; return product(self.norm(x), 3.0)",
    "two calls": "h = linear(self.norm(x), self.weight); return h + self.norm(h)",
    "the norm by another name": "norm = self.norm; return norm(x) + linear(self.norm(x), self.weight)",
    "the norm by getattr": "return linear(self.norm(x), self.weight) + getattr(self, 'norm')(x)",
    "the norm in a function": "return linear(self.norm(x), self.weight) + summed(self, x)",
    "by a method": "return self.mlp(self.norm(x))",  # what a method does with it is not followed
    "a norm of a norm": "return linear(self.other(self.norm(x)), self.weight)",
    "unpacked": "ys = (self.norm(x),); return self.up(*ys)[..., :WIDTH]",
    "handed to a child that returns it": "return x + self.same(self.norm(x))",
    "handed to a child by a position behind all names": "return self.inner(x, x, x, self.norm(x))",
    "handed to a child behind a starred argument": "return self.inner(*(x, x), self.norm(x))",
    "handed to a function given later": "self.function = torch.sum; return x + self.function(self.norm(x))",
    "not called here": "return self.up(x)",  # what a child's norm computes is read by the parent
    "reinterpreted as the input's dtype": "return linear(self.norm(x).view(x.dtype), self.weight)",
    "reinterpreted as float32": "return linear(self.norm(x).view(torch.float32), self.weight)",
    "with a child's weight": "return linear(self.norm(x), self.up.weight)",
}


class Returning(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Inner(nn.Module):
    """Reads second and k by products alone."""

    def forward(self, first: Tensor, second: Tensor, *rest: Tensor, k: Any = None) -> Tensor:
        return linear(second, first) + first + rest[-1] + (0 if k is None else linear(k, first))


class Block(NormBlock):
    def __init__(self) -> None:
        super().__init__()
        self.same, self.inner = Returning(), Inner()


CallsMore = written(NormBlock, "return linear(self.norm(x), self.weight) + self.more(x)", globals())
"""A method or an attribute calls the norm, too."""
METHODS = {
    "in a method": "return self.norm(x)",
    "in a lambda of a method": "return (lambda: self.norm(x))()",
    "by a name in a method": "return self.get_submodule('norm')(x)",
}


class InAProperty(CallsMore):
    @property
    def more(self) -> Any:
        return self.norm


class InAListOfChildren(NormBlock):
    def __init__(self) -> None:
        super().__init__()
        self.all = [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.weight) + self.all[0](x)


class InAnotherListOfChildren(InAListOfChildren):
    def __init__(self) -> None:
        super().__init__()
        self.norm = norm = nn.LayerNorm(WIDTH)
        self.all = [norm]


class InACachedProperty(NormBlock):
    @functools.cached_property
    def own(self) -> Any:
        return [self.norm]

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.norm(x), self.weight) + self.own[0](x)


class OfAnotherKind(nn.Parameter):
    """As torchao's weights: their products are their own."""


class WithAnotherKindOfWeight(NormBlock):
    def __init__(self) -> None:
        super().__init__()
        self.weight = OfAnotherKind(torch.eye(WIDTH))


class Sums:
    def __matmul__(self, x: Tensor) -> Tensor:
        return x.sum()


class ByAnOperator(NormBlock):
    operator = Sums()


ESCAPES = {name: written(Block, body, globals(), "x, flag=False") for name, body in FORWARDS.items()}
ESCAPES |= {name: written(CallsMore, body, globals(), method="more") for name, body in METHODS.items()}
ESCAPES |= {
    "in a decorated method": written(CallsMore, METHODS["in a method"], globals(), "x", "more", [torch.no_grad()]),
    "of another kind of weight": written(WithAnotherKindOfWeight, ALONE, globals()),
    "by an operator": written(ByAnOperator, "return self.operator @ self.norm(x)", globals()),
    "by a parameter": written(NormBlock, "return product(self.norm(x), 3.0)", globals(), "x, product=torch.mul"),
    **{kind.__name__: kind for kind in (InAProperty, InAListOfChildren, InAnotherListOfChildren, InACachedProperty)},
}


@pytest.fixture(autouse=True)
def _autocast() -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        yield


def dtype_of_norm(model: Any, x: Tensor, norm: str = "norm") -> torch.dtype:
    patch_model(model, patterns=("layer_norm",))
    return model.get_submodule(norm)(x).dtype


def test_a_norm_that_a_product_alone_reads_rounds(x: Tensor) -> None:
    assert dtype_of_norm(written(Block, ALONE, globals())(), x) == torch.bfloat16


@pytest.mark.parametrize("name", ESCAPES)
def test_a_norm_keeps_float32_where_anything_else_may_read_it(name: str, x: Tensor) -> None:
    assert dtype_of_norm(ESCAPES[name](), x) == torch.float32


class AlsoOfAParent(nn.Module):
    """Calls the norm of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Direct()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.norm(x)


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
    assert dtype_of_norm(cls(), x, "block.norm") == torch.float32


def test_a_norm_with_two_places_keeps_float32(x: Tensor) -> None:
    model = nn.Sequential(Direct(), ESCAPES["added"]())
    model[1].norm = model[0].norm
    assert dtype_of_norm(model, x, "0.norm") == torch.float32
