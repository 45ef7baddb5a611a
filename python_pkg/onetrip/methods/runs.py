"""`onetrip methods`: every method chosen, one after another; what is done is kept whatever happens then."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import html as page_builder
from ..anatomy import UsageError
from ..anatomy.measure import Progress
from ..anatomy.models import reason_of
from ..environment import describe, header, packages
from ..measure import Spread
from .catalog import BASELINE, Method, chosen
from .session import NO_MEMORY, MethodFailed, Options, Session
from .verdict import memory_verdict, speed_verdict, unpaired_ratio
from .worker import measure_isolated

FORMAT = 1
MEASURED, SKIPPED, FAILED = "measured", "skipped", "failed"
RATIOS = ("peak_memory", "saved_activations", "optimizer_states")
_PEERS = ("peft", "bitsandbytes", "torchao", "deepspeed", "datasets", "flash-attn")

Save = Callable[[dict[str, Any]], object]


def run(
    options: Options,
    progress: Progress | None = None,
    *,
    save: Save | None = None,
    previous: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measures the methods; what methods.json holds. Ctrl-C ends it early, with result["interrupted"] set.

    save: given the result so far after every method. previous: an earlier result of the same options, whose measured
    methods are not measured again. Raises UsageError where the options cannot be met.
    """
    options.check()
    device = options.torch_device()
    asked = json.loads(json.dumps(asdict(options)))  # as methods.json has it
    result: dict[str, Any] = {"format": FORMAT, **header(device), "options": asked, "interrupted": False}
    result["versions"] |= packages(*_PEERS)
    if previous is not None:
        check_same_run(previous, result)
    session = Session(options)
    methods = chosen(options.only, options.combine, session.setting)
    result["model"] = {"name": options.model, "parameters": sum(p.numel() for p in session.source.parameters())}
    result["data"] = {"tokens": session.data.tokens, "held_out_samples": session.data.n_held_out}
    kept = {entry["name"]: entry for entry in (previous or {}).get("methods", ()) if entry["status"] == MEASURED}
    entries: dict[str, dict[str, Any]] = {}
    total, done = session.n_units * len(methods), 0

    def publish() -> None:
        result["methods"] = judged([entries[m.name] for m in methods if m.name in entries], options.steps)
        if save is not None:
            save(result)

    try:
        # Those with a process of their own last: the baseline in this one is then made once only.
        for index, method in enumerate(sorted(methods, key=lambda method: method.isolated)):
            done = index * session.n_units

            def advance(what: str, name: str = method.name) -> None:
                nonlocal done
                if progress is not None:
                    progress(min(done, total), total, f"{name}: {what}")
                done += 1

            entries[method.name] = kept.get(method.name) or _entry(session, method, advance)
            if method is BASELINE and entries[method.name]["status"] == FAILED:
                raise UsageError(f"{options.model} cannot be trained here: {entries[method.name]['reason']}")
            publish()
        if progress is not None:
            progress(total, total, "done")
    except KeyboardInterrupt:
        result["interrupted"] = True
        publish()
    finally:
        session.release()
    return result


def _entry(session: Session, method: Method, advance: Callable[[str], None]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": method.name,
        "family": method.family,
        "title": method.title,
        "said": {"speed": method.said[0], "memory": method.said[1]},
        "own": method.own,
        "parts": list(method.parts),
    }
    if why := session.missing(method):
        return entry | {"status": SKIPPED, "reason": why}
    try:
        if method.isolated:
            session.release()
            figures = measure_isolated(session.options, method, advance)
        else:
            figures = session.measure(method, advance)
    except Exception as error:  # one method's failure, whatever it is, is a row of the table
        reason = str(error) if isinstance(error, MethodFailed) else reason_of(error)
        return entry | {"status": FAILED, "reason": reason}
    if figures["loss"] is None:  # what does not train is no method, however fast
        return entry | {"status": FAILED, "reason": f"its loss is not finite after {figures['trained_steps']} steps"}
    return entry | {"status": MEASURED, "isolated": method.isolated, **figures}


def judged(entries: list[dict[str, Any]], n_steps: int) -> list[dict[str, Any]]:
    """The entries with their ratios to the baseline, the first of them, and what those say."""
    if not entries or entries[0]["status"] != MEASURED:
        return entries
    baseline = entries[0]
    drift = baseline["samples_per_s_ratio"]["median"] - 1.0 if "samples_per_s_ratio" in baseline else 0.0
    out = []
    for entry in entries:
        if entry["status"] == MEASURED:
            if "samples_per_s_ratio" in entry:
                speed = Spread(**entry["samples_per_s_ratio"])
            else:
                speed = unpaired_ratio(Spread(**baseline["samples_per_s"]), Spread(**entry["samples_per_s"]))
            ratios = {name: entry[name] / baseline[name] if baseline[name] else None for name in RATIOS}
            verdict = {
                "speed": speed_verdict(speed, n_steps, drift),
                "memory": memory_verdict(entry["peak_memory"] / baseline["peak_memory"]),
            }
            entry = entry | {"samples_per_s_ratio": speed.to_dict(), "ratios": ratios}
            if entry["name"] != BASELINE.name:
                entry["verdict"] = verdict
        out.append(entry)
    return out


def own_failures(result: dict[str, Any]) -> list[str]:
    """Names of onetrip's own methods that failed.

    A combination counts unless a part that is not onetrip's failed by itself, or memory did not suffice.
    """
    failed = {entry["name"]: entry for entry in result["methods"] if entry["status"] == FAILED}
    return [
        name
        for name, entry in failed.items()
        if entry["own"]
        and not entry["reason"].startswith(NO_MEMORY)
        and not any(part in failed and not failed[part]["own"] for part in entry["parts"])
    ]


def check_same_run(previous: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UsageError unless the earlier figures can stand beside new ones: same options, machine, versions, code."""
    if previous.get("format") != FORMAT:
        raise UsageError(f"--resume: methods.json has format {previous.get('format')}, not {FORMAT}")
    before = _terms(previous)
    differing = {name: (before.get(name), value) for name, value in _terms(now).items() if before.get(name) != value}
    if differing:
        told = "; ".join(f"{name} was {before}, is {after}" for name, (before, after) in differing.items())
        raise UsageError(f"--resume: methods.json is of another run: {told}")


def _terms(result: dict[str, Any]) -> dict[str, Any]:
    """What two runs must share. Which methods are asked for may change: those measured before are measured."""
    options = {name: value for name, value in result["options"].items() if name not in ("only", "combine")}
    described = describe(result)
    return {
        **{f"--{name.replace('_', '-')}": value for name, value in options.items()},
        **result["versions"],
        **{subject: described[subject] for subject in ("machine", "commit")},
    }


def load_previous(folder: Path) -> dict[str, Any] | None:
    """folder/methods.json; None where there is none yet. Raises UsageError where it is something else."""
    path = folder / "methods.json"
    if not path.exists():
        return None
    try:
        previous = json.loads(path.read_text())
        describe(previous)
        is_whole = all(entry["name"] and entry["status"] for entry in previous["methods"])
        if not is_whole or not isinstance(previous["options"], dict):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--resume: {path} is not a result of onetrip methods") from None
    return previous


def write_json(result: dict[str, Any], folder: Path) -> Path:
    """folder/methods.json, replaced whole."""
    return page_builder.write(folder / "methods.json", json.dumps(result, indent=2) + "\n")
