"""Python source as data: reading functions, matching expressions against patterns, defining rewritten functions.

A pattern is an expression as text. Its names in capitals match any expression, each the same one wherever it occurs.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import linecache
import pickle
import textwrap
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, TypeVar, cast
from zlib import crc32

import torch
from torch.nn import functional

from .report import Unsuitable

Tree = TypeVar("Tree", bound=ast.AST)
FUNCTIONS: dict[Any, str] = {
    functional.softmax: "softmax",
    torch.softmax: "softmax",
    functional.dropout: "dropout",
    torch.dropout: "dropout",
    torch.matmul: "matmul",
    torch.cat: "cat",
    torch.tanh: "tanh",
    torch.sigmoid: "sigmoid",
    functional.sigmoid: "sigmoid",
}
"""The functions that patterns can name, by what a call resolves to."""


_sources: weakref.WeakKeyDictionary[Callable[..., Any], tuple[CodeType, str]] = weakref.WeakKeyDictionary()
"""Function -> (its code, the source that compiles to it): models share classes, and are patched again."""


def parse(function: Any, may_call_super: bool = False) -> ast.FunctionDef | Unsuitable:
    """The definition of a plain function, if it is the code that runs. A decorator must return the function itself, as
    auto_docstring does."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return Unsuitable("unknown_forward", "not a plain Python function")
    if function.__closure__ and not (may_call_super and function.__code__.co_freevars == ("__class__",)):
        return Unsuitable("unknown_forward", "calls super(), or is defined inside a function")
    code, source = _sources.get(function, (None, ""))
    is_known = code is function.__code__
    source = source if is_known else _source(function)
    tree = _defined_by(source)
    if tree is None:
        return Unsuitable("unknown_forward", "its source cannot be read")
    is_decorated = bool(tree.decorator_list)
    tree.decorator_list = []
    if (is_decorated and vars(function)) or not (is_known or _is_source_of(tree, function)):
        return Unsuitable("unknown_forward", "decorated" if is_decorated else "its source is not the code that runs")
    _sources[function] = function.__code__, source
    return tree


def definition(code: CodeType) -> ast.FunctionDef | None:
    """The definition that the source of code begins with; None where it cannot be read."""
    return _defined_by(_source(code))


def _source(function: Any) -> str:
    """Of a function, or of code; empty where it cannot be read."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""


def _defined_by(source: str) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(source).body[0]
    except (SyntaxError, IndexError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _is_source_of(tree: ast.FunctionDef, function: Any) -> bool:
    """Whether the definition compiles to the code of the function. It does not after an edit on disk, or a new
    __code__."""
    name = function.__qualname__.split(".")[-2:]
    body: list[ast.stmt] = [tree]
    if len(name) == 2 and name[0].isidentifier():  # a class mangles private names
        body = [ast.ClassDef(name[0], [], [], body, [])]
    module = ast.fix_missing_locations(ast.Module(body, []))
    flags = function.__code__.co_flags & __future__.annotations.compiler_flag
    actual = list(_instructions(function.__code__))
    return any(list(_instructions(code)) == actual for code in code_in(compile(module, "", "exec", flags, True)))


def code_in(code: CodeType) -> Iterator[CodeType]:
    """The code of what is defined inside: comprehensions, lambdas, functions."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from code_in(constant)


def own_names(function: Any) -> set[str]:
    """All names in a function, of variables, globals and attributes, nested functions' too."""
    codes = (function.__code__, *code_in(function.__code__))
    return own_variables(function) | {name for code in codes for name in code.co_names}


def own_variables(function: Any) -> set[str]:
    """The same without attributes."""
    codes = (function.__code__, *code_in(function.__code__))
    loaded = {each.argval for code in codes for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    return loaded | {name for code in codes for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)}


# A call of a global's attribute compiles in two ways: where the global is an import of the same file, and elsewhere.
_CALL_FORMS = frozenset(["PUSH_NULL", "PRECALL", "CACHE", "NOP", "EXTENDED_ARG"])


def _instructions(code: CodeType) -> Iterator[tuple[str, Any]]:
    """The instructions, nested code included, apart from addresses and from what depends on the rest of the file."""
    for each in dis.get_instructions(code):
        if isinstance(each.argval, CodeType):
            yield from _instructions(each.argval)
        elif each.opname not in _CALL_FORMS:
            is_jump = each.opcode in dis.hasjrel or each.opcode in dis.hasjabs
            yield each.opname.replace("LOAD_METHOD", "LOAD_ATTR"), None if is_jump else repr(each.argval)


def deep_copy(tree: Tree) -> Tree:
    """A copy of all of a tree, in a fifth of the time that copy.deepcopy takes."""
    return cast(Tree, pickle.loads(pickle.dumps(tree)))


def bare(tree: ast.FunctionDef) -> ast.FunctionDef:
    """Makes of a definition one that is called forward, without annotations, whose names a rewritten function could not
    resolve, and without docstring."""
    tree.name, tree.returns, tree.args = "forward", None, without_annotations(tree.args)
    if ast.get_docstring(tree) is not None and len(tree.body) > 1:
        del tree.body[0]
    return tree


