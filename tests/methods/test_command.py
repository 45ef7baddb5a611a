import json
import re

import pytest
from onetrip.cli import app
from onetrip.methods import METHODS, NAMES
from typer.testing import CliRunner

SMALL = ["small", "--batch-size", "2", "--sequence-length", "8", "--steps", "1"]


@pytest.fixture
def run():
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["methods", *map(str, arguments)])


def assert_bad_usage(result, *words):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in result.stderr


@pytest.mark.slow
def test_json_is_all_of_standard_output(run, tmp_path):
    result = run(*SMALL, "--only", "sgd", "--combine", "sgd+accumulation", "--json", "--output", tmp_path / "new")
    assert result.exit_code == 0
    read = json.loads(result.stdout)
    assert [entry["name"] for entry in read["methods"]] == ["baseline", "sgd", "sgd+accumulation"]
    assert read == json.loads((tmp_path / "new" / "methods.json").read_text())
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"methods.json", "methods.html"}


def test_tables(run, measuring):
    result = run(*SMALL)
    assert result.exit_code == 0
    assert "improves speed" in result.stdout and "saves memory" in result.stdout


def test_interrupted_keeps_what_is_done_and_resume_measures_the_rest(
    run, measuring, break_method, monkeypatch, tmp_path
):
    def saved():
        result = json.loads((tmp_path / "methods.json").read_text())
        return result["interrupted"], [entry["name"] for entry in result["methods"]]

    asked = [*SMALL, "--only", "adamw8bit", "--only", "sgd", "--output", tmp_path]
    with monkeypatch.context() as patch:
        break_method(patch, "sgd", KeyboardInterrupt())
        result = run(*asked)
    assert result.exit_code == 130 and "interrupted" in result.stdout
    assert saved() == (True, ["baseline", "adamw8bit"])
    assert "interrupted" in (tmp_path / "methods.html").read_text()
    measuring.clear()
    assert run(*asked, "--only", "preloading", "--resume").exit_code == 0
    assert measuring == ["sgd", "preloading"]
    assert saved() == (False, ["baseline", "adamw8bit", "sgd", "preloading"])


@pytest.mark.parametrize(("name", "code"), [("adamw8bit", 1), ("sgd", 0)])
def test_only_onetrip_s_own_failures_are_the_command_s(run, measuring, break_method, monkeypatch, name, code):
    break_method(monkeypatch, name, ValueError("broken"))
    result = run(*SMALL, "--only", name)
    assert result.exit_code == code
    assert [METHODS[name].title, "failed", "ValueError: broken"] in [
        re.split(r"\s{2,}", line.strip()) for line in result.stdout.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "sgd", "--only", "magic"], ["--only magic: unknown method", "batch-2x", "combined-memory"]),
        (["--combine", "sgd+magic"], ["'magic'", "batch-2x"]),
        (["--combine", "sgd+adafactor"], ["exclude each other"]),
        (["--dtype", "float16"], ["--dtype", "float32, bfloat16", "--only fp16"]),
        (["--batch-size", "0"], ["--batch-size must be at least 1"]),
        (["--sequence-length", "65"], ["--sequence-length", "at most 64"]),
        (["--resume"], ["--resume needs --output"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_usage(run, arguments, words):
    assert_bad_usage(run("small", *arguments), *words)


def test_output_without_what_the_page_needs(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert_bad_usage(run("small", "--output", tmp_path), "--output", "jinja2", "pip install")


def test_help_names_every_method(run):
    text = " ".join(run("--help").stdout.replace("│", " ").split())
    assert all(name in text for name in NAMES)
