"""What is measured, as data: operators with the least bytes they can move, providers, and cases that pair them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

Outputs = Tensor | tuple[Tensor, ...]
Dropout = Callable[[Tensor], Tensor]
P = TypeVar("P", bound=Any)
"""A provider: of an operator, or an optimizer's."""

PASSES = ("forward", "backward", "forward_backward")
ELEMENTS = 4096 * 1024
"""Elements of a tensor at every width of a series."""
LARGE_ELEMENTS = 1 << 25
"""Elements of tensors of 64 MiB and up. An H100's L2 cache has 50 MB; one of 96 MB and more (RTX 4090, B200) may keep
part of them."""
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class LeastBytes(NamedTuple):
    """What a pass must move when each input is read once and each output written once."""

    forward: int
    backward: int

    @property
    def forward_backward(self) -> int:
        return self.forward + self.backward


def matrices(forward: float, backward: float) -> Callable[[int, int, int], LeastBytes]:
    """Operator.least_bytes of one that moves so many matrices of [n_rows, n_cols] in a pass."""

    def least_bytes(n_rows: int, n_cols: int, itemsize: int) -> LeastBytes:
        matrix = n_rows * n_cols * itemsize
        return LeastBytes(int(forward * matrix), int(backward * matrix))

    return least_bytes


@dataclass(frozen=True)
class Operator:
    """One operator at one setting, in the two forms that are compared."""

    name: str
    matrices: tuple[str, ...]
    """Names of the inputs of shape [n_rows, n_cols]; all differentiable."""
    vectors: tuple[str, ...]
    """Names of the inputs of shape [n_cols]: the parameters."""
    formula: Callable[..., Outputs]
    """formula(dropout, **inputs): what is written in PyTorch without fused kernels; in float64 it is the truth."""
    fused: Callable[..., Outputs]
    """fused(**inputs): the call of onetrip.ops."""
    least_bytes: Callable[[int, int, int], LeastBytes]
    """least_bytes(n_rows, n_cols, itemsize)."""
    dropout_p: float = 0.0
    constants: Callable[[int, int, torch.dtype, torch.device], dict[str, Tensor]] = lambda *_: {}
    """constants(n_rows, n_cols, dtype, device): further inputs, not differentiated: masks, labels."""

    weights: Callable[[int, int], dict[str, tuple[int, int]]] = lambda n_rows, n_cols: {}
    """weights(n_rows, n_cols): shapes of further parameters, as those of linear layers: normal, of deviation n_cols **
    -0.5."""

    between: Callable[[int, int], int] = lambda n_rows, n_cols: n_rows * n_cols
    """between(n_rows, n_cols): elements that the formula holds at one time beside its inputs, outputs and gradients."""

    mask_shows_in: Literal["gradient", "output"] = "gradient"
    """Where a dropped element is exactly zero: in the gradient of the first input, or in the first output."""

    twin: Operator | None = None
    """The same without dropout: checked in its place where a mask cannot be read off outputs or gradients."""
    others: Mapping[str, Callable[[], Callable[..., Outputs]]] = field(default_factory=dict)
    """What torch or another library has for this very operator, by provider: others[name]() imports what it needs and
    gives a function that is called with the inputs by name."""

    family: str | None = None
    """Name in onetrip.ops.common.backends.FAMILIES, where not every backend has it."""
    is_warm: bool = False
    """Timed right after a call with the same inputs, in place of emptied caches."""

    def warm(self) -> Operator:
        return replace(self, name=f"warm_{self.name}", is_warm=True)

    def eager(self, **inputs: Tensor) -> Outputs:
        return self.formula(lambda values: torch.nn.functional.dropout(values, self.dropout_p, True), **inputs)


@dataclass(frozen=True)
class Provider:
    """One way to run an operator."""

    name: str
    bind: Callable[[Operator], Callable[..., Outputs]]
    unavailable: Callable[[torch.device], str] = lambda device: ""
    """Why it cannot run on the device; empty where it can."""
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    """Entered around every run, outside the timed region."""