def without_annotations(arguments: ast.arguments) -> ast.arguments:
    """A copy of the parameters without annotations, whose names a rewritten function could not resolve."""
    arguments = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args  # type: ignore[attr-defined]
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return arguments


def passed_on(parameters: ast.arguments) -> str:
    """The arguments of a call with all that a function was given."""
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    names += [f"*{parameters.vararg.arg}"] if parameters.vararg else []
    names += [f"{each.arg}={each.arg}" for each in parameters.kwonlyargs]
    names += [f"**{parameters.kwarg.arg}"] if parameters.kwarg else []
    return ", ".join(names)


def calls_in(expression: ast.AST) -> list[ast.Call]:
    """All calls in a tree."""
    return [node for node in ast.walk(expression) if isinstance(node, ast.Call)]


def resolve(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object that a dotted name refers to; None for any other expression and for unknown names."""
    match expression:
        case ast.Name(id=name):
            return names.get(name)
        case ast.Attribute(value=inner, attr=name):
            return getattr(resolve(inner, names), name, None)
    return None


_OF_LIBRARIES = frozenset({"torch", "math", "builtins", "None"})
"""Where pure functions come from; None: torch's built-in ones."""


def is_pure(function: Any, callers: tuple[Any, ...] = ()) -> bool:
    """Whether a function only gives values to names of its own and returns an expression without conditions, so that it
    may be probed, and computes the same of larger tensors. So do the functions that it calls, but for torch's and
    math's, and no number is a global one, which may change."""
    tree = parse(function)
    if isinstance(tree, Unsuitable):
        return False
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=targets) if all(map(_is_name, targets)):
                pass
            case ast.Expr(value=ast.Constant()) | ast.Return():
                pass
            case _:
                return False
    nodes = [node for statement in tree.body for node in ast.walk(statement)]  # no annotations
    if any(isinstance(node, (ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.NamedExpr)) for node in nodes):
        return False
    names = function.__globals__
    read = [names[node.id] for node in nodes if isinstance(node, ast.Name) and node.id in names]
    if not all(isinstance(each, (ModuleType, FunctionType, BuiltinFunctionType, torch.dtype, type)) for each in read):
        return False
    called = [
        found for node in nodes if isinstance(node, ast.Call) and (found := resolve(node.func, names)) is not None
    ]
    others = [each for each in called if str(getattr(each, "__module__", "")).partition(".")[0] not in _OF_LIBRARIES]
    return all(
        inspect.isfunction(each) and each not in callers and is_pure(each, (*callers, function)) for each in others
    )


def has_effects(function: Any) -> bool:
    """Whether a function's own statements do more than to compute: they call something else than torch for no result (a
    log), or give values to globals, attributes and items of what is not its own (a counter)."""
    tree = parse(function)
    if isinstance(tree, Unsuitable):
        return False
    own = {*function.__code__.co_varnames} - {each.arg for each in tree.args.args}
    for node in ast.walk(tree):
        match node:
            case ast.Global() | ast.Nonlocal() | ast.Attribute(ctx=ast.Store()):
                return True
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()) if name in own:
                pass
            case ast.Subscript(ctx=ast.Store()):
                return True
            case ast.Expr(value=ast.Call(func=called)):
                if getattr(resolve(called, function.__globals__), "__module__", None) != "torch":
                    return True
    return False


def _is_name(target: ast.expr) -> bool:
    return isinstance(target, ast.Name) or (isinstance(target, ast.Tuple) and all(map(_is_name, target.elts)))


class Unreadable(Exception):
    """The source contains a statement or expression that the reader does not handle."""


