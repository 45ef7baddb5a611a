"""Attention modules whose forward asks transformers' AttentionInterface for the attention function to call.

The patched forward exchanges the answer: a fused function in place of the eager one (or of SDPA's, on request). The
rest stays the model's own. The implementation in its config keeps its name, and with it the masks that are made, the
branches that models take on that name, and the support of output_attentions.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...cpu_advice import multiplies_bfloat16_in_vectors
from ...ops.common.tracing import is_traced, is_transformed, watched_as
from ..calls import count_fallback, original_class
from ..classes import method_of
from ..forward import Forward, places, read_forward
from ..report import Unsuitable
from ..rewriting import InForward, Rewriting
from ..source import calls_in
from ..verify import kind_of
from . import one_mask
from .eager import PATTERN, EagerFunction, fused_function, read_eager_function
from .one_mask import with_one_mask
from .verify import verify_attention, verify_mask

IMPLEMENTATION = "onetrip"
"""The name under which register_attention registers."""

_UNREGISTERED = object()
"""In place of a function: the interface has none of that name, such as "eager"."""

SDPA = """\
def attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, **kwargs
):
    causal_ = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal_ = bool(causal_ and attention_mask is None and query.shape[2] > 1)
    output_ = None
    if kwargs.get("cache") is None and kwargs.get("softcap") is None:
        output_ = sdpa_(attention_, query, key, value, attention_mask, dropout, causal_, scaling, position_bias)
    if output_ is None:
        count_fallback_(module)
        return original_(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, **kwargs
        )
    count_fused_(module)
    return output_.transpose(1, 2).contiguous(), None
"""
"""What transformers' sdpa function computes. It returns no weights."""

SDPA_IN_USE = Unsuitable(
    "sdpa_in_use",
    "without dropout, SDPA's fused kernels are faster. attention=True replaces SDPA (onetrip bench --op attention "
    "compares both)",
)

BY_RULE = "in place of SDPA, for dropout or training in bfloat16 on a CPU"
"""What the report says of SDPA that is replaced where is_slower."""

_LEAST_SCORES, _LEAST_QUERIES, _MOST_KEYS = 1 << 16, 64, 512
_MOST_BYTES = 8 << 20
"""Where training in bfloat16 is faster than with SDPA, forward and backward (2 threads, Zen 4, heads of 64 columns): 12
heads of 64 tokens 1.0x, of 128 1.4x, of 512 with causality 1.3x; 2 x 12 of 384 1.2x, masked 1.1x. 12 heads of 1,024
tokens: 1.1x, masked 0.9x. 12 of 32: 0.7x. Forward alone 1.0x: without gradients SDPA stays. With tiles (AMX) nothing
was measured, and it stays, too. The scores of heads that share a key head, which are worked on at once, have at most
_MOST_BYTES."""


@cache
def by_rule(original: Callable[..., Any], fused: Callable[..., Any], shares_mask: bool) -> Callable[..., Any]:
    """An attention function that calls fused where SDPA is slower. Elsewhere it stays. shares_mask: with one mask for
    all layers."""
    if shares_mask:
        original = with_one_mask(original, is_counted=False)

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        given = query, key, value, attention_mask
        has_bias = len(args) > 2 or kwargs.get("position_bias") is not None
        is_replaced = is_slower(*given, dropout, has_bias)
        return (fused if is_replaced else original)(module, *given, dropout, *args, **kwargs)

    return attention


def is_slower(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, has_bias: bool = False
) -> bool:
    """Whether SDPA is slower than ops.attention: on a CPU, with dropout but for float16, and in training with bfloat16.

    With dropout SDPA is composed of unfused operators there; its kernel for bfloat16 multiplies in float32
    (docs/benchmarks.md, attention).
    """
    on_cpu = (watched_as() or query.device.type) == "cpu"
    if not on_cpu or query.dtype == torch.float16:
        return False
    return bool(dropout or (not has_bias and _trains_slowly(query, key, value, mask)))


