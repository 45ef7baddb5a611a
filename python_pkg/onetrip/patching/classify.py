"""What each module of a model is: an attention, a block, a leaf norm, or nothing that can be patched.

Decided once per module, by structure and behaviour. The answer is a site, which can rewrite and verify the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..ops.common.backends import KERNEL_DTYPES
from . import dropouts, experts, linear_loss, watched_logits
from .activations import (
    Activation,
    Activations,
    FoundActivation,
    choose_activations,
    recognise_activation,
)
from .activations.methods import read_methods
from .activations.soft_caps import SoftCaps
from .attention import Attention, Interface, SoftmaxRegions, eager, one_mask, read_attention
from .attention.cached import CacheUpdates
from .attention.heads import Heads
from .attention.interface import reads_strides
from .attention.sdpa_calls import SdpaCalls, SdpaMasks, read_sdpa_calls, sdpa_site
from .calls import configuration, is_distributed, is_released, original_class
from .classes import Rewrite, is_stacked, method_of, plain_forward, returns_as_is
from .dropouts import Dropout, FunctionalDropouts
from .experts import Experts, read_experts
from .forward import Forward, read_forward
from .linear import tied_embedding
from .linear.biased_logits import BiasedLogits
from .linear.cast_input import CastInputs
from .linear.lora import Adapters
from .linear.packed_parts import PackedParts
from .linear.packed_slices import PackedSlices
from .linear.scaled_logits import ScaledLogits
from .linear.shared_input import SharedInputs
from .linear_loss import VocabularyLoss, labels_position, output_layer
from .norms import KERNEL_DEVICES, NormSpec, could_be_norm, recognise
from .report import Unsuitable
from .residual import ResidualSums, choose_sums, read_sums
from .residual.layer_scale import LayerScales
from .rewriting import InForward
from .rotary import Rotations
from .scans import Scans

_IN_ORDER: tuple[type[InForward], ...] = (
    *(Heads, Rotations, Activations, LayerScales, ResidualSums),
    *(PackedSlices, PackedParts, SharedInputs, CastInputs, SoftCaps, ScaledLogits, BiasedLogits),
    *(Adapters, FunctionalDropouts, CacheUpdates, Scans),
)
"""What is fused in a forward, each with those before it fused; after attention."""

_ATTENTION = (Attention, SoftmaxRegions, SdpaCalls)


@dataclass(frozen=True)
class Together:
    """Several sites in one module: around its forward; in it, each in the forward with those before it fused; and in
    methods."""

    parts: tuple[InForward | Experts | VocabularyLoss, ...]

    @property
    def named(self) -> InForward | Experts | VocabularyLoss:
        """The site that gives its name to the whole: the loss, else attention, else the last one in the forward that is
        not minor, else shared inputs, else the last one that fuses something."""
        first = [part for part in self.parts if isinstance(part, (VocabularyLoss, *_ATTENTION))]
        shared = [part for part in self.parts if isinstance(part, SharedInputs)]
        others = [part for part in self.parts if isinstance(part, InForward) and not part.is_minor]
        in_forward = [part for part in reversed(others) if part.forward.method == "forward"]
        fused = [part for part in reversed(self.parts) if not isinstance(part, SdpaMasks)]
        return [*first, *in_forward, *shared, *fused, self.parts[-1]][0]

    @property
    def pattern(self) -> str:
        return self.named.pattern

    @property
    def detail(self) -> str:
        named = self.named
        if isinstance(named, _ATTENTION):
            rest = tuple(part for part in self.parts if not isinstance(part, _ATTENTION))
            return f"and {Together(rest).pattern}" if rest else self.parts[-1].detail
        others = (f"and {part.pattern}" for part in reversed(self.parts) if part.pattern != named.pattern)
        return ", ".join(dict.fromkeys(filter(None, (named.detail, *others))))

    def rewrite(self, cls: type) -> Rewrite:
        """The forward and the methods with all of it fused."""
        rewrites = [part.rewrite(cls) for part in self.parts]
        constants, absorbed, functions = (
            tuple(dict.fromkeys(each for part in rewrites for each in getattr(part, name)))
            for name in ("constants", "absorbed", "functions")
        )
        # Of one method the last, with all before it fused.
        sources = {name: source for part in rewrites for name, source in part.sources}
        around = "".join(part.around for part in rewrites)  # no class has a loss and experts
        return Rewrite(self.pattern, tuple(sources.items()), around, constants, absorbed, functions)

    def verify(self, module: nn.Module) -> None:
        """Raise VerificationError unless each computes the same as the original."""
        for part in self.parts:
            part.verify(module)


Site = InForward | Together | Experts | NormSpec | Dropout | VocabularyLoss | tied_embedding.TiedEmbedding
"""Each has a pattern, a detail, rewrite(cls) -> Rewrite and verify(module)."""


class Classifier:
    """Classifies the modules of one model. Reads each class once, and probes each configuration of a norm once."""

    def __init__(
        self, model: nn.Module, wanted: frozenset[str], excluded: frozenset[str], replace_sdpa: bool | None
    ) -> None:
        self.wanted, self.replace_sdpa = wanted, replace_sdpa
        self.excluded = {id(module) for name, module in model.named_modules(remove_duplicate=False) if name in excluded}
        losses = [name for name in (linear_loss.PATTERN, watched_logits.PATTERN) if name in wanted]
        self.loss_pattern = losses[0] if losses else None
        blocks = [module for module in model.modules() if module._modules] if self.loss_pattern else []
        self.output_layers = {id(module): head for module in blocks if (head := output_layer(module)) is not None}
        """id(model that computes a loss) -> its output layer."""
        self.tied = tied_embedding.tied_modules(model) if tied_embedding.PATTERN in wanted else frozenset()
        self.left: dict[int, Unsuitable] = {}
        """id(module of which a part is a site) -> why another part is none."""
        self.model_device = _kernel_device(model) or torch.device("cpu")
        self.dropout = Dropout(self.model_device) if dropouts.PATTERN in wanted and _in_float64(model) is None else None
        self.is_lazy = any(map(is_lazy, model.parameters()))
        self.known: dict[Any, Any] = {}
        """What was found of classes, of rewritten forwards, of configurations of leaves, and of sites: see once."""

    def once(self, function: Callable[..., Any], *arguments: Any, key: tuple[Any, ...] | None = None) -> Any:
        """function(*arguments), computed once for a key: the layers of a model share a class and a configuration. The
        key is that of the arguments, unless one is given."""
        key = (function, *(arguments if key is None else key))
        if key not in self.known:
            self.known[key] = function(*arguments)
        return self.known[key]

    def classify(self, module: nn.Module) -> Site | Unsuitable | None:
        """The site that a module is; why it is none, if a user would expect one; None for anything else."""
        if isinstance(module, torch.jit.ScriptModule):
            return None if module._modules else Unsuitable("unknown_forward", "TorchScript")
        if self.is_lazy and any(map(is_lazy, module.parameters())):
            return _LAZY
        if self.loss_pattern and any(head is module for head in self.output_layers.values()):
            return _replaced(module) or _in_float64(module) or VocabularyLoss(None, self.loss_pattern)
        if id(module) in self.tied:
            return unsuitable(module) or tied_embedding.tied_site(module)
        return self._own(module)

    def rewrite(self, module: nn.Module, site: Site) -> Rewrite:
        """The rewrite of a site, one for all equal ones."""
        rewrite: Rewrite = self.once(type(site).rewrite, site, original_class(type(module)))
        return rewrite

    def _own(self, module: nn.Module) -> Site | Unsuitable | None:
        """What the module's forward computes, and the methods that it may call."""
        cls = original_class(type(module))
        reading = self.once(read_attention, cls)
        parts: list[Any] = []
        if reading is not None or module._modules or self.once(_calls_sdpa, cls):
            parts, why = self._in_forward(module, cls, reading)
        else:
            leaf = self._leaf(module)
            if isinstance(leaf, (NormSpec, Dropout)):
                return leaf
            why = leaf
        if reading is None:
            methods = (self._activations(module, *each) for each in self.once(read_methods, cls))
            parts += [each for each in methods if each is not None and unsuitable(module) is None]
        grouped = self.once(read_experts, cls) if experts.PATTERN in self.wanted else None
        if isinstance(grouped, Unsuitable):
            why = grouped
        elif grouped is not None and unsuitable(module) is None:
            parts.insert(0, Experts(grouped))
        if self.loss_pattern and id(module) in self.output_layers:
            is_excluded = id(self.output_layers[id(module)]) in self.excluded
            blocked = _HEAD_EXCLUDED if is_excluded else _replaced(module) or _in_float64(module)
            if blocked is None:
                parts.insert(0, VocabularyLoss(labels_position(module), self.loss_pattern))
            why = blocked or why
        if not parts:
            return why
        if why is not None and why is not _NO_SUM:
            self.left[id(module)] = why
        return Together(tuple(parts)) if len(parts) > 1 else parts[0]

    def _in_forward(
        self, module: nn.Module, cls: Any, reading: Interface | SoftmaxRegions | Unsuitable | None
    ) -> tuple[list[InForward], Unsuitable | None]:
        """The sites in the module's forward, and why something else in it is none. reading: of its attention."""
        parts: list[InForward] = []
        source, why, blocked = "", None, unsuitable(module)
        cannot = None if reading is None else _replaced(module) or _in_float64(module)
        fused: InForward | Unsuitable | None = None
        shares_mask = one_mask.PATTERN in self.wanted
        if eager.PATTERN in self.wanted:
            fused = reading.site(module, self.replace_sdpa, shares_mask) if isinstance(reading, Interface) else reading
        if fused is not None and not isinstance(fused, Unsuitable):
            fused = cannot or fused
        first = None if isinstance(fused, Unsuitable) else fused
        if first is None and cannot is None and isinstance(reading, Interface) and shares_mask:
            first = reading.mask_site(module)
        if first is not None:
            parts, source = [first], self.rewrite(module, first).forward
        n_attention = len(parts)
        for kind in _IN_ORDER:
            if kind in (Heads, CacheUpdates) and not (isinstance(reading, Interface) and reads_strides(module)):
                continue
            forward = self.once(_read, cls, source, kind.in_wrapper)
            if isinstance(forward, Forward):
                part = self._part(kind, module, forward)
            else:
                part = forward if kind is ResidualSums else None
            if isinstance(part, Unsuitable):
                why = part if part.reason != "unknown_forward" or _resembles_block(module) else None
            elif part is not None and blocked is not None:
                why = blocked if kind is ResidualSums else why
            elif part is not None:
                parts.append(part)
                source = self.rewrite(module, part).forward
        sdpa, stays = self._sdpa(module, cls, source)
        if sdpa is not None:
            parts.append(sdpa)
        stays = stays or (fused if isinstance(fused, Unsuitable) else None)
        if stays is not None:
            return parts, stays
        return parts, why if reading is None or len(parts) > n_attention else None

    def _sdpa(self, module: nn.Module, cls: Any, source: str) -> tuple[SdpaCalls | SdpaMasks | None, Unsuitable | None]:
        """The calls of SDPA in the forward as a site, and why SDPA stays. source: of all else fused."""
        forward = self.once(_read, cls, source, True)
        calls = self.once(read_sdpa_calls, forward) if isinstance(forward, Forward) else ()
        if not calls:
            return None, None
        site, stays = sdpa_site(module, forward, calls, self.replace_sdpa, self.wanted)
        cannot = None if site is None else _replaced(module) or _in_float64(module)
        return (site, stays) if cannot is None else (None, stays or cannot)

    def _part(self, kind: type[InForward], module: nn.Module, forward: Forward) -> InForward | Unsuitable | None:
        """What of one kind is fused in the forward, the others before it fused."""
        if kind is Activations:
            return self._activations(module, forward)
        if kind is ResidualSums:
            return self._sums(module, forward)
        if self.wanted.isdisjoint(kind.patterns):
            return None
        chosen = kind.choose(module, self.once(kind.read, forward), self.excluded)
        return kind(forward, chosen) if chosen else None

    def _activations(
        self, module: nn.Module, forward: Forward, found: list[FoundActivation] | None = None
    ) -> Activations | None:
        """found: what was read of a method that is not the forward."""
        found = self.once(Activations.read, forward) if found is None else found
        chosen = choose_activations(module, found, self._activation, self.excluded)
        wanted = tuple(choice for choice in chosen if choice.pattern in self.wanted)
        return Activations(forward, wanted) if wanted else None

    def _activation(self, act: Any) -> Activation | None:
        """What a module or function computes. Remembered, of modules for those of the same class and configuration."""
        key: tuple[Any, ...] = (act,)
        if isinstance(act, nn.Module):
            found = configuration(act)
            if _replaced(act) is not None or found is None:
                return None
            key = (original_class(type(act)), found)
        activation: Activation | None = self.once(recognise_activation, act, key=key)
        return activation

    def _sums(self, module: nn.Module, forward: Forward) -> ResidualSums | Unsuitable | None:
        forward, sums = self.once(read_sums, forward)
        is_wrapped = not self.once(returns_as_is, plain_forward(original_class(type(module))))
        chosen = choose_sums(module, sums, self.norm, self.excluded, is_wrapped)
        if isinstance(chosen, Unsuitable):
            return chosen
        if not chosen:
            return _NO_SUM
        wanted = tuple(choice for choice in chosen if choice.pattern in self.wanted)
        return ResidualSums(forward, wanted) if wanted else None

    def _leaf(self, module: nn.Module) -> NormSpec | Dropout | Unsuitable | None:
        if original_class(type(module)) is nn.Dropout:
            return self.dropout if module.p and not module.inplace and _replaced(module) is None else None
        spec = self.norm(module) if could_be_norm(module) else _BUFFERS if module._buffers else _WRONG_SHAPE
        if isinstance(spec, Unsuitable):
            return spec if _is_called_norm(module) else None
        return spec if spec.pattern in self.wanted else None

    def norm(self, module: nn.Module) -> NormSpec | Unsuitable:
        """The norm that a leaf computes. Remembered for modules of the same class and configuration."""
        if type(module).__module__.partition(".")[0] == "peft":
            return Unsuitable("peft_wrapper", type(module).__name__)
        if reason := unsuitable(module):
            return reason
        if module._modules or not could_be_norm(module):
            return Unsuitable("unknown_forward", f"{type(module).__name__} is no leaf norm")
        parameters = tuple((n, None if p is None else (p.shape, p.dtype)) for n, p in module._parameters.items())
        device = _kernel_device(module) or self.model_device  # never meta
        found = configuration(module)
        key = (original_class(type(module)), parameters, id(module) if found is None else found, device)
        spec: NormSpec | Unsuitable = self.once(recognise, module, device, key=key)
        return spec


