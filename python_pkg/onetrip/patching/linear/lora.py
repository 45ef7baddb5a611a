"""Low-rank adapters beside a layer (LoRA, Hu et al. 2021), as PEFT computes them.

    result = self.base_layer(x)               ->   result = adapter_.base(self.base_layer, x)
    A, B = self.lora_A[name], ...                  A, B = self.lora_A[name], ...
    result = result + B(A(dropout(x))) * s         result = adapter_.add(result, B, adapter_.down(A, dropout, x), s)

torch writes B's product, its multiple and the sum, each as large as the result, and as many gradients. Here B's product
is added where the result lies (a matrix product with alpha = s, beta = 1), and all readers of x share its gradient
(readers.py). A dropout is drawn again in backward: all adapters of x keep x, and none what its dropout leaves of it.
Under autocast x is not cast to the dtype of A's weight, from which A would cast it back.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import calls
from ..calls import is_plain, original_class
from ..forward import Forward, Place, assigned_name, child_at, n_reads, places
from ..rewriting import InForward, Rewriting
from ..source import first_match, is_same, passed_on
from ..verify import check_function, kind_of
from .cast_input import is_cast_back
from .readers import SharedInput

PATTERN = "lora"


class _Add(torch.autograd.Function):
    """result + alpha * x @ weight.T. in_place: into the result's memory."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, weight: Tensor, alpha: float, in_place: bool) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.alpha = alpha
        if in_place:
            ctx.mark_dirty(result)
        else:
            result = result.clone(memory_format=torch.contiguous_format)
        result.view(-1, result.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t(), alpha=alpha)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (dy,) = grads
        if dy is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dx = (rows @ weight).view(x.shape) * ctx.alpha
        if ctx.needs_input_grad[2]:
            dweight = (rows.t() @ x.reshape(-1, x.shape[-1])) * ctx.alpha
        return dy, dx, dweight, None, None


