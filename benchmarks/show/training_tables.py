"""Tables of one machine's recorded results: training steps, optimizers, the installation."""

from __future__ import annotations

from collections.abc import Iterator

from onetrip.html import Cell, Table

from . import targets
from .operator_tables import BOTH, Cases, error, fixed, gigabytes, mib, milliseconds, of_copy, ratio


def training(cases: Cases) -> Iterator[Table]:
    columns = (
        "variant", "forward ms", "backward ms", "both ms", "optimizer ms", "step ms", "samples/s", "matrix products ms",
        "saved MiB", "peak MiB", "with weights and states MiB",
    )  # fmt: skip
    for case in cases:
        rows = [
            (
                name,
                *(milliseconds(step.get(which)) for which in ("forward", "backward", BOTH, "optimizer", "step")),
                fixed(step.get("samples_per_s"), 1),
                fixed(step.get("matrix_products_ms"), 0),
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
            f"Loss without dropout: {losses}. Matrix products: of one profiled forward and backward. "
            "Peak: above weights and states."
        )
        yield Table(title, columns, rows, note)


def adam(cases: Cases) -> Iterator[Table]:
    columns = (
        "optimizer", "step ms", "its time / onetrip's", "GB/s", "of copy", "state bytes a parameter", "temporary MiB",
        "error",
    )  # fmt: skip
    for case in cases:
        ours = (targets.provider(case, targets.ADAM) or {}).get("step")
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
            f"written, gradients read. A copy ran at {case['copy']['gb_per_s']:.1f} GB/s. error: of 20 updates under "
            "gradients of a normal distribution, root mean square, relative to exact ones."
        )
        yield Table(f"A step of AdamW: {case['model']}, {case['dtype']}", columns, rows, note)


def streams(cases: Cases) -> Iterator[Table]:
    columns = ("gradients", "optimizer", "relative error of updates", "largest update / lr", "exact largest")
    rows = []
    for case in cases:
        exact = targets.provider(case, "exact") or {}
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
    names = list(dict.fromkeys(entry["name"] for case in cases for entry in case["providers"]))
    rows = []
    for name in names:
        losses = [(targets.provider(case, name) or {}).get("held_out_loss") for case in cases]
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
