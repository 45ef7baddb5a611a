"""What docs/cpu.md quotes is what was recorded, and the tool that records it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import cpu_advice

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks/results/amd-epyc-2-cores/cpu_advice.json"


def test_the_page_quotes_the_recorded_figures() -> None:
    page = (ROOT / "docs/cpu.md").read_text()
    for case in json.loads(RECORDED.read_text())["cases"]:
        ratio = case["faster"]
        figures = f"{case['cpu_ms']['median']:.0f} | {case['system_ms']:.0f} | {ratio['median']:.2f}"
        if case["case"].startswith("threads"):
            figures = f"{case['wall_ms']['median']:.0f} | {ratio['median']:.2f}"
        assert f"| {case['case']} | {figures} ({ratio['p20']:.2f}-{ratio['p80']:.2f}) |" in page


@pytest.mark.slow
def test_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [(cpu_advice.GLIBC, {}), ("glibc, tuned", {"GLIBC_TUNABLES": cpu_advice.TUNABLES})]
    threads = [("1 thread", {"OMP_NUM_THREADS": "1"}), ("2 threads, bound", dict(list(cpu_advice.threads())[-1][1]))]
    monkeypatch.setattr(cpu_advice, "environments", lambda: iter(twice))
    monkeypatch.setattr(cpu_advice, "threads", lambda: iter(threads))
    cases = cpu_advice.measure("tiny-bert", 1)
    assert len(cases) == len(twice) + 4 + len(threads)
    for case in cases:
        assert case["cpu_ms"]["median"] > 0 and case["system_ms"] >= 0 and case["faster"]["median"] > 0
    assert cases[0]["faster"]["median"] == 1.0 and cases[1]["environment"] == twice[1][1]
