"""Recorded results as tables: on the terminal, and in docs/benchmarks.md, which is never written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import figures, targets
from .machine import PACKAGE
from .results import Results
from .row_norm import ELEMENTS

TEMPLATE = PACKAGE / "benchmarks.md.j2"
_MIB = 1 << 20
_NO_NUMBER = "–"


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: bool = True
    """All columns but the first are aligned to the right."""


def _milliseconds(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return _NO_NUMBER
    return f"{figures['median_ms']:.3g} ({figures['p20_ms']:.3g}–{figures['p80_ms']:.3g})"


def _percent(figures: dict[str, Any] | None) -> str:
    return _NO_NUMBER if figures is None else f"{100 * figures['share_of_copy']:.0f}%"


def _gigabytes(figures: dict[str, Any] | None) -> str:
    return _NO_NUMBER if figures is None else f"{figures['gb_per_s']:.1f}"


def _ratio(value: float | None) -> str:
    return _NO_NUMBER if value is None else f"{value:.2f}x"


def _mib(count: int | None) -> str:
    return _NO_NUMBER if count is None else f"{count / _MIB:.1f}"


def _error(value: float | None) -> str:
    return _NO_NUMBER if value is None else f"{value:.0e}"


def _targets(results: Results) -> Iterator[Table]:
    found = [verdict for verdict in targets.verdicts(results) if verdict.reached is not None]
    words = {True: "yes", False: "no"}
    if found:
        rows = [(verdict.target, verdict.measured, words[verdict.reached]) for verdict in found]
        yield Table("Targets", "", ("target", "measured", "reached"), rows, numeric=False)


def _full(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = (
        "provider", "forward ms", "GB/s", "of copy", "backward ms", "GB/s", "of copy", "both ms", "eager / it",
        "saved MiB", "peak MiB", "error",
    )  # fmt: skip
    for case in cases:
        eager = targets.provider(case, targets.EAGER)
        rows = []
        for entry in case["providers"]:
            forward, backward, both = (entry.get(name) for name in case["least_bytes"])
            known = both and eager and "forward_backward" in eager
            rows.append(
                (
                    entry["name"],
                    _milliseconds(forward),
                    _gigabytes(forward),
                    _percent(forward),
                    _milliseconds(backward),
                    _gigabytes(backward),
                    _percent(backward),
                    _milliseconds(both),
                    _ratio(eager["forward_backward"]["median_ms"] / both["median_ms"] if known else None),
                    _mib(entry.get("saved_bytes")),
                    _mib(entry.get("peak_bytes")),
                    _error(entry["check"]["largest_error"]),
                )
            )
        note = (
            f"Least bytes: forward {_mib(case['least_bytes']['forward'])} MiB, "
            f"backward {_mib(case['least_bytes']['backward'])} MiB. "
            f"A copy ran at {case['copy']['gb_per_s']:.1f} GB/s, "
            f"at {case['copy_to_fresh_memory']['gb_per_s']:.1f} GB/s into a tensor that it allocates."
        )
        yield Table(f"{case['operator']}, {case['n_rows']} x {case['n_cols']} {case['dtype']}", note, columns, rows)


def _widths(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = (
        "width", "torch forward ms", "onetrip forward ms", "torch / onetrip", "of copy", "torch backward ms",
        "onetrip backward ms", "torch / onetrip", "of copy",
    )  # fmt: skip
    series: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases:
        series.setdefault((case["operator"], case["dtype"]), []).append(case)
    for (operator, dtype), members in series.items():
        if len(members) < 2:
            continue
        rows = []
        for case in sorted(members, key=lambda case: case["n_cols"]):
            torch, ours = targets.provider(case, targets.EAGER) or {}, targets.own(case) or {}
            row = [f"{case['n_cols']}"]
            for name in ("forward", "backward"):
                row += [
                    _milliseconds(torch.get(name)),
                    _milliseconds(ours.get(name)),
                    _ratio(targets.speed_up(case, name)),
                    _percent(ours.get(name)),
                ]
            rows.append(tuple(row))
        yield Table(f"{operator} alone, {dtype}, 4 Mi elements at every width", "", columns, rows)


def _attention(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = ("length", "provider", "forward ms", "backward ms", "both ms", "eager / it", "saved MiB", "peak MiB")
    for dropout_p in sorted({case["dropout_p"] for case in cases}):
        rows = []
        for case in cases:
            if case["dropout_p"] != dropout_p:
                continue
            eager = targets.provider(case, targets.EAGER) or {}
            for entry in case["providers"]:
                if not entry["check"]["passed"]:
                    continue
                times = [_milliseconds(entry.get(name)) for name in ("forward", "backward", "forward_backward")]
                both = "forward_backward"
                ratio = eager[both]["median_ms"] / entry[both]["median_ms"] if both in eager else None
                sizes = _mib(entry["saved_bytes"]), _mib(entry["peak_bytes"])
                rows.append((case["operator"].split("-")[1][1:], entry["name"], *times, _ratio(ratio), *sizes))
        note = (
            "Heads of width 64, no mask. SDPA's flash backend never writes the scores; this operator does, and is for "
            "models that run eager attention: those that want the weights, or have no SDPA path. "
            "With dropout every provider was checked without it: a mask cannot be read off the output."
        )
        yield Table(f"Attention, fp32, dropout {dropout_p:g}", note, columns, rows)


def _attention_winners(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = ("length", "dropout", "fastest of SDPA", "its both ms", "onetrip both ms", "faster", "by")
    rows = []
    for case in cases:
        both = "forward_backward"
        timed = [entry for entry in case["providers"] if both in entry]
        sdpa = [entry for entry in timed if entry["name"].startswith("SDPA")]
        ours = next((entry for entry in timed if entry["name"].startswith("onetrip")), None)
        if not sdpa or ours is None:
            continue
        best = min(sdpa, key=lambda entry: entry[both]["median_ms"])
        ratio = best[both]["median_ms"] / ours[both]["median_ms"]
        rows.append(
            (
                case["operator"].split("-")[1][1:],
                f"{case['dropout_p']:g}",
                best["name"],
                _milliseconds(best[both]),
                _milliseconds(ours[both]),
                "onetrip" if ratio > 1.0 else "SDPA",
                _ratio(max(ratio, 1.0 / ratio)),
            )
        )
    if rows:
        yield Table("Attention: where SDPA wins", "", columns, rows, numeric=False)


def _training(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = ("step", "forward ms", "backward ms", "both ms", "matrix products ms", "saved MiB", "peak MiB")
    for case in cases:
        rows = []
        for name, step in case["steps"].items():
            times = [_milliseconds(step[which]) for which in ("forward", "backward", "forward_backward")]
            products = f"{step['matrix_products_ms']:.0f}" if "matrix_products_ms" in step else _NO_NUMBER
            rows.append((name, *times, products, _mib(step["saved_bytes"]), _mib(step["peak_bytes"])))
        title = (
            f"Training step of {case['model']}, {case['n_layers']} layers, eager attention, "
            f"{case['batch_size']} x {case['sequence_length']} tokens, dropout {case['dropout_p']:g}"
        )
        losses = case["loss_without_dropout"]
        note = (
            f"{case['patched_sites']} sites patched. Loss without dropout: {losses['eager']:.6f} unpatched, "
            f"{losses['patched']:.6f} patched. Matrix products: of one profiled step."
        )
        yield Table(title, note, columns, rows)


def _adam(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = (
        "optimizer", "step ms", "its time / onetrip's", "GB/s", "of copy", "state bytes a parameter", "temporary MiB",
        "error",
    )  # fmt: skip
    for case in cases:
        ours = targets.provider(case, targets.ADAM)
        rows = []
        for entry in case["providers"]:
            if not entry["check"]["passed"]:
                continue
            step = entry["step"]
            rows.append(
                (
                    entry["name"],
                    _milliseconds(step),
                    _ratio(step["median_ms"] / ours["step"]["median_ms"] if ours and "step" in ours else None),
                    _gigabytes(step),
                    _percent(step),
                    f"{entry['state_bytes_per_parameter']:.3f}",
                    _mib(entry["temporary_bytes"]),
                    _error(entry["check"]["largest_error"]),
                )
            )
        note = (
            f"{case['n_tensors']:,} tensors, {case['n_parameters']:,} parameters. GB/s: parameters and states read and "
            f"written, gradients read. A copy ran at {case['copy']['gb_per_s']:.1f} GB/s. error: of 20 updates under "
            "gradients of a normal distribution, root mean square, relative to exact ones."
        )
        yield Table(f"A step of AdamW: {case['model']}, {case['dtype']}", note, columns, rows)


def _streams(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = ("gradients", "optimizer", "relative error of updates", "largest update / lr", "exact largest")
    rows = []
    for case in cases:
        exact = targets.provider(case, "exact") or {}
        for entry in case["providers"]:
            if entry is not exact:
                figures = (f"{entry['relative_rms']:.3f}", f"{entry['largest_update']:.2f}")
                rows.append((case["stream"], entry["name"], *figures, f"{exact['largest_update']:.2f}"))
    if rows:
        note = (
            f"{cases[0]['n_steps']} steps; root mean square of the error of the updates over that of exact Adam's. "
            "Exact Adam's largest update is 7.27 lr, whatever the gradients."
        )
        yield Table("8-bit states: the updates", note, columns, rows)


def _language_model(cases: list[dict[str, Any]]) -> Iterator[Table]:
    names = list(dict.fromkeys(entry["name"] for case in cases for entry in case["providers"]))
    rows = []
    for name in names:
        found = [entry for case in cases if (entry := targets.provider(case, name)) is not None]
        losses = [entry["held_out_loss"] for entry in found]
        ratio = targets.loss_ratio(cases, name)
        cells = "–" if ratio is None else f"{100 * (ratio - 1):+.2f}%"
        rows.append((name, *(f"{loss:.4f}" for loss in losses), f"{sum(losses) / len(losses):.4f}", cells))
    if rows:
        note = (
            f"{cases[0]['n_parameters']:,} parameters, {cases[0]['n_steps']:,} steps on the prose of "
            "pydoc_data.topics, loss on the tenth that was held out."
        )
        seeds = tuple(f"seed {case['seed']}" for case in cases)
        columns = ("optimizer", *seeds, "mean", f"against {targets.ADAM_OF_TORCH}")
        yield Table("A language model trained with each optimizer", note, columns, rows)


def _overhead(cases: list[dict[str, Any]]) -> Iterator[Table]:
    columns = ("call on 1 x 8 fp32, forward", "requires grad", "torch eager µs", "onetrip µs")
    rows = []
    for case in cases:
        cells = []
        for entry in (targets.provider(case, targets.EAGER), targets.own(case)):
            figures = (entry or {}).get("forward")
            cells.append(
                _NO_NUMBER
                if figures is None
                else f"{figures['median_us']:.1f} ({figures['p20_us']:.1f}–{figures['p80_us']:.1f})"
            )
        rows.append((case["operator"], "yes" if case["requires_grad"] else "no", *cells))
    if rows:
        yield Table("Overhead of a call", "", columns, rows)


def _saved(cases: list[dict[str, Any]]) -> Iterator[Table]:
    names = {
        "blocks": "the two output blocks, without the inputs of their Linears",
        "blocks_with_linear_inputs": "the two output blocks, with them",
        "layer": "the whole encoder layer",
    }
    for case in cases:
        eager, patched = case["saved_bytes"]["eager"], case["saved_bytes"]["patched"]
        rows = [
            (words, _mib(eager[name]), _mib(patched[name]), f"{patched[name] / eager[name]:.3f}")
            for name, words in names.items()
        ]
        note = (
            "BertSelfOutput and BertOutput of transformers, training mode; distinct storages saved by autograd, "
            "parameters never counted. What a Linear keeps of its own input it keeps whatever follows it."
        )
        title = (
            f"Saved for backward: BERT-large encoder layer, {case['batch_size']} x {case['sequence_length']} tokens, "
            f"dropout {case['dropout_p']:g}"
        )
        yield Table(title, note, ("what is counted", "eager MiB", "patched MiB", "patched / eager"), rows)


def _install(cases: list[dict[str, Any]]) -> Iterator[Table]:
    rows = [
        (case["build"], f"{case['dependencies_s']:.0f}", f"{case['package_s']:.0f}", f"{case['total_s']:.0f}")
        for case in cases
    ]
    if rows:
        note = "A fresh clone into a fresh virtual environment, build isolation on, no cache."
        columns = ("pip install . of", "dependencies s", "package s", "both s")
        yield Table("Installation", note, columns, rows)


def _without_number(cases: Iterable[dict[str, Any]]) -> Iterator[Table]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for name, reason in case.get("unavailable", {}).items():
            reasons.setdefault((name, reason), []).append(case["case"])
        for entry in case.get("providers", ()):
            if not entry.get("check", {"passed": True})["passed"]:
                reasons.setdefault((entry["name"], f"failed: {entry['check']['detail']}"), []).append(case["case"])
    rows = [(name, reason, ids[0] if len(ids) == 1 else f"{len(ids)} cases") for (name, reason), ids in reasons.items()]
    if rows:
        yield Table("Without a number", "", ("provider", "why", "where"), rows, numeric=False)


def tables(results: Results) -> list[Table]:
    """Everything that one machine's results hold."""
    by_suite = {suite: content["cases"] for suite, content in results.items()}
    operators = [*by_suite.get("row_norm", []), *by_suite.get("softmax", [])]
    return [
        *_targets(results),
        *_full([case for case in operators if case["full"]]),
        *_widths([case for case in operators if case["n_rows"] * case["n_cols"] == ELEMENTS]),
        *_attention_winners(by_suite.get("attention", [])),
        *_attention(by_suite.get("attention", [])),
        *_training(by_suite.get("training", [])),
        *_adam(by_suite.get("adam", [])),
        *_streams(by_suite.get("adam_streams", [])),
        *_language_model(by_suite.get("adam_training", [])),
        *_overhead(by_suite.get("overhead", [])),
        *_saved(by_suite.get("bert_blocks", [])),
        *_install(by_suite.get("install", [])),
        *_without_number(case for cases in by_suite.values() for case in cases),
    ]


