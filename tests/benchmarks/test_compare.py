"""onetrip bench compare: what became faster or slower beyond noise."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onetrip.benchmarks.command import app
from onetrip.benchmarks.show.tables import three_digits
from typer.testing import CliRunner, Result

Make = Callable[..., Path]


def figures(median: float, spread: float = 0.02, unit: str = "ms") -> dict[str, float]:
    return {f"median_{unit}": median, f"p20_{unit}": median * (1 - spread), f"p80_{unit}": median * (1 + spread)}


def entry(name: str, passed: bool = True, **passes: dict[str, float]) -> dict[str, Any]:
    check = {"passed": passed, "detail": "" if passed else "output 0: 3.0e-01 of its largest value"}
    return {"name": name, "check": check, **passes}


def content(*providers: dict[str, Any], suite: str = "softmax", case: str = "softmax-M8-N8-fp32", **rest: Any) -> dict:
    cases = [{"case": case, "copy": figures(1.0), "providers": list(providers)}]
    header = {"versions": {"torch": "2.13.0"}, "machine": {"id": "here"}, "commit": {"id": "a" * 40}}
    return {"schema": 1, "suite": suite, **header, "cases": cases, **rest}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(name: str, *args: dict[str, Any], **rest: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content(*args, **rest)))
        return path

    return write


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def compared(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((10.0, 0.02), (5.0, 0.02), "faster"),
        ((10.0, 0.02), (12.0, 0.02), "slower"),
        ((10.0, 0.02), (10.0, 0.02), "same"),
        ((10.0, 0.20), (12.0, 0.02), "same"),  # the intervals overlap
        ((10.0, 0.001), (10.4, 0.001), "same"),  # apart, and less than 5%
        ((10.0, 0.001), (9.6, 0.001), "same"),
        ((10.0, 0.001), (10.6, 0.001), "slower"),
    ],
)
def test_a_change_counts_beyond_noise(
    make: Make, before: tuple[float, float], after: tuple[float, float], verdict: str
) -> None:
    paths = [make(f"{i}.json", entry("onetrip cpu", forward=figures(*side))) for i, side in enumerate((before, after))]
    found = compared(*paths)
    (change,) = found["changes"]
    assert change["verdict"] == verdict
    assert change["ratio"] == pytest.approx(after[0] / before[0])
    assert found["summary"] == {"faster": 0, "slower": 0, "same": 0} | {verdict: 1}
    assert run(*paths, "--fail-on-slower").exit_code == (verdict == "slower")
    assert ("softmax-M8-N8-fp32" in run(*paths).output) is (verdict != "same")
    assert "softmax-M8-N8-fp32" in run(*paths, "--all").output


def test_every_pass_of_every_provider_is_compared(make: Make) -> None:
    before = make(
        "a.json",
        entry("torch eager", forward=figures(4.0), backward=figures(8.0)),
        entry("onetrip cuda", forward=figures(2.0), graph={"forward": figures(1.0)}),
        entry("onetrip gone", forward=figures(2.0)),
    )
    after = make(
        "b.json",
        entry("torch eager", forward=figures(4.0), backward=figures(8.0)),
        entry("onetrip cuda", forward=figures(1.0), graph={"forward": figures(0.5)}, backward=figures(1.0)),
    )
    found = compared(before, after)
    assert {(c["provider"], c["which"]): c["verdict"] for c in found["changes"]} == {
        ("torch eager", "forward"): "same",
        ("torch eager", "backward"): "same",
        ("onetrip cuda", "forward"): "faster",
        ("onetrip cuda", "graph forward"): "faster",
    }
    assert (found["only_before"], found["only_after"]) == (1, 1)
    assert found["copy_ratio"] == 1.0


def test_a_folder_s_own_files_come_before_those_of_folders_in_it(make: Make) -> None:
    """As where what was measured before is kept in a folder beside the new files."""
    make("now/before/softmax.json", entry("onetrip", forward=figures(1.0)))
    now = make("now/softmax.json", entry("onetrip", forward=figures(3.0))).parent
    assert compared(now / "before", now)["summary"]["slower"] == 1


def test_steps_of_a_model_and_microseconds_are_compared_too(make: Make) -> None:
    for name, factor in (("a", 1.0), ("b", 2.0)):
        overhead = entry("onetrip cpu", forward=figures(10.0 * factor, unit="us"))
        make(f"{name}/overhead.json", overhead, suite="overhead", case="overhead-softmax")
        path = make(f"{name}/training.json", suite="training")
        training = json.loads(path.read_text())
        step = {"forward": figures(100.0 * factor), "saved_bytes": 5}
        training["cases"] = [{"case": "training-bert", "steps": {"patched": step}}]
        path.write_text(json.dumps(training))
    found = compared(path.parent.parent / "a", path.parent)
    assert [(c["suite"], c["provider"], c["which"], c["before"]["unit"]) for c in found["changes"]] == [
        ("overhead", "onetrip cpu", "forward", "us"),
        ("training", "patched", "forward", "ms"),
    ]
    assert found["summary"]["slower"] == 2


def test_the_summary_names_the_change_and_what_else_differs(make: Make) -> None:
    before = make("a.json", entry("onetrip cpu", forward=figures(10.0)))
    versions = {"versions": {"torch": "2.14.0"}, "commit": {"id": "b" * 40}, "machine": {"id": "there"}}
    after = make("b.json", entry("onetrip cpu", forward=figures(4.0)), **versions)
    output = run(before, after).output
    assert "2.50x faster" in output
    assert "1 figures: 1 faster, 0 slower, 0 same; 0 only before, 0 only after" in output
    assert f"commit: {'a' * 12} -> {'b' * 12}" in output
    assert "machine: here -> there" in output
    assert "torch: 2.13.0 -> 2.14.0" in output


def test_a_number_that_was_lost_to_a_failed_check_is_no_improvement(make: Make) -> None:
    before = make("a.json", entry("onetrip cpu", forward=figures(10.0)))
    after = make("b.json", entry("onetrip cpu", passed=False))
    result = run(before, after, "--fail-on-slower")
    assert result.exit_code == 1
    assert "no number any more: softmax-M8-N8-fp32: onetrip cpu: output 0: 3.0e-01" in result.output


def _spoil(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _empty(path: Path) -> Path:
    (path.parent / "empty").mkdir()
    return path.parent / "empty"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.with_name("nothing"), "no such file or folder"),
        (lambda path: _spoil(path, "{"), "not JSON"),
        (lambda path: _spoil(path, "[1]"), "schema must be 1, got None"),
        (lambda path: _spoil(path, '{"schema": 2}'), "schema must be 1, got 2"),
        (lambda path: _spoil(path, '{"schema": 1}'), "not the results of a suite"),
        (lambda path: _spoil(path, json.dumps(content() | {"cases": [{}]})), "not the results of a suite"),
        (lambda path: _spoil(path, json.dumps(content())), "have no figure in common"),
        (_empty, "no results of a suite in it"),
    ],
)
def test_a_bad_file_exits_2_with_one_line(make: Make, spoil: Callable[[Path], Path], message: str) -> None:
    good = make("good.json", entry("onetrip cpu", forward=figures(10.0)))
    bad = spoil(make("bad.json"))
    for paths in ((good, bad), (bad, good)):
        result = run(*paths)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_folders_of_several_machines_must_be_told_apart(make: Make, tmp_path: Path) -> None:
    for machine in ("one", "two"):
        make(f"{machine}/softmax.json", entry("onetrip cpu", forward=figures(10.0)))
    result = run(tmp_path, tmp_path)
    assert result.exit_code == 2
    assert "holds the results of several machines: name one of one, two" in result.stderr
    assert run(tmp_path / "one", tmp_path / "two").exit_code == 0


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (9.876, "9.88"), (999.4, "999"), (999.6, "1,000"), (12345.6, "12,346")]
)
def test_times_are_written_out(value: float, text: str) -> None:
    assert three_digits(value) == text


def loaded(before: float | None, after: float | None, ratio: float, make: Make, device: str = "cpu") -> list[Path]:
    """Two runs of which the later took ratio times as long, while waiting for a CPU made calls so much slower."""
    paths = []
    for name, slowdown, time in (("a", before, 10.0), ("b", after, 10.0 * ratio)):
        path = make(f"{name}.json", entry("onetrip cpu", forward=figures(time)))
        suite = json.loads(path.read_text())
        suite["machine"]["device"] = device
        suite["cases"][0]["cpu_slowdown"] = slowdown
        path.write_text(json.dumps(suite))
        paths.append(path)
    return paths


@pytest.mark.parametrize(("before", "after"), [(1.0, 2.0), (2.0, 1.0), (1.1, 2.0)])
def test_two_runs_of_the_same_code_under_load_are_not_slower(make: Make, before: float, after: float) -> None:
    paths = loaded(before, after, 1.9, make)
    assert run(*paths, "--fail-on-slower").exit_code == 0
    output = run(*paths).output
    assert f"waiting for a CPU slowed cases by up to {before:.1f}x before, {after:.1f}x after" in output
    assert "changes of up to 2.10x count as noise" in output


@pytest.mark.parametrize("slowdown", [None, 1.0, 1.2])
def test_a_quiet_machine_keeps_its_narrow_threshold(make: Make, slowdown: float | None) -> None:
    assert run(*loaded(slowdown, slowdown, 1.3, make), "--fail-on-slower").exit_code == 1


def test_load_on_the_cpu_does_not_excuse_a_kernel_on_a_gpu(make: Make) -> None:
    assert compared(*loaded(3.0, 3.0, 1.9, make, "cuda"))["summary"]["slower"] == 1


def test_tables_obey_columns(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [make(f"{t}.json", entry("onetrip cpu", forward=figures(t))) for t in (10.0, 20.0)]
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert max(map(len, run(*paths).output.splitlines())) == columns
