"""Attention modules: those whose forward asks transformers' AttentionInterface for the function to call.

A site is patched by its forward: where it asks, it is handed a fused function in place of the eager one that it would
have got. Everything else stays the model's own: the name of the implementation in its config, and with it the masks
that are made, the branches that models take on that name, and what output_attentions allows.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from .calls import count_fallback, original_class
from .classes import Rewrite
from .eager import EagerFunction, parse, read_eager_function, without_annotations
from .norms import Unsuitable

PATTERN = "attention_softmax"
IMPLEMENTATION = "onetrip"
"""The name under which register_attention registers."""

SDPA = """\
def attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None, **kwargs
):
    scale_ = query.shape[-1] ** -0.5 if scaling is None else scaling
    n_queries_, n_keys_ = query.shape[2], key.shape[2]
    causal_ = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal_ = bool(causal_ and attention_mask is None and n_queries_ > 1)
    keys_, values_, bias_ = key, value, position_bias
    if causal_ and n_keys_ > n_queries_:
        keys_, values_ = key[:, :, :n_queries_], value[:, :, :n_queries_]
        bias_ = None if position_bias is None else position_bias[..., :n_queries_]
    if (
        kwargs.get("cache") is not None
        or kwargs.get("softcap") is not None
        or (causal_ and n_keys_ < n_queries_)
        or not fits_(query, keys_, values_, attention_mask, bias_, None, scale_, True)
    ):
        count_fallback_(module)
        return original_(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
            position_bias=position_bias, **kwargs
        )
    count_fused_(module)
    mask_, bias_ = biased_mask_(attention_mask, bias_)
    output_, _ = attention_(
        query, keys_, values_, mask_, scale=scale_, position_bias=bias_, causal=causal_, dropout_p=dropout
    )
    return output_.transpose(1, 2).contiguous(), None
"""
"""What transformers' sdpa function computes: causal, where it is, counts from the first query; no weights."""


@dataclass(frozen=True)
class Interface:
    """A forward that asks the AttentionInterface."""

    tree: ast.FunctionDef
    questions: tuple[ast.expr, ...]
    """The expressions in the tree that give the function to call."""


def read_interface(cls: Any) -> Interface | Unsuitable | None:
    """How instances of a class come by their attention function; None where no forward asks."""
    return _read_interface(getattr(cls, "forward", None))


@lru_cache(maxsize=4096)
def _read_interface(forward: Any) -> Interface | Unsuitable | None:
    code, names = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    if code is None or not any(_is_interface(names.get(name)) for name in code.co_names):
        return None
    tree = parse(forward)
    if isinstance(tree, Unsuitable):
        return tree
    questions = tuple(node for node in ast.walk(tree) if _is_question(node, names))
    if not questions:
        return Unsuitable("unknown_forward", "asks the attention interface in an unknown way")
    return Interface(tree, questions)  # type: ignore[arg-type]


def _is_interface(value: object) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    interface = getattr(modeling, "AttentionInterface", None)
    return interface is not None and isinstance(value, interface)


def _is_question(node: ast.AST, names: dict[str, Any]) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="get_interface")):
            return _is_interface(names.get(name))
        case ast.Subscript(value=ast.Name(id=name)):
            return _is_interface(names.get(name))
    return False


def find_attention(module: nn.Module, replace_sdpa: bool) -> EagerFunction | Unsuitable | None:
    """The attention function that the module calls now, if it can be fused; None where the module is no such site.

    replace_sdpa: fuse in place of sdpa as well.
    """
    cls = original_class(type(module))
    interface = read_interface(cls)
    if interface is None or isinstance(interface, Unsuitable):
        return interface
    functions = {_answer(cls.forward, interface, question, module) for question in interface.questions}
    function = functions.pop()
    if functions or function is None:
        return Unsuitable("unknown_forward", "its attention function depends on more than the module")
    if function is attention_forward:
        return Unsuitable("kernelized_already", f"attn_implementation is {IMPLEMENTATION!r}")
    if function is _sdpa():
        if not replace_sdpa:
            return Unsuitable("sdpa_in_use", SDPA_IS_BETTER)
        takes_bias = "position_bias" in inspect.signature(function).parameters  # of transformers 5
        return EagerFunction(function, SDPA, True, False, takes_bias, False, returns_weights=False, has_bool_mask=True)
    if function.__module__.startswith("transformers.integrations."):
        return Unsuitable("other_attention_in_use", function.__name__)
    return read_eager_function(function)


