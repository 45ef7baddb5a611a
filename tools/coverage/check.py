"""One model type: build, compare patched with unpatched, unpatch, count what was fused."""

from __future__ import annotations

import copy
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from onetrip.patching import PatchReport, calls, patch_model, unpatch_model
from onetrip.patching.classes import is_patched, rewrite_of
from torch import Tensor, nn

from .inputs import Inputs, candidates, repaired, run, supplied
from .tiny import Dropouts, build, completed, configs
from .trace import Pair, trace

MODES = {"train": True, "eval": False}
KINDS = ("add_norm", "dropout_add")
TOO_LONG = "takes too long"


class TooLong(BaseException):
    """Raised by the alarm. No Exception: models catch those."""


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TooLong after this much CPU time: a busy machine changes no result."""

    def alarm(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGPROF, alarm)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class Found(NamedTuple):
    """A tiny model, without dropout, and what it runs with."""

    model: nn.Module
    dropouts: Dropouts
    inputs: Inputs
    outcomes: dict[str, dict[str, Tensor]]
    """Outputs and gradients by mode, of the modes in which it runs."""
    config: str


def find_model(model_type: str, smallest: bool = False) -> Found:
    """The first config and inputs that the unpatched model runs with. Raises the first error if there are none."""
    first: Exception | None = None
    for way, config in configs(model_type, smallest):
        try:
            model = _built(model_type, config)
        except Exception as error:
            first = first or error
            continue
        dropouts = Dropouts(model)
        dropouts.set(False)
        for candidate in candidates(model):
            inputs: Inputs | None = candidate
            for _ in range(8):
                if inputs is None:
                    break
                outcomes, error = _outcomes(model, inputs)
                if outcomes:
                    return Found(model, dropouts, inputs, outcomes, way)
                assert error is not None
                first = first or error
                if not completed(config, error):
                    inputs = repaired(inputs, error) or supplied(model, inputs, error)
    raise first or ValueError("no config")


def _built(model_type: str, config: Any) -> nn.Module:
    """The model, of a config that is completed as long as errors say what it lacks."""
    while True:
        try:
            return build(model_type, config)
        except AttributeError as error:
            if not completed(config, error):
                raise


def _outcomes(model: nn.Module, inputs: Inputs) -> tuple[dict[str, dict[str, Tensor]], Exception | None]:
    """Outputs and gradients in the modes in which the model runs, and why it does not in the other."""
    found, failed = {}, None
    for mode, on in MODES.items():
        try:
            found[mode] = run(model.train(on), inputs)
        except Exception as error:
            failed = error
    return found, failed


def difference(
    actual: dict[str, Tensor], expected: dict[str, Tensor], exact: bool = False, noise: Sequence[dict[str, Tensor]] = ()
) -> str:
    """The first tensor that differs by more than rounding explains; empty if none does.

    noise: the unpatched model's tensors with other rounding. Ten times their difference is allowed.
    """
    if actual.keys() != expected.keys():
        return f"keys differ: {sorted(actual.keys() ^ expected.keys())[:4]}"
    gradients = [t for name, t in expected.items() if t.numel() and not name.startswith("output")]
    largest = max((_size(t) for t in gradients), default=1.0)
    for name, tensor in expected.items():
        other = actual[name]
        if other.dtype != tensor.dtype or other.shape != tensor.shape:
            return f"{name}: {other.dtype} {tuple(other.shape)} for {tensor.dtype} {tuple(tensor.shape)}"
        if not tensor.numel():
            continue
        if exact:
            if not torch.equal(other.nan_to_num(7.0), tensor.nan_to_num(7.0)):
                return f"{name}: not the same bits"
            continue
        scale = _size(tensor)
        allowed = 1e-4 * scale + 1e-6 * largest + 1e-7
        allowed += 10 * max((_size(each[name] - tensor) for each in noise if name in each), default=0.0)
        if not torch.allclose(other, tensor, 1e-3, allowed, equal_nan=True):
            return f"{name}: {_size(other - tensor):.2e} of {scale:.2e}"
    return ""


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _other_roundings(model: nn.Module, inputs: Inputs) -> Iterator[dict[str, Tensor]]:
    """What rounding alone changes: runs with every weight changed by up to one part in 10 million, and in float64.

    A choice of the k largest, as detectors make, may fall on other queries; a sampling location on another pixel, which
    one run of four may show.
    """
    for n in range(12):
        changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(n)
        with torch.no_grad():
            for parameter in changed.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + 1e-7 * torch.randn(parameter.shape, generator=generator))
        yield run(changed, inputs)
    with suppress(Exception):  # some models compute in float32 only
        doubles = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in inputs.items()}
        yield run(copy.deepcopy(model).double(), doubles)


def reason(pair: Pair, model: nn.Module, report: PatchReport) -> str:
    """Why a pair is left, from the report."""
    skipped = {site.name: site for site in report.skipped}
    adder, other = model.get_submodule(pair.adder), model.get_submodule(pair.other)
    if pair.kind == "add_norm" and pair.other in skipped:
        return f"norm skipped: {skipped[pair.other].reason}"
    if pair.adder in skipped:
        return f"block skipped: {skipped[pair.adder].reason}"
    if not is_patched(adder):
        return "the adding forward is not rewritten"
    if pair.kind == "dropout_add":
        is_near = pair.adder in (pair.other, pair.other.rpartition(".")[0])
        return "dropout not joined in a rewritten forward" if is_near else "dropout in another module"
    block, _, name = pair.other.rpartition(".")
    parent = model.get_submodule(block)
    absorbed = is_patched(parent) and name in rewrite_of(parent).absorbed
    return "sum not linked to its norm" if is_patched(other) or absorbed else "norm not patched"


def _where(pair: Pair, model: nn.Module) -> str:
    return f"{type(model.get_submodule(pair.adder)).__name__} -> {type(model.get_submodule(pair.other)).__name__}"


def opportunities(traced: list[Pair], left: list[Pair], model: nn.Module, report: PatchReport) -> dict[str, Any]:
    """Per kind: how many were traced and fused, and of the rest "adding class -> other class: reason" with counts."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        n_traced, n_left = (sum(pair.kind == kind for pair in pairs) for pairs in (traced, left))
        n_left = min(n_traced, n_left)
        rest = [pair for pair in left if pair.kind == kind][:n_left]
        found[kind] = {
            "traced": n_traced,
            "fused": n_traced - n_left,
            "left": dict(Counter(f"{_where(pair, model)}: {reason(pair, model, report)}" for pair in rest)),
        }
    return found


