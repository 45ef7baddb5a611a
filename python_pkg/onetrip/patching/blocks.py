"""Blocks in one module: a forward that ends in norm(dropout(x) + residual), or in a part of that.

The source of the forward becomes a graph of values, so names, temporaries and the order of an addition do not matter.
`self.something` is resolved to the child that the instance holds. RULES are matched against the returned value. All
values computed before it stay as written.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import functional

from .calls import is_plain, original_class
from .classes import GLOBAL_NAMES, Rewrite
from .clones import width_of
from .norms import ANY_WIDTH, NormSpec
from .report import Unsuitable
from .source import Unreadable, parse, resolve, substituted
from .verify import verify_forward


@dataclass(frozen=True)
class Rule:
    """The end of a forward, and the call that replaces it."""

    pattern: str
    before: str
    """An expression over roles: norm and dropout are children, x and residual any two values."""
    after: str
    """rewrite_block fills in {weight}, {norm_bias}, {norm} (its keywords) and {p}. bias: the Linear's, or None."""


RULES = (
    Rule(
        "dropout_add_norm",
        "norm(dropout(x) + residual)",
        "bias_dropout_residual_norm(x, residual, {weight}, {norm_bias}, bias=bias, dropout_p={p}, {norm})",
    ),
    Rule(
        "add_norm",
        "norm(x + residual)",
        "bias_dropout_residual_norm(x, residual, {weight}, {norm_bias}, bias=bias, {norm})",
    ),
    Rule("dropout_add", "dropout(x) + residual", "bias_dropout_residual(x, residual, bias, dropout_p={p})"),
)


@dataclass(eq=False)
class Value:
    """A value in a forward: an argument, the result of a child's call, of a functional dropout, or a sum."""

    kind: str
    name: str = ""
    """argument: its name. call: the name of the child. dropout: the name of the attribute that holds p."""
    inputs: tuple[Value, ...] = ()


@dataclass
class Reading:
    """A forward as values, in the order of computation."""

    arguments: list[Value]
    values: list[Value] = field(default_factory=list)
    result: Value | None = None


def read_forward(cls: type) -> Reading | Unsuitable:
    """The class's forward, if it is straight-line code of child calls, dropout and +."""
    forward: Any = getattr(cls, "forward", None)
    tree = parse(forward)
    if isinstance(tree, Unsuitable):
        return tree
    given = tree.args
    if given.posonlyargs or given.kwonlyargs or given.vararg or given.kwarg or given.defaults:
        return Unsuitable("extra_forward_args", f"forward({ast.unparse(given)})")
    try:
        return _Reader(forward, [argument.arg for argument in given.args]).read(tree.body)
    except Unreadable as error:
        return Unsuitable("unknown_forward", str(error))


class _Reader:
    def __init__(self, forward: Callable[..., Any], arguments: list[str]) -> None:
        self.globals = forward.__globals__
        self.self_name, *names = arguments
        if clash := [name for name in names if name in GLOBAL_NAMES or name.endswith("_")]:
            raise Unreadable(f"argument {clash[0]}")
        self.names = {name: Value("argument", name) for name in names}
        self.reading = Reading(list(self.names.values()))

    def read(self, body: list[ast.stmt]) -> Reading:
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant()):  # the docstring
                    pass
                case ast.Assign(targets=[ast.Name(id=name)], value=expression):
                    self.names[name] = self.value(expression)
                case ast.Return(value=ast.expr() as expression):
                    self.reading.result = self.value(expression)
                    return self.reading
                case _:
                    raise Unreadable(ast.unparse(statement).splitlines()[0])
        raise Unreadable("returns nothing")

    def value(self, expression: ast.expr) -> Value:
        match expression:
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.new("add", "", (left, right))
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=inputs, keywords=[]) if (
                owner == self.self_name and inputs
            ):
                return self.new("call", name, tuple(inputs))
            case ast.Call(func=function, args=[x, *rest], keywords=keywords) if (
                resolve(function, self.globals) is functional.dropout
            ):
                options = dict(zip(("p", "training"), rest, strict=False)) | {k.arg: k.value for k in keywords}
                if options.keys() == {"p", "training"}:
                    p, training = self.own_attribute(options["p"]), self.own_attribute(options["training"])
                    if p is not None and training == "training":
                        return self.new("dropout", p, (x,))
        raise Unreadable(ast.unparse(expression))

    def new(self, kind: str, name: str, inputs: tuple[ast.expr, ...]) -> Value:
        value = Value(kind, name, tuple(self.value(expression) for expression in inputs))
        self.reading.values.append(value)
        return value

    def own_attribute(self, expression: ast.expr) -> str | None:
        match expression:
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner == self.self_name:
                return name
        return None


