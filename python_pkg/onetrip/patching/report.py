"""The result of patch_model: patched and skipped sites, reasons, and calls since patching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..html import Table


@dataclass(frozen=True)
class Unsuitable:
    """Why a module is not patched: a reason of SkippedSite and the details."""

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class PatchedSite:
    """A module whose forward was rewritten."""

    name: str
    module_class: str
    pattern: str
    detail: str = ""


@dataclass(frozen=True)
class SkippedSite:
    """A module that resembles a site and is not patched.

    reason: unknown_forward, extra_forward_args, not_exact_type, hf_hook, forward_hooks, peft_wrapper, quantized,
    kernelized_already, sdpa_in_use, other_attention_in_use, unsupported_dtype, unsupported_shape, unsupported_device,
    verify_failed or excluded.
    """

    name: str
    module_class: str
    reason: str
    detail: str = ""


class PatchReport:
    """The sites that patch_model patched and skipped, with live call counts."""

    def __init__(self) -> None:
        self._patched: list[PatchedSite] = []
        self._skipped: list[SkippedSite] = []
        self._counters: dict[str, tuple[list[int], tuple[int, int]]] = {}
        self._diffs: dict[str, Callable[[], str]] = {}

    @property
    def patched(self) -> tuple[PatchedSite, ...]:
        """Sites with a rewritten forward, in the model's order."""
        return tuple(self._patched)

    @property
    def skipped(self) -> tuple[SkippedSite, ...]:
        """Sites that were not patched, in the model's order."""
        return tuple(self._skipped)

    def calls(self) -> dict[str, tuple[int, int]]:
        """Site name -> (calls of the fused operator, calls that fell back to the original code) since patching.

        Calls inside a torch.compile graph are not counted.
        """
        return {
            site.name: (counter[0] - fused, counter[1] - fallen_back)
            for site in self._patched
            for counter, (fused, fallen_back) in [self._counters[site.name]]
        }

    def diff(self, name: str) -> str:
        """The rewritten forward of the patched site of this name, as a unified diff. Raises ValueError for others."""
        if name not in self._diffs:
            known = ", ".join(map(repr, self._diffs)) or "none"
            raise ValueError(f"diff: name must be the name of a patched site ({known}), got {name!r}")
        return self._diffs[name]()

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain types, ready for json.dumps."""
        calls = self.calls()
        return {
            "patched": [
                {**asdict(site), "fused_calls": calls[site.name][0], "fallback_calls": calls[site.name][1]}
                for site in self._patched
            ],
            "skipped": [asdict(site) for site in self._skipped],
        }

    def summary(self) -> str:
        """Two tables as text: patched sites by pattern and class with their calls, skipped sites by reason."""
        from ..terminal import text

        calls = self.calls()
        was_called = any(map(any, calls.values()))

        def counted(sites: list[PatchedSite]) -> list[int | None]:
            counts = [calls[site.name] for site in sites]
            fused, fallen_back = (sum(column) for column in zip(*counts, strict=True))
            return [fused or None, fallen_back or None, counts.count((0, 0)) or None if was_called else None]

        called = ("fused\ncalls", "fallback\ncalls", "never\ncalled")
        tables = [_table("patched", self._patched, "pattern", called, counted)]
        if self._skipped:
            tables.append(_table("skipped", self._skipped, "reason"))
        return text(tables)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"PatchReport({len(self._patched)} patched, {len(self._skipped)} skipped)"

    def _add(self, site: PatchedSite, counter: list[int], diff: Callable[[], str]) -> None:
        self._patched.append(site)
        self._diffs[site.name] = diff
        self._counters[site.name] = (counter, (counter[0], counter[1]))

    def _skip(self, site: SkippedSite) -> None:
        self._skipped.append(site)


def _table(
    verb: str,
    sites: Sequence[Any],
    first: str,
    last: Sequence[str] = (),
    entries: Callable[[list[Any]], Sequence[int | None]] = lambda sites: (),
) -> str | Table:
    """A row for each kind of site; a line where there are none. last, entries: columns behind the common ones."""
    from ..html import Table

    title = f"{len(sites)} site{'s' * (len(sites) != 1)} {verb}"
    kinds: dict[tuple[Any, ...], list[Any]] = {}
    for site in sites:
        kinds.setdefault((getattr(site, first), site.detail or None, site.module_class), []).append(site)
    rows = [(*kind, of_kind[0].name or "(root)", len(of_kind), *entries(of_kind)) for kind, of_kind in kinds.items()]
    return Table(title, (first, "detail", "module class", "example", "sites", *last), rows) if rows else title