def _trains_slowly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether SDPA without dropout is slower than ops.attention, which keeps no scores either."""
    if query.dtype != torch.bfloat16 or query.is_nested or not query.dim() == key.dim() == 4:
        return False
    if is_traced(query, key, value, mask) or is_transformed():
        return False
    if not multiplies_bfloat16_in_vectors() or not torch.backends.mkldnn.enabled:
        return False
    if not torch.is_grad_enabled() or not (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if mask is not None and mask.dtype != torch.bool:
        return False
    (batch, n_heads, n_queries, _), (_, n_key_heads, n_keys, _) = query.shape, key.shape
    n_scores = n_heads * n_queries * n_keys
    if n_queries < _LEAST_QUERIES or n_keys > _MOST_KEYS:
        return False
    return batch * n_scores >= _LEAST_SCORES and query.itemsize * n_scores <= _MOST_BYTES * n_key_heads


@dataclass(frozen=True)
class Interface:
    """A forward that asks the AttentionInterface."""

    forward: Forward
    questions: tuple[ast.expr, ...]
    """The expressions in the tree whose value is the function to call."""
    defaults: tuple[ast.expr, ...]
    """The eager functions of forwards that ask only if the implementation is not "eager" (up to transformers 5.0)."""

    def site(self, module: nn.Module, replace_sdpa: bool | None, shares_mask: bool) -> Attention | Unsuitable:
        """The attention function that the module calls now, if it can be fused. shares_mask: where SDPA stays."""
        function, questions = self._function(module)
        if function is None:
            return Unsuitable("unknown_forward", "its attention function depends on more than the module")
        if function is attention_forward:
            return Unsuitable("kernelized_already", f"attn_implementation is {IMPLEMENTATION!r}")
        if function is _sdpa():
            options = (each for call in calls_in(self.forward.tree) for each in call.keywords if each.arg == "dropout")
            dropouts = [each.value for each in options]
            if not (replace_sdpa or not dropouts or may_be_slower(module, self.forward, dropouts)):
                return SDPA_IN_USE
            shares_mask = shares_mask and not replace_sdpa and self._passes_mask()
            return Attention(self.forward, questions, sdpa_function(function), not replace_sdpa, shares_mask)
        if _is_for_a_library(function):
            return Unsuitable("other_attention_in_use", function.__name__)
        found = read_eager_function(function)
        return found if isinstance(found, Unsuitable) else Attention(self.forward, questions, found)

    def mask_site(self, module: nn.Module) -> OneMask | None:
        """Of a module that calls SDPA now, with a mask and without a position bias."""
        function, questions = self._function(module)
        is_sdpa = function is not None and function is _sdpa() and self._passes_mask()
        return OneMask(self.forward, questions, sdpa_function(function)) if is_sdpa else None

    def _passes_mask(self) -> bool:
        return any(map(_passes_mask, calls_in(self.forward.tree)))

    def _function(self, module: nn.Module) -> tuple[Any, tuple[ast.expr, ...]]:
        """(the one attention function that the module calls now, the expressions whose value it is); the function is
        None if it depends on more than the module."""
        for questions in (self.questions, self.defaults):
            functions = {self.forward.evaluated(question, module, _UNREGISTERED) for question in questions}
            if functions != {_UNREGISTERED}:
                break
        return functions.pop() if len(functions) == 1 else None, questions


def read_interface(cls: Any) -> Interface | Unsuitable | None:
    """How instances of a class find their attention function; None if their forward does not ask."""
    forward = method_of(cls, "forward")
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or not any(_is_interface(names.get(name)) for name in code.co_names):
        return None
    read = read_forward(forward)
    if isinstance(read, Unsuitable):
        return read
    questions = tuple(node for node in ast.walk(read.tree) if is_question(node, names))
    if not questions:
        return Unsuitable("unknown_forward", "asks the attention interface in an unknown way")
    return Interface(read, questions, tuple(value for _, value in _defaults(read)))  # type: ignore[arg-type]


def _passes_mask(call: ast.Call) -> bool:
    """Whether a call is one of an attention function with a mask that may be a bool one. With a position bias SDPA is
    given the sum of both."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    mask = options.get("attention_mask", call.args[4] if len(call.args) > 4 else None)
    has_mask = mask is not None and not isinstance(mask, ast.Constant)
    has_options = bool(options.keys() & {"scaling", "dropout"}) or len(call.args) > 5
    return has_mask and has_options and "position_bias" not in options


