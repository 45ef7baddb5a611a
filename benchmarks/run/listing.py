"""What can be measured, and what it can be compared with on this machine: `onetrip bench --list`."""

from __future__ import annotations

from typing import Any

import torch
from onetrip import terminal
from onetrip.html import Table

from ..measure.providers import NAMES, named, own_provider
from ..measure.results import SUITES
from .selection import TAKES, module, operators


def listing(device: torch.device) -> dict[str, Any]:
    """Suites with their operators and options; providers with why they are not available ("" where they are)."""
    from ..suites.optimizers import PROVIDERS as OPTIMIZERS

    suites = {
        suite: {
            "operators": operators(suite),
            "cases": [case.id for case in module(suite).cases()],
            "options": [f"--{name}" for name in TAKES.get(suite, {})],
        }
        for suite in SUITES
    }
    own = own_provider(device).name
    providers: dict[str, dict[str, str]] = {}
    for name in NAMES:
        for provider in named(name):
            note = "what onetrip picks here; always measured" if provider.name == own else ""
            providers[provider.name] = {"against": name, "unavailable": provider.unavailable(device), "note": note}
    for provider in OPTIMIZERS:
        name = "" if provider.key == "onetrip" else provider.key
        providers[provider.name] = {
            "against": name,
            "unavailable": provider.unavailable(device),
            "note": "a step of Adam" + ("" if name else "; always measured"),
        }
    return {"device": str(device), "suites": suites, "providers": providers}


def print_listing(found: dict[str, Any]) -> None:
    suites = []
    for name, suite in found["suites"].items():
        # Attention has one operator a length: their common stem says enough.
        names = list(dict.fromkeys(op if not op.startswith("attention-") else "attention" for op in suite["operators"]))
        suites.append((name, ", ".join(names) or None, len(suite["cases"]), " ".join(suite["options"]) or None))
    providers = []
    for name, provider in found["providers"].items():
        note = f" ({provider['note']})" if provider["note"] else ""
        words = f"no: {provider['unavailable']}" if provider["unavailable"] else f"yes{note}"
        providers.append((provider["against"] or None, name, words))
    terminal.show(
        [
            Table("What is measured", ("--op: suite", "--op: operators", "cases", "takes"), suites),
            Table(f"What it is compared with on {found['device']}", ("--against", "provider", "available"), providers),
        ]
    )