@dataclass(frozen=True)
class Case:
    operator: Operator
    n_rows: int
    n_cols: int
    dtype: torch.dtype
    full: bool
    """All three passes, memory as well, and in float32 every provider there is; otherwise forward and backward of eager
    and of onetrip's choice."""
    wanted: tuple[str, ...] = ()
    """Passes to time; all that belong to the case where none is named."""

    @property
    def id(self) -> str:
        return f"{self.operator.name}-M{self.n_rows}-N{self.n_cols}-{DTYPE_NAMES[self.dtype]}"

    @property
    def passes(self) -> tuple[str, ...]:
        """In the order in which they are timed."""
        if self.wanted:
            return tuple(name for name in PASSES if name in self.wanted)
        return PASSES if self.full else PASSES[:2]


def available(providers: Sequence[P], device: torch.device) -> tuple[list[P], dict[str, str]]:
    """(The providers that can run on the device; name -> why not, of the others)."""
    why = {provider.name: provider.unavailable(device) for provider in providers}
    return [p for p in providers if not why[p.name]], {name: reason for name, reason in why.items() if reason}


def dtypes(quick: bool) -> tuple[torch.dtype, ...]:
    """Dtypes of a grid."""
    return (torch.float32,) if quick else (torch.float32, torch.bfloat16)


def width_cases(operators: Iterable[Operator], widths: Iterable[int], quick: bool) -> list[Case]:
    """Rows of every width, of the same number of elements in all."""
    return [
        Case(operator, ELEMENTS // width, width, dtype, full=width == 1024)
        for dtype in dtypes(quick)
        for operator in operators
        for width in widths
    ]


def warm_cases(operators: Iterable[Operator], shapes: Sequence[tuple[int, int]], quick: bool) -> list[Case]:
    return [
        Case(operator.warm(), *shape, dtype, full=False)
        for dtype in dtypes(quick)
        for shape in (shapes[:1] if quick else shapes)
        for operator in operators
    ]


def gpu_shapes() -> list[tuple[int, int]]:
    """(n_rows, n_cols) that are measured on a GPU only: LARGE_ELEMENTS at every width, then rows from one to 32 K of
    widths from 64 to 64 K, small launches included."""
    large = [(LARGE_ELEMENTS // width, width) for width in (1 << k for k in range(8, 17))]
    grid = [(rows, width) for rows in (1, 32, 1024, 32768) for width in (64, 1024, 8192, 65536)]
    return list(dict.fromkeys([*large, *(shape for shape in grid if shape[0] * shape[1] <= 1 << 28)]))


def gpu_cases(operators: Iterable[Operator]) -> list[Case]:
    """Cases of these shapes, where there is a GPU; every pass of each."""
    if not torch.cuda.is_available():
        return []
    return [
        Case(operator, *shape, dtype, full=False, wanted=PASSES)
        for dtype in (torch.bfloat16, torch.float32)
        for operator in operators
        for shape in gpu_shapes()
    ]


class Session(NamedTuple):
    """How the cases of a run are measured."""

    device: torch.device
    quick: bool = False
    against: tuple[str, ...] = ()
    """Names of providers; empty: those that a suite compares with by default."""
    rounds: Callable[[Callable[[], Any], int], Any] = lambda function, rounds: function()
    """rounds(function, n) calls function n times and gives what the last call returned: timing.Rounds, or once."""


Record = dict[str, Any]
"""What a case leaves in the JSON of its suite."""


class Skip(Exception):
    """The case cannot run here; the message says why."""


def needed(module: str) -> Any:
    """A module that a case cannot do without."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise Skip(f"{module.partition('.')[0]} cannot be imported: {error}") from None


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


class Named(Protocol):
    """What cases(quick) of a suite lists: anything with an id, which measure(case, session) of the suite measures."""

    @property
    def id(self) -> str: ...


def selects(pattern: str | None, case_id: str) -> bool:
    """A pattern is a glob over the whole id, or any part of it; or several of them, with commas between."""
    words = (pattern or "").split(",")
    return pattern is None or any(word and (word in case_id or fnmatchcase(case_id, word)) for word in words)
