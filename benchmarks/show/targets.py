"""What users can expect of the kernels, and whether the recorded figures reach it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..measure.cases import ELEMENTS
from ..measure.results import Results

EAGER = "torch eager"
PATCHING = "call", "unpatched", "patched"
"""What speed_up compares of a model that is patched with default arguments."""
ADAM, ADAM_OF_TORCH = "onetrip AdamW8bit", "torch AdamW fused"


@dataclass(frozen=True)
class Verdict:
    target: str
    measured: str
    reached: bool | None
    """None where the figure was not measured."""


class Found(NamedTuple):
    value: float | None
    """None where it was measured in part."""
    where: str = ""
    """Where the value was found; what is missing where there is none."""


Measure = Callable[[Results], Found | None]
"""The figure of a target; None where the results lack it."""


@dataclass(frozen=True)
class _Target:
    name: str
    limit: float
    measure: Measure
    unit: str = "x"
    at_least: bool = True

    def verdict(self, results: Results) -> Verdict:
        target = f"{self.name} {'≥' if self.at_least else '≤'} {self.limit:g}{self.unit}"
        found = self.measure(results)
        if found is None or found.value is None:
            return Verdict(target, found.where if found else "not measured", None)
        value, where = found
        # Two decimals that round to the limit without reaching it would read as a contradiction.
        text = f"{value:.3f}" if abs(value - self.limit) < 0.005 else f"{value:.2f}" if value < 100 else f"{value:.0f}"
        reached = value >= self.limit if self.at_least else value <= self.limit
        return Verdict(target, f"{text}{self.unit}{where and f' ({where})'}", reached)


def provider(case: dict[str, Any], name: str) -> dict[str, Any]:
    """Its entry; empty where it has none."""
    return next((entry for entry in case.get("providers", ()) if entry["name"] == name), {})


def own(case: dict[str, Any]) -> dict[str, Any]:
    """onetrip's entry: of its backends the one that `auto` picks, which comes first. Empty where there is none."""
    return next((entry for entry in case.get("providers", ()) if entry["name"].startswith("onetrip")), {})


def speed_up(case: dict[str, Any], part: str, against: str = EAGER, ours: str = "") -> float | None:
    """How many times faster onetrip is, median against median; None where either has no number.

    part: a pass of a provider, or a part of a training step; ours: the name of its entry, onetrip's choice by default.
    """

    def entry(name: str) -> dict[str, Any]:
        return case.get("steps", {}).get(name) or provider(case, name)

    theirs, found = entry(against), entry(ours) if ours else own(case)
    return theirs[part]["median_ms"] / found[part]["median_ms"] if part in found and part in theirs else None


def _cases(results: Results, suite: str, **wanted: object) -> Iterator[dict[str, Any]]:
    for case in results.get(suite, {}).get("cases", ()):
        if all(case.get(key) == value for key, value in wanted.items()):
            yield case


def _first(figure: Callable[[dict[str, Any]], Found | None], suite: str, **wanted: object) -> Measure:
    """The figure of the first case that has it."""
    return lambda results: next(
        (f for case in _cases(results, suite, **wanted) if (f := figure(case)) is not None), None
    )


def _speed_up(
    suite: str, part: str, against: str = EAGER, ours: str = "", where: str = "", **wanted: object
) -> Measure:
    """speed_up in the first case that is as wanted and has it. where: its description, formatted with the case."""

    def figure(case: dict[str, Any]) -> Found | None:
        value = speed_up(case, part, against, ours)
        return None if value is None else Found(value, where.format(**case))

    return _first(figure, suite, **wanted)