def is_of_transformers(function: Callable[..., Any]) -> bool:
    """Whether an attention function is transformers' or ours, not a user's own."""
    return _is_for_a_library(function) or function.__module__.startswith("onetrip.")


def _is_for_a_library(function: Callable[..., Any]) -> bool:
    """Whether an attention function is one of transformers' for a library, not what functools.wraps named so."""
    return function.__module__.startswith("transformers.integrations.") and not hasattr(function, "__wrapped__")


def interface_of(forward: Forward) -> Any:
    """The interface that the forward's module has; None without one."""
    return next(filter(_is_interface, forward.globals.values()), None)


def _is_interface(value: object) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    shared = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", None)  # a dict up to transformers 4.50
    return shared is not None and (value is shared or isinstance(value, getattr(modeling, "AttentionInterface", ())))


def is_question(node: ast.AST, names: dict[str, Any]) -> bool:
    """Whether the value of an expression is an attention function that the interface gives."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get_interface")):
            return _is_interface(names.get(name))
        case ast.Subscript(value=ast.Name(id=name)):
            return _is_interface(names.get(name))
    return False


def reads_strides(module: nn.Module) -> bool:
    """Whether the attention function that the module calls now is transformers' for a library (SDPA, FlashAttention),
    which reads views as fast as copies. A user's own may need rows one after another, whatever its name."""
    interface = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    function = interface.get(getattr(getattr(module, "config", None), "_attn_implementation", None))
    return function is not None and _is_for_a_library(function)


def attention_functions(forward: Forward) -> set[str]:
    """The names of a forward that are only assigned what is_question, or a default before it."""
    functions: set[str] = set()
    others: set[str] = set()
    defaults = {id(value) for _, value in _defaults(forward)}
    for statement in ast.walk(forward.tree):
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if id(value) not in defaults:
                (functions if _asks(value, forward) else others).add(name)
    return functions - others


def may_be_slower(module: nn.Module, forward: Forward, given: Sequence[ast.expr]) -> bool:
    """Whether is_slower may hold: for bfloat16, or for what is given as dropout."""
    return any(_may_drop(module, forward, each) for each in given) or _is_bfloat16_on_cpu(module)


def _may_drop(module: nn.Module, forward: Forward, p: ast.expr) -> bool:
    """Whether the module's attributes in an expression give a dropout above 0. Local names and calls may."""
    nodes = (node for node in ast.walk(p) if isinstance(node, ast.Attribute) and not calls_in(node))
    values = [value for node in nodes if type(value := forward.evaluated(node, module)) in (int, float)]
    return not values or any(values)


def _defaults(forward: Forward) -> Iterator[tuple[str, ast.expr]]:
    """(name, function) of `name = function`, followed by `if implementation != "eager": name = <a question>`, where the
    name is called only."""
    called = {id(call.func) for call in calls_in(forward.tree)}
    read = [node for node in ast.walk(forward.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    others = {node.id for node in read if id(node) not in called}
    for place in places(forward.tree.body):
        match place.statement, place.following[:1]:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Name() as value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Name() as value),
                [
                    ast.If(
                        test=ast.Compare(ops=[ast.NotEq()], comparators=[ast.Constant(value="eager")]), orelse=[]
                    ) as asked
                ],
            ) if name not in others and inspect.isfunction(forward.resolved(value)) and _asks(asked, forward):
                yield name, value


def _asks(tree: ast.AST, forward: Forward) -> bool:
    """Whether part of a forward asks the interface."""
    return any(is_question(node, forward.globals) for node in ast.walk(tree))


def _is_bfloat16_on_cpu(module: nn.Module) -> bool:
    device, dtype = kind_of(module)
    is_on_cpu = device.type == "cpu" and not any(parameter.is_meta for parameter in module.parameters())
    return is_on_cpu and dtype == torch.bfloat16 and multiplies_bfloat16_in_vectors()


def _sdpa() -> Any:
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    return getattr(module, "sdpa_attention_forward", None)


