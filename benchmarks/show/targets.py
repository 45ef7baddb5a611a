"""What users can expect of the kernels, and whether the recorded figures reach it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..measure.cases import ELEMENTS, LARGE_ELEMENTS, gpu_shapes
from ..measure.providers import LIBRARIES
from ..measure.results import Results

EAGER, COMPILE = "torch eager", "torch.compile"
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


Shape = tuple[int, int, str]
"""Rows, columns, dtype."""


def _least(
    suite: str,
    operator: str,
    figure: Callable[[dict[str, Any]], float | None],
    wanted: Callable[[], list[Shape]],
    what: str = "shape",
) -> Measure:
    """The least figure of an operator's cases of the wanted shapes; without a value where one of them has none. what:
    a shape, or the width that tells them apart."""

    def measure(results: Results) -> Found | None:
        found = {
            (case["n_rows"], case["n_cols"], case["dtype"]): figure(case)
            for case in _cases(results, suite, operator=operator)
        }
        if not found:
            return None
        shapes = wanted()
        values = {shape: value for shape, value in found.items() if shape in shapes and value is not None}
        if len(values) < len(shapes):
            return Found(None, f"{len(values)} of {len(shapes)} {what}s measured") if values else None
        n_rows, n_cols, dtype = worst = min(values, key=lambda shape: values[shape])
        where = f"width {n_cols}" if what == "width" else f"shape {n_rows} x {n_cols} {dtype}"
        return Found(values[worst], f"{where}, the worst of {len(shapes)}")

    return measure


def _worst(suite: str, operator: str, which: str) -> Measure:
    """The speed-up over every shape and dtype of the suite's warm cases, or over every width of its grid."""
    is_warm = operator.startswith("warm_")

    def wanted() -> list[Shape]:
        module = importlib.import_module(f"onetrip.benchmarks.suites.{suite}")
        if is_warm:
            return [(*shape, dtype) for shape in module.WARM_SHAPES for dtype in ("fp32", "bf16")]
        return [(ELEMENTS // width, width, "fp32") for width in module.WIDTHS]

    return _least(suite, operator, partial(speed_up, part=which), wanted, "shape" if is_warm else "width")


def _on_a_gpu(figure: Callable[[dict[str, Any]], float | None], suite: str, operator: str, large: bool) -> Measure:
    """Over the shapes that only a GPU is asked for: the large tensors, or all."""
    shapes = [shape for shape in gpu_shapes() if not large or shape[0] * shape[1] == LARGE_ELEMENTS]
    return _least(suite, operator, figure, lambda: [(*shape, dtype) for shape in shapes for dtype in ("bf16", "fp32")])


def _gpu_targets() -> Iterator[_Target]:
    def share(which: str) -> Callable[[dict[str, Any]], float | None]:
        return lambda case: own(case).get(which, {}).get("share_of_copy")

    for suite, operator in (("row_norm", "layer_norm"), ("row_norm", "rms_norm"), ("softmax", "softmax")):
        for which, limit in (("forward", 0.92), ("backward", 0.85)):
            name = f"{operator}, tensors of {LARGE_ELEMENTS >> 20} Mi elements: {which}, share of a copy's speed"
            yield _Target(name, limit, _on_a_gpu(share(which), suite, operator, large=True), unit="")
        for against in (EAGER, LIBRARIES["liger"].title):
            for which in ("forward", "forward_backward"):
                name = f"{operator}, every shape: {which.replace('_', ' + ')}, {against} / onetrip"
                ratio = partial(speed_up, part=which, against=against)
                yield _Target(name, 1.0, _on_a_gpu(ratio, suite, operator, large=False))


def _overhead(operator: str) -> Measure:
    """Time of the slower one of the calls with and without requires_grad."""

    def measure(results: Results) -> Found | None:
        found = []
        for case in _cases(results, "overhead", operator=operator):
            ours = own(case)
            if "forward" not in ours:
                return None
            where = "with grad" if case["requires_grad"] else "without grad"
            found.append(Found(ours["forward"]["median_us"], where))
        return max(found, default=None)

    return measure


def _install(case: dict[str, Any]) -> Found:
    return Found(case["total_s"], f"{case['package_s']:.0f} s without the dependencies")


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


_ROW_NORM_BLOCK = "bias_dropout_residual_layer_norm"
_SUBLAYER = "bias + dropout + residual + LayerNorm"
_ATTENTION_SOFTMAX = "scale + mask + softmax + dropout, 8 x 16 x 512 x 512"
_BLOCK_LIMITS = ((0.1, 8.0, 6.0), (0.0, 1.8, 1.8))
"""Dropout, least speed-up forward, and forward and backward."""
_SOFTMAX_LIMITS = (
    (0.1, "forward", EAGER, 8.0),
    (0.1, "forward_backward", EAGER, 6.0),
    (0.1, "forward_backward", COMPILE, 4.0),
    (0.0, "forward", EAGER, 1.5),
    (0.0, "forward_backward", EAGER, 1.5),
)
_OPERATOR_LIMITS = (
    ("rotary", "rotary_embedding", 4 * 16 * 1024, 64, "forward", COMPILE, 2.0),
    ("rotary", "rotary_embedding", 4 * 16 * 1024, 64, "forward", EAGER, 4.0),
    ("rotary", "rotary_embedding", 4 * 16 * 1024, 64, "forward_backward", COMPILE, 2.0),
    ("rotary", "rotary_embedding", 4 * 16 * 1024, 64, "forward_backward", EAGER, 4.0),
    ("glu", "glu-silu", 2048, 2816, "forward", COMPILE, 1.0),
    ("glu", "glu-silu", 2048, 2816, "forward_backward", COMPILE, 1.1),
    ("glu", "glu-silu", 2048, 2816, "forward_backward", EAGER, 2.5),
    ("glu", "bias_activation-gelu", 2048, 2816, "forward", COMPILE, 1.0),
    ("glu", "bias_activation-gelu", 2048, 2816, "forward_backward", COMPILE, 1.3),
    ("cross_entropy", "cross_entropy", 2048, 32000, "forward_backward", EAGER, 4.0),
    ("cross_entropy", "linear_cross_entropy-V32000", 2048, 512, "forward_backward", EAGER, 1.0),
    ("cross_entropy", "linear_cross_entropy-V32000", 2048, 512, "forward_backward", "torch chunked", 1.4),
    ("cross_entropy", "linear_cross_entropy-V32000-labels15", 2048, 512, "forward_backward", EAGER, 5.0),
)
_ADAM_LIMITS = ((ADAM_OF_TORCH, 1.0), ("torch AdamW foreach", 5.0), ("bitsandbytes AdamW8bit", 25.0))
_TRAINING_LIMITS = (
    ("BERT-base masked LM, bf16", "bert_base_mlm", 1.9),
    ("Llama-shaped 100 M, bf16", "llama_100m", 1.2),
    ("Llama-shaped 100 M, vocabulary 128,256", "llama_100m_128k", 1.0),
)
_PATCH_LIMITS = (
    ("BERT", 1.1, 1.65),
    ("GPT-2", 1.12, 1.6),
    ("T5", 1.1, 1.5),
    ("BART", 1.02, 1.1),
    ("ViT", 1.0, 1.05),
    ("Llama", 1.0, 1.01),
)
"""Model, least speed-up in fp32 and in bf16."""
_OVERHEAD_LIMITS = (
    ("layer_norm", "layer_norm", 8.5),
    ("rms_norm", "rms_norm", 8.5),
    ("bias_dropout_residual_norm, p = 0.1", f"{_ROW_NORM_BLOCK}-p0.1", 15.0),
    ("bias_dropout_residual_norm, p = 0", f"{_ROW_NORM_BLOCK}-p0", 9.5),
    ("softmax", "softmax", 9.0),
    ("scale_mask_softmax_dropout, p = 0.1", "scale_mask_softmax_dropout-p0.1", 15.0),
    *((name, name, 12.0) for name in ("rotary_embedding", "glu-silu", "bias_activation-gelu", "cross_entropy")),
    *((name.partition("-")[0], name, 12.0) for name in ("linear_cross_entropy-V8", "linear_logprobs-V8")),
)
"""Title, operator, most microseconds."""


def _words(which: str) -> str:
    return which.replace("_", " + ")


def _cpu_targets() -> Iterator[_Target]:
    yield from _operator_targets()
    yield from _adam_targets()
    yield from _model_targets()
    for title, operator, limit in _OVERHEAD_LIMITS:
        yield _Target(f"Eager call on 1 x 8: {title}", limit, _overhead(operator), unit=" µs", at_least=False)
    for build, title, limit in (("cpu", "no CUDA", 180.0), ("cuda", "nvcc, default architectures", 480.0)):
        measure = _first(_install, "install", case=f"install-{build}")
        yield _Target(f"pip install . from a clean clone, {title}", limit, measure, unit=" s", at_least=False)


def _operator_targets() -> Iterator[_Target]:
    fp32: dict[str, Any] = {"dtype": "fp32"}
    for p, *limits in _BLOCK_LIMITS:
        case = fp32 | {"operator": f"{_ROW_NORM_BLOCK}-p{p:g}", "n_rows": 4096, "n_cols": 1024}
        for which, limit in zip(("forward", "forward_backward"), limits, strict=True):
            name = f"{_SUBLAYER}, p = {p:g}: {_words(which)}, eager / onetrip"
            yield _Target(name, limit, _speed_up("row_norm", which, **case))
    for title, operator in (("LayerNorm", "layer_norm"), ("RMSNorm", "rms_norm")):
        for which in ("forward", "backward"):
            name = f"{title} alone, widths 64 to 16,384: {which}, torch / onetrip"
            yield _Target(name, 1.0, _worst("row_norm", operator, which))
    for title, operator in (("LayerNorm", "layer_norm"), (f"{_SUBLAYER}, p = 0", f"{_ROW_NORM_BLOCK}-p0")):
        for which, limit in (("forward", 1.0), ("backward", 1.1)):
            name = f"{title}, warm, every shape and dtype: {which}, eager / onetrip"
            yield _Target(name, limit, _worst("row_norm", f"warm_{operator}", which))
    for p, which, against, limit in _SOFTMAX_LIMITS:
        case = fp32 | {"operator": f"scale_mask_softmax_dropout-p{p:g}", "n_rows": 8 * 16 * 512, "n_cols": 512}
        name = f"{_ATTENTION_SOFTMAX}, p = {p:g}: {_words(which)}, {against.removeprefix('torch ')} / onetrip"
        yield _Target(name, limit, _speed_up("softmax", which, against, **case))
    for which in ("forward", "backward"):
        name = f"softmax alone, widths 64 to 65,536: {which}, torch / onetrip"
        yield _Target(name, 1.0, _worst("softmax", "softmax", which))
        name = f"softmax, warm, every shape and dtype: {which}, torch / onetrip"
        yield _Target(name, 1.0, _worst("softmax", "warm_softmax", which))
    for suite, operator, n_rows, n_cols, which, against, limit in _OPERATOR_LIMITS:
        case = fp32 | {"operator": operator, "n_rows": n_rows, "n_cols": n_cols}
        name = f"{operator}, {n_rows:,} x {n_cols:,}: {_words(which)}, {against} / onetrip"
        yield _Target(name, limit, _speed_up(suite, which, against, **case))


def _adam_targets() -> Iterator[_Target]:
    step = "AdamW8bit, a step of BERT-base, fp32"
    for against, limit in _ADAM_LIMITS:
        measure = _speed_up("adam", "step", against, ADAM, model="bert_base", dtype="fp32")
        yield _Target(f"{step}: {against} / onetrip", limit, measure)
    yield _Target(f"{step}: share of a copy's bandwidth", 0.6, _adam_figure("share_of_copy", "step"), unit="")
    state_bytes = _adam_figure("state_bytes_per_parameter")
    yield _Target(f"{step}: bytes of state a parameter", 2.07, state_bytes, unit="", at_least=False)
    for title, model, limit in (
        ("10,000 tensors of 100 elements", "10000_tensors_of_100", 7.0),
        ("adapters of rank 8 for BERT-base, warm", "adapters_of_rank_8", 1.0),
    ):
        measure = _speed_up("adam", "step", ADAM_OF_TORCH, ADAM, model=model, dtype="fp32")
        yield _Target(f"AdamW8bit, {title}: {ADAM_OF_TORCH} / onetrip", limit, measure)
    yield _Target("AdamW8bit, language model: held-out loss against torch AdamW", 0.5, _loss, unit="%", at_least=False)


def _model_targets() -> Iterator[_Target]:
    training = partial(_speed_up, "training", where="{batch_size} x {sequence_length} tokens", n_layers=12)
    both = training("forward_backward", "eager", "patched", model="bert_base")
    yield _Target("BERT-base training step, eager attention: unpatched / patched", 1.3, both)
    for title, model, limit in _TRAINING_LIMITS:
        step = training("step", "sdpa", "sdpa, patched, linear_cross_entropy", model=model)
        yield _Target(f"{title}: a step, unpatched / patched with the loss", limit, step)
    for shape, *limits in _PATCH_LIMITS:
        for dtype, limit in zip(("fp32", "bf16"), limits, strict=True):
            measure = _speed_up("default_patch", *PATCHING, shape=shape, dtype=dtype, mode="train")
            name = f"{shape}, {dtype}: forward + backward, unpatched / patched with default arguments"
            yield _Target(name, limit, measure)


TARGETS = {"cpu": tuple(_cpu_targets()), "gpu": tuple(_gpu_targets())}


def verdicts(results: Results) -> list[Verdict]:
    """Every target of one machine: a CPU, or a GPU."""
    on_a_gpu = any(content["machine"]["device"] != "cpu" for content in results.values())
    return [target.verdict(results) for target in TARGETS["gpu" if on_a_gpu else "cpu"]]