def provenance(results: Results) -> list[str]:
    """One line for each distinct origin: what ran, where, when, on which commit."""
    lines: dict[str, list[str]] = {}
    for suite, content in results.items():
        machine, commit = content["machine"], content["commit"]
        where = machine.get("gpu") or f"{machine['cpu']}, {machine['cpu_count']} cores"
        if machine["device"] == "cpu":
            where += f", {machine['torch_threads']} threads, kernels: {machine['cpu_level'] or 'not built'}"
        used = ", ".join(f"{name} {version}" for name, version in content["versions"].items() if version != "absent")
        tree = "no commit" if commit is None else commit["id"][:12] + (" with changes" if commit["modified"] else "")
        lines.setdefault(f"{content['date'][:10]}, {where}; {used}; commit {tree}", []).append(suite)
    return [f"{', '.join(suites)}: {line}." for line, suites in lines.items()]


def print_tables(results: Results) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    for table in tables(results):
        rich = RichTable(title=table.title, caption=table.note or None, title_justify="left", caption_justify="left")
        for index, column in enumerate(table.columns):
            rich.add_column(column, justify="right" if table.numeric and index else "left")
        for row in table.rows:
            style = "red" if table.title == "Targets" and row[-1] == "no" else None
            rich.add_row(*row, style=style)
        console.print(rich)
    for line in provenance(results):
        console.print(line, style="dim")


def render(recorded: dict[str, Results]) -> str:
    """docs/benchmarks.md from every machine's recorded results."""
    import jinja2

    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    machines = [
        {
            "id": name,
            "provenance": provenance(results),
            "tables": tables(results),
            "figures": figures.names(name, results),
        }
        for name, results in recorded.items()
    ]
    return environment.from_string(TEMPLATE.read_text()).render(machines=machines)


def write_docs(recorded: dict[str, Results], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(recorded))
    for machine, results in recorded.items():
        figures.draw(machine, results, path.parent)
