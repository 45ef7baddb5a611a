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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import calls
from ..calls import is_plain, original_class
from ..forward import Forward, Place, assigned_name, child_at, n_reads, places
from ..rewriting import InForward, Rewriting
from ..source import first_match, is_same
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

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.own: Tensor | None = None
        """A result that only this call holds: to be written to."""

    def base(self, dense: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """dense(x, *args, **kwargs), which the forward hands to no other call than those below."""
        result = self.read(dense, x, *args, **kwargs)
        self.own = result if is_plain(dense, nn.Linear) else None
        return result

    def read(self, dense: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """dense(x, *args, **kwargs)."""
        if args or kwargs or not is_plain(dense, nn.Linear):
            return dense(x, *args, **kwargs)
        return self(self.module, dense, x)

    def copied(self, result: Tensor) -> Tensor:
        """The result, a copy just made."""
        self.own = result
        return result

    def given(self, result: Any) -> Any:
        """What another function made of the result, which it may hold."""
        self.own = None
        return result

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
        is_own = self.own is not None and result is self.own
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
    base: ast.Call | None = None
    """The call of a child that gave the result its value."""
    copy: ast.Call | None = None
    """`result.clone()`, after it."""
    given: list[ast.Assign] = field(default_factory=list)
    """Other calls that are given the result, and make another one."""
    is_kept: bool = False
    """Whether the forward does anything else with a result."""


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
    match first_match(("UP(DOWN(DROPOUT(X))) * SCALING",), added):
        case (
            _,
            {
                "UP": ast.Name() as up,
                "DOWN": ast.Name() as down,
                "DROPOUT": ast.Name() as dropout,
                "X": ast.Name() as x,
                "SCALING": ast.Name() as scaling,
            },
        ):
            pass
        case _:
            return None
    parameters = {each.arg for each in forward.tree.args.args[1:]}
    if up.id not in containers or down.id not in containers or x.id not in parameters:
        return None
    cast = _cast(forward, statement, down, x)
    paths = tuple(containers[each.id] for each in (up, down, dropout) if each.id in containers)
    found = FoundAdapter(statement, result, up, scaling, (down, dropout, x), paths, product, conversion, cast)
    _find_base(forward, found)
    _find_uses(forward, found)
    return found


def _named(place: Place, name: ast.Name) -> tuple[ast.Assign | None, ast.If | None]:
    """The assignment of a product to the name just before the place's statement, and a conversion between them."""
    before = place.block[: place.position]
    conversion = None
    match before[-1:]:
        case [ast.If(body=[ast.Assign(targets=[ast.Name(id=target)], value=value)], orelse=[]) as each]:
            match value:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="to"), args=[_], keywords=[]) if (
                    target == of == name.id
                ):
                    conversion = each
                    before.pop()
    match before[-1:]:
        case [ast.Assign(targets=[ast.Name(id=target)]) as product] if target == name.id:
            return product, conversion
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


def _find_base(forward: Forward, found: FoundAdapter) -> None:
    """The last call of a child that gave the result its value, in a block around the sum, and a copy after it."""
    for place in places(forward.tree.body):
        after = [*ast.walk(ast.Module([*place.following], []))]
        if assigned_name(place.statement) == found.result.id and found.statement in after:
            match place.statement.value:  # type: ignore[attr-defined]
                case ast.Call(func=function, args=[x, *_]) as call if forward.child(function) and not isinstance(
                    x, ast.Starred
                ):
                    found.base, found.copy = call, None
                case ast.Call(func=ast.Attribute(value=ast.Name(id=of), attr="clone"), args=[], keywords=[]) as call:
                    found.copy = call if of == found.result.id else None
                case _:
                    found.base = found.copy = None


def _find_uses(forward: Forward, found: FoundAdapter) -> None:
    """What else the forward does with results than add to them and return them."""
    name, n_known = found.result.id, 0
    for node in ast.walk(forward.tree):
        match node:
            case ast.Attribute(value=ast.Name(id=of), attr="dtype" | "shape" | "device"):
                n_known += of == name
            case ast.Return(value=ast.Name(id=of)):
                n_known += of == name
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.BinOp(left=ast.Name(id=of))) if target == name:
                n_known += of == name
            case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as call) if target == name:
                given = [getattr(call.func, "value", None), *call.args, *(each.value for each in call.keywords)]
                n_given = sum(isinstance(each, ast.Name) and each.id == name for each in given)
                n_known += n_given
                if n_given and call is not found.copy:
                    found.given.append(node)
    found.is_kept = n_reads(forward.tree, name) != n_known


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
        rewriting.constants |= {"Adapter_": Adapter, "is_worth_": _is_worth, "unfused_": self.forward.function}
        x, arguments = self.chosen[0].down[2].id, _passed_on(self.forward.tree.args)
        rewriting.put_first(
            f"if not is_worth_({x}):\n    return unfused_({arguments})\nadapter_ = Adapter_({rewriting.own})"
        )

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless a small layer with an adapter has the outputs and gradients that it has
        unfused."""
        device, dtype = kind_of(module)
        shapes = {"x": (2, 5, 8), "weight": (6, 8), "down": (4, 8), "up": (6, 4)}
        check_function(_fused, _unfused, shapes, device, dtype)


def _passed_on(parameters: ast.arguments) -> str:
    """The arguments of a call with all that a function was given."""
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    names += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    names += [f"{each.arg}={each.arg}" for each in parameters.kwonlyargs]
    names += [f"**{parameters.kwarg.arg}"] if parameters.kwarg else []
    return ", ".join(names)


def _rewrite(rewriting: Rewriting, found: FoundAdapter) -> None:
    copy_of = rewriting.copy_of
    if found.base is not None:
        base = copy_of(found.base)
        base.args.insert(0, base.func)
        base.func = _method("read" if found.is_kept else "base")
    if found.copy is not None and not found.is_kept:
        copied = copy_of(found.copy)
        rewriting.replace(found.copy, lambda: ast.Call(_method("copied"), [copied], []))
    for each in found.given:
        given = copy_of(each)
        given.value = ast.Call(_method("given"), [given.value], [])
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
