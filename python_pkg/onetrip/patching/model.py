"""patch_model, unpatch_model, patched."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from torch import nn
from torch._guards import detect_fake_mode

from ..ops.common.backends import environment_fault
from . import activations, dropouts, experts, linear_loss, rotary, scans, watched_logits
from .activations import soft_caps
from .attention import cached, eager, heads, one_mask
from .calls import counter_of, original_class
from .classes import (
    calls_super,
    forward_diff,
    is_patched,
    is_stacked,
    patched_class,
    patched_class_of,
    restore_class,
    rewrite_of,
    set_class,
    was_patched,
)
from .classify import Classifier, Site
from .dropouts import uncalled_dropouts
from .half_results import find_half_results
from .linear import biased_logits, cast_input, lora, packed_slices, scaled_logits, shared_input, tied_embedding
from .norms import could_be_norm
from .report import PatchedSite, PatchReport, SkippedSite, Unsuitable
from .residual import layer_scale
from .verify import kind_of, undisturbed

_OF_ATTENTION = (eager.PATTERN, one_mask.PATTERN, heads.PATTERN, cached.PATTERN)
PATTERNS = (
    *("layer_norm", "rms_norm", "dropout_add_norm", "dropout_add", "add_norm"),
    *_OF_ATTENTION,
    *(*activations.PATTERNS, experts.PATTERN, rotary.PATTERN, layer_scale.PATTERN),
    *(packed_slices.PATTERN, shared_input.PATTERN, cast_input.PATTERN, tied_embedding.PATTERN, lora.PATTERN),
    *(scaled_logits.PATTERN, biased_logits.PATTERN, soft_caps.PATTERN, watched_logits.PATTERN),
    *(dropouts.PATTERN, scans.PATTERN),
)
"""The patterns of patch_model, unless others are asked for."""
NAMES = (*PATTERNS, linear_loss.PATTERN)
"""The names that patch_model accepts as patterns."""


def patch_model(
    model: nn.Module,
    *,
    patterns: Iterable[str] | None = None,
    exclude: Iterable[str] = (),
    attention: bool | None = None,
    verify: bool = True,
    strict: bool = False,
) -> PatchReport:
    """Run a model's memory-bound parts as fused operators, in place: norms, residual sums with their dropout and norm,
    attention softmax, SDPA's mask, activations, gated products, sums of experts, rotary embeddings, losses, gradients
    of what several layers read.

    Only forwards of this model's modules change. Parameters, buffers, hooks, modes, state_dict keys, classes, other
    models and the random state stay as they are. Sites are recognised by structure and behaviour, never by class. Each
    distinct site is compared with the original before it is kept (a loss on an example); parameters on the meta
    device are random numbers on the CPU there.
    The report lists modules that were not patched, with reasons. Patching twice has no further effect. The fused
    operators can be differentiated once, in reverse mode.

    patterns: names; None for onetrip.patching.PATTERNS, which are all but linear_cross_entropy: with that a model in
        training returns logits that are computed only when they are used (docs/patching.md).
    exclude: names of modules, with all that is in them, or glob patterns.
    attention: None patches eager attention, and replaces SDPA where it is slower: on a CPU with dropout, and in
        training with bfloat16 where the CPU multiplies it (docs/patching.md). True replaces SDPA in every call that
        can be fused. False patches no attention.
    verify: compare outputs and every gradient with the original before keeping a site (dropout on and off).
    strict: raise RuntimeError if nothing is patched.
    Raises TypeError or ValueError for wrong arguments or an unknown ONETRIP_BACKEND, RuntimeError in
        FakeTensorMode: nothing can be compared there.
    copy.deepcopy of a patched model is patched. pickle and torch.save keep the original classes.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    if detect_fake_mode() is not None:
        raise RuntimeError("patch_model: must be called outside of FakeTensorMode, in which nothing can be compared")
    if fault := environment_fault([]):
        raise ValueError(f"patch_model: {fault}")
    wanted = _checked_attention(attention, _checked_patterns(patterns))
    excluded = _checked_exclude(model, exclude)
    patcher = _Patcher(model, Classifier(model, wanted, excluded, attention), excluded, verify)
    before = _patched_modules(model)
    try:
        patcher.run()
    except BaseException:
        _restore(model, before)
        raise
    report = patcher.report
    if strict and not report.patched:
        raise RuntimeError(f"patch_model: nothing was patched\n{report}")
    return report


def unpatch_model(model: nn.Module) -> nn.Module:
    """Restore the class of every patched module: bit for bit the original. A no-op on an unpatched model.

    Changes the model in place and returns it. Raises TypeError if model is not a torch.nn.Module. Raises RuntimeError
    and changes nothing if parametrize or fully_shard put another class on top of a patched one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"unpatch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    _restore(model, frozenset())
    return model


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """patch_model for the duration of a with block, with the same options. Yields the report.

    On exit, also by an exception, the sites patched on entry are restored. Sites patched before stay patched.
    Raises on exit what unpatch_model raises.
    """
    before = _patched_modules(model)
    report = patch_model(model, **options)
    try:
        yield report
    finally:
        _restore(model, before)


def _patched_modules(model: nn.Module) -> frozenset[int]:
    """ids of the modules that are patched."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return frozenset(id(module) for module in modules if was_patched(module))


