"""Rewriting a forward: other expressions in some places of its syntax tree; and the sites that do so."""

from __future__ import annotations

import ast
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from .classes import Rewrite
from .forward import Forward, linear_at
from .source import bare, deep_copy

if TYPE_CHECKING:
    from .residual.read import Operand
    from .residual.tails import Tail


class Rewriting(ast.NodeTransformer):
    """A copy of a forward, with other expressions in some places. The nodes given are those of the original."""

    def __init__(self, forward: Forward) -> None:
        self.method, self.own, self.tree = forward.method, forward.self_name, deep_copy(forward.tree)
        self.copies: dict[int, Any] = dict(zip(map(id, ast.walk(forward.tree)), ast.walk(self.tree), strict=True))
        self.constants: dict[str, Any] = {}
        self.replaced: dict[int, Callable[[], ast.expr | list[ast.stmt]]] = {}
        self.removed: set[int] = set()
        self.added_targets: dict[int, str] = {}

    def source(self) -> str:
        """The rewritten forward."""
        self.visit(self.tree)
        return ast.unparse(bare(ast.fix_missing_locations(self.tree))) + "\n"

    def rewrite(self, pattern: str, absorbed: Iterable[str] = ()) -> Rewrite:
        """The rewritten forward as a Rewrite."""
        source = self.source()  # names the constants that it uses
        constants = tuple((dict.fromkeys(self.added_targets.values()) | self.constants).items())
        return Rewrite(pattern, ((self.method, source),), constants=constants, absorbed=tuple(absorbed))

    def put_first(self, source: str) -> None:
        """Statements before all others."""
        at = int(ast.get_docstring(self.tree) is not None)
        added = ast.parse(source)
        self.tree.body[at:at] = added.body
        bound = (each.id for each in ast.walk(added) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        self.constants |= dict.fromkeys(bound)

    def put_call(self, call: ast.Call, name: str, *more: str) -> None:
        """name(self, function, more, ...) in place of function(...). more: expressions."""
        copied = self.copy_of(call)
        first = [ast.parse(each, mode="eval").body for each in more]
        copied.args = [ast.Name(self.own), copied.func, *first, *copied.args]
        copied.func = ast.Name(name)

    def put_other_call(self, call: ast.Call, name: str, *arguments: ast.expr) -> None:
        """name(self, arguments, ...) in place of function(...)."""
        copied = self.copy_of(call)
        copied.func, copied.args, copied.keywords = ast.Name(name), [ast.Name(self.own), *arguments], []

    def put_around(self, expression: ast.expr, name: str) -> None:
        """name(self, expression) in place of the expression."""
        self.replace(expression, lambda: self.call(name, self.visit(self.copy_of(expression))))

    def put_tail(self, name: str, tail: Tail, operand: Operand) -> None:
        """The operand's child or method is called through its Tail, of this name."""
        assert operand.call is not None
        call = self.copy_of(operand.call)

        def opened() -> ast.expr:
            self.generic_visit(call)
            module = self.attribute(operand.opened) if tail.method == "forward" else ast.Name(self.own)
            return ast.Call(ast.Name(name), [module, *call.args], call.keywords)

        self.constants[name] = tail
        self.replace(operand.call, opened)

    def put_part(self, expression: ast.expr, part: ast.expr) -> None:
        """A part of the expression in place of all of it."""
        self.replace(expression, lambda: self.visit(self.copy_of(part)))

    def replace(self, node: ast.expr | ast.stmt, made: Callable[[], ast.expr | list[ast.stmt]]) -> None:
        """What made() returns in place of the expression, or of the statement. It is called when the copy is written:
        what it visits is rewritten then."""
        self.replaced[id(self.copy_of(node))] = made

    def remove(self, *statements: ast.stmt) -> None:
        self.removed.update(id(self.copy_of(each)) for each in statements)

    def copy_of(self, node: ast.AST) -> Any:
        """The node's counterpart in the copy."""
        return self.copies[id(node)]

    def call(self, name: str, *arguments: ast.expr) -> ast.Call:
        """name(self, arguments, ...)."""
        return ast.Call(ast.Name(name), [ast.Name(self.own), *arguments], [])

    def visit(self, node: ast.AST) -> Any:
        if id(node) in self.removed:
            return None
        if id(node) in self.replaced:
            return self.replaced.pop(id(node))()
        self.generic_visit(node)
        if isinstance(node, ast.Assign) and id(node) in self.added_targets:
            node.targets = [ast.Tuple([*node.targets, ast.Name(self.added_targets[id(node)])])]
        return node

    def attribute(self, path: str) -> ast.expr:
        return ast.parse(f"{self.own}.{path}", mode="eval").body

    def probability(self, p: ast.expr | None, training: ast.expr | None) -> ast.expr:
        """Probability of a functional dropout: p in training, else 0; 0 where there is none. A number: torch also takes
        a tensor or a NumPy number, as torch.linspace(0, 0.1, n_layers)[i] is."""
        if p is None or training is None:
            return ast.Constant(0.0)
        self.constants["float_"] = float
        number = ast.Call(ast.Name("float_"), [self.copy_of(p)], [])
        return ast.IfExp(self.copy_of(training), number, ast.Constant(0.0))


@dataclass(frozen=True)
class InForward:
    """What one pattern fuses in a module's forward, or in another method, as a site.

    A forward is read once for its class. What is fused of what was found is chosen for each instance.
    """

    forward: Forward
    chosen: tuple[Any, ...]
    patterns: ClassVar[tuple[str, ...]] = ()
    """The names that it may have in patch_model's patterns."""
    is_minor: ClassVar[bool] = False
    """Whether a site is named after it only where there is nothing else."""
    in_wrapper: ClassVar[bool] = False
    """Whether a forward is also read inside of a wrapper that may change its results, as those of whole models do."""

    @property
    def pattern(self) -> str:
        return self.patterns[0]

    @property
    def detail(self) -> str:
        return ""

    @staticmethod
    def read(forward: Forward) -> Iterable[Any]:
        """What there is to fuse in a forward."""
        raise NotImplementedError

    @classmethod
    def choose(cls, module: nn.Module, found: Iterable[Any], excluded: Container[int]) -> tuple[Any, ...]:
        """What is fused of it in one instance. excluded: ids of modules that are to stay as they are."""
        return tuple(each for each in found if cls.is_of(module, each, excluded))

    @staticmethod
    def is_of(module: nn.Module, each: Any, excluded: Container[int]) -> bool:
        """Whether the instance has it: here, a plain nn.Linear at its path."""
        return linear_at(module, each.path, excluded) is not None

    def rewrite(self, cls: type) -> Rewrite:
        """The forward with what was chosen fused."""
        rewriting = Rewriting(self.forward)
        self.put(rewriting)
        return rewriting.rewrite(self.pattern)

    def put(self, rewriting: Rewriting) -> None:
        """Put what is fused in place of what was chosen."""
        raise NotImplementedError

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless what is fused computes what the module does."""
        raise NotImplementedError
