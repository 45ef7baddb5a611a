"""From recorded JSON to verdicts, tables and docs/benchmarks.md."""

import copy
from pathlib import Path

import made_up_results
import pytest
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.measure.cases import ELEMENTS
from onetrip.benchmarks.show import docs_page, tables
from onetrip.benchmarks.show.targets import verdicts
from onetrip.benchmarks.suites import row_norm
from onetrip.environment import checkout

ALONE = ("layer_norm", "rms_norm")


@pytest.fixture
def recorded() -> results.Results:
    """With every width of LayerNorm and RMSNorm: those that the files lack are copies of 1024."""
    found = made_up_results.recorded()
    alone = [case for case in found["row_norm"]["cases"] if case["n_cols"] == 1024 and case["operator"] in ALONE]
    widths = set(row_norm.WIDTHS) - {64, 1024}
    found["row_norm"]["cases"] += [
        copy.deepcopy(case) | {"n_cols": width, "n_rows": ELEMENTS // width} for case in alone for width in widths
    ]
    return found


@pytest.mark.parametrize(
    ("target", "measured", "reached"),
    [
        ("LayerNorm, p = 0.1: forward, eager", "9.00x", True),
        ("LayerNorm, p = 0.1: forward + backward, eager", "6.000x", True),
        ("LayerNorm, p = 0: forward, eager", "1.60x", False),
        ("LayerNorm, p = 0: forward + backward, eager", "1.67x", False),
        ("LayerNorm alone, widths 64 to 16,384: forward", "0.80x (width 64, the worst of 10)", False),
        ("LayerNorm alone, widths 64 to 16,384: backward", "1.33x (width 1024, the worst of 10)", True),
        ("RMSNorm alone, widths 64 to 16,384: forward", "1.50x (width 64, the worst of 10)", True),
        ("RMSNorm alone, widths 64 to 16,384: backward", "3.00x (width 64, the worst of 10)", True),
        ("1 x 8: layer_norm", "8.40 µs (with grad)", True),
        ("1 x 8: rms_norm", "15.50 µs (with grad)", False),
        ("1 x 8: bias_dropout_residual_norm, p = 0.1", "not measured", None),
        ("pip install . from a clean clone, no CUDA", "105 s (45 s without the dependencies)", True),
        ("pip install . from a clean clone, nvcc", "not measured", None),
    ],
)
def test_verdicts(recorded: results.Results, target: str, measured: str, reached: bool | None) -> None:
    found = [verdict for verdict in verdicts(recorded) if target in verdict.target]
    assert [(verdict.measured, verdict.reached) for verdict in found] == [(measured, reached)]


def test_a_failed_check_leaves_its_target_unmeasured(recorded: results.Results) -> None:
    del recorded["row_norm"]["cases"][0]["providers"][1]["forward"]
    assert next(iter(verdicts(recorded))).reached is None


@pytest.mark.parametrize("operator", ["layer_norm", "rms_norm"])
def test_a_target_of_many_widths_is_not_judged_from_one(recorded: results.Results, operator: str) -> None:
    one = [case for case in recorded["row_norm"]["cases"] if (case["operator"], case["n_cols"]) == (operator, 1024)]
    recorded["row_norm"]["cases"] = one
    found = [verdict for verdict in verdicts(recorded) if "widths 64 to 16,384" in verdict.target]
    assert {verdict.reached for verdict in found} == {None}
    assert sum(verdict.measured == "1 of 10 widths measured" for verdict in found) == 2


def test_a_width_beside_those_of_a_target_does_not_count(recorded: results.Results) -> None:
    before = verdicts(recorded)
    for width in (16, 32_768):
        alone = next(case for case in recorded["row_norm"]["cases"] if case["operator"] == "layer_norm")
        slower = copy.deepcopy(alone) | {"n_cols": width}
        for entry in slower["providers"]:
            if entry["name"].startswith("onetrip"):
                entry["forward"]["median_ms"] *= 100
        recorded["row_norm"]["cases"].append(slower)
    assert verdicts(recorded) == before


def test_targets_of_the_cpu_are_not_judged_on_a_gpu(recorded: results.Results) -> None:
    for content in recorded.values():
        content["machine"] = content["machine"] | {"device": "cuda", "gpu": "Test GPU"}
    assert verdicts(recorded) == []
    assert tables.every(recorded)[0].caption != "Targets"


@pytest.fixture(scope="module")
def page() -> list[str]:
    """The lines of the page."""
    return docs_page.render({made_up_results.MACHINE: made_up_results.recorded()}).splitlines()


@pytest.mark.parametrize(
    "line",
    [
        "## test-cpu-2-cores",
        "install, overhead, row_norm: 2026-01-02, Test CPU, 2 cores, 2 threads, kernels: avx512; "
        "python 3.11.7, torch 2.13.0+cpu, onetrip 0.1.0; commit 0123456789ab.",
        "### bias_dropout_residual_layer_norm-p0.1, 4096 x 1024 fp32",
        "| onetrip cpu | 4 (3.6–4.4) | 10.0 | 50% | 8 (7.2–8.8) | 10.0 | 50% | 12 (10.8–13.2) | 6.00x | 16.0 | 48.0 | "
        "1e-07 |",
        "| torch.compile | – | – | – | – | – | – | – | – | – | – | 3e-01 |",
        "### layer_norm alone, fp32, 4 Mi elements at every width",
        "| 64 | 2 (1.8–2.2) | 2.5 (2.25–2.75) | 0.80x | 50% | 4 (3.6–4.4) | 3 (2.7–3.3) | 1.33x | 50% |",
        "| rms_norm | yes | 7.0 (6.0–8.0) | 15.5 (14.5–16.5) |",
        "| CPU kernels only | 60 | 45 | 105 |",
        "| onetrip triton | on the CPU it is only interpreted: a time would mean nothing | "
        "bias_dropout_residual_layer_norm-p0.1-M4096-N1024-fp32 |",
        "| torch.compile | failed: output 0: 3.0e-01 of its largest value (bound 2e-05) | "
        "bias_dropout_residual_layer_norm-p0.1-M4096-N1024-fp32 |",
    ],
)
def test_rendering_shows(line: str, page: list[str]) -> None:
    assert line in page


def test_rendering_without_results_says_so(tmp_path: Path) -> None:
    assert "No results are recorded yet." in docs_page.render(results.read(tmp_path))


def test_the_page_in_the_repository_is_the_rendered_one() -> None:
    root = checkout()
    if root is None:
        pytest.skip("onetrip was installed from a wheel: there is no page beside it")
    page = (root / "docs/benchmarks.md").read_text()
    assert page == docs_page.render(results.read(results.RECORDED)), "run python -m onetrip.benchmarks --render"


def test_a_run_under_load_says_so(recorded: results.Results) -> None:
    assert tables.load_in_words(recorded) == ""
    recorded = {"row_norm": recorded["row_norm"] | {"cases": recorded["row_norm"]["cases"][:4]}}
    for case, load in zip(recorded["row_norm"]["cases"], (1.01, 2.6, None, 1.9), strict=True):
        case["cpu_slowdown"] = load
    assert "slowed 2 of 4 cases by up to 2.6x" in tables.load_in_words(recorded)


def test_written_results_are_read_back_with_five_digits(recorded: results.Results, tmp_path: Path) -> None:
    recorded["row_norm"]["cases"][0]["providers"][0]["forward"]["median_ms"] = 1.23456789
    paths = results.write({"row_norm": recorded["row_norm"]}, tmp_path)
    assert paths == [tmp_path / "test-cpu-2-cores/row_norm.json"]
    read = results.read(tmp_path)["test-cpu-2-cores"]["row_norm"]
    assert read["cases"][0]["providers"][0]["forward"]["median_ms"] == 1.2346
    assert read["machine"] == recorded["row_norm"]["machine"]
