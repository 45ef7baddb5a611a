"""Sweeps every model type of transformers and writes a record and docs/coverage.md. See README.md.

python -m tools.coverage --rows ROWS.jsonl [TYPE ...]
python -m tools.coverage --rows ROWS.jsonl --record
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from onetrip import html, patch_model
from onetrip.benchmarks.measure.results import SCHEMA
from onetrip.environment import commit, header

from .attention import modeling_files, survey
from .check import TOO_LONG, check, limit
from .page import page

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "coverage.md"
SECONDS = 40
"""CPU time for one type, with all its runs."""


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by type; the last one of a type counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def sweep(path: Path, types: Sequence[str]) -> None:
    """Append a row per type."""
    at = commit()
    for model_type in types:
        for smallest in (False, True):
            with limit(SECONDS):
                row = check(model_type, smallest)
            if not str(row.get("why", "")).endswith(TOO_LONG):
                break
        row["commit"] = at and at["id"][:12] + " with changes" * at["modified"]
        print(model_type, row["result"], row.get("why", ""), flush=True)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def patch_seconds() -> dict[str, float]:
    """CPU time of patch_model for BERT-base, and for a Llama of 7B parameters on meta. The median of three."""
    import transformers

    def timed(config: Any, device: str) -> float:
        times = []
        for _ in range(3):
            with torch.device(device):
                model = transformers.AutoModel.from_config(config)
            begin = time.process_time()
            patch_model(model)
            times.append(time.process_time() - begin)
        return round(sorted(times)[1], 3)

    return {
        "bert_base": timed(transformers.BertConfig(), "cpu"),
        "llama_7b": timed(transformers.LlamaConfig(), "meta"),
    }


def record(rows: dict[str, dict[str, Any]], types: Sequence[str]) -> dict[str, Any]:
    """What is kept of a sweep: a row per type, the survey of attention, and patch_model's time."""
    return {
        "schema": SCHEMA,
        **header(torch.device("cpu")),
        **survey(modeling_files()),
        "patch_seconds": patch_seconds(),
        "registered": len(types),
        "types": [rows[model_type] for model_type in types if model_type in rows],
    }


def written(found: dict[str, Any]) -> str:
    """The record as JSON, a type per line."""
    head = json.dumps({key: value for key, value in found.items() if key != "types"}, indent=1)
    rows = ",\n".join(f"  {json.dumps(row)}" for row in found["types"])
    return head[: head.rindex("\n}")] + f',\n "types": [\n{rows}\n ]\n}}\n'


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines, a row for each type that ran")
    parser.add_argument("--record", action="store_true", help="write record and page from the rows; nothing is swept")
    parser.add_argument("types", nargs="*", help="model types to run, again too; by default those without a row")
    arguments = parser.parse_args(words)
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    registered, rows = sorted(transformers.CONFIG_MAPPING), read_rows(arguments.rows)
    if not arguments.record:
        sweep(arguments.rows, arguments.types or [each for each in registered if each not in rows])
        return 0
    found = record(rows, registered)
    html.write(RESULTS / f"transformers-{transformers.__version__}.json", written(found))
    html.write(PAGE, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
