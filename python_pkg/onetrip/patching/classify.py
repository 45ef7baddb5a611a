"""What each module of a model is: an attention, a block, a leaf norm, or nothing that can be patched.

Decided once per module, by structure and behaviour. The answer is a site, which can rewrite and verify the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.common.backends import KERNEL_DTYPES
from .activations import (
    Activation,
    Activations,
    FoundActivations,
    choose_activations,
    read_activations,
    recognise_activation,
)
from .activations.methods import InMethods, choose_methods, read_methods
from .attention import PATTERN as ATTENTION
from .attention import Attention, Interface, SoftmaxRegions, read_attention
from .calls import configuration, is_distributed, is_released, original_class
from .classes import Rewrite, is_stacked, method_of, plain_forward, returns_as_is
from .dropouts import PATTERN as DROPOUT
from .dropouts import Dropout
from .linear_loss import PATTERN as LINEAR_LOSS
from .linear_loss import VocabularyLoss, labels_position, output_layer
from .norms import KERNEL_DEVICES, Leaf, NormSpec, could_be_norm, recognise
from .report import Unsuitable
from .residual import FoundSums, ResidualSums, choose_sums, read_sums
from .rotary import PATTERN as ROTARY
from .rotary import Rotations, read_rotations
from .shared_input import PATTERN as SHARED_INPUT
from .shared_input import FoundGroups, SharedInputs, choose_shared_inputs, read_shared_inputs
from .tied_embedding import PATTERN as TIED_EMBEDDING
from .tied_embedding import TiedEmbedding, tied_modules, tied_site
from .watched_logits import PATTERN as CROSS_ENTROPY


@dataclass(frozen=True)
class Together:
    """Two kinds of site in one forward."""

    first: Attention | SoftmaxRegions | Rotations | Activations | ResidualSums
    second: Rotations | Activations | ResidualSums | SharedInputs | Together
    """Site in the forward with the first fused."""

    @property
    def names_first(self) -> bool:
        """Attention gives its name to the whole, shared inputs and, before sums, all others do not."""
        return isinstance(self.first, (Attention, SoftmaxRegions)) or isinstance(self.second, SharedInputs)

    @property
    def pattern(self) -> str:
        return (self.first if self.names_first else self.second).pattern

    @property
    def detail(self) -> str:
        named, other = (self.first, self.second) if self.names_first else (self.second, self.first)
        detail = "" if isinstance(named, (Attention, SoftmaxRegions)) else named.detail
        return ", ".join(filter(None, (detail, f"and {other.pattern}")))

    def rewrite(self, module: nn.Module) -> Rewrite:
        """The forward with both fused."""
        first, second = self.first.rewrite(module), self.second.rewrite(module)
        constants, absorbed = (*first.constants, *second.constants), (*first.absorbed, *second.absorbed)
        return replace(second, pattern=self.pattern, constants=constants, absorbed=absorbed)

    def verify(self, module: nn.Module, rewrite: Rewrite) -> None:
        """Raise VerificationError unless both compute the same as the original."""
        self.first.verify(module, rewrite)
        self.second.verify(module, rewrite)


InForward = Attention | SoftmaxRegions | Rotations | Activations | ResidualSums | SharedInputs
Site = InForward | Together | InMethods | Leaf | Dropout | VocabularyLoss | TiedEmbedding
"""Each has a pattern, rewrite(module) -> Rewrite and verify(module, rewrite)."""


class Classifier:
    """Classifies the modules of one model. Reads each class once, and probes each configuration of a norm once."""

    def __init__(
        self, model: nn.Module, wanted: frozenset[str], excluded: frozenset[str], replace_sdpa: bool | None
    ) -> None:
        self.wanted, self.replace_sdpa = wanted, replace_sdpa
        self.excluded = {id(module) for name, module in model.named_modules(remove_duplicate=False) if name in excluded}
        self.loss_pattern = next((name for name in (LINEAR_LOSS, CROSS_ENTROPY) if name in wanted), None)
        blocks = [module for module in model.modules() if module._modules] if self.loss_pattern else []
        self.output_layers = {id(module): head for module in blocks if (head := output_layer(module)) is not None}
        """id(model that computes a loss) -> its output layer."""
        self.tied = tied_modules(model) if TIED_EMBEDDING in wanted else frozenset()
        self.left: dict[int, Unsuitable] = {}
        """id(module of which a part is a site) -> why another part is none."""
        self.model_device = _kernel_device(model) or torch.device("cpu")
        self.dropout = Dropout(self.model_device) if DROPOUT in wanted and _in_float64(model) is None else None
        self.attentions: dict[type, Interface | SoftmaxRegions | Unsuitable | None] = {}
        self.readings: dict[tuple[Any, type, str], Any] = {}
        """(function that reads, class, source of its forward's rewrite) -> what it found."""
        self.activations: dict[Any, Activation | None] = {}
        self.sites: dict[Site, Site] = {}
        """One for all equal ones: the layers of a model share one rewrite."""
        self.norms: dict[Any, NormSpec | Unsuitable] = {}

    def classify(self, module: nn.Module) -> Site | Unsuitable | None:
        """The site that a module is; why it is none, if a user would expect one; None for anything else."""
        if is_stacked(module) and module._modules:
            return STACKED
        if isinstance(module, torch.jit.ScriptModule):
            return None if module._modules else Unsuitable("unknown_forward", "TorchScript")
        if self.loss_pattern and any(head is module for head in self.output_layers.values()):
            return _replaced(module) or _in_float64(module) or VocabularyLoss(None, self.loss_pattern)
        if id(module) in self.tied:
            return unsuitable(module) or tied_site(module)
        site = self._in_forward(module)
        if self.loss_pattern and id(module) in self.output_layers:
            why = _replaced(module) or _in_float64(module)
            if isinstance(site, Unsuitable):
                self.left[id(module)], site = site, None
            return site or why if why else VocabularyLoss(labels_position(module), self.loss_pattern, site)
        return site

    def _in_forward(self, module: nn.Module) -> Site | Unsuitable | None:
        """What the module's forward computes."""
        cls = original_class(type(module))
        if cls not in self.attentions:
            self.attentions[cls] = read_attention(cls)
        reading = self.attentions[cls]
        if reading is None:
            return self._with_methods(module, self._block(module, "") if module._modules else self._leaf(module))
        attention = self._attention(module, reading) if ATTENTION in self.wanted else None
        if isinstance(attention, (Attention, SoftmaxRegions)):
            rewrite = attention.rewrite(module)
            block = self._block(module, rewrite.source) if rewrite.method == "forward" else None
            is_alone = block is None or isinstance(block, Unsuitable)
            return attention if is_alone else self._together([attention, block])
        block = self._block(module, "")
        if block is None or isinstance(block, Unsuitable):
            return attention
        if isinstance(attention, Unsuitable):
            self.left[id(module)] = attention
        return block

    def _together(self, parts: list[Any]) -> Site:
        """One site of all parts, each of the forward with those before it fused."""
        site = parts[-1]
        for part in reversed(parts[:-1]):
            site = Together(part, site)
            site = self.sites.setdefault(site, site)
        return site

    def _attention(
        self, module: nn.Module, reading: Interface | SoftmaxRegions | Unsuitable
    ) -> Attention | SoftmaxRegions | Unsuitable:
        site = reading.site(module, self.replace_sdpa) if isinstance(reading, Interface) else reading
        if isinstance(site, Unsuitable):
            return site
        return _replaced(module) or _in_float64(module) or self.sites.setdefault(site, site)  # type: ignore[return-value]

    def _block(self, module: nn.Module, source: str) -> Site | Unsuitable | None:
        """source: of the rewritten forward, if another part of it is fused too."""
        parts: list[Any] = []
        why: Unsuitable | None = None
        for read in (self._rotations, self._activations, self._sums, self._shared_inputs):
            part = read(module, source)
            if isinstance(part, Unsuitable):
                why = part
            elif part is not None:
                parts.append(part)
                source = part.rewrite(module).source
        if not parts:
            return why
        if why is not None:
            self.left[id(module)] = why
        return self._together(parts)

    def _read(self, read: Callable[[Any, str], Any], module: nn.Module, source: str) -> Any:
        """What is found in the forward of the module's class, or in its rewrite. Each is read once. In a wrapper that
        may change results, as those of whole models and of experts do, only activations are looked for here."""
        cls = original_class(type(module))
        key = (read, cls, source)
        if key not in self.readings:
            outer = plain_forward(cls)
            is_read = read is read_activations or returns_as_is(outer)
            self.readings[key] = read(method_of(cls, "forward"), source) if is_read else read(outer, "")
        return self.readings[key]

    def _shared_inputs(self, module: nn.Module, source: str) -> SharedInputs | None:
        found: FoundGroups | None = self._read(read_shared_inputs, module, source)
        if SHARED_INPUT not in self.wanted or found is None or unsuitable(module) is not None:
            return None
        site = SharedInputs(found, choose_shared_inputs(module, found, self.excluded))
        return self.sites.setdefault(site, site) if site.chosen else None  # type: ignore[return-value]

    def _rotations(self, module: nn.Module, source: str) -> Rotations | None:
        if ROTARY not in self.wanted or unsuitable(module) is not None:
            return None
        return self._read(read_rotations, module, source)

    def _activations(self, module: nn.Module, source: str) -> Activations | None:
        found: FoundActivations | None = self._read(read_activations, module, source)
        if found is None or unsuitable(module) is not None:
            return None
        chosen = choose_activations(module, found, self._activation, self.excluded)
        wanted = tuple(choice for choice in chosen if choice.pattern in self.wanted)
        site = Activations(found, wanted)
        return self.sites.setdefault(site, site) if wanted else None  # type: ignore[return-value]

    def _with_methods(self, module: nn.Module, site: Site | Unsuitable | None) -> Site | Unsuitable | None:
        """The site of a module's forward, and with it the activations in functions that the forward may call."""
        cls = original_class(type(module))
        key = (read_methods, cls, "")
        if key not in self.readings:
            self.readings[key] = read_methods(cls)
        if not self.readings[key] or isinstance(site, Leaf) or unsuitable(module) is not None:
            return site
        methods = choose_methods(module, self.readings[key], self._activation, self.excluded, self.wanted)
        if not methods:
            return site
        if isinstance(site, Unsuitable):
            self.left[id(module)] = site
        both = InMethods(None if isinstance(site, Unsuitable) else site, methods)  # type: ignore[arg-type]
        return self.sites.setdefault(both, both)

    def _activation(self, act: Any) -> Activation | None:
        """What a module or function computes. Remembered, of modules for those of the same class and configuration."""
        key: Any = act
        if isinstance(act, nn.Module):
            found = configuration(act)
            if _replaced(act) is not None or found is None:
                return None
            key = (original_class(type(act)), found)
        if key not in self.activations:
            self.activations[key] = recognise_activation(act)
        return self.activations[key]

    def _sums(self, module: nn.Module, source: str) -> ResidualSums | Unsuitable | None:
        sums: FoundSums | Unsuitable | None = self._read(read_sums, module, source)
        chosen = choose_sums(module, sums, self.norm, self.excluded) if isinstance(sums, FoundSums) else sums
        if isinstance(sums, FoundSums) and isinstance(chosen, list) and chosen:
            wanted = tuple(choice for choice in chosen if choice.pattern in self.wanted)
            site = ResidualSums(sums, wanted)
            return unsuitable(module) or self.sites.setdefault(site, site) if wanted else None  # type: ignore[return-value]
        reason = chosen if isinstance(chosen, Unsuitable) else _NO_SUM
        return reason if reason.reason != "unknown_forward" or _resembles_block(module) else None

    def _leaf(self, module: nn.Module) -> Site | Unsuitable | None:
        if original_class(type(module)) is nn.Dropout:
            return self.dropout if module.p and not module.inplace and _replaced(module) is None else None
        spec = self.norm(module) if could_be_norm(module) else _BUFFERS if module._buffers else _WRONG_SHAPE
        if isinstance(spec, Unsuitable):
            return spec if _is_called_norm(module) else None
        return Leaf(spec) if spec.pattern in self.wanted else None

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
        if key not in self.norms:
            spec = recognise(module, device)
            if isinstance(spec, NormSpec):
                dtype = next((p.dtype for p in module._parameters.values() if p is not None), torch.float32)
                if (dtype, dtype if spec.weight else None) in spec.unsupported:
                    spec = Unsuitable("unsupported_dtype", f"rounds in another order in {str(dtype)[6:]}")
            self.norms[key] = spec
        return self.norms[key]


STACKED = Unsuitable("kernelized_already", "patched, and given another class on top of that")
_NO_SUM = Unsuitable("unknown_forward", "adds no residual to a dropped or normalised branch")
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
    arguments = inspect.signature(type(module).forward).parameters.values()
    takes_two = len(arguments) == 3 and all(argument.default is argument.empty for argument in arguments)
    return has_linear and has_norm_or_dropout and takes_two and not any(child._modules for child in children)


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
