"""What a run was asked for, as words on a command line and as values; the same for the command and under pytest."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..measure.cases import DTYPE_NAMES, PASSES
from ..measure.results import UsageError

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()} | {str(d).partition(".")[2]: d for d in DTYPE_NAMES}
_PASSES = {"forward": PASSES[:1], "backward": PASSES[1:2], "both": PASSES[2:]}


def _parsed(option: str, word: str, known: dict[str, object]) -> object:
    if word not in known:
        raise UsageError(f"{option} {word}: no such thing; there are {', '.join(known)}")
    return known[word]


def _shape(word: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
    if match is None:
        raise UsageError(f"--shape {word}: must read ROWSxCOLS, for example 4096x1024")
    return int(match[1]), int(match[2])


@dataclass(frozen=True)
class Options:
    only: str | None = None
    """A glob over the ids of cases, or a part of them."""
    quick: bool = False
    ops: tuple[str, ...] = ()
    """Suites, operators, or operators without what follows the dash; empty: all."""
    dtypes: tuple[torch.dtype, ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    passes: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        only: str | None = None,
        quick: bool = False,
        ops: Iterable[str] = (),
        dtypes: Iterable[str] = (),
        shapes: Iterable[str] = (),
        passes: Iterable[str] = (),
        against: Iterable[str] = (),
    ) -> Options:
        """From words; raises UsageError for what does not exist. What the operators are is known to selection.py."""
        from ..measure.providers import NAMES
        from ..suites.optimizers import PROVIDERS

        names = dict.fromkeys([*NAMES, *(provider.key for provider in PROVIDERS)])
        for word in against:
            _parsed("--against", word, names)
        wanted = [name for word in passes for name in _parsed("--pass", word, _PASSES)]
        return cls(
            only,
            quick,
            tuple(dict.fromkeys(ops)),
            tuple(dict.fromkeys(_parsed("--dtype", word, _DTYPES) for word in dtypes)),
            tuple(dict.fromkeys(map(_shape, shapes))),
            tuple(name for name in PASSES if name in wanted),
            tuple(dict.fromkeys(against)),
        )

    @property
    def partial(self) -> bool:
        """Whether less than the whole suite is meant: a record of the repository is not replaced by that."""
        return self != Options()

    def words(self) -> list[str]:
        """The command line that parse reads back."""
        found = ["--quick"] if self.quick else []
        found += [f"--only={self.only}"] if self.only is not None else []
        found += [f"--op={name}" for name in self.ops]
        found += [f"--dtype={DTYPE_NAMES[dtype]}" for dtype in self.dtypes]
        found += [f"--shape={n_rows}x{n_cols}" for n_rows, n_cols in self.shapes]
        found += [f"--pass={'both' if name == PASSES[2] else name}" for name in self.passes]
        return found + [f"--against={name}" for name in self.against]

    def measured(self) -> dict[str, object]:
        """What decides how a case is measured, and not which cases are: records that differ in it must not be mixed."""
        return {"quick": self.quick, "passes": list(self.passes), "against": list(self.against)}
