"""Writes the tables of docs/concepts/one_trip.md from the recorded anatomy: python -m tools.class_table"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/amd-epyc-2-cores-avx2/anatomy.json"
PAGE = ROOT / "docs/concepts/one_trip.md"
BETWEEN = re.compile(r"(<!-- classes: from the record[^>]*-->\n).*?(<!-- end -->)", re.DOTALL)
COLUMNS = {"eager": "eager", "patched": "patched", "patched_adamw8bit": "patched + AdamW8bit"}
BYTES = ("weights", "gradients", "optimizer_states", "saved_activations", "temporaries", "peak")


def _table(head: str, rows: list[tuple[str, list[str]]]) -> str:
    lines = [f"| {head} | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    return "\n".join(lines + [f"| {name} | {' | '.join(values)} |" for name, values in rows]) + "\n"


def _per_class(measured: list[dict[str, Any]], unit: float) -> list[tuple[str, list[str]]]:
    """A row for each class of operator, in the order of the first column that has it."""
    names = dict.fromkeys(name for column in measured for name in column)
    return [(name, [f"{column[name] / unit:,.1f}" if name in column else "" for column in measured]) for name in names]


def tables() -> str:
    record = json.loads(RECORD.read_text())
    options, machine = record["options"], record["machine"]
    measured = [record["columns"][name]["measured"] for name in COLUMNS]
    sizes = [(name.replace("_", " "), [f"{column[name] / 1e6:,.1f}" for column in measured]) for name in BYTES]
    saved = _per_class([column["saved"]["by_operator_class"] for column in measured], 1e6)
    phases = [(phase, [f"{column['ms'][phase]['median']:,.1f}" for column in measured]) for phase in measured[0]["ms"]]
    operators = _per_class([column["operators_ms"] for column in measured], 1.0)
    shape = f"batch {options['batch_size']} x {options['sequence_length']} tokens, {options['dtype']}"
    where = f"{machine['cpu']}, {machine['torch_threads']} threads; torch {record['versions']['torch']}"
    return "\n".join(
        [
            f"{options['model']}, {shape}; {where}; recorded on {record['date'][:10]}.\n",
            _table("MB held", sizes),
            _table("MB saved for backward, by class of operator", saved),
            _table("milliseconds, median", phases),
            _table("milliseconds, by class of operator, one profiled step", operators),
        ]
    )


def page(text: str) -> str:
    """The page with the tables of the record."""
    return BETWEEN.sub(lambda found: f"{found[1]}{tables()}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