def _least(suite: str, operator: str, which: str, results: Results) -> Found | None:
    """The least speed-up of an operator over every width of its suite's grid, or over every shape and dtype of its warm
    cases; without a value where one of them has none."""
    found = {
        (case["n_rows"], case["n_cols"], case["dtype"]): speed_up(case, which)
        for case in _cases(results, suite, operator=operator)
    }
    if not found:
        return None
    module = importlib.import_module(f"onetrip.benchmarks.suites.{suite}")
    is_warm = operator.startswith("warm_")
    if is_warm:
        shapes = [(*shape, dtype) for shape in module.WARM_SHAPES for dtype in ("fp32", "bf16")]
    else:
        shapes = [(ELEMENTS // width, width, "fp32") for width in module.WIDTHS]
    values = {shape: value for shape, value in found.items() if shape in shapes and value is not None}
    if len(values) < len(shapes):
        what = "shapes" if is_warm else "widths"
        return Found(None, f"{len(values)} of {len(shapes)} {what} measured") if values else None
    n_rows, n_cols, dtype = worst = min(values, key=lambda shape: values[shape])
    where = f"shape {n_rows} x {n_cols} {dtype}" if is_warm else f"width {n_cols}"
    return Found(values[worst], f"{where}, the worst of {len(shapes)}")


def _overhead(operator: str, results: Results) -> Found | None:
    """Time of the slower one of the calls with and without requires_grad."""
    found = []
    for case in _cases(results, "overhead", operator=operator):
        ours = own(case)
        if "forward" not in ours:
            return None
        where = "with grad" if case["requires_grad"] else "without grad"
        found.append(Found(ours["forward"]["median_us"], where))
    return max(found, default=None)


def _adam_figure(name: str, part: str = "") -> Measure:
    def figure(case: dict[str, Any]) -> Found | None:
        ours = provider(case, ADAM)
        return Found((ours[part] if part else ours)[name]) if "step" in ours else None

    return _first(figure, "adam", model="bert_base", dtype="fp32")


def loss_ratio(cases: list[dict[str, Any]], name: str) -> float | None:
    """Mean loss of the seeds with an optimizer over that with torch's AdamW; None for that one."""
    found = [(provider(case, name), provider(case, ADAM_OF_TORCH)) for case in cases]
    pairs = [(ours["held_out_loss"], theirs["held_out_loss"]) for ours, theirs in found if ours and theirs]
    if not pairs or name == ADAM_OF_TORCH:
        return None
    return sum(ours for ours, _ in pairs) / sum(theirs for _, theirs in pairs)


def _loss(results: Results) -> Found | None:
    ratio = loss_ratio(results.get("adam_training", {}).get("cases", []), ADAM)
    return None if ratio is None else Found(100 * abs(ratio - 1), "mean of the seeds")


def _at(
    title: str, suite: str, operator: str, shape: tuple[int, int], *limits: tuple[str, str, float]
) -> list[_Target]:
    """limits: (pass, compared with, least speed-up) in one shape, float32."""
    case = {"operator": operator, "n_rows": shape[0], "n_cols": shape[1], "dtype": "fp32"}
    return [
        _Target(
            f"{title}: {which.replace('_', ' + ')}, {against} / onetrip",
            limit,
            _speed_up(suite, which, EAGER if against == "eager" else against, **case),
        )
        for which, against, limit in limits
    ]


def _worst(title: str, against: str, suite: str, operator: str, **limits: float) -> list[_Target]:
    """limits: the least speed-up of a pass over every width of the suite's grid, or every shape and dtype of its warm
    cases."""
    return [
        _Target(f"{title}: {which}, {against} / onetrip", limit, partial(_least, suite, operator, which))
        for which, limit in limits.items()
    ]


def _patched(shape: str, **limits: float) -> list[_Target]:
    """limits: the least speed-up in a dtype."""
    return [
        _Target(
            f"{shape}, {dtype}: forward + backward, unpatched / patched with default arguments",
            limit,
            _speed_up("default_patch", *PATCHING, shape=shape, dtype=dtype, mode="train"),
        )
        for dtype, limit in limits.items()
    ]


def _training(title: str, limit: float, model: str, part: str, against: str, ours: str) -> _Target:
    where = "{batch_size} x {sequence_length} tokens"
    return _Target(title, limit, _speed_up("training", part, against, ours, where, n_layers=12, model=model))


def _with_loss(title: str, model: str, limit: float) -> _Target:
    title = f"{title}: a step, unpatched / patched with the loss"
    return _training(title, limit, model, "step", "sdpa", "sdpa, patched, linear_cross_entropy")


def _step(title: str, limit: float, against: str, model: str) -> _Target:
    """Of AdamW8bit, float32."""
    measure = _speed_up("adam", "step", against, ADAM, model=model, dtype="fp32")
    return _Target(f"AdamW8bit, {title}: {against} / onetrip", limit, measure)


def _call(title: str, limit: float, operator: str = "") -> _Target:
    measure = partial(_overhead, operator or title)
    return _Target(f"Eager call on 1 x 8: {title}", limit, measure, unit=" µs", at_least=False)


def _install(build: str, title: str, limit: float) -> _Target:
    def figure(case: dict[str, Any]) -> Found:
        return Found(case["total_s"], f"{case['package_s']:.0f} s without the dependencies")

    measure = _first(figure, "install", case=f"install-{build}")
    return _Target(f"pip install . from a clean clone, {title}", limit, measure, unit=" s", at_least=False)


_F, _B, _FB = "forward", "backward", "forward_backward"
_BLOCK, _SUBLAYER = "bias_dropout_residual_layer_norm", "bias + dropout + residual + LayerNorm"
_SCORES, _ATTENTION = "scale_mask_softmax_dropout", "scale + mask + softmax + dropout, 8 x 16 x 512 x 512"
_LINEAR = "linear_cross_entropy"
_SHAPE = 8 * 16 * 512, 512
_WARM = "warm, every shape and dtype"
_STATE_BYTES = _adam_figure("state_bytes_per_parameter")
_BERT_EAGER = "BERT-base training step, eager attention"
_BERT_STEP = "a step of BERT-base, fp32"
TARGETS = (
    *_at(f"{_SUBLAYER}, p = 0.1", "row_norm", f"{_BLOCK}-p0.1", (4096, 1024), (_F, "eager", 8.0), (_FB, "eager", 6.0)),
    *_at(f"{_SUBLAYER}, p = 0", "row_norm", f"{_BLOCK}-p0", (4096, 1024), (_F, "eager", 1.8), (_FB, "eager", 1.8)),
    *_worst("LayerNorm alone, widths 64 to 16,384", "torch", "row_norm", "layer_norm", forward=1.0, backward=1.0),
    *_worst("RMSNorm alone, widths 64 to 16,384", "torch", "row_norm", "rms_norm", forward=1.0, backward=1.0),
    *_worst(f"LayerNorm, {_WARM}", "eager", "row_norm", "warm_layer_norm", forward=1.0, backward=1.1),
    *_worst(f"{_SUBLAYER}, p = 0, {_WARM}", "eager", "row_norm", f"warm_{_BLOCK}-p0", forward=1.0, backward=1.1),
    *_at(f"{_ATTENTION}, p = 0.1", "softmax", f"{_SCORES}-p0.1", _SHAPE, (_F, "eager", 8.0), (_FB, "eager", 6.0)),
    *_at(f"{_ATTENTION}, p = 0.1", "softmax", f"{_SCORES}-p0.1", _SHAPE, (_FB, "torch.compile", 4.0)),
    *_at(f"{_ATTENTION}, p = 0", "softmax", f"{_SCORES}-p0", _SHAPE, (_F, "eager", 1.5), (_FB, "eager", 1.5)),
    *_worst("softmax alone, widths 64 to 65,536", "torch", "softmax", "softmax", forward=1.0, backward=1.0),
    *_worst(f"softmax, {_WARM}", "torch", "softmax", "warm_softmax", forward=1.0, backward=1.0),
    *(
        target
        for suite, operator, shape, *limits in (
            ("rotary", "rotary_embedding", (65_536, 64), (_F, "torch.compile", 2.0), (_F, EAGER, 4.0)),
            ("rotary", "rotary_embedding", (65_536, 64), (_FB, "torch.compile", 2.0), (_FB, EAGER, 4.0)),
            ("glu", "glu-silu", (2048, 2816), (_F, "torch.compile", 1.0), (_FB, "torch.compile", 1.1)),
            ("glu", "glu-silu", (2048, 2816), (_FB, EAGER, 2.5)),
            ("glu", "bias_activation-gelu", (2048, 2816), (_F, "torch.compile", 1.0), (_FB, "torch.compile", 1.3)),
            ("cross_entropy", "cross_entropy", (2048, 32000), (_FB, EAGER, 4.0)),
            ("cross_entropy", f"{_LINEAR}-V32000", (2048, 512), (_FB, EAGER, 1.0), (_FB, "torch chunked", 1.4)),
            ("cross_entropy", f"{_LINEAR}-V32000-labels15", (2048, 512), (_FB, EAGER, 5.0)),
        )
        for target in _at(f"{operator}, {shape[0]:,} x {shape[1]:,}", suite, operator, shape, *limits)
    ),
    _step(_BERT_STEP, 1.0, ADAM_OF_TORCH, "bert_base"),
    _step(_BERT_STEP, 5.0, "torch AdamW foreach", "bert_base"),
    _step(_BERT_STEP, 25.0, "bitsandbytes AdamW8bit", "bert_base"),
    _Target(f"AdamW8bit, {_BERT_STEP}: share of a copy's bandwidth", 0.6, _adam_figure("share_of_copy", "step"), ""),
    _Target(f"AdamW8bit, {_BERT_STEP}: bytes of state a parameter", 2.07, _STATE_BYTES, "", at_least=False),
    _step("10,000 tensors of 100 elements", 7.0, ADAM_OF_TORCH, "10000_tensors_of_100"),
    _step("adapters of rank 8 for BERT-base, warm", 1.0, ADAM_OF_TORCH, "adapters_of_rank_8"),
    _Target("AdamW8bit, language model: held-out loss against torch AdamW", 0.5, _loss, "%", at_least=False),
    _training(f"{_BERT_EAGER}: unpatched / patched", 1.3, "bert_base", _FB, "eager", "patched"),
    _with_loss("BERT-base masked LM, bf16", "bert_base_mlm", 1.9),
    _with_loss("Llama-shaped 100 M, bf16", "llama_100m", 1.2),
    _with_loss("Llama-shaped 100 M, vocabulary 128,256", "llama_100m_128k", 1.0),
    *_patched("BERT", fp32=1.1, bf16=1.65),
    *_patched("GPT-2", fp32=1.12, bf16=1.6),
    *_patched("T5", fp32=1.1, bf16=1.5),
    *_patched("BART", fp32=1.02, bf16=1.1),
    *_patched("ViT", fp32=1.0, bf16=1.05),
    *_patched("Llama", fp32=1.0, bf16=1.01),
    *(_call(name, 8.5) for name in ("layer_norm", "rms_norm")),
    _call("bias_dropout_residual_norm, p = 0.1", 15.0, f"{_BLOCK}-p0.1"),
    _call("bias_dropout_residual_norm, p = 0", 9.5, f"{_BLOCK}-p0"),
    _call("softmax", 9.0),
    _call("scale_mask_softmax_dropout, p = 0.1", 15.0, f"{_SCORES}-p0.1"),
    *(_call(name, 12.0) for name in ("rotary_embedding", "glu-silu", "bias_activation-gelu", "cross_entropy")),
    *(_call(name, 12.0, f"{name}-V8") for name in (_LINEAR, "linear_logprobs")),
    _install("cpu", "no CUDA", 180.0),
    _install("cuda", "nvcc, default architectures", 480.0),
)


def verdicts(results: Results) -> list[Verdict]:
    """Every target, where the results are of a CPU: of GPUs none is set."""
    on_a_gpu = any(content["machine"]["device"] != "cpu" for content in results.values())
    return [] if on_a_gpu else [target.verdict(results) for target in TARGETS]
