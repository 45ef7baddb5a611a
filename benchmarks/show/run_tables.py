"""Tables of training steps, optimizers, overhead and installation, of kernels under ncu, and of a full run."""

from __future__ import annotations

import re
from collections.abc import Iterator

from onetrip.html import Cell, Table

from ..measure.results import Results
from . import targets
from .tables import (
    BOTH,
    Cases,
    cases,
    error,
    fixed,
    gigabytes,
    mib,
    microseconds,
    milliseconds,
    of_copy,
    percent,
    providers,
    ratio,
    shown,
)


def by_topic(results: Results) -> dict[str, list[Table]]:
    """As tables.by_topic, of which these are a part."""
    return {
        "training": [*training(cases(results, "training")), *default_patch(cases(results, "default_patch"))],
        "optimizers": [
            *adam(cases(results, "adam")),
            *streams(cases(results, "adam_streams")),
            *language_model(cases(results, "adam_training")),
        ],
        "installation": [*install(cases(results, "install"))],
        "overhead": [*overhead(cases(results, "overhead"))],
        "memory": [*saved(cases(results, "bert_blocks"))],
        "counters": [*counters(results)],
        "run": [*verified(cases(results, "everything"))],
    }


def training(cases: Cases) -> Iterator[Table]:
    for case in cases:
        on_gpu = any("kernels_ms" in step for step in case["steps"].values())
        part, what, of = (
            ("kernels", "kernels_ms", "step")
            if on_gpu
            else ("matrix products", "matrix_products_ms", "forward and backward")
        )
        columns = (
            "variant", "forward ms", "backward ms", "both ms", "optimizer ms", "step ms", "samples/s", f"{part} ms",
            "saved MiB", "peak MiB", "with weights and states MiB",
        )  # fmt: skip
        rows = [
            (
                name,
                *(milliseconds(step.get(which)) for which in ("forward", "backward", BOTH, "optimizer", "step")),
                fixed(step.get("samples_per_s"), 1),
                fixed(step.get(what), 1 if on_gpu else 0),
                mib(step.get("saved_bytes")),
                mib(step.get("peak_bytes")),
                mib(step.get("training_bytes")),
            )
            for name, step in case["steps"].items()
        ]
        title = (
            f"Training step of {case['model']}, {case['n_layers']} layers, {case.get('dtype', 'fp32')}, "
            f"{case['batch_size']} x {case['sequence_length']} tokens, dropout {case['dropout_p']:g}"
        )
        losses = ", ".join(f"{name} {loss:.6f}" for name, loss in case["loss_without_dropout"].items())
        note = (
            f"{case['patched_sites']} sites patched; eager attention unless the name says otherwise. "
            f"Loss without dropout: {losses}. {part.capitalize()}: of one profiled {of}. "
            "Peak: above weights and states."
        )
        yield Table(title, columns, rows, note)


def default_patch(cases: Cases) -> Iterator[Table]:
    rows = []
    for case in cases:
        unpatched, patched = (case["steps"][name] for name in ("unpatched", "patched"))
        rows.append(
            (
                case["shape"],
                case["dtype"],
                case["mode"],
                milliseconds(unpatched["call"]),
                milliseconds(patched["call"]),
                ratio(targets.speed_up(case, *targets.PATCHING)),
                mib(unpatched["saved_bytes"]),
                mib(patched["saved_bytes"]),
            )
        )
    if rows:
        note = (
            "Four layers of 768 columns, 2 x 384 tokens, models as transformers ships them. Train: forward, backward. "
            "Eval: forward without gradients."
        )
        columns = (
            "model", "dtype", "mode", "unpatched ms", "patched ms", "unpatched / patched", "saved MiB",
            "patched, saved MiB",
        )  # fmt: skip
        yield Table("patch_model(model) with default arguments", columns, rows, note)