class Inliner:
    """Executes statements symbolically: the value of a name is the expression assigned to it, names replaced."""

    def __init__(self, function_globals: Mapping[str, Any], environment: dict[str, ast.expr]) -> None:
        self.globals, self.environment = function_globals, environment

    def run(self, body: list[ast.stmt]) -> ast.expr:
        """The expression that the body returns."""
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.inline(statement.value)
            self.step(statement)
        raise Unreadable("returns nothing")

    def step(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.environment[name] = self.inline(value)
            case ast.If(test=test, body=body, orelse=orelse):
                condition = self.inline(test)
                branches = [Inliner(self.globals, dict(self.environment)) for _ in range(2)]
                for branch, statements in zip(branches, (body, orelse), strict=True):
                    for each in statements:
                        branch.step(each)
                then, otherwise = (branch.environment for branch in branches)
                for name in then.keys() | otherwise.keys():
                    if name not in then or name not in otherwise:
                        self.environment.pop(name, None)
                    elif then[name] is not otherwise[name]:
                        self.environment[name] = ast.IfExp(condition, then[name], otherwise[name])
            case _:
                raise Unreadable(ast.unparse(statement).splitlines()[0])

    def inline(self, expression: Any) -> Any:
        """The expression with local names replaced and known functions renamed as in FUNCTIONS."""
        match expression:
            case ast.Name(id=name):
                return self.environment.get(name) or ast.Name(name)
            case ast.Call(func=function, args=arguments, keywords=keywords):
                return ast.Call(
                    ast.Name(known) if (known := self.function_name(function)) else self.inline(function),
                    [self.inline(each) for each in arguments],
                    sorted((ast.keyword(k.arg, self.inline(k.value)) for k in keywords), key=lambda k: k.arg or ""),
                )
            case ast.Attribute() if self.resolve(expression) is torch.float32:
                return ast.Name("float32")
            case ast.AST():
                fields = {name: self.inline(value) for name, value in ast.iter_fields(expression) if name != "ctx"}
                return type(expression)(**fields)
            case list():
                return [self.inline(each) for each in expression]
        return expression

    def resolve(self, expression: ast.expr) -> Any:
        """The global object that a dotted name refers to; None for local names."""
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        is_local = isinstance(root, ast.Name) and root.id in self.environment
        return None if is_local else resolve(expression, self.globals)

    def function_name(self, function: ast.expr) -> str | None:
        """The name in FUNCTIONS of a called function."""
        resolved = self.resolve(function)
        return FUNCTIONS.get(resolved) if resolved is not None and resolved.__hash__ else None


def is_same(expression: Any, other: Any) -> bool:
    """Whether two expressions are equal, wherever they stand in the source: a name read is the same as one bound."""
    return ast.unparse(expression) == ast.unparse(other)


def matches(pattern: Any, expression: Any, found: dict[str, ast.expr]) -> bool:
    """Whether the expression fits the pattern. found: receives the expression for each name in capitals."""
    if isinstance(pattern, ast.Name) and pattern.id.isupper():
        if pattern.id in found:
            return isinstance(expression, ast.AST) and is_same(found[pattern.id], expression)
        found[pattern.id] = expression
        return True
    if isinstance(pattern, str) and pattern.isupper() and isinstance(expression, str):  # the name of an attribute
        found[pattern] = ast.Name(expression)
        return True
    if isinstance(pattern, list):
        return (
            isinstance(expression, list)
            and len(pattern) == len(expression)
            and all(matches(one, other, found) for one, other in zip(pattern, expression, strict=True))
        )
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(expression) and all(
            matches(value, getattr(expression, name, None), found)
            for name, value in ast.iter_fields(pattern)
            if name not in ("ctx", "kind")
        )
    return bool(pattern == expression)


def first_match(patterns: tuple[str, ...], expression: ast.expr) -> tuple[str, dict[str, ast.expr]] | None:
    """The first pattern that fits, and the expressions for its names in capitals."""
    for text in patterns:
        found: dict[str, ast.expr] = {}
        if matches(_parsed(text), expression, found):
            return text, found
    return None


def _parsed(text: str) -> ast.expr:
    tree = ast.parse(text, mode="eval").body
    for node in calls_in(tree):
        node.keywords.sort(key=lambda keyword: keyword.arg or "")  # the order in which Inliner puts them
    return tree


class Substitution(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, substitutes: Mapping[str, ast.expr]) -> None:
        self.substitutes = substitutes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return deep_copy(self.substitutes.get(node.id, node))


def define(original: Any, source: str, names: Mapping[str, Any], name: str, pattern: str) -> Callable[..., Any]:
    """The function `name` that the source defines, as if written in the module of the original function.

    names: added to that module's globals, which are looked up at each call. Defaults are the original's objects, by the
    names of the parameters. A method is defined in a class, which mangles its private names.
    """
    tree: Any = ast.parse(source)
    arguments = tree.body[0].args
    parameters = inspect.signature(original).parameters.values()
    defaults = {f"default_of_{each.name}_": each.default for each in parameters if each.default is not each.empty}

    def default_of(parameter: ast.arg, default: Any) -> Any:
        name = f"default_of_{parameter.arg}_"
        return ast.Name(name) if default is not None and name in defaults else default

    last = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) or None :]
    arguments.defaults = [*map(default_of, last, arguments.defaults)]
    arguments.kw_defaults = [*map(default_of, arguments.kwonlyargs, arguments.kw_defaults)]
    names = {**names, **defaults}
    source, made_name, owner = ast.unparse(tree), name, original.__qualname__.split(".")[-2:-1]
    if owner and owner[0].isidentifier():
        # Private names are mangled without the underscores that a class's begins with; these keep its own name free.
        mangling = f"___{owner[0]}"
        source, made_name = f"class {mangling}:\n{textwrap.indent(source, '    ')}", f"{mangling}.{name}"
    code = f"def make({', '.join(names)}):\n{textwrap.indent(source, '    ')}\n    return {made_name}\n"
    scope: dict[str, Any] = {}
    filename = f"<onetrip {pattern} of {original.__module__}.{original.__qualname__} {crc32(code.encode()):08x}>"
    exec(compile(code, filename, "exec"), original.__globals__, scope)
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)  # for tracebacks
    made: Any = scope["make"](**names)
    if "__class__" in made.__code__.co_freevars:  # super() means the class of the original, not the one made here
        cell, own = (each.__closure__[each.__code__.co_freevars.index("__class__")] for each in (made, original))
        cell.cell_contents = own.cell_contents
    made.__module__, made.__name__, made.__qualname__ = original.__module__, original.__name__, original.__qualname__
    function: Callable[..., Any] = made
    return function
