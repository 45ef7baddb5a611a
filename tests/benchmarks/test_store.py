"""Results while they are made: on disk after every case, continued by the same code only, never mixed."""

import json
from pathlib import Path
from typing import Any

import pytest
from onetrip.benchmarks.measure import results
from onetrip.benchmarks.measure.results import Store, UsageError, fingerprint

HEADER: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": {"id": "a" * 40, "modified": False},
    "versions": {"torch": "2.13.0"},
    "machine": {"id": "test", "device": "cpu", "driver and clocks": "580, 1980 MHz"},
    "code": "c0de",
    "measured": {"quick": True, "passes": [], "against": []},
}
LATER = HEADER | {"date": "2026-01-03T00:00:00+00:00"}
EXPECTED = {"softmax": ["a", "b", "c"]}


def record(case: str, passed: bool = True, provider: str = "onetrip cpu") -> dict[str, Any]:
    return {"case": case, "providers": [{"name": provider, "check": {"passed": passed, "detail": "", "error": 0.5}}]}


def store(folder: Path | None, header: dict[str, Any] = HEADER) -> Store:
    return Store(folder, header, EXPECTED)


def cases(path: Path) -> list[str]:
    return [found["case"] for found in json.loads(path.read_text())["cases"]]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_every_case_is_on_disk_when_the_next_one_starts(tmp_path: Path) -> None:
    running = store(tmp_path)
    for case, expected in (("a", ["a"]), ("b", ["a", "b"])):
        running.add("softmax", record(case))
        assert cases(tmp_path / "test/softmax.partial.json") == expected
    assert running.paths == {"softmax": tmp_path / "test/softmax.partial.json"}
    assert results.read(tmp_path)["test"]["softmax"]["complete"] is False  # of a run that was cut there is a report too
    running.finish()
    assert results.read(tmp_path)["test"]["softmax"]["complete"] is True
    assert running.paths == {"softmax": tmp_path / "test/softmax.json"}
    assert files(tmp_path) == ["test/softmax.json"]


def test_the_record_of_another_run_stands_until_this_one_is_whole(tmp_path: Path) -> None:
    before = store(tmp_path)
    before.add("softmax", record("a"))
    before.finish()
    running = store(tmp_path, LATER)
    running.add("softmax", record("b"))
    assert files(tmp_path) == ["test/softmax.json", "test/softmax.partial.json"]
    assert cases(tmp_path / "test/softmax.json") == ["a"]
    (softmax,) = results.read(tmp_path)["test"].values()
    assert [case["case"] for case in softmax["cases"]] == ["a"]  # what waits is no record
    running.finish()
    assert files(tmp_path) == ["test/softmax.json"]
    assert cases(tmp_path / "test/softmax.json") == ["b"]


def test_a_run_is_continued_where_it_stopped(tmp_path: Path) -> None:
    store(tmp_path).add("softmax", record("b"))
    later = store(tmp_path, LATER)
    assert later.resume() == {"softmax": {"b"}}
    later.add("softmax", record("a"))
    again = store(tmp_path, LATER | {"date": "2026-01-04T00:00:00+00:00"})
    assert again.resume() == {"softmax": {"a", "b"}}
    again.add("softmax", record("c"))
    again.finish()
    assert cases(tmp_path / "test/softmax.json") == ["a", "b", "c"]  # in the order of the suite
    assert files(tmp_path) == ["test/softmax.json"]


def test_continuing_keeps_what_was_not_asked_for_this_time(tmp_path: Path) -> None:
    before = Store(tmp_path, HEADER, {"softmax": ["y", "z"]})
    before.add("softmax", record("y", passed=False))
    before.add("softmax", record("z"))
    before.finish()
    later = store(tmp_path, LATER)
    assert later.resume() == {"softmax": set()}
    later.add("softmax", record("a"))
    later.finish()
    assert cases(tmp_path / "test/softmax.json") == ["y", "z", "a"]


def test_what_continued_a_whole_record_and_was_cut_is_read(tmp_path: Path) -> None:
    """Parts of a full run add to one file, one after the other."""
    first = Store(tmp_path, HEADER, {"softmax": ["a"]})
    first.add("softmax", record("a"))
    first.finish()
    cut = Store(tmp_path, LATER, {"softmax": ["b", "c"]})
    cut.resume()
    cut.add("softmax", record("b"))
    (softmax,) = results.read(tmp_path)["test"].values()
    assert [case["case"] for case in softmax["cases"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("commit", {"id": "b" * 40, "modified": False}),
        ("code", "changed"),
        ("versions", {"torch": "2.14.0"}),
        ("machine", HEADER["machine"] | {"torch_threads": 4}),
        ("measured", HEADER["measured"] | {"passes": ["forward"]}),
    ],
)
def test_what_another_run_measured_is_not_continued(tmp_path: Path, name: str, value: object) -> None:
    store(tmp_path).add("softmax", record("a"))
    named = "choice of --quick, --pass or --against" if name == "measured" else name
    with pytest.raises(UsageError, match=rf"softmax\.partial\.json was measured with another {named}: name another"):
        store(tmp_path, LATER | {name: value}).resume()


@pytest.mark.parametrize(
    ("name", "change"), [("commit", {"modified": True}), ("machine", {"driver and clocks": "580, 345 MHz"})]
)
def test_results_in_the_source_tree_and_clocks_that_moved_make_no_other_run(
    tmp_path: Path, name: str, change: dict[str, object]
) -> None:
    store(tmp_path).add("softmax", record("a"))
    assert store(tmp_path, LATER | {name: HEADER[name] | change}).resume() == {"softmax": {"a"}}


def test_results_of_another_machine_are_kept_apart(tmp_path: Path) -> None:
    store(tmp_path, HEADER | {"machine": {"id": "elsewhere"}}).add("softmax", record("a"))
    here = store(tmp_path)
    assert here.resume() == {}
    here.add("softmax", record("b"))
    assert cases(tmp_path / "elsewhere/softmax.partial.json") == ["a"]


@pytest.mark.parametrize(("provider", "again"), [("onetrip cpu", True), ("torch.compile", False)])
def test_a_case_is_made_again_only_where_our_own_provider_failed(tmp_path: Path, provider: str, again: bool) -> None:
    store(tmp_path).add("softmax", record("a", passed=False, provider=provider))
    assert store(tmp_path, LATER).resume() == {"softmax": set() if again else {"a"}}


def test_a_file_that_is_no_record_is_not_continued_and_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "test/softmax.json"
    path.parent.mkdir()
    path.write_text("{")
    with pytest.raises(UsageError, match=r"^--resume: .*softmax\.json: not JSON"):
        store(tmp_path).resume()
    assert path.read_text() == "{"


def test_without_a_folder_nothing_is_written() -> None:
    running = store(None)
    running.add("softmax", record("a"))
    running.finish()
    assert running.paths == {}
    assert running.results["softmax"]["cases"] == [record("a")]


def test_the_fingerprint_is_that_of_the_code() -> None:
    fingerprint.cache_clear()
    first = fingerprint()
    fingerprint.cache_clear()
    assert fingerprint() == first
    assert len(first) == 16