def adam(cases: Cases) -> Iterator[Table]:
    columns = (
        "optimizer", "step ms", "its time / onetrip's", "GB/s", "of copy", "state bytes a parameter", "temporary MiB",
        "error",
    )  # fmt: skip
    for case in cases:
        ours = targets.provider(case, targets.ADAM).get("step")
        rows = []
        for entry in case["providers"]:
            if not entry["check"]["passed"]:
                continue
            step = entry["step"]
            rows.append(
                (
                    entry["name"],
                    milliseconds(step),
                    ratio(step["median_ms"] / ours["median_ms"] if ours else None),
                    gigabytes(step),
                    of_copy(step),
                    fixed(entry["state_bytes_per_parameter"], 3),
                    mib(entry["temporary_bytes"]),
                    error(entry["check"].get("largest_error")),
                )
            )
        note = (
            f"{case['n_tensors']:,} tensors, {case['n_parameters']:,} parameters. GB/s: parameters and states read and "
            f"written, gradients read (twice to clip). A copy ran at {case['copy']['gb_per_s']:.1f} GB/s. error: of 20 "
            "updates under gradients of a normal distribution, root mean square, relative to exact ones."
        )
        yield Table(f"A step of AdamW: {case['model']}, {case['dtype']}", columns, rows, note)


def streams(cases: Cases) -> Iterator[Table]:
    columns = ("gradients", "optimizer", "relative error of updates", "largest update / lr", "exact largest")
    rows = []
    for case in cases:
        exact = targets.provider(case, "exact")
        for entry in case["providers"]:
            if entry is not exact:
                found = fixed(entry["relative_rms"], 3), fixed(entry["largest_update"], 2)
                rows.append((case["stream"], entry["name"], *found, fixed(exact["largest_update"], 2)))
    if rows:
        note = (
            f"{cases[0]['n_steps']} steps; root mean square of the error of the updates over that of exact Adam's. "
            "Exact Adam's largest update is 7.27 lr, whatever the gradients."
        )
        yield Table("8-bit states: the updates", columns, rows, note)


def language_model(cases: Cases) -> Iterator[Table]:
    rows = []
    for name in providers(cases):
        losses = [targets.provider(case, name).get("held_out_loss") for case in cases]
        found = [loss for loss in losses if loss is not None]
        against = targets.loss_ratio(cases, name)
        change = None if against is None else Cell(against, f"{100 * (against - 1):+.2f}%")
        rows.append((name, *(fixed(loss, 4) for loss in losses), fixed(sum(found) / len(found), 4), change))
    if rows:
        note = (
            f"{cases[0]['n_parameters']:,} parameters, {cases[0]['n_steps']:,} steps on the prose of "
            "pydoc_data.topics, loss on the tenth that was held out."
        )
        seeds = tuple(f"seed {case['seed']}" for case in cases)
        columns = ("optimizer", *seeds, "mean", f"against {targets.ADAM_OF_TORCH}")
        yield Table("A language model trained with each optimizer", columns, rows, note)


def install(cases: Cases) -> Iterator[Table]:
    columns = ("pip install . of", "dependencies s", "package s", "both s")
    rows = [
        (case["build"], *(fixed(case[f"{part}_s"], 0) for part in ("dependencies", "package", "total")))
        for case in cases
    ]
    if rows:
        note = "A fresh clone into a fresh virtual environment, build isolation on, no cache."
        yield Table("Installation", columns, rows, note)


def overhead(cases: Cases) -> Iterator[Table]:
    others = [name for name in providers(cases) if name != targets.EAGER and not name.startswith("onetrip")]
    rows = []
    for case in cases:
        entries = targets.provider(case, targets.EAGER), targets.own(case), *(targets.provider(case, o) for o in others)
        dtype = case.get("dtype", "fp32")
        call = case["operator"] if dtype == "fp32" else f"{case['operator']}, {dtype}"
        times = [microseconds(entry.get("forward")) for entry in entries]
        rows.append((call, "yes" if case["requires_grad"] else "no", *times))
    if rows:
        columns = ("call on 1 x 8 fp32, forward", "requires grad", "torch eager µs", "onetrip µs")
        yield Table("Overhead of a call", (*columns, *(f"{name} µs" for name in others)), rows)


