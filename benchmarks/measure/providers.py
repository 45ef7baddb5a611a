"""Who provides the operators: eager PyTorch, SDPA, torch.compile, every backend of onetrip, and other libraries.

What another library has for an operator stands with the operator, as Operator.others; a library is imported only where
it is about to run.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import onetrip
import torch
from onetrip.environment import packages
from onetrip.ops.common import backends
from torch.nn.attention import SDPBackend, sdpa_kernel

from .cases import Case, Operator, Outputs, Provider, Session


class Library(NamedTuple):
    title: str
    module: str
    """Its import shows that the library works here."""
    distribution: str
    """What pip calls it."""


LIBRARIES = {
    "liger": Library("Liger-Kernel", "liger_kernel.transformers.functional", "liger-kernel"),
    "apex": Library("apex", "apex.normalization.fused_layer_norm", "apex"),
    "flash-attn": Library("flash-attn", "flash_attn", "flash-attn"),
    "quack": Library("QuACK", "quack", "quack-kernels"),
    "transformer-engine": Library("TransformerEngine", "transformer_engine.pytorch", "transformer-engine"),
}
"""By the name that the command gives them. All of them are for CUDA."""

_MOST_REFERENCE_ELEMENTS = 1 << 23


def why_absent(module: str, device: torch.device, needs_cuda: bool = True) -> str:
    """Why a library cannot run on the device; empty where it can. Imports it only where the device would do."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return "not installed"
    if needs_cuda and device.type != "cuda":
        return "needs CUDA"
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises anything
        return f"{module} cannot be imported ({type(error).__name__}: {error})".splitlines()[0]
    return ""


def absent_libraries(device: torch.device) -> str:
    """Those that cannot run on the device, and why, in a line."""
    reasons = {library.title: why_absent(library.module, device) for library in LIBRARIES.values()}
    return ", ".join(f"{title} ({why})" for title, why in reasons.items() if why)


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed, the optimizers' included."""
    names = *(library.distribution for library in LIBRARIES.values()), "bitsandbytes", "torchao"
    return {name: version for name, version in packages(*names).items() if version != "absent"}


def imported(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def form(library: str, name: str, call: Callable[..., Outputs], module: str = "") -> dict[str, Callable[[], Any]]:
    """An entry of Operator.others: call(function, **inputs) with the library's function of that name.

    Where a library lacks a part of an operator (a bias before dropout, the dropout after a softmax), the call has that
    part in plain PyTorch, as its users would write it. module: that has the function, where it is not the library's
    own. A form that is wrong on the inputs at hand gets no number, like any other provider.
    """
    module = module or LIBRARIES[library].module
    return {library: lambda: partial(call, imported(module, name))}


def _onetrip(backend: str) -> Provider:
    def unavailable(device: torch.device) -> str:
        if backend == "triton" and device.type == "cpu":
            return "on the CPU it is only interpreted: a time would mean nothing"
        return backends.unavailable_reason(backend, device.type, device.index or 0)

    def scope() -> AbstractContextManager[object]:
        return onetrip.use_backend(backend)

    return Provider(f"onetrip {backend}", lambda operator: operator.fused, unavailable, scope)


def _compiled(mode: str | None = None) -> Provider:
    """torch.compile of the eager form, for one shape.

    max-autotune replays CUDA graphs, which write their outputs into the same memory every time. Each call therefore
    says first that a new step begins (a counter on the host), which is how a training loop gives the outputs of the
    step before back. No output is held longer than that, and what is checked has been cloned. The inputs are not
    a module's parameters, so the graph copies them into its own memory: that copy is part of its time.
    """

    def bind(operator: Operator) -> Callable[..., Outputs]:
        function = torch.compile(operator.eager, dynamic=False, mode=mode)
        if mode is None:
            return function

        def step(**inputs: torch.Tensor) -> Outputs:
            torch.compiler.cudagraph_mark_step_begin()
            return function(**inputs)

        return step

    def unavailable(device: torch.device) -> str:
        return "" if mode is None or device.type == "cuda" else f"mode {mode} is for CUDA"

    return Provider("torch.compile" if mode is None else f"torch.compile {mode}", bind, unavailable)


def _sdpa(name: str, backend: SDPBackend, needs_cuda: bool = False) -> Provider:
    def unavailable(device: torch.device) -> str:
        return f"SDPA's {name} backend is for CUDA" if needs_cuda and device.type == "cpu" else ""

    return Provider(
        f"SDPA {name}", lambda operator: operator.others["sdpa"](), unavailable, lambda: sdpa_kernel(backend)
    )


def _library(name: str, library: Library) -> Provider:
    return Provider(
        library.title, lambda operator: operator.others[name](), lambda device: why_absent(library.module, device)
    )


def _chunked_is_missing(device: torch.device) -> str:
    return "" if hasattr(torch.nn, "LinearCrossEntropyOptions") else f"torch {torch.__version__} has none"


EAGER = Provider("torch eager", lambda operator: operator.eager)
OF_TORCH = {
    "sdpa": (
        _sdpa("flash", SDPBackend.FLASH_ATTENTION),
        _sdpa("efficient", SDPBackend.EFFICIENT_ATTENTION, needs_cuda=True),
        _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION, needs_cuda=True),
        _sdpa("math", SDPBackend.MATH),
    ),
    "chunked": (Provider("torch chunked", lambda operator: operator.others["chunked"](), _chunked_is_missing),),
}
"""What torch has for some operators beside the formula: fused attention, the loss of chunks of logits."""
PROVIDERS: dict[str, tuple[Provider, ...]] = {
    "eager": (EAGER,),
    **OF_TORCH,
    "compile": (_compiled(),),
    "compile-max-autotune": (_compiled("max-autotune"),),
    **{name: (_library(name, library),) for name, library in LIBRARIES.items()},
    **{backend: (_onetrip(backend),) for backend in backends.BACKENDS},
}
"""By what the command calls them."""
AGAINST = (*PROVIDERS, "bitsandbytes", "torchao")
"""Values of --against: the optimizers' libraries too."""


