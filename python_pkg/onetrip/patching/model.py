"""patch_model, unpatch_model, patched."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from .attention import PATTERN as ATTENTION
from .attention import find_attention, read_interface, rewrite_attention
from .blocks import Reading, argument_widths, dropout_of, find_match, read_forward, rewrite_block
from .calls import counter_of, is_distributed, original_class
from .classes import Rewrite, is_patched, is_stacked, patched_class, restore_class, rewrite_of, set_class, subclass
from .eager import EagerFunction
from .norms import (
    KERNEL_DEVICES,
    KERNEL_DTYPES,
    NormSpec,
    Unsuitable,
    could_be_norm,
    n_cols_of,
    recognise,
    rewrite_norm,
)
from .report import PatchedSite, PatchReport, SkippedSite
from .verify import verify as verify_site
from .verify_attention import verify_attention
from .windows import Windows, read_windows, rewrite_windows, verify_windows

PATTERNS = ("layer_norm", "rms_norm", "dropout_add_norm", "dropout_add", "add_norm", ATTENTION)
"""What patch_model knows, as its `patterns` names it."""

_Check = tuple[tuple[int, ...], tuple[str, str] | None] | EagerFunction | Windows
"""What to verify: widths of the inputs, where the dropout is; or an attention function; or softmaxes."""


def patch_model(
    model: nn.Module,
    *,
    patterns: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    attention: bool | None = None,
    verify: bool = True,
    strict: bool = False,
) -> PatchReport:
    """Make a model run its norms, dropout + residual (+ norm) blocks and eager attention as fused operators, in place.

    Only forwards of this model's modules change: no parameter, buffer, hook, mode or state_dict key, no class, no other
    model. Sites are recognised by what they compute and how they are written, never by name, and each distinct one is
    compared with the original before it is kept; what is not recognised is left alone and reported with a reason.
    Random state is as before. Modules on the meta device are compared at their first call. Patching twice is patching
    once. The fused operators can be differentiated once, in reverse mode.

    patterns: names from PATTERNS; None for all. exclude: names of modules, with all that is in them, or glob patterns.
    attention: True replaces SDPA as well wherever it can, None eager attention only, False no attention.
    verify: compare outputs and every gradient with the original before keeping a site (dropout on and off).
    strict: raise RuntimeError if nothing is patched. Raises TypeError or ValueError for wrong arguments.
    copy.deepcopy of a patched model is patched; pickle and torch.save keep the original classes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    wanted = _checked_attention(attention, _checked_patterns(patterns))
    patcher = _Patcher(model, wanted, _checked_exclude(model, exclude), verify, attention is True)
    try:
        patcher.run()
    except BaseException:
        patcher.undo()
        raise
    report = patcher.report
    if strict and not report.patched:
        raise RuntimeError(f"patch_model: nothing was patched\n{report}")
    return report


def unpatch_model(model: nn.Module) -> nn.Module:
    """Give every patched module of the model its class back: bit for bit the original. A no-op on an unpatched model.

    Changes the model in place and returns it. Raises TypeError if model is not a torch.nn.Module, and RuntimeError,
    with nothing changed, if parametrize or fully_shard put another class on top of a patched one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    _restore(model, frozenset())
    return model


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """patch_model for the length of a with block; options as there. Yields the report.

    On exit, exceptions included, the sites patched on entry are the original again; sites patched before stay patched.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    before = frozenset(id(module) for module in modules if is_patched(module) or is_stacked(module))
    report = patch_model(model, **options)
    try:
        yield report
    finally:
        _restore(model, before)


def _restore(model: nn.Module, kept: Container[int]) -> None:
    """Give all patched modules their classes back, but those whose id is kept."""
    for name, module in model.named_modules():
        if is_stacked(module) and id(module) not in kept:
            raise RuntimeError(
                f"unpatch_model: {name} was given the class {type(module).__name__} on top of the patched one "
                "(by parametrize or fully_shard?): undo that first"
            )
    for module in model.modules():
        if is_patched(module) and id(module) not in kept:
            restore_class(module)


def _checked_patterns(patterns: Iterable[str] | None) -> frozenset[str]:
    if patterns is None:
        return frozenset(PATTERNS)
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise TypeError(f"patch_model: patterns must be None or an iterable of names, got {patterns!r}")
    names = frozenset(patterns)
    if unknown := sorted(map(str, names - set(PATTERNS))):
        raise ValueError(f"patch_model: patterns must be among {', '.join(PATTERNS)}, got {', '.join(unknown)}")
    return names


