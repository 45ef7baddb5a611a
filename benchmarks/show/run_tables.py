"""Tables of training steps, optimizers, overhead and installation, and of a full run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from onetrip.html import Cell, Table

from ..measure.results import Results
from . import targets
from .tables import (
    BOTH,
    Cases,
    Column,
    by_provider,
    cases,
    error,
    fixed,
    gigabytes,
    mib,
    microseconds,
    milliseconds,
    of_copy,
    providers,
    ratio,
    table,
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
        "installation": install(cases(results, "install")),
        "overhead": overhead(cases(results, "overhead")),
        "run": verified(cases(results, "everything")),
    }


def training(cases: Cases) -> Iterator[Table]:
    """A table a case; a row is (name of the variant, what was measured of it)."""

    def times(which: str, head: str = "") -> Column:
        return f"{head or which} ms", lambda row: milliseconds(row[1].get(which))

    for case in cases:
        part, key, of, digits = "matrix products", "matrix_products_ms", "forward and backward", 0
        if any("kernels_ms" in step for step in case["steps"].values()):
            part, key, of, digits = "kernels", "kernels_ms", "step", 1
        columns: list[Column] = [
            ("variant", lambda row: row[0]),
            *(times("forward"), times("backward"), times(BOTH, "both"), times("optimizer"), times("step")),
            ("samples/s", lambda row: fixed(row[1].get("samples_per_s"), 1)),
            (f"{part} ms", lambda row, key=key, digits=digits: fixed(row[1].get(key), digits)),
            ("saved MiB", lambda row: mib(row[1].get("saved_bytes"))),
            ("peak MiB", lambda row: mib(row[1].get("peak_bytes"))),
            ("with weights and states MiB", lambda row: mib(row[1].get("training_bytes"))),
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
        yield from table(title, columns, case["steps"].items(), note)


def default_patch(cases: Cases) -> list[Table]:
    columns: list[Column] = [
        ("model", lambda case: case["shape"]),
        ("dtype", lambda case: case["dtype"]),
        ("mode", lambda case: case["mode"]),
        ("unpatched ms", lambda case: milliseconds(case["steps"]["unpatched"]["call"])),
        ("patched ms", lambda case: milliseconds(case["steps"]["patched"]["call"])),
        ("unpatched / patched", lambda case: ratio(targets.speed_up(case, *targets.PATCHING))),
        ("saved MiB", lambda case: mib(case["steps"]["unpatched"]["saved_bytes"])),
        ("patched, saved MiB", lambda case: mib(case["steps"]["patched"]["saved_bytes"])),
    ]
    note = (
        "Four layers of 768 columns, 2 x 384 tokens, models as transformers ships them. Train: forward, backward. "
        "Eval: forward without gradients."
    )
    return table("patch_model(model) with default arguments", columns, cases, note)


def adam(cases: Cases) -> Iterator[Table]:
    over_ours = partial(targets.speed_up, part="step", ours=targets.ADAM)
    columns: list[Column] = [
        ("optimizer", lambda row: row.entry["name"]),
        ("step ms", lambda row: milliseconds(row.entry["step"])),
        ("its time / onetrip's", lambda row: ratio(over_ours(row.case, against=row.entry["name"]))),
        ("GB/s", lambda row: gigabytes(row.entry["step"])),
        ("of copy", lambda row: of_copy(row.entry["step"])),
        ("state bytes a parameter", lambda row: fixed(row.entry["state_bytes_per_parameter"], 3)),
        ("temporary MiB", lambda row: mib(row.entry["temporary_bytes"])),
        ("error", lambda row: error(row.entry["check"].get("largest_error"))),
    ]
    for case in cases:
        note = (
            f"{case['n_tensors']:,} tensors, {case['n_parameters']:,} parameters. GB/s: parameters and states read and "
            f"written, gradients read (twice to clip). A copy ran at {case['copy']['gb_per_s']:.1f} GB/s. error: of 20 "
            "updates under gradients of a normal distribution, root mean square, relative to exact ones."
        )
        timed = [row for row in by_provider([case]) if row.entry["check"]["passed"]]
        yield from table(f"A step of AdamW: {case['model']}, {case['dtype']}", columns, timed, note)


def streams(cases: Cases) -> list[Table]:
    columns: list[Column] = [
        ("gradients", lambda row: row.case["stream"]),
        ("optimizer", lambda row: row.entry["name"]),
        ("relative error of updates", lambda row: fixed(row.entry["relative_rms"], 3)),
        ("largest update / lr", lambda row: fixed(row.entry["largest_update"], 2)),
        ("exact largest", lambda row: fixed(targets.provider(row.case, "exact")["largest_update"], 2)),
    ]
    note = (
        f"{cases[0]['n_steps'] if cases else 0} steps; root mean square of the error of the updates over that of exact "
        "Adam's. Exact Adam's largest update is 7.27 lr, whatever the gradients."
    )
    rows = [row for row in by_provider(cases) if row.entry["name"] != "exact"]
    return table("8-bit states: the updates", columns, rows, note)


def language_model(cases: Cases) -> list[Table]:
    if not cases:
        return []

    def loss(case: dict[str, Any], name: str) -> float | None:
        return targets.provider(case, name).get("held_out_loss")

    def mean(name: str) -> Cell | None:
        found = [value for case in cases if (value := loss(case, name)) is not None]
        return fixed(sum(found) / len(found), 4)

    def change(name: str) -> Cell | None:
        against = targets.loss_ratio(cases, name)
        return None if against is None else Cell(against, f"{100 * (against - 1):+.2f}%")

    columns: list[Column] = [
        ("optimizer", lambda name: name),
        *((f"seed {case['seed']}", lambda name, case=case: fixed(loss(case, name), 4)) for case in cases),
        ("mean", mean),
        (f"against {targets.ADAM_OF_TORCH}", change),
    ]
    note = (
        f"{cases[0]['n_parameters']:,} parameters, {cases[0]['n_steps']:,} steps on the prose of "
        "pydoc_data.topics, loss on the tenth that was held out."
    )
    return table("A language model trained with each optimizer", columns, providers(cases), note)


def install(cases: Cases) -> list[Table]:
    columns: list[Column] = [
        ("pip install . of", lambda case: case["build"]),
        ("dependencies s", lambda case: fixed(case["dependencies_s"], 0)),
        ("package s", lambda case: fixed(case["package_s"], 0)),
        ("both s", lambda case: fixed(case["total_s"], 0)),
    ]
    note = "A fresh clone into a fresh virtual environment, build isolation on, no cache."
    return table("Installation", columns, cases, note)


def overhead(cases: Cases) -> list[Table]:
    def call(case: dict[str, Any]) -> str:
        dtype = case.get("dtype", "fp32")
        return case["operator"] if dtype == "fp32" else f"{case['operator']}, {dtype}"

    def time(name: str) -> Column:
        return f"{name} µs", lambda case: microseconds(targets.provider(case, name).get("forward"))

    others = [name for name in providers(cases) if name != targets.EAGER and not name.startswith("onetrip")]
    columns: list[Column] = [
        ("call on 1 x 8 fp32, forward", call),
        ("requires grad", lambda case: "yes" if case["requires_grad"] else "no"),
        time(targets.EAGER),
        ("onetrip µs", lambda case: microseconds(targets.own(case).get("forward"))),
        *map(time, others),
    ]
    return table("Overhead of a call", columns, cases)


def verified(cases: Cases) -> list[Table]:
    """What `onetrip bench --everything` ran, and what became of it."""
    good = {"passed": True, "failed": False}
    columns: list[Column] = [
        ("part", lambda case: case["case"]),
        ("status", lambda case: Cell(case["status"], case["status"], good.get(case["status"]))),
        ("s", lambda case: fixed(case["seconds"], 0)),
        ("why", lambda case: "; ".join(filter(None, (case.get("reason", ""), *case.get("failures", ()))))),
    ]
    return table("Parts of the run", columns, cases)
