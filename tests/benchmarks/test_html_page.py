"""`onetrip bench report`: what stands on the page, and what it rejects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_up_results import MACHINE, every_suite
from onetrip import html
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.show import (
    docs_page,
    html_page,
    plots,
    tables,
)
from onetrip.cli import app
from typer.testing import CliRunner

SECTIONS = {
    "Targets": [],
    "Speed-up over torch eager": ["How many times faster than torch eager"],
    "Bandwidth against width": [
        "layer_norm, fp32: bandwidth against width",
        "rms_norm, fp32: bandwidth against width",
    ],
    "Attention and SDPA": [],
    "Training steps": [],
    "Optimizers": [
        "The largest update of every gradient stream; dotted: the bound of exact Adam",
        "Training loss with each optimizer, mean and range of the seeds",
    ],
    "Overhead of a call": [],
    "Every measurement": [],
    "Installation": [],
    "What was run": [],
    "Without a number": [],
    "Origin": [],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    results.write(every_suite(), tmp_path / "results")
    return tmp_path / "results"


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Results of one suite: a page without figures."""
    results.write({"install": every_suite()["install"]}, tmp_path / "results")
    return tmp_path / "results"


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["bench", "report", *map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
    return done.exit_code, done.stdout, done.stderr


def captions(section: html.Section, kind: type) -> list[str]:
    return [part.caption for part in section.parts if isinstance(part, kind)]


@pytest.mark.slow
def test_the_page_has_every_section_with_its_figures():
    found = {section.title: captions(section, html.Figure) for section in html_page.sections(every_suite())}
    assert found == SECTIONS and list(found) == list(SECTIONS)


@pytest.mark.slow
def test_every_table_of_the_documentation_stands_on_the_page_those_of_single_cases_in_one():
    shown = [caption for section in html_page.sections(every_suite()) for caption in captions(section, html.Table)]
    single = {table.caption for table in tables.operators(tables.cases(every_suite(), "row_norm"))}
    assert {table.caption for table in tables.every(every_suite())} - single <= set(shown)
    assert "Every operator, shape, dtype and provider" in shown and len(shown) == len(set(shown))


def test_the_table_of_all_measurements_has_a_row_for_every_provider_of_every_case():
    cases = tables.cases(every_suite(), "row_norm", "softmax")
    (table,) = tables.measurements(cases)
    assert len(table.rows) == sum(len(case["providers"]) for case in cases)
    failed = next(row for row in table.rows if row[4] == "torch.compile")
    assert failed[5:-1] == (None,) * 10, "a provider that failed its check must have no number"


def test_attention_has_a_table_for_each_dtype_and_dropout():
    cases = tables.cases(every_suite(), "attention")
    kinds = ["fp32, dropout 0", "fp32, dropout 0.1", "bf16, dropout 0"]
    assert [table.caption for table in tables.attention(cases)] == [f"Attention, {kind}" for kind in kinds]
    assert [len(table.rows) for table in tables.attention(cases)] == [9, 9, 6]
    (winners,) = tables.attention_winners(cases)
    assert {row[:3] for row in winners.rows if row[0] == 64} == {
        (64, "fp32", 0.0), (64, "fp32", 0.1), (64, "bf16", 0.0),
    }  # fmt: skip


@pytest.mark.slow
def test_a_suite_without_results_leaves_its_section_out():
    found = every_suite()
    del found["attention"], found["adam_training"]
    sections = {section.title: captions(section, html.Figure) for section in html_page.sections(found)}
    assert "Attention and SDPA" not in sections and len(sections["Optimizers"]) == 1


@pytest.mark.slow
def test_targets_reached_and_missed_are_counted_and_the_unmeasured_named():
    section = html_page.sections(every_suite())[0]
    (table,) = [part for part in section.parts if isinstance(part, html.Table)]
    reached = [row for row in table.rows if row[-1].good]
    assert section.parts[0] == f"{len(reached)} of {len(table.rows)} measured targets are reached."
    assert "nvcc, default architectures" in section.parts[-1] and section.parts[-1].startswith("Not measured here: ")


@pytest.mark.slow
def test_the_figures_of_the_documentation_are_drawn_where_the_page_looks_for_them(tmp_path: Path):
    plots.draw(MACHINE, every_suite(), tmp_path)
    drawn = list(plots.drawings(every_suite()))
    assert {"speed_up", "adam_streams", "adam_training"} <= {figure.name for figure in drawn}
    for figure in drawn:
        path = f"figures/{MACHINE}/{figure.name}.png"
        assert (tmp_path / path).stat().st_size > 5000
        assert f"![{figure.title}]({path})" in docs_page.render({MACHINE: every_suite()})


@pytest.mark.slow
def test_the_command_writes_the_page_beside_the_results(folder: Path):
    status, out, err = run(folder)
    assert (status, out, err) == (0, "", f"wrote {folder / 'report.html'}\n")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<svg") == sum(map(len, SECTIONS.values()))
    assert "Test CPU, 2 cores" in page and "0123456789ab" in page


@pytest.mark.slow
def test_the_folder_of_one_machine_will_do_and_json_says_what_was_written(folder: Path, tmp_path: Path):
    status, out, _ = run(folder / MACHINE, "--output", tmp_path / "new/page.html", "--json")
    assert status == 0 and (tmp_path / "new/page.html").exists()
    found = json.loads(out)
    assert found["path"] == str(tmp_path / "new/page.html") and found["machines"] == [MACHINE]
    assert found["figures"] == sum(map(len, SECTIONS.values())) and found["tables"] > 15


def test_sections_of_several_machines_carry_their_names(small: Path):
    other = every_suite()
    for content in other.values():
        content["machine"] = content["machine"] | {"id": "other"}
    results.write({"install": other["install"]}, small)
    assert run(small)[0] == 0
    page = (small / "report.html").read_text()
    assert f"<h2>{MACHINE}: Installation</h2>" in page and "<h2>other: Installation</h2>" in page


@pytest.mark.parametrize("command", ["anatomy", "methods"])
def test_results_of_the_other_commands_are_shown_by_their_own_sections(small: Path, monkeypatch, command: str):
    content = {"answer": 42}
    path = small / MACHINE / f"{command}_bert.json"
    path.write_text(json.dumps(content))
    made = SimpleNamespace(sections=lambda found: [html.Section(f"{command} of {found['answer']}", ["said"])])
    monkeypatch.setitem(sys.modules, f"onetrip.{command}.report", made)
    assert run(small)[0] == 0
    assert f"<h2>{command} of 42</h2>" in (small / "report.html").read_text()
    path.write_text("{}")
    status, _, err = run(small)
    assert status == 2 and f"{path}: not what `onetrip {command}` writes: KeyError: 'answer'" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "row_norm.json: not JSON"),
        ({"schema": 99}, "row_norm.json: schema must be 1, got 99"),
        ({"cases": [{"operator": "layer_norm"}]}, f"{MACHINE}: its results cannot be read: KeyError: 'n_rows'"),
    ],
    ids=["not JSON", "schema", "cases"],
)
def test_results_that_cannot_be_read_are_named_and_nothing_is_written(folder: Path, change: dict | None, message: str):
    path = folder / MACHINE / "row_norm.json"
    path.write_text("{" if change is None else json.dumps(json.loads(path.read_text()) | change))
    status, out, err = run(folder)
    assert (status, out, len(err.splitlines())) == (2, "", 1) and message in err
    assert not (folder / "report.html").exists()


def test_a_folder_without_results_or_without_existence_is_rejected(tmp_path: Path):
    assert run(tmp_path)[0::2] == (
        2,
        f"onetrip bench report: {tmp_path}: no results in it; `onetrip bench --output {tmp_path}` records some\n",
    )
    assert run(tmp_path / "none")[2].endswith("none: there is no such folder\n")


@pytest.mark.parametrize("name", ["there", "new"])
def test_the_output_of_a_report_may_be_a_folder(small: Path, tmp_path: Path, name: str):
    (tmp_path / "there").mkdir()
    status, _, err = run(small, "--output", tmp_path / name)
    assert (status, err) == (0, f"wrote {tmp_path / name / 'report.html'}\n")
    assert (tmp_path / name / "report.html").is_file()


def test_an_output_that_cannot_be_written_is_rejected(small: Path):
    (small / "file").touch()
    status, _, err = run(small, "--output", small / "file/page.html")
    assert status == 2 and f"cannot write to {small / 'file/page.html'}: " in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named_before_anything_is_read(monkeypatch, tmp_path: Path, package: str):
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = run(tmp_path)
    assert status == 2 and f"{package} is missing: pip install 'onetrip[report]'" in err