def _restore(model: nn.Module, kept: Container[int]) -> None:
    """Restore all patched modules except those whose id is in kept."""
    for name, module in model.named_modules():
        if is_stacked(module) and id(module) not in kept:
            raise RuntimeError(
                f"unpatch_model: {name or 'the model'} was given the class {type(module).__name__} on top of the "
                "patched one (by parametrize or fully_shard?): undo that first"
            )
    for module in model.modules():
        if is_patched(module) and id(module) not in kept:
            restore_class(module)
            tied_embedding.drop_alias(module)


def _checked_patterns(patterns: Iterable[str] | None) -> frozenset[str]:
    if patterns is None:
        return frozenset(PATTERNS)
    if isinstance(patterns, str) or not isinstance(patterns, Iterable):
        raise TypeError(f"patch_model: patterns must be None or an iterable of names, got {patterns!r}")
    names = frozenset(patterns)
    if unknown := sorted(map(str, names - set(NAMES))):
        raise ValueError(f"patch_model: patterns must be among {', '.join(NAMES)}, got {', '.join(unknown)}")
    return names


def _checked_attention(attention: bool | None, wanted: frozenset[str]) -> frozenset[str]:
    """The wanted patterns, with or without attention."""
    if attention is not None and not isinstance(attention, bool):
        raise TypeError(f"patch_model: attention must be True, False or None, got {attention!r}")
    if attention and eager.PATTERN not in wanted:
        raise ValueError(
            f"patch_model: patterns must name {eager.PATTERN} where attention is True, got {sorted(wanted)}"
        )
    return wanted.difference(_OF_ATTENTION) if attention is False else wanted


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

    def __init__(self, model: nn.Module, classifier: Classifier, excluded: frozenset[str], verify: bool) -> None:
        self.model, self.classifier, self.excluded, self.verify = model, classifier, excluded, verify
        self.report = PatchReport()

    def run(self) -> None:
        modules = list(self.model.named_modules())
        found: dict[int, PatchedSite | SkippedSite | None] = {}
        absorbed: set[int] = set()
        # Blocks before leaves: a norm or a dropout that a block absorbs is no site of its own. A child before its
        # parent: the parent may call a second forward of the child's class (residual/tails.py).
        blocks, leaves = ([named for named in modules if bool(named[1]._modules) is kind] for kind in (True, False))
        for name, module in reversed(blocks):
            found[id(module)] = site = self.site(name, module)
            # What a forward overrides may call its children, too.
            if isinstance(site, PatchedSite) and not calls_super(original_class(type(module))):
                absorbed |= {id(module._modules[child]) for child in rewrite_of(module).absorbed}
        absorbed |= uncalled_dropouts(module for _, module in modules)
        for name, module in leaves:
            if id(module) not in absorbed or was_patched(module):
                found[id(module)] = self.site(name, module)
        find_half_results(self.model, (module for _, module in leaves if could_be_norm(module)))
        for name, module in modules:
            site = found.get(id(module))
            if isinstance(site, PatchedSite):
                self.report._add(site, counter_of(module), partial(forward_diff, patched_class_of(module)))
                if (left := self.classifier.left.get(id(module))) is not None:
                    self.report._skip(_skipped(name, module, left))
            elif site is not None:
                self.report._skip(site)

    def site(self, name: str, module: nn.Module) -> PatchedSite | SkippedSite | None:
        """Patch the module if it is a site."""
        if was_patched(module):
            rewrite = rewrite_of(module)
            if (
                is_stacked(module)
                or not self.classifier.replace_sdpa
                or rewrite.pattern not in self.classifier.wanted - {eager.PATTERN}
            ):
                return PatchedSite(name, patched_class_of(module).__name__, rewrite.pattern, rewrite.detail)
            restore_class(module)  # SDPA may have been left to torch: everything again, with it
        site = self.classifier.classify(module)
        if site is None:
            return None
        return _skipped(name, module, site) if isinstance(site, Unsuitable) else self.patch(name, module, site)

    def patch(self, name: str, module: nn.Module, site: Site) -> PatchedSite | SkippedSite:
        """Patch the module where that computes what it should."""
        rewrite = replace(self.classifier.rewrite(module, site), detail=site.detail)
        if self.excluded & {name, *(f"{name}.{child}".removeprefix(".") for child in rewrite.absorbed)}:
            return _skipped(name, module, Unsuitable("excluded"))
        if taken := rewrite.taken_names(original_class(type(module))):
            return _skipped(name, module, Unsuitable("unknown_forward", f"the rewrite's name {min(taken)} is its own"))
        # One verdict for modules of the same class, rewrite and parameters.
        parameters = tuple((n, p.shape, p.dtype, p.device) for n, p in module.named_parameters())
        key = (type(module), rewrite, parameters)
        error = self.classifier.once(_verdict, module, site, key=key) if self.verify else None
        if error is not None:
            return _skipped(name, module, Unsuitable("verify_failed", error))
        set_class(module, patched_class(type(module), rewrite))
        return PatchedSite(name, type(module).__name__, rewrite.pattern, site.detail)


def _skipped(name: str, module: nn.Module, why: Unsuitable) -> SkippedSite:
    return SkippedSite(name, type(module).__name__, why.reason, why.detail)


def _verdict(module: nn.Module, site: Site) -> str | None:
    """Why the rewritten forward must not be kept; None if it computes the same as the original."""
    try:
        with undisturbed(kind_of(module)[0]):
            site.verify(module)
    except Exception as error:  # a forward that cannot be compared is not kept, whatever it raises
        return str(error) or type(error).__name__
    return None