class Adapter(SharedInput):
    """Calls the layer and the adapters of one call of a forward."""

    def __init__(self, module: nn.Module, may_write: bool) -> None:
        """may_write: whether nothing but this call holds the results that it makes."""
        super().__init__()
        self.module, self.may_write = module, may_write
        self.own: Tensor | None = None
        """A result that only this call holds: to be written to."""

    def base(self, dense: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """dense(x, *args, **kwargs)."""
        if args or kwargs or not is_plain(dense, nn.Linear):
            return dense(x, *args, **kwargs)
        self.own = self(self.module, dense, x)
        return self.own

    def copied(self, result: Tensor) -> Tensor:
        """result.clone()."""
        self.own = result.clone()
        return self.own

    def cast(self, method: Callable[..., Any], x: Any, dense: Any, dropout: Any) -> Any:
        """method(x, dense.weight.dtype); x as it is where autocast gives dense(dropout(x)) the same operand."""
        keeps_dtype = is_plain(dropout, nn.Identity) or is_plain(dropout, nn.Dropout)
        dtype = dense.weight.dtype
        return x if isinstance(x, Tensor) and keeps_dtype and is_cast_back(dense, x, dtype) else method(x, dtype)

    def down(self, dense: Any, dropout: Any, x: Any) -> Any:
        """dense(dropout(x))."""
        return self.dropped(self.module, dense, dropout, x)

    def add(self, result: Any, dense: Any, x: Any, scaling: Any, dtype: torch.dtype | None = None) -> Any:
        """result + (dense(x) * scaling).to(dtype), dtype None: as it is."""
        if not _fits(result, dense, x, scaling):
            calls.count_fallback(self.module)
            delta = dense(x) * scaling
            return result + (delta if dtype is None else delta.to(dtype))
        calls.count_fused(self.module)
        is_own = self.may_write and result is self.own
        in_place = is_own and result.is_contiguous() and not result._is_view()
        self.own = _Add.apply(result, x, dense.weight.to(result.dtype), scaling, in_place)
        return self.own


def _is_worth(x: Any) -> bool:
    """Whether a layer's forward is run with an Adapter: compilers fuse the sums themselves."""
    return not calls.is_followed() and isinstance(x, Tensor) and calls.is_large(x)


def _fits(result: Any, dense: Any, x: Any, scaling: Any) -> bool:
    """Whether one matrix product computes the sum, in the dtypes of the unfused expression."""
    return (
        isinstance(result, Tensor)
        and isinstance(x, Tensor)
        and isinstance(scaling, (int, float))
        and calls.fits(result)
        and calls.multiplies(dense, x)
        and dense.bias is None
        and (result.dtype, result.device) == (x.dtype, x.device)
        and result.shape == (*x.shape[:-1], dense.weight.shape[0])
    )


@dataclass(eq=False)
class FoundAdapter:
    """`result = result + B(A(dropout(x))) * scaling`, of layers that the module's containers hold."""

    statement: ast.Assign
    """The sum."""
    result: ast.Name
    up: ast.Name
    scaling: ast.expr
    down: tuple[ast.Name, ast.Name, ast.Name]
    """(A, dropout, x), x a parameter of the forward."""
    containers: tuple[str, ...]
    """Paths of what holds the layers: that of B first."""
    product: ast.Assign | None = None
    """The statement that gave the multiple a name; None where it stands in the sum."""
    conversion: ast.If | None = None
    """`if condition: output = output.to(dtype)`, between the two."""
    cast: tuple[ast.If, ast.Assign] | None = None
    """`x = self.method(x, A.weight.dtype)`, and the statement after it, in which the sum is."""


def read_adapters(forward: Forward) -> list[FoundAdapter]:
    """The adapters of a forward."""
    containers = _containers(forward)
    found = (_read(forward, place, containers) for place in places(forward.tree.body))
    return [each for each in found if each is not None]


def _containers(forward: Forward) -> dict[str, str]:
    """name -> path of a child, of all `name = self.path[...]`."""
    return {
        name: path
        for place in places(forward.tree.body)
        if (name := assigned_name(place.statement))
        and isinstance(value := place.statement.value, ast.Subscript)  # type: ignore[attr-defined]
        and (path := forward.child(value.value))
    }


def _read(forward: Forward, place: Place, containers: dict[str, str]) -> FoundAdapter | None:
    match place.statement:
        case (
            ast.Assign(
                targets=[ast.Name(id=target)], value=ast.BinOp(left=ast.Name() as result, op=ast.Add(), right=added)
            ) as statement
        ) if target == result.id:
            pass
        case _:
            return None
    product, conversion = None, None
    if isinstance(added, ast.Name):
        product, conversion = _named(place, added)
        if product is None or n_reads(forward.tree, added.id) != 1 + (conversion is not None):
            return None
        added = product.value
    found = first_match(("UP(DOWN(DROPOUT(X))) * SCALING",), added)
    parts: list[Any] = [] if found is None else [*found[1].values()]
    if not parts or not all(isinstance(each, ast.Name) for each in parts):
        return None
    up, down, dropout, x, scaling = parts  # in the order of the pattern
    parameters = {each.arg for each in forward.tree.args.args[1:]}
    if up.id not in containers or down.id not in containers or x.id not in parameters:
        return None
    cast = _cast(forward, statement, down, x)
    paths = tuple(containers[each.id] for each in (up, down, dropout) if each.id in containers)
    return FoundAdapter(statement, result, up, scaling, (down, dropout, x), paths, product, conversion, cast)


def _named(place: Place, name: ast.Name) -> tuple[ast.Assign | None, ast.If | None]:
    """The assignment of a product to the name just before the place's statement, and a conversion between them."""
    match place.block[: place.position]:
        case [
            *_,
            ast.Assign(targets=[ast.Name(id=target)]) as product,
            ast.If(body=[ast.Assign(targets=[ast.Name(id=again)], value=value)], orelse=[]) as conversion,
        ] if target == again == name.id and (to := first_match(("X.to(DTYPE)",), value)) and is_same(to[1]["X"], name):
            return product, conversion
        case [*_, ast.Assign(targets=[ast.Name(id=target)]) as product] if target == name.id:
            return product, None
    return None, None


def _cast(forward: Forward, statement: ast.Assign, down: ast.Name, x: ast.Name) -> tuple[ast.If, ast.Assign] | None:
    """`x = self.method(x, A.weight.dtype)` before the `if` whose first branch is the sum, if only the two read x, there
    and in the next turn of a loop."""
    expected = ast.parse(f"{down.id}.weight.dtype", mode="eval").body
    for place in places(forward.tree.body):
        match place.block[place.position : place.position + 2]:
            case [
                ast.Assign(
                    targets=[ast.Name(id=target)],
                    value=ast.Call(func=function, args=[ast.Name(id=of), dtype], keywords=[]),
                ) as cast,
                ast.If(body=[first]) as branches,
            ] if first is statement and target == of == x.id and forward.child(function) and is_same(expected, dtype):
                loops = [each for each in ast.walk(forward.tree) if isinstance(each, (ast.For, ast.While))]
                around = [loop.lineno for loop in loops if cast in ast.walk(loop)]
                start = min([cast.lineno, *around])
                reads = [n.lineno for n in ast.walk(forward.tree) if isinstance(n, ast.Name) and n.id == x.id]
                others = [n for n in reads if n >= start and not cast.lineno <= n <= (branches.end_lineno or 0)]
                return None if others or n_reads(branches.test, x.id) else (branches, cast)
    return None


def _results(forward: Forward, name: str) -> tuple[list[ast.Call], bool]:
    """The calls of children, and the copies, whose results have the name, and whether the forward does more with one
    than add to it, convert it, return it, and give it to another variant of adapter: something may hold it then, as in
    PEFT before 0.16."""
    found: list[ast.Call] = []
    known: set[int] = set()
    for node in ast.walk(forward.tree):
        match node:
            case ast.Attribute(value=read, attr="dtype" | "shape" | "device") | ast.Return(value=ast.Name() as read):
                known.add(id(read))
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.BinOp() as value) if target == name:
                known |= {id(each) for each in ast.walk(value)}
            case ast.Assign(
                targets=[ast.Name(id=target)], value=ast.Call(func=ast.Attribute(value=owner) as function) as value
            ) if target == name:
                is_own = ast.unparse(owner) == name
                if is_own or isinstance(owner, ast.Subscript):  # self.lora_variant[name].forward(...)
                    known |= {id(each) for each in ast.walk(value)}
                is_base = forward.child(function) != "" and value.args and not isinstance(value.args[0], ast.Starred)
                if is_base or ast.unparse(value) == f"{name}.clone()":
                    found.append(value)
    reads = (node for node in ast.walk(forward.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return found, any(id(node) not in known for node in reads if node.id == name)


class Adapters(InForward):
    """A module with low-rank adapters, as a site."""

    patterns = (PATTERN,)
    read = staticmethod(read_adapters)

    @staticmethod
    def is_of(module: nn.Module, each: FoundAdapter, excluded: Container[int]) -> bool:
        """Whether its B is a linear layer, and nothing that it calls is excluded."""
        held = [child_at(module, path) for path in each.containers]
        children = [child for child in held if child is not None]
        if len(children) < len(held) or any(id(part) in excluded for child in children for part in child.modules()):
            return False
        return any(original_class(type(layer)) is nn.Linear for layer in children[0]._modules.values())

    def put(self, rewriting: Rewriting) -> None:
        """The adapters called through an Adapter."""
        for each in self.chosen:
            _rewrite(rewriting, each)
        may_write = True
        for name in {each.result.id for each in self.chosen}:
            found, is_kept = _results(self.forward, name)
            may_write &= not is_kept
            for call in found:
                copied = rewriting.copy_of(call)
                if self.forward.child(call.func):
                    copied.func, copied.args = _method("base"), [copied.func, *copied.args]
                else:
                    copied.func, copied.args = _method("copied"), [copied.func.value]
        rewriting.constants |= {"Adapter_": Adapter, "is_worth_": _is_worth, "unfused_": self.forward.function}
        x, arguments = self.chosen[0].down[2].id, passed_on(self.forward.tree.args)
        rewriting.put_first(f"adapter_ = Adapter_({rewriting.own}, {may_write})")
        rewriting.put_first(f"if not is_worth_({x}):\n    return unfused_({arguments})")

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer with an adapter has the outputs and gradients that it has
        unfused."""
        device, dtype = kind_of(module)
        shapes = {"x": (2, 5, 8), "weight": (6, 8), "down": (4, 8), "up": (6, 4)}
        check_function(_fused, _unfused, shapes, device, dtype)


def _rewrite(rewriting: Rewriting, found: FoundAdapter) -> None:
    copy_of = rewriting.copy_of
    down, dropout, x = map(copy_of, found.down)
    inner = ast.Call(_method("down"), [down, dropout, x], [])
    arguments = [copy_of(found.result), copy_of(found.up), inner, copy_of(found.scaling)]
    if found.conversion is not None:
        converted = copy_of(found.conversion)
        dtype = ast.IfExp(converted.test, converted.body[0].value.args[0], ast.Constant(None))
        arguments.append(dtype)
        rewriting.remove(found.conversion)
    if found.product is not None:
        rewriting.remove(found.product)
    copy_of(found.statement).value = ast.Call(_method("add"), arguments, [])
    if found.cast is not None:
        branches, cast = map(copy_of, found.cast)
        rewriting.remove(found.cast[1])
        skipped = ast.Call(_method("cast"), [cast.value.func, x, down, dropout], [])
        branches.body.insert(0, ast.Assign(cast.targets, skipped))
        branches.orelse.insert(0, ast.Assign(cast.targets, cast.value))


def _method(name: str) -> ast.expr:
    return ast.Attribute(ast.Name("adapter_"), name)


def _fused(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    result = nn.functional.linear(x, weight)
    added: Tensor = _Add.apply(result, nn.functional.linear(x, down), up, 0.5, True)
    return added


def _unfused(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    return nn.functional.linear(x, weight) + nn.functional.linear(nn.functional.linear(x, down), up) * 0.5