@dataclass
class Match:
    """A rule that fits a forward."""

    rule: Rule
    reading: Reading
    roles: dict[str, Value]
    window: list[Value]
    """The values that the fused call replaces."""
    norm: NormSpec | None

    def child(self, role: str) -> str | None:
        """The attribute that holds the norm or the dropout; None if the role has no module."""
        value = self.roles.get(role)
        return value.name if value is not None and value.kind == "call" else None

    @property
    def absorbed(self) -> tuple[str, ...]:
        """The children that the fused call reads instead of calling them."""
        return tuple(name for role in ("norm", "dropout") if (name := self.child(role)) is not None)


def find_match(
    module: nn.Module, reading: Reading, norm_of: Callable[[nn.Module], NormSpec | Unsuitable]
) -> Match | Unsuitable:
    """The first rule that fits the returned value. norm_of: recognises a leaf norm."""
    uses = Counter(id(value) for computed in reading.values for value in computed.inputs)
    uses[id(reading.result)] += 1
    why_not = Unsuitable("unknown_forward", "returns no norm(dropout(x) + residual) or part of it")
    for rule in RULES:
        pattern = ast.parse(rule.before, mode="eval").body
        assert reading.result is not None
        for roles, window in _matches(pattern, reading.result, module):
            if any(uses[id(value)] > 1 for value in window):
                continue
            spec = None
            if "norm" in roles:
                found = norm_of(module._modules[roles["norm"].name])  # type: ignore[arg-type]
                if isinstance(found, Unsuitable):
                    why_not = Unsuitable(found.reason, f"{roles['norm'].name}: {found.detail}")
                    continue
                spec = found
            match = Match(rule, reading, roles, window, spec)
            for attribute in match.absorbed:
                child = module._modules[attribute]
                assert child is not None
                if "forward" in vars(child):
                    return Unsuitable("hf_hook", f"{attribute} has a forward of its own")
                if not is_plain(child, original_class(type(child))):
                    return Unsuitable("forward_hooks", f"on {attribute}")
            return match
    return why_not


def _matches(pattern: ast.expr, value: Value, module: nn.Module) -> Iterator[tuple[dict[str, Value], list[Value]]]:
    """All ways to match the pattern: (role -> value, the values inside the pattern)."""
    match pattern:
        case ast.Name(id=role):
            yield {role: value}, []
        case ast.Call(func=ast.Name(id=role), args=[inner]):
            child = module._modules.get(value.name) if value.kind == "call" else None
            is_dropout = value.kind == "dropout" or _forwards_as(child, nn.Dropout)
            if len(value.inputs) == 1 and (
                is_dropout if role == "dropout" else value.kind == "call" and child is not None
            ):
                for roles, window in _matches(inner, value.inputs[0], module):
                    yield {role: value, **roles}, [value, *window]
        case ast.BinOp(left=left, right=right) if value.kind == "add":
            sides = value.inputs
            # If both sides could be x, take the output of a Linear: its bias can be fused.
            if value.inputs[1].kind == "call" and isinstance(module._modules.get(value.inputs[1].name), nn.Linear):
                sides = sides[::-1]
            for first, second in (sides, sides[::-1]):
                for left_roles, left_window in _matches(left, first, module):
                    for right_roles, right_window in _matches(right, second, module):
                        yield {**left_roles, **right_roles}, [value, *left_window, *right_window]


def _forwards_as(child: nn.Module | None, expected: type[nn.Module]) -> bool:
    """Whether the child runs expected.forward, and not in place: that would change values that are read later."""
    is_expected = isinstance(child, expected) and original_class(type(child)).forward is expected.forward
    return is_expected and not getattr(child, "inplace", False)