SDPA_IS_BETTER = (
    "its fused kernels keep no probabilities (a CPU has none for dropout: there the fused softmax is faster; "
    "onetrip bench --op attention measures both); attention=True replaces it"
)


def _answer(forward: Any, interface: Interface, question: ast.expr, module: nn.Module) -> Any:
    """What the question gives for this module; None where more than the module is needed."""
    expression = ast.fix_missing_locations(ast.Expression(copy.deepcopy(question)))
    try:
        return eval(
            compile(expression, "<attention interface>", "eval"),
            forward.__globals__,
            {interface.tree.args.args[0].arg: module},
        )
    except Exception:  # whatever a name that is not there leads to
        return None


def _sdpa() -> Any:
    module = sys.modules.get("transformers.integrations.sdpa_attention")
    return getattr(module, "sdpa_attention_forward", None)


def rewrite_attention(module: nn.Module, found: EagerFunction) -> Rewrite:
    """The forward that calls the fused function wherever the interface hands out the one that was found."""
    interface = read_interface(original_class(type(module)))
    assert isinstance(interface, Interface)
    tree = copy.deepcopy(interface.tree)
    names = original_class(type(module)).forward.__globals__
    self_name = tree.args.args[0].arg

    class Asking(ast.NodeTransformer):
        def generic_visit(self, node: Any) -> Any:
            super().generic_visit(node)
            if not _is_question(node, names):
                return node
            return ast.Call(ast.Name("chosen_"), [ast.Name(self_name), node], [])

    Asking().visit(tree)
    tree.name, tree.returns, tree.args = "forward", None, without_annotations(tree.args)
    chosen = Chosen(found.function, fused_function(found))
    return Rewrite(PATTERN, ast.unparse(tree) + "\n", (("chosen_", chosen),), in_module=True)


_fused: dict[EagerFunction, Callable[..., Any]] = {}


def fused_function(found: EagerFunction) -> Callable[..., Any]:
    """The fused function; one for each original in the process."""
    if found not in _fused:
        _fused[found] = found.compile()
    return _fused[found]


@dataclass(frozen=True)
class Chosen:
    """Hands out the fused function in place of one other. Whatever else the interface gives is called as it is."""

    replaced: Callable[..., Any]
    fused: Callable[..., Any]

    def __call__(self, module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        if function is self.replaced:
            return self.fused
        count_fallback(module)
        return function


def register_attention() -> None:
    """Make attn_implementation="onetrip" known to transformers: what a model's own eager function computes, fused.

    For models that are to be made with it (from_pretrained(..., attn_implementation="onetrip")); patch_model needs
    no such name. Registers the function with AttentionInterface and eager's masks with AttentionMaskInterface: without
    the second, masks would be dropped. Changes nothing else. Raises ImportError without transformers 4.53 or newer.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, eager_mask)


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """The attention function "onetrip": the module's own eager function, by one fused call where it is understood.

    Raises ValueError for modules whose forward has no eager function, or hands over what no eager function takes.
    """
    function = _own_eager_function(original_class(type(module)))
    if function is None:
        raise ValueError(
            f"attn_implementation {IMPLEMENTATION!r}: {type(module).__name__} has no eager attention function"
        )
    if extra := sorted(name for name in kwargs if name in ("indices", "block_indices")):
        raise ValueError(
            f"attn_implementation {IMPLEMENTATION!r}: {type(module).__name__} gives {extra[0]}, which its eager "
            "attention does not take; use attn_implementation='eager' and onetrip.patch_model"
        )
    found = read_eager_function(function)
    if isinstance(found, EagerFunction):
        function = fused_function(found)
    else:
        count_fallback(module)
    return function(module, query, key, value, attention_mask, **kwargs)


def _own_eager_function(cls: Any) -> Any:
    """The default that a class's forward gives get_interface."""
    interface = read_interface(cls)
    for question in interface.questions if isinstance(interface, Interface) else ():
        match question:
            case ast.Call(args=[_, ast.Name(id=name)]):
                return cls.forward.__globals__.get(name)
    return None
