"""Sweeps every model type of transformers and writes a record and docs/coverage.md. See README.md.

python -m tools.coverage --rows ROWS.jsonl [--retry] [TYPE ...]
python -m tools.coverage --rows ROWS.jsonl --record benchmarks/results --page docs/coverage.md
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
from onetrip.benchmarks.measure.results import SCHEMA, unwritable
from onetrip.environment import commit, header

from .attention import modeling_files, survey
from .check import TOO_LONG, check, limit
from .page import page

SECONDS = 40
"""CPU time for one type, with all its runs."""


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Rows by type; the last one of a type counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["type"]: row for row in map(json.loads, lines)}


def sweep(path: Path, types: Sequence[str], retry: bool) -> None:
    """Append a row per type that the file lacks. retry: also of those that did not run."""
    done, at = read_rows(path), commit()
    for model_type in types:
        if model_type in done and not (retry and done[model_type]["result"] == "not_run"):
            continue
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
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines; types in it are not run again")
    parser.add_argument("--retry", action="store_true", help="run types again that did not run")
    parser.add_argument(
        "--record", type=Path, help="write DIR/transformers-VERSION.json from the rows; nothing is swept"
    )
    parser.add_argument("--page", type=Path, help="with --record: write the page too")
    parser.add_argument("types", nargs="*", help="model types; all by default")
    arguments = parser.parse_args(words)
    if arguments.record is not None and (reason := unwritable(arguments.record)):
        print(f"{parser.prog}: {reason}", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    types = arguments.types or sorted(transformers.CONFIG_MAPPING)
    if arguments.record is None:
        sweep(arguments.rows, types, arguments.retry)
        return 0
    found = record(read_rows(arguments.rows), types)
    html.write(arguments.record / f"transformers-{transformers.__version__}.json", written(found))
    if arguments.page is not None:
        html.write(arguments.page, page(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