@dataclass(frozen=True, eq=False)
class Block:
    """A module whose forward ends as one of RULES, as a site."""

    match: Match

    @property
    def pattern(self) -> str:
        return self.match.rule.pattern

    def rewrite(self, module: nn.Module) -> Rewrite:
        """The forward with its end in one operator call."""
        return rewrite_block(module, self.match)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless the rewritten forward computes the same as the original."""
        verify_forward(module, rewrite, argument_widths(module, self.match), dropout_of(self.match))


def rewrite_block(module: nn.Module, match: Match) -> Rewrite:
    """The forward with its end in one operator call.

    Each call checks that the children are unchanged: PEFT, offloading or a hook may come later.
    """
    roles, norm = match.roles, match.norm
    arguments = ", ".join(value.name for value in match.reading.arguments)
    constants: dict[str, Any] = {}
    lines: list[str] = []
    for role in ("norm", "dropout"):
        attribute = match.child(role)
        if attribute is not None:
            constants[f"{role}_type"] = original_class(type(module._modules[attribute]))
            lines.append(f"{role}_ = self.{attribute}")
    if constants:
        tests = [f"is_plain({name[:-5]}_, {name})" for name in constants]
        checks = " and ".join([*tests, *(["not dropout_.inplace"] if "dropout_type" in constants else [])])
        lines += [f"if not ({checks}):", "    count_fallback(self)", f"    return original(self, {arguments})"]

    prefix, names, has_bias = _prefix(module, match)
    lines += prefix
    x, residual = names[id(roles["x"])], names[id(roles["residual"])]
    guards = [f"not is_fusable({x}, {residual})"]
    values: dict[str, str] = {}
    if norm is not None:
        guards += norm.guards("norm_", x)
        guards += [guard for guard in norm.guards("norm_", residual) if guard not in guards]
        if norm.unsupported:
            constants["unsupported"] = norm.unsupported
        values |= {"weight": norm.part("norm_", norm.weight), "norm_bias": norm.part("norm_", norm.bias)}
        values["norm"] = norm.keywords("norm_", x)
    substitutes = {"norm": "norm_", "dropout": "dropout_", "x": x, "residual": residual}
    if match.child("dropout") is not None:
        values["p"] = "dropout_.p if dropout_.training else 0.0"
    elif "dropout" in roles:
        p = f"self.{roles['dropout'].name}"
        values["p"] = f"{p} if self.training else 0.0"
        substitutes["dropout"] = f"partial(dropout, p={p}, training=self.training)"
    substitutes["bias"] = "bias_" if has_bias else "None"
    whole = {"x": f"({x} if bias_ is None else {x} + bias_)"} if has_bias else {}
    lines += [
        f"if {' or '.join(guards)}:",
        "    count_fallback(self)",
        f"    return {substituted(match.rule.before, substitutes | whole)}",
        "count_fused(self)",
        f"return {substituted(match.rule.after.format(**values), substitutes)}",
    ]
    source = f"def forward(self, {arguments}):\n" + "".join(f"    {line}\n" for line in lines)
    return Rewrite(match.rule.pattern, source, tuple(sorted(constants.items())), match.absorbed)


def argument_widths(module: nn.Module, match: Match) -> tuple[int, ...]:
    """The last dimension of each argument of the forward, as the children that receive it need it."""
    x, norm = match.roles["x"], match.child("norm")
    producer = module._modules.get(norm or x.name)
    width = width_of(producer, "out_features") if producer is not None else None
    widths = []
    for argument in match.reading.arguments:
        consumers = (value for value in match.reading.values if value.kind == "call" and argument in value.inputs)
        found = (
            width_of(module._modules[value.name], "in_features") for value in consumers if value.name in module._modules
        )
        widths.append(next((each for each in found if each is not None), width or ANY_WIDTH))
    return tuple(widths)


def dropout_of(match: Match) -> tuple[str, str] | None:
    """("child", its name) or ("attribute", the name of p) for the dropout that the fused call replaces."""
    value = match.roles.get("dropout")
    return None if value is None else ("child" if value.kind == "call" else "attribute", value.name)


def _prefix(module: nn.Module, match: Match) -> tuple[list[str], dict[int, str], bool]:
    """Statements for the values before the fused call, the values' names by id, and whether x has a separate bias."""
    names = {id(value): value.name for value in match.reading.arguments}
    x = match.roles["x"]
    has_bias = (
        x.kind == "call"
        and isinstance(module._modules.get(x.name), nn.Module)
        and len(x.inputs) == 1
        and match.roles["residual"] is not x
        and not any(x in value.inputs for value in match.reading.values if value not in match.window)
    )
    lines: list[str] = []
    for value in match.reading.values:
        if value in match.window:
            continue
        name = names[id(value)] = f"value{len(lines)}_"
        inputs = ", ".join(names[id(each)] for each in value.inputs)
        if value is x and has_bias:
            lines.append(f"{name}, bias_ = linear_parts(self.{value.name}, {inputs})")
        elif value.kind == "call":
            lines.append(f"{name} = self.{value.name}({inputs})")
        elif value.kind == "dropout":
            lines.append(f"{name} = dropout({inputs}, p=self.{value.name}, training=self.training)")
        else:
            lines.append(f"{name} = {inputs.replace(', ', ' + ')}")
    return lines, names, has_bias