def saved(cases: Cases) -> Iterator[Table]:
    names = {
        "blocks": "the two output blocks, without the inputs of their Linears",
        "blocks_with_linear_inputs": "the two output blocks, with them",
        "layer": "the whole encoder layer",
    }
    for case in cases:
        eager, patched = case["saved_bytes"]["eager"], case["saved_bytes"]["patched"]
        rows = [
            (words, mib(eager[name]), mib(patched[name]), fixed(patched[name] / eager[name], 3))
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
        yield Table(title, ("what is counted", "eager MiB", "patched MiB", "patched / eager"), rows, note)


def _function(demangled: str) -> str:
    """Without its namespace, what it is instantiated for, and its parameters."""
    found = re.search(r"(\w+)(?=[<(]|$)", demangled.replace("(anonymous namespace)::", ""))
    return found[1] if found else demangled


_COUNTED = (
    "launch", "of copy", "kernel", "µs", "read MiB", "written MiB", "floor MiB", "moved at", "instr./el.", "issue",
    "occup.", "L2", "regs", "shared KiB", "local MiB", "grid x block",
)  # fmt: skip


def counters(results: Results) -> Iterator[Table]:
    """What Nsight Compute counted, a table a backend, what is furthest from the speed of a copy first."""
    note = (
        "Caches empty, clocks as they are. Of copy: the floor, which the whole launch must move, in the time of all "
        "its kernels, over this GPU's copy. Moved at: what this kernel moved through DRAM, of the copy's speed; "
        "what is still in L2 when it ends is not written. Instr./el.: instructions of warps, times 32, an element. "
        "Issue: clocks in which a scheduler issued, of those in which it had warps. Occup.: warps that were there, of "
        "those that fit. L2: of its peak. Local: spills, and arrays that are indexed."
    )
    for suite, content in results.items():
        if not suite.startswith("counters-"):
            continue
        rows = [
            (
                case["case"],
                shown(case["share_of_copy"], "{:.0f}%", 0.01),
                _function(kernel["kernel"]),
                shown(kernel["duration_ns"], "{:.1f}", 1e3),
                mib(kernel["read_bytes"]),
                mib(kernel["written_bytes"]),
                mib(case["floor_bytes"]),
                shown(kernel["moved_share_of_copy"], "{:.0f}%", 0.01),
                fixed(kernel["instructions_per_element"], 1),
                *(percent(kernel[f"{name}_percent"]) for name in ("issue", "occupancy", "l2")),
                fixed(kernel["registers"], 0),
                shown(kernel["shared_bytes"], "{:.1f}", 1 << 10),
                mib(kernel["local_bytes"]),
                re.sub(r"(, 1)*\)|\(", "", f"{kernel['grid']} x {kernel['block']}"),
            )
            for case in sorted(content["cases"], key=lambda case: case["share_of_copy"] or float("inf"))
            for kernel in case["kernels"]
        ]
        if rows:
            yield Table(f"What the kernels do on the GPU: {suite.removeprefix('counters-')}", _COUNTED, rows, note)


def verified(cases: Cases) -> Iterator[Table]:
    """What `onetrip bench --everything` ran, and what became of it."""
    good = {"passed": True, "failed": False}
    rows = [
        (
            case["case"],
            Cell(case["status"], case["status"], good=good.get(case["status"])),
            fixed(case["seconds"], 0),
            "; ".join(filter(None, (case.get("reason", ""), *case.get("failures", ())))),
        )
        for case in cases
    ]
    if rows:
        yield Table("Parts of the run", ("part", "status", "s", "why"), rows)