def _calls_sdpa(cls: Any) -> bool:
    forward = _read(cls, "", True)
    return isinstance(forward, Forward) and bool(read_sdpa_calls(forward))


def _read(cls: Any, source: str, in_wrapper: bool) -> Forward | Unsuitable:
    """The forward of a class, or its rewrite. in_wrapper: as InForward's."""
    outer = plain_forward(cls)
    if in_wrapper or returns_as_is(outer):
        return read_forward(method_of(cls, "forward"), source, may_call_super=True)
    return read_forward(outer, may_call_super=True)


STACKED = Unsuitable("kernelized_already", "patched, and given another class on top of that")
_NO_SUM = Unsuitable("unknown_forward", "adds no residual to a dropped or normalised branch")
_HEAD_EXCLUDED = Unsuitable("excluded", "the loss, whose output layer is excluded")
_LAZY = Unsuitable("unsupported_shape", "lazy parameters have no shape yet: run the model once, then patch it")
_BUFFERS = Unsuitable("unknown_forward", "keeps buffers")
_WRONG_SHAPE = Unsuitable("unsupported_shape", "not a module with at most one weight and one bias, both vectors")


def _kernel_device(module: nn.Module) -> torch.device | None:
    devices = (parameter.device for parameter in module.parameters())
    return next((device for device in devices if device.type in KERNEL_DEVICES), None)