def _checked_attention(attention: bool | None, wanted: frozenset[str]) -> frozenset[str]:
    """The wanted patterns, with or without attention."""
    if attention is not None and not isinstance(attention, bool):
        raise TypeError(f"patch_model: attention must be True, False or None, got {attention!r}")
    if attention and ATTENTION not in wanted:
        raise ValueError(f"patch_model: patterns must name {ATTENTION} where attention is True, got {sorted(wanted)}")
    return wanted - {ATTENTION} if attention is False else wanted


def _checked_exclude(model: nn.Module, exclude: Iterable[str]) -> frozenset[str]:
    """The names of all excluded modules."""
    exclude = exclude if isinstance(exclude, str) or not isinstance(exclude, Iterable) else tuple(exclude)
    if not isinstance(exclude, tuple) or not all(isinstance(pattern, str) for pattern in exclude):
        raise TypeError(f"patch_model: exclude must be an iterable of names, got {exclude!r}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    excluded: set[str] = set()
    for pattern in exclude:
        found = [name for name in names if fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not found:
            raise ValueError(
                f"patch_model: exclude must name modules of the model, got {pattern!r}, which matches none"
            )
        excluded.update(found)
    return frozenset(excluded)


class _Patcher:
    """One run of patch_model."""

    def __init__(
        self, model: nn.Module, wanted: frozenset[str], excluded: frozenset[str], verify: bool, replace_sdpa: bool
    ) -> None:
        self.model, self.wanted, self.excluded, self.verify = model, wanted, excluded, verify
        self.replace_sdpa = replace_sdpa
        self.model_device = _kernel_device(model) or torch.device("cpu")
        self.report = PatchReport()
        self.done: list[nn.Module] = []
        self.readings: dict[type, Reading | Unsuitable] = {}
        self.norms: dict[Any, NormSpec | Unsuitable] = {}
        self.verdicts: dict[Any, str | None] = {}

    def run(self) -> None:
        modules = list(self.model.named_modules())
        found: dict[int, PatchedSite | SkippedSite | None] = {}
        absorbed: set[int] = set()
        # Blocks first: a norm inside one is the block's.
        for name, module in modules:
            if _reaches_softmax(module):
                found[id(module)] = self.attention(name, module)
            elif module._modules:
                found[id(module)] = site = self.block(name, module)
                if isinstance(site, PatchedSite):
                    absorbed |= {id(module._modules[child]) for child in rewrite_of(module).absorbed}
        for name, module in modules:
            if not module._modules and id(module) not in found and (id(module) not in absorbed or is_patched(module)):
                found[id(module)] = self.leaf(name, module)
        for _, module in modules:
            site = found.get(id(module))
            if isinstance(site, PatchedSite):
                self.report._add(site, counter_of(module))
            elif site is not None:
                self.report._skip(site)

    def undo(self) -> None:
        for module in self.done:
            if is_patched(module):
                restore_class(module)

    def block(self, name: str, module: nn.Module) -> PatchedSite | SkippedSite | None:
        """Patch a module with children, if its forward ends as a rule has it."""
        if is_patched(module):
            return PatchedSite(name, type(module).__name__, rewrite_of(module).pattern)
        if is_stacked(module):
            return self.skip(name, module, _STACKED)
        if isinstance(module, torch.jit.ScriptModule):
            return None
        cls = type(module)
        if cls not in self.readings:
            self.readings[cls] = read_forward(cls)
        reading = self.readings[cls]
        match = reading if isinstance(reading, Unsuitable) else find_match(module, reading, self.norm)
        if isinstance(match, Unsuitable):
            is_structural = match.reason in ("unknown_forward", "extra_forward_args")
            return self.skip(name, module, match) if not is_structural or self.resembles_block(module) else None
        if match.rule.pattern not in self.wanted:
            return None
        if unsuitable := _unsuitable(module):
            return self.skip(name, module, unsuitable)
        rewrite = rewrite_block(module, match)
        if self.excluded & {name, *(f"{name}.{child}".removeprefix(".") for child in rewrite.absorbed)}:
            return self.skip(name, module, Unsuitable("excluded"))
        return self.patch(name, module, rewrite, (argument_widths(module, match), dropout_of(match)))

    def attention(self, name: str, module: nn.Module) -> PatchedSite | SkippedSite | None:
        """Patch a module that calls an attention function or computes a softmax, if they can be fused."""
        if is_patched(module):
            return PatchedSite(name, type(module).__name__, rewrite_of(module).pattern)
        if ATTENTION not in self.wanted:
            return None
        found = find_attention(module, self.replace_sdpa) or read_windows(original_class(type(module)))
        unsuitable = found if isinstance(found, Unsuitable) else _replaced(module) or _unfit(module)
        if unsuitable is not None:
            return self.skip(name, module, unsuitable)
        assert isinstance(found, (EagerFunction, Windows))
        if name in self.excluded:
            return self.skip(name, module, Unsuitable("excluded"))
        rewrite = rewrite_windows(found) if isinstance(found, Windows) else rewrite_attention(module, found)
        return self.patch(name, module, rewrite, found)

    def leaf(self, name: str, module: nn.Module) -> PatchedSite | SkippedSite | None:
        """Patch a module without children, if it computes a norm."""
        if is_patched(module):
            return PatchedSite(name, type(module).__name__, rewrite_of(module).pattern)
        if isinstance(module, torch.jit.ScriptModule):
            return self.skip(name, module, Unsuitable("unknown_forward", "TorchScript"))
        if not could_be_norm(module):
            why = _BUFFERS if module._buffers else _WRONG_SHAPE
            return self.skip(name, module, why) if _is_called_norm(module) else None
        spec = self.norm(module)
        if isinstance(spec, Unsuitable):
            return self.skip(name, module, spec) if _is_called_norm(module) else None
        if spec.pattern not in self.wanted:
            return None
        if name in self.excluded:
            return self.skip(name, module, Unsuitable("excluded"))
        return self.patch(name, module, rewrite_norm(module, spec), ((n_cols_of(module),), None))

    def norm(self, module: nn.Module) -> NormSpec | Unsuitable:
        """What norm a leaf computes, remembered for modules of the same class and configuration."""
        if _is_wrapper(module):
            return Unsuitable("peft_wrapper", type(module).__name__)
        if unsuitable := _unsuitable(module):
            return unsuitable
        if module._modules or not could_be_norm(module):
            return Unsuitable("unknown_forward", f"{type(module).__name__} is no leaf norm")
        parameters = tuple((n, None if p is None else (p.shape, p.dtype)) for n, p in module._parameters.items())
        scalars = tuple((n, v) for n, v in vars(module).items() if isinstance(v, (int, float, str)) and n != "training")
        device = self.device(module)
        key = (original_class(type(module)), parameters, scalars, device)
        if key not in self.norms:
            spec = recognise(module, device)
            if isinstance(spec, NormSpec):
                dtype = next((p.dtype for p in module._parameters.values() if p is not None), torch.float32)
                if (dtype, dtype if spec.weight else None) in spec.unsupported:
                    spec = Unsuitable("unsupported_dtype", f"rounds in another order in {str(dtype)[6:]}")
            self.norms[key] = spec
        return self.norms[key]

    def device(self, module: nn.Module) -> torch.device:
        """Where to probe: where the module is; a module without parameters, where the model is; never on meta."""
        return _kernel_device(module) or self.model_device

    def patch(self, name: str, module: nn.Module, rewrite: Rewrite, check: _Check) -> PatchedSite | SkippedSite:
        original, module_class = type(module), type(module).__name__
        if self.verify and any(parameter.is_meta for parameter in module.parameters()):
            set_class(module, _deferred_class(original, rewrite, check))
            self.done.append(module)
            _pending[id(module)] = (weakref.ref(self.report), name)
            weakref.finalize(module, _pending.pop, id(module), None).atexit = False
            return PatchedSite(name, module_class, rewrite.pattern, "verified at the first call")
        if self.verify:
            parameters = tuple((n, p.shape, p.dtype, p.device) for n, p in module.named_parameters())
            key = (original, rewrite, check, parameters)
            if key not in self.verdicts:
                self.verdicts[key] = _verdict(module, rewrite, check)
            error = self.verdicts[key]
            if error is not None:
                return self.skip(name, module, Unsuitable("verify_failed", error))
        set_class(module, patched_class(original, rewrite))
        self.done.append(module)
        return PatchedSite(name, module_class, rewrite.pattern)

    def skip(self, name: str, module: nn.Module, why: Unsuitable) -> SkippedSite:
        return SkippedSite(name, type(module).__name__, why.reason, why.detail)

    def resembles_block(self, module: nn.Module) -> bool:
        """Whether a user would expect a fused block here: leaves only, among them a Linear, and a dropout or a norm."""
        children = [child for child in module._modules.values() if child is not None]
        has_norm_or_dropout = any(isinstance(child, nn.Dropout) or _is_called_norm(child) for child in children)
        has_linear = any(isinstance(child, nn.Linear) for child in children)
        arguments = inspect.signature(type(module).forward).parameters.values()
        takes_two = len(arguments) == 3 and all(argument.default is argument.empty for argument in arguments)
        return has_linear and has_norm_or_dropout and takes_two and not any(child._modules for child in children)


def _reaches_softmax(module: nn.Module) -> bool:
    """Whether the module asks for an attention function, or computes a softmax and a dropout itself."""
    cls = original_class(type(module))
    return read_interface(cls) is not None or read_windows(cls) is not None


def _kernel_device(module: nn.Module) -> torch.device | None:
    devices = (parameter.device for parameter in module.parameters())
    return next((device for device in devices if device.type in KERNEL_DEVICES), None)


_STACKED = Unsuitable("kernelized_already", "patched, and given another class on top of that")
_BUFFERS = Unsuitable("unknown_forward", "keeps buffers")
_WRONG_SHAPE = Unsuitable("unsupported_shape", "not a module with at most one weight and one bias, both vectors")


def _is_called_norm(module: nn.Module) -> bool:
    """Whether to mention the module in the report when it is not patched; nothing else goes by the name.

    Not batch norms, nor the parametrizations weight_norm and spectral_norm: no fused operator could take their place.
    """
    name = type(module).__name__.lower()
    if any(word in name for word in ("batchnorm", "weightnorm", "spectralnorm")):
        return False
    return "norm" in name or isinstance(module, (nn.LayerNorm, nn.RMSNorm))


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def _replaced(module: nn.Module) -> Unsuitable | None:
    """Why a swap of the module's class would not reach its forward, or not for long."""
    state = vars(module)
    if "forward" in state and "_hf_hook" not in state:
        if hasattr(type(module), "kernel_layer_name"):
            return Unsuitable("kernelized_already", "a hub kernel replaced its forward")
        return Unsuitable("hf_hook", "forward is set on the instance")
    if type(module).__module__.startswith("onetrip.nn"):
        return Unsuitable("kernelized_already", "an onetrip module")
    if is_stacked(module):
        return _STACKED
    if "_hf_hook" in state:
        return Unsuitable("hf_hook", f"accelerate's {type(module._hf_hook).__name__}")
    return None


def _unfit(module: nn.Module) -> Unsuitable | None:
    """Why attention functions of this module are not for the kernels."""
    doubles = (name for name, parameter in module.named_parameters() if parameter.dtype == torch.float64)
    if (double := next(doubles, None)) is not None:
        return Unsuitable("unsupported_dtype", f"{double} is float64")
    return None


def _unsuitable(module: nn.Module) -> Unsuitable | None:
    """Why a module, whatever it computes, must not be patched."""
    if replaced := _replaced(module):
        return replaced
    hooked = next((child for child in module.modules() if "_hf_hook" in vars(child)), None)
    if hooked is not None:
        return Unsuitable("hf_hook", f"accelerate's {type(hooked._hf_hook).__name__} on a {type(hooked).__name__}")
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


def _verdict(module: nn.Module, rewrite: Rewrite, check: _Check) -> str | None:
    """Why the rewritten forward must not be kept; None where it may."""
    try:
        if isinstance(check, EagerFunction):
            verify_attention(module, check)
        elif isinstance(check, Windows):
            verify_windows(module, check)
        else:
            verify_site(module, rewrite, *check)
    except Exception as error:  # a forward that cannot be compared is not kept, whatever it raised
        return str(error) or type(error).__name__
    return None


_pending: dict[int, tuple[Any, str]] = {}
"""id(module) -> (weak reference to the report, site name) of sites that wait for their first call."""

_deferred_classes: dict[Any, type] = {}


def _deferred_class(original: type, rewrite: Rewrite, check: _Check) -> type:
    """A patched class that verifies itself at the first call, when the parameters are there."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        report, name = _pending.pop(id(self), (None, ""))
        error = _verdict(self, rewrite, check)
        restore_class(self)
        if error is None:
            set_class(self, patched_class(original, rewrite))
        elif report is not None and report() is not None:
            report()._demote(name, "verify_failed", error)
        return self.forward(*args, **kwargs)

    key = (original, rewrite, check)
    if key not in _deferred_classes:
        _deferred_classes[key] = subclass(original, rewrite, forward)
    return _deferred_classes[key]
