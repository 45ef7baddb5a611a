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


def _table(head: str, columns: list[dict[str, float]], unit: float) -> str:
    """A row for each name, in the order of the first column that has it."""
    lines = [f"| {head} | {' | '.join(COLUMNS.values())} |", "|---|" + "---:|" * len(COLUMNS)]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [f"{column[name] / unit:,.1f}" if name in column else "" for column in columns]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def tables() -> str:
    record = json.loads(RECORD.read_text())
    options, machine = record["options"], record["machine"]
    columns: list[dict[str, Any]] = [record["columns"][name]["measured"] for name in COLUMNS]
    shape = f"batch {options['batch_size']} x {options['sequence_length']} tokens, {options['dtype']}"
    where = f"{machine['cpu']}, {machine['torch_threads']} threads; torch {record['versions']['torch']}"
    tables = [
        ("MB held", [{name: c[name] for name in BYTES} for c in columns], 1e6),
        ("MB saved for backward, by class of operator", [c["saved"]["by_operator_class"] for c in columns], 1e6),
        ("milliseconds, median", [{phase: ms["median"] for phase, ms in c["ms"].items()} for c in columns], 1.0),
        ("milliseconds, by class of operator, one profiled step", [c["operators_ms"] for c in columns], 1.0),
    ]
    heading = f"{options['model']}, {shape}; {where}; recorded on {record['date'][:10]}.\n"
    return "\n".join([heading, *(_table(*each) for each in tables)])


def page(text: str) -> str:
    """The page with the tables of the record."""
    return BETWEEN.sub(lambda found: f"{found[1]}{tables()}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