def _is_called_norm(module: nn.Module) -> bool:
    """Whether the report mentions the module if it is not patched. The name is used for nothing else.

    False for batch norms and for the parametrizations weight_norm and spectral_norm: no fused operator replaces them.
    """
    name = type(module).__name__.lower()
    if any(word in name for word in ("batchnorm", "weightnorm", "spectralnorm")):
        return False
    return "norm" in name or isinstance(module, (nn.LayerNorm, nn.RMSNorm))


def _resembles_block(module: nn.Module) -> bool:
    """Whether a user would expect a fused block here: leaves only, among them a Linear, and a dropout or a norm."""
    children = [child for child in module._modules.values() if child is not None]
    has_norm_or_dropout = any(isinstance(child, nn.Dropout) or _is_called_norm(child) for child in children)
    has_linear = any(isinstance(child, nn.Linear) for child in children)
    try:
        arguments = inspect.signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):  # a property, a built-in function
        return False
    takes_two = len(arguments) == 3 and all(argument.default is argument.empty for argument in arguments)
    return has_linear and has_norm_or_dropout and takes_two and not any(child._modules for child in children)


_META = frozenset({"__new__", "__init__", "__setattr__"})
"""What a metaclass runs for each class."""
_PLAIN = frozenset({"builtins", "abc", "typing", "typing_extensions"})
"""Modules with metaclasses whose classes may be inherited from."""