def sdpa_function(function: Any) -> EagerFunction:
    """transformers' sdpa function, to be fused as SDPA says."""
    takes_bias = "position_bias" in inspect.signature(function).parameters  # since transformers 5
    return EagerFunction(function, SDPA, frozenset(("mask", "bias") if takes_bias else ("mask",)), is_sdpa=True)


@dataclass(frozen=True)
class _Exchange(InForward):
    """A module that calls another function wherever the interface returns a certain one. chosen: its questions."""

    function: EagerFunction

    def put(self, rewriting: Rewriting) -> None:
        rewriting.constants["chosen_"] = Chosen(self.function.function, self.other())
        for question in self.chosen:
            rewriting.put_around(question, "chosen_")

    def other(self) -> Callable[..., Any]:
        """The function that is called instead."""
        raise NotImplementedError


@dataclass(frozen=True)
class Attention(_Exchange):
    """A module that calls an attention function which can be fused."""

    by_rule: bool = False
    """Whether SDPA is replaced only in calls where it is the slower one."""
    shares_mask: bool = False
    """Whether all layers have one mask where SDPA stays."""
    patterns = (PATTERN,)

    @property
    def detail(self) -> str:
        return BY_RULE if self.by_rule else ""

    def other(self) -> Callable[..., Any]:
        fused = fused_function(self.function)
        return by_rule(self.function.function, fused, self.shares_mask) if self.by_rule else fused

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless the fused function computes the same as the original for this module."""
        verify_attention(module, self.function)
        if self.shares_mask:
            verify_mask(module, self.function, with_one_mask(self.function.function))


class OneMask(_Exchange):
    """A module that calls SDPA, which stays; its mask is that of the other layers."""

    patterns, is_minor = (one_mask.PATTERN,), True

    def other(self) -> Callable[..., Any]:
        return with_one_mask(self.function.function)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless SDPA computes the same as with the bool mask."""
        verify_mask(module, self.function, self.other())


@dataclass(frozen=True)
class Chosen:
    """Exchanges one function for the fused one. Any other function that the interface returns is called unchanged."""

    replaced: Callable[..., Any]
    fused: Callable[..., Any]

    def __call__(self, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        if function is self.replaced:
            return self.fused
        count_fallback(module)
        return function


def register_attention() -> None:
    """Register attn_implementation="onetrip" with transformers: the model's own eager attention, fused.

    For models created with that name (from_pretrained(..., attn_implementation="onetrip")); patch_model does not need
    it. Registers the function with AttentionInterface, and eager's masks with AttentionMaskInterface: otherwise
    transformers would drop the masks. Changes nothing else. Raises ImportError without transformers 4.53 or newer.
    Models with a class for each implementation (BERT up to 4.57) do not know the name: transformers raises KeyError.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask
    except ImportError as error:
        raise ImportError("register_attention: needs transformers 4.53 or newer") from error

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The attention function "onetrip": the module's own eager function, fused if its source is understood.

    Raises ValueError for modules without an eager function, and for arguments that no eager function takes.
    """
    function = _own_eager_function(original_class(type(module)))
    if function is None:
        raise ValueError(
            f"attn_implementation {IMPLEMENTATION!r}: {type(module).__name__} has no eager attention function"
        )
    if extra := sorted(name for name in kwargs if name in ("indices", "block_indices")):
        raise ValueError(
            f"attn_implementation {IMPLEMENTATION!r}: {type(module).__name__} passes {extra[0]}, which its eager "
            "attention does not take; use attn_implementation='eager' and onetrip.patch_model"
        )
    found = read_eager_function(function)
    if isinstance(found, EagerFunction):
        function = fused_function(found)
    else:
        count_fallback(module)
    return function(module, query, key, value, attention_mask, **kwargs)


@cache
def _own_eager_function(cls: Any) -> Any:
    """The function that a class's forward calls for "eager". Cached: attention_forward asks at each call."""
    interface = read_interface(cls)
    if not isinstance(interface, Interface):
        return None
    for question in (*interface.questions, *interface.defaults):
        match question:
            case ast.Call(args=[_, ast.Name(id=name)]) | ast.Name(id=name):
                return interface.forward.globals.get(name)
    return None
