"""What docs/cpu.md quotes is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

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