def _replaced(module: nn.Module) -> Unsuitable | None:
    """Why a change of the module's class would not change its forward, or not permanently."""
    state = vars(module)
    if "forward" in state and "_hf_hook" not in state:
        if hasattr(type(module), "kernel_layer_name"):
            return Unsuitable("kernelized_already", "a hub kernel replaced its forward")
        return Unsuitable("hf_hook", "forward is set on the instance")
    if type(module).__module__.startswith("onetrip.nn"):
        return Unsuitable("kernelized_already", "an onetrip module")
    if is_stacked(module):
        return STACKED
    if _META & {name for kind in type(type(module)).__mro__ if kind.__module__ not in _PLAIN for name in vars(kind)}:
        return Unsuitable("unknown_forward", "its metaclass sees every class that is made, a patched one too")
    if "_hf_hook" in state:
        return Unsuitable("hf_hook", f"accelerate's {type(module._hf_hook).__name__}")
    return None


def _in_float64(module: nn.Module) -> Unsuitable | None:
    doubles = (name for name, parameter in module.named_parameters() if parameter.dtype == torch.float64)
    name = next(doubles, None)
    return None if name is None else Unsuitable("unsupported_dtype", f"{name} is float64")


def _released(module: nn.Module) -> Unsuitable | None:
    """Why probes and comparisons would read no values, with which any result agrees (DeepSpeed ZeRO-3 leaves empty
    parameters between calls), or freed memory (FSDP1 leaves views, which are no parameters)."""
    empty = (name for name, parameter in module._parameters.items() if parameter is not None and parameter.numel() == 0)
    attributes = (item for child in module.modules() for item in vars(child).items())
    freed = (name for name, value in attributes if type(value) is Tensor and is_released(value))
    name = next(empty, None) or next(freed, None)
    return None if name is None else Unsuitable("unsupported_device", f"{name} is sharded, gathered for each call only")


def unsuitable(module: nn.Module) -> Unsuitable | None:
    """Why a block or a norm must not be patched, whatever it computes."""
    if replaced := _replaced(module):
        return replaced
    hooked = next((child for child in module.modules() if "_hf_hook" in vars(child)), None)
    if hooked is not None:
        return Unsuitable("hf_hook", f"accelerate's {type(hooked._hf_hook).__name__} on a {type(hooked).__name__}")
    if released := _released(module):
        return released
    for name, parameter in module.named_parameters():
        own = name in module._parameters  # children in other formats are called, not read
        if own and not parameter.is_floating_point():
            return Unsuitable("quantized", f"{name} is {str(parameter.dtype)[6:]}")
        if parameter.dtype == torch.float64 or (own and parameter.dtype not in KERNEL_DTYPES):
            return Unsuitable("unsupported_dtype", f"{name} is {str(parameter.dtype)[6:]}")
        if is_distributed(parameter.data):
            return Unsuitable("unsupported_device", f"{name} is sharded")
        if parameter.device.type not in (*KERNEL_DEVICES, "meta"):
            return Unsuitable("unsupported_device", f"{name} is on {parameter.device}")
    return None