@patch.object(calls, "SMALLEST", 0)  # tiny models have small sums, which are linked here
def check(model_type: str, smallest: bool = False) -> dict[str, Any]:
    """A row of the record. result: ok, wrong, exception (ours) or not_run (the unpatched model's, or no inputs)."""
    row: dict[str, Any] = {"type": model_type}
    stage, begin = "unpatched", time.process_time()
    try:
        model, dropouts, inputs, first, row["config"] = find_model(model_type, smallest)
        row["modes"] = modes = list(first)
        again = {mode: run(model.train(MODES[mode]), inputs) for mode in modes}
        steady = [mode for mode in modes if not difference(again[mode], first[mode])]
        exact = [mode for mode in modes if not difference(again[mode], first[mode], exact=True)]
        if not steady:
            raise ValueError("two unpatched runs differ")
        model.train("train" in steady)
        traced = trace(model, partial(run, model, inputs))
        stage = "patch"
        dropouts.set(True)  # as users patch: a module without dropout is no site of a dropout pattern
        began = time.process_time()
        report = patch_model(model)
        row["patch_seconds"] = round(time.process_time() - began, 2)
        dropouts.set(False)
        row["sites"] = dict(Counter(site.pattern for site in report.patched))
        row["skipped"] = dict(Counter(site.reason for site in report.skipped))
        stage = "patched"
        wrong = _compare(model, inputs, steady, first, row)
        model.train("train" in steady)
        row |= opportunities(traced, trace(model, partial(run, model, inputs)), model, report)
        stage = "with dropout"
        if "train" in steady:
            wrong += _with_dropout(model, inputs, dropouts, first["train"])
        stage = "unpatched again"
        unpatch_model(model)
        for mode in exact:
            if why := difference(run(model.train(MODES[mode]), inputs), first[mode], exact=True):
                wrong.append(f"unpatched {mode}: {why}")
        row |= {"result": "wrong", "why": wrong} if wrong else {"result": "ok"}
    except TooLong:
        row |= {"result": "not_run", "why": f"{stage}: {TOO_LONG}"}
    except Exception as error:
        result = "not_run" if stage == "unpatched" else "exception"
        row |= {"result": result, "why": f"{stage}: {type(error).__name__}: {error}"[:300]}
    return row | {"seconds": round(time.process_time() - begin, 1)}


def _compare(
    model: nn.Module, inputs: Inputs, modes: list[str], first: dict[str, dict[str, Tensor]], row: dict[str, Any]
) -> list[str]:
    """Three runs in each mode: sums find their norms in the first, and are linked from the second on.

    The row has the first tensor that differs as much as rounding alone makes it differ: as many runs of the unpatched
    model with other rounding are made as explain the difference.
    """
    wrong: list[str] = []
    for mode in modes:
        noise: list[dict[str, Tensor]] = []
        for i in range(3):
            found = run(model.train(MODES[mode]), inputs)
            why = difference(found, first[mode], noise=noise)
            if why and not noise:
                row["sensitive"] = f"{mode}: {why}"
                others = _other_roundings(unpatch_model(copy.deepcopy(model)).train(MODES[mode]), inputs)
            while why and (another := next(others, None)) is not None:
                noise.append(another)
                why = difference(found, first[mode], noise=noise)
            if why:
                wrong.append(f"{mode}, run {i}: {why}")
    return wrong


def _with_dropout(model: nn.Module, inputs: Inputs, dropouts: Dropouts, first: dict[str, Tensor]) -> list[str]:
    """Two runs with every dropout on: nothing may become NaN that was none."""
    dropouts.set(True)
    run(model.train(), inputs)
    found = run(model, inputs)
    dropouts.set(False)
    return ["with dropout: NaN"] if _has_nan(found) and not _has_nan(first) else []


def _has_nan(tensors: dict[str, Tensor]) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in tensors.values())
