"""docs/coverage.md from the record: what was fused in each model type, and why the rest was not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from .check import KINDS

Row = dict[str, Any]
TITLES = {"add_norm": "add+norm", "dropout_add": "dropout+add"}


def totals(rows: Iterable[Row]) -> dict[str, Any]:
    """Results, and traced and fused pairs of each kind, with the reasons and the most frequent places of the rest."""
    rows = list(rows)
    found: dict[str, Any] = {"types": len(rows), "results": dict(Counter(row["result"] for row in rows))}
    for kind in KINDS:
        counted = [row[kind] for row in rows if kind in row]
        places = Counter[str]()
        for each in counted:
            places.update(each["left"])
        found[kind] = {
            "traced": sum(each["traced"] for each in counted),
            "fused": sum(each["fused"] for each in counted),
            "reasons": dict(_reasons(places).most_common()),
            "places": dict(places.most_common(15)),
        }
    return found


def _reasons(places: Mapping[str, int]) -> Counter[str]:
    """Counts by reason, of counts by "classes: reason"."""
    reasons = Counter[str]()
    for place, n in places.items():
        reasons[place.partition(": ")[2]] += n
    return reasons


def _pairs(row: Row, kind: str) -> str:
    if kind not in row:
        return ""
    return f"{row[kind]['fused']} / {row[kind]['traced']}" if row[kind]["traced"] else "-"


def _left(row: Row) -> str:
    """The reasons of the pairs that are left, and of a model that did not run."""
    if "why" in row:
        why = row["why"] if isinstance(row["why"], str) else "; ".join(row["why"])
        return " ".join(why.split())[:110]
    reasons = Counter[str]()
    for kind in KINDS:
        reasons += _reasons(row.get(kind, {}).get("left", {}))
    return ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def page(record: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows, versions, seconds = record["types"], record["versions"], record["patch_seconds"]
    found = totals(rows)
    results = found["results"]
    n_ran = sum(results.get(each, 0) for each in ("ok", "wrong", "exception"))
    summary = []
    for kind in KINDS:
        traced, fused = found[kind]["traced"], found[kind]["fused"]
        summary.append([TITLES[kind], str(traced), str(fused), f"{fused / max(traced, 1):.0%}"])
    lines = [
        "# Coverage of transformers' models",
        "",
        f"`patch_model` with default arguments on {found['types']} of the {record['registered']} model types of "
        f"transformers {versions['transformers']}, as [tools/coverage](../tools/coverage/README.md) recorded it "
        f"(torch {versions['torch']}, CPU).",
        *([f"{unswept} types have not been swept yet."] if (unswept := record["registered"] - found["types"]) else []),
        f"A tiny model of each type runs forward and backward, in train and eval mode. {n_ran} types run here; "
        f"{results.get('not_run', 0)} do not.",
        f"Outputs and every gradient agree with the unpatched model's in {results.get('ok', 0)} types; "
        f"{results.get('wrong', 0)} are wrong and {results.get('exception', 0)} raise an exception. "
        "After `unpatch_model` they are the same bit for bit.",
        f"In {sum('sensitive' in row for row in rows)} types some tensor is as far off as rounding alone makes it in "
        "the unpatched model (a detector's choice of the best queries, for example).",
        "Sums are linked to norms here whatever their size; by default from 2^18 elements on (on a GPU 2^24).",
        "",
        *_table(["opportunities, per forward in train mode", "traced", "fused", "share"], summary),
        "",
        "Traced in the unpatched model: a sum of two tensors of one shape that a norm reads, and a dropout's result "
        "that is added. What the patched model still shows is left. "
        "[trace.py](../tools/coverage/trace.py) has the rules.",
        "",
        f"`patch_model` takes {seconds['bert_base']:.2f} s of CPU time on one core for BERT-base, and "
        f"{seconds['llama_7b']:.2f} s for a Llama of 7B parameters on the meta device (32 layers of 4,096 columns). "
        "Verification is included for BERT.",
        "",
        "## What is left, by reason",
        "",
    ]
    for kind in KINDS:
        rest = [[str(n), reason] for reason, n in found[kind]["reasons"].items()]
        lines += [*_table([TITLES[kind], "reason"], rest), ""]
    lines += ["## What is left, by place", ""]
    for kind in KINDS:
        places = [
            [str(n), f"`{place.partition(': ')[0]}`: {place.partition(': ')[2]}"]
            for place, n in found[kind]["places"].items()
        ]
        lines += [*_table([TITLES[kind], "adding module, norm or dropout: reason"], places), ""]
    unread = record["refused"]["eager_functions"] | record["refused"]["own_softmax"]
    lines += [
        "## Attention that is left",
        "",
        "The table of all types counts sums and dropouts. Attention of these functions and classes is not read:",
        "",
        *_table(["place", "reason"], ([f"`{place}`", reason] for place, reason in unread.items())),
        "",
    ]
    header = ["type", "result", *(f"{TITLES[kind]} fused / traced" for kind in KINDS), "left, or why it does not run"]
    body = [
        [f"`{row['type']}`", row["result"].replace("_", " "), *(_pairs(row, kind) for kind in KINDS), _left(row)]
        for row in rows
    ]
    return "\n".join([*lines, "## Every type", "", *_table(header, body)]) + "\n"