def _has_family(backend: str, family: str | None) -> bool:
    return family is None or backend == "reference" or family in backends.FAMILIES[backend]


def own_provider(device: torch.device, family: str | None = None) -> Provider:
    """onetrip with the backend that `auto` picks. family: as an Operator's."""
    return PROVIDERS[next(name for name in onetrip.available_backends(device) if _has_family(name, family))][0]


def has(operator: Operator, name: str) -> bool:
    """Whether a provider has the operator at all."""
    if name in backends.BACKENDS:
        return _has_family(name, operator.family)
    return name in operator.others or name not in (*OF_TORCH, *LIBRARIES)


def _usual(case: Case, session: Session) -> Iterator[str]:
    """Names of PROVIDERS."""
    operator, device = case.operator, session.device
    attention = "sdpa" in operator.others
    everything = case.full and (case.dtype == torch.float32 or device.type == "cuda") and not session.quick
    yield "eager"
    if everything or attention:
        yield "compile"
    if everything and device.type == "cuda":
        yield "compile-max-autotune"
    yield from OF_TORCH
    for name, library in LIBRARIES.items():
        if not session.quick and (everything or not why_absent(library.module, device)):
            yield name  # what is absent is named in the full cases
    if everything and not attention:
        for backend in backends.BACKENDS:
            # seconds a call: Philox in plain PyTorch
            if backend != "reference" or case.n_rows * case.n_cols <= _MOST_REFERENCE_ELEMENTS:
                yield backend


def providers(case: Case, session: Session) -> list[Provider]:
    """The providers of a case: onetrip's choice of backend always, before its other ones, and those asked for; by
    default all that are there, fewer in the small cases."""
    operator, own = case.operator, own_provider(session.device, case.operator.family)
    found = {}
    for name in session.against or [name for name in _usual(case, session) if has(operator, name)]:
        for provider in PROVIDERS[name]:
            lacking = replace(provider, unavailable=lambda device: f"has no {operator.name}")
            found[provider.name] = provider if has(operator, name) else lacking
    others = {name: provider for name, provider in found.items() if not name.startswith("onetrip")}
    return list((others | {own.name: own} | found).values())
