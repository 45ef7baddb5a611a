"""What patch_model can read of transformers, as recorded: the survey says the same of a few folders, README of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
coverage = pytest.importorskip("tools.transformers_coverage")

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "transformers-5.23.0.json").read_text())
FOLDERS = ("bert", "bloom", "deberta_v2", "gptj", "xlnet")


@pytest.mark.skipif(
    transformers.__version__ != RECORDED["versions"]["transformers"], reason="recorded with another version"
)
def test_survey_of_a_few_folders():
    files = [file for file in coverage.modeling_files() if file.parent.name in FOLDERS]
    found = coverage.survey(files)
    assert (found["eager_functions"], found["eager_functions_read"]) == (1, 1)  # BERT's
    assert (found["own_softmax_folders"], found["own_softmax_folders_read"]) == (4, 2)
    refused = found["refused"]["own_softmax"]
    assert {name.partition(".")[0] for name in refused} == {"modeling_gptj", "modeling_xlnet"}
    assert refused.items() <= RECORDED["refused"]["own_softmax"].items()


def test_readme_says_what_is_recorded():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{RECORDED['eager_functions_read']} of the {RECORDED['eager_functions']} in transformers 5.23.0" in text
    assert f"in {RECORDED['own_softmax_folders_read']} of {RECORDED['own_softmax_folders']} model folders" in text


def test_a_folder_that_cannot_be_written_is_refused_before_the_survey(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coverage, "modeling_files", lambda: pytest.fail("surveyed"))
    (tmp_path / "file").touch()
    assert coverage.main(["--output", str(tmp_path / "file" / "folder")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot write to" in line
