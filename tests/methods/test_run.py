import io
import json
import os
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from onetrip import anatomy, methods
from onetrip.anatomy import UsageError
from onetrip.methods import worker
from onetrip.methods.catalog import METHODS
from onetrip.methods.runs import check_same_run, judged
from onetrip.methods.session import MethodFailed, check_fits
from onetrip.methods.trainer import Trainer
from onetrip.methods.worker import measure_isolated


def by_name(result):
    return {entry["name"]: entry for entry in result["methods"]}


@pytest.mark.slow
def test_a_short_run_end_to_end(options):
    seen = []
    result = methods.run(
        replace(options, only=("adamw8bit", "fused-kernels", "fp16"), combine=("sgd+accumulation",)),
        lambda *progress: seen.append(progress),
    )
    entries = by_name(json.loads(json.dumps(result)))
    assert list(entries) == ["baseline", "fp16", "adamw8bit", "fused-kernels", "sgd+accumulation"]
    assert entries["fp16"]["status"] == "skipped" and "CUDA" in entries["fp16"]["reason"]
    measured = [entry for entry in entries.values() if entry["status"] == "measured"]
    assert len(measured) == 4
    for entry in measured:
        assert entry["paired"] and entry["trained_steps"] == 2
        assert 0 < entry["held_memory"] < entry["peak_memory"]
        assert entry["loss_before"] == pytest.approx(measured[0]["loss_before"], abs=1e-4)
    assert "verdict" not in entries["baseline"]
    assert entries["adamw8bit"]["verdict"] == {"speed": "unknown", "memory": "yes"}
    assert entries["adamw8bit"]["ratios"]["optimizer_states"] < 0.8
    assert entries["fused-kernels"]["patched_sites"] >= 4
    assert {"commit", "machine", "versions", "date", "options", "data", "model"} <= result.keys()
    done, total, _ = zip(*seen, strict=True)
    assert list(done) == sorted(done) and set(total) == {seen[-1][0]}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses(options):
    a, b = (methods.run(replace(options, only=("sgd",)))["methods"] for _ in range(2))
    assert [entry["loss"] for entry in a] == [entry["loss"] for entry in b]


def test_turns_alternate(session, monkeypatch):
    order = []
    step = Trainer.timed_step
    monkeypatch.setattr(Trainer, "timed_step", lambda self: (order.append(self.recipe.optimizer), step(self))[1])
    session.options = replace(session.options, steps=3)
    session.measure(METHODS["sgd"], lambda what: None)
    assert order == ["sgd", "adamw", "adamw", "sgd"] * 2
    session.release()


def test_what_does_not_fit_beside_the_baseline_goes_alone(session, monkeypatch):
    step = Trainer.train_step
    tries = []

    def tight(self):
        if self.recipe.optimizer == "sgd" and session._partner is not None:
            tries.append("beside")
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        step(self)

    monkeypatch.setattr(Trainer, "train_step", tight)
    figures = session.measure(METHODS["sgd"], lambda what: None)
    assert tries == ["beside"]
    assert not figures["paired"] and "samples_per_s_ratio" not in figures


def test_a_method_that_empties_the_shared_cache_goes_alone(session, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    method = replace(METHODS["empty-cache"], missing=lambda recipe, setting: "")
    figures = session.measure(method, lambda what: None)
    assert not figures["paired"] and "samples_per_s_ratio" not in figures


@pytest.mark.parametrize(("drift", "verdict"), [(1.0, "yes"), (1.08, "no"), (0.92, "no")])
def test_speed_is_judged_by_how_far_apart_two_baselines_are(figures, drift, verdict):
    def entry(name, median):
        ratio = {"median": median, "p20": median - 0.01, "p80": median + 0.01}
        return figures | {"name": name, "status": "measured", "samples_per_s_ratio": ratio}

    assert judged([entry("baseline", drift), entry("sgd", 1.06)], n_steps=20)[1]["verdict"]["speed"] == verdict


def test_memory_is_judged_by_the_peak_and_unpaired_figures_against_the_baseline_s(figures):
    base = figures | {"name": "baseline", "status": "measured"}
    less = base | {"name": "sgd", "peak_memory": base["peak_memory"] // 2, "saved_activations": 1}
    more = base | {"name": "batch-2x", "peak_memory": base["peak_memory"] * 2, "optimizer_states": 0}
    more["samples_per_s"] = {"median": 160.0, "p20": 150.0, "p80": 170.0}
    del more["samples_per_s_ratio"]
    found = judged([base, less, more], n_steps=20)
    assert [entry["verdict"]["memory"] for entry in found[1:]] == ["yes", "more"]
    assert found[1]["ratios"]["peak_memory"] == 0.5
    assert found[2]["samples_per_s_ratio"]["median"] == 2.0 and found[2]["verdict"]["speed"] == "yes"


@pytest.mark.parametrize(
    ("dtype", "device", "free", "words"),
    [
        (torch.float32, "cpu", {"cpu": 19}, r"fit on cpu: .* takes 20\.0 MiB, 19\.0 MiB are free, 1\.0 MiB too little"),
        (torch.float32, "cpu", {"cpu": 20}, ""),
        (torch.bfloat16, "cpu", {"cpu": 10}, ""),
        (torch.float32, "cuda", {"cpu": 4, "cuda": 16}, ""),
        (torch.float32, "cuda", {"cpu": 4, "cuda": 15}, r"fit on cuda: .* takes 16\.0 MiB, 15\.0 MiB are free"),
        (torch.float32, "cuda", {"cpu": 3, "cuda": 16}, r"fit on cpu: .* takes 4\.0 MiB, 3\.0 MiB are free"),
        (torch.float32, "cpu", {"cpu": None}, ""),
    ],
)
def test_a_model_that_does_not_fit_says_by_how_much(monkeypatch, dtype, device, free, words):
    model = torch.nn.Linear(1024, 1024, bias=False, device="meta")  # 4 MiB in float32
    mib = {where: None if n is None else n << 20 for where, n in free.items()}
    monkeypatch.setattr("onetrip.measure.free_bytes", lambda device: mib[device.type])
    with pytest.raises(UsageError, match=words) if words else nullcontext():
        check_fits(model, dtype, torch.device(device))


def test_the_weights_of_a_model_that_does_not_fit_are_never_made(options, monkeypatch):
    """They alone could be more than there is: Linux then ends the process without a word."""
    loaded = []
    load = anatomy.load_model

    def load_model(name, *, weights=True):
        loaded.append(weights)
        return load(name, weights=weights)

    monkeypatch.setattr("onetrip.anatomy.load_model", load_model)
    monkeypatch.setattr("onetrip.measure.free_bytes", lambda device: 1 << 10)
    with pytest.raises(UsageError, match=r"does not fit on cpu: .* 1\.0 KiB are free"):
        methods.run(options)
    assert loaded == [False]


def test_more_than_is_free_is_refused_where_it_would_end_the_process(session, monkeypatch):
    """Beside the baseline and alone: the step asks for more than there is, and hears of it."""
    monkeypatch.setattr("onetrip.measure.free_bytes", lambda device: 256 << 20)
    asked = []

    def hungry(self):
        asked.append(self)
        torch.empty(1 << 32, dtype=torch.uint8)  # more than the garbage of other tests, whose end makes room

    monkeypatch.setattr(Trainer, "train_step", hungry)
    with pytest.raises(MethodFailed, match=r"^does not fit in memory: .* you tried to allocate 4294967296 bytes"):
        session.measure(METHODS["sgd"], lambda what: None)
    assert len(asked) == 2
    torch.empty(1 << 32, dtype=torch.uint8)  # the limit is gone


def test_a_method_that_fails_is_reported_and_the_others_go_on(options, measuring, break_method, monkeypatch):
    break_method(monkeypatch, "sgd", ValueError("no luck\nat all"))
    result = methods.run(replace(options, only=("sgd", "preloading")))
    entries = by_name(result)
    assert (entries["sgd"]["status"], entries["sgd"]["reason"]) == ("failed", "ValueError: no luck")
    assert entries["preloading"]["status"] == "measured"
    assert methods.own_failures(result) == []


@pytest.mark.parametrize(("name", "blamed"), [("adamw8bit", ["adamw8bit"]), ("sgd", [])])
def test_a_method_whose_loss_is_not_finite_has_failed(options, measuring, figures, monkeypatch, name, blamed):
    measure = methods.Session.measure

    def diverge(self, method, advance):
        return measure(self, method, advance) | ({"loss": None} if method.name == name else {})

    monkeypatch.setattr(methods.Session, "measure", diverge)
    result = methods.run(replace(options, only=(name,)))
    entry = by_name(result)[name]
    assert (entry["status"], entry["reason"]) == ("failed", "its loss is not finite after 23 steps")
    assert "verdict" not in entry
    assert methods.own_failures(result) == blamed


def test_a_loss_that_is_not_a_number_is_none(session, monkeypatch):
    monkeypatch.setattr(Trainer, "held_out_loss", lambda self: float("nan"))
    assert session.measure(METHODS["sgd"], lambda what: None)["loss"] is None


def test_a_baseline_that_fails_ends_the_run(options, measuring, break_method, monkeypatch):
    break_method(monkeypatch, "baseline", ValueError("no loss"))
    with pytest.raises(UsageError, match="small cannot be trained here: ValueError: no loss"):
        methods.run(options)


@pytest.mark.parametrize(
    ("failed", "blamed"),
    [
        (["adamw8bit"], ["adamw8bit"]),
        (["sgd", "compile"], []),
        (["compile", "fused-kernels+compile"], []),
        (["fused-kernels+compile"], ["fused-kernels+compile"]),
    ],
    ids=" ".join,
)
def test_own_failures(failed, blamed):
    entries = []
    for name in failed:
        method = methods.combine(tuple(name.split("+"))) if "+" in name else METHODS[name]
        entry = {"name": name, "status": "failed", "reason": "broken", "own": method.own, "parts": list(method.parts)}
        entries.append(entry)
    assert methods.own_failures({"methods": entries}) == blamed
    for entry in entries:
        entry["reason"] = "does not fit in memory: CUDA out of memory"
    assert methods.own_failures({"methods": entries}) == []


def test_what_is_done_is_saved_after_every_method(options, measuring):
    saved = []
    save = lambda result: saved.append([entry["name"] for entry in result["methods"]])  # noqa: E731
    methods.run(replace(options, only=("sgd", "preloading")), save=save)
    assert saved == [["baseline"], ["baseline", "sgd"], ["baseline", "sgd", "preloading"]]


def test_resuming_measures_again_what_failed(options, measuring, break_method, monkeypatch):
    asked = replace(options, only=("sgd",))
    with monkeypatch.context() as patch:
        break_method(patch, "sgd", ValueError("once"))
        previous = methods.run(asked)
    measuring.clear()
    assert by_name(methods.run(asked, previous=previous))["sgd"]["status"] == "measured"
    assert measuring == ["sgd"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r["options"].update(batch_size=2), "--batch-size was 4, is 2"),
        (lambda r: r["versions"].update(torch="2.6.0"), "torch was"),
        (lambda r: r["machine"].update(cpu="another"), "machine was"),
        (lambda r: r.update(commit={"id": "f" * 40, "modified": False}), "commit was"),
        (lambda r: r.update(format=0), "format"),
    ],
    ids=["options", "versions", "machine", "commit", "format"],
)
def test_figures_of_another_run_are_not_mixed_in(options, measuring, change, words):
    previous = methods.run(replace(options, only=("sgd",)))
    now = json.loads(json.dumps(previous))
    check_same_run(previous, now)
    now["options"]["only"] = ["preloading"]  # may change
    check_same_run(previous, now)
    change(now)
    if words == "format":
        previous, now = now, previous
    with pytest.raises(UsageError, match="--resume") as error:
        check_same_run(previous, now)
    assert words in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1, "options": {}}'])
def test_a_file_that_is_no_result(tmp_path, content):
    assert methods.load_previous(tmp_path) is None
    (tmp_path / "methods.json").write_text(content)
    with pytest.raises(UsageError, match="is not a result of onetrip methods"):
        methods.load_previous(tmp_path)


def test_a_result_with_a_part_that_is_not_one(options, measuring, tmp_path):
    result = methods.run(replace(options, only=("sgd",)))
    methods.write_json(result, tmp_path)
    assert methods.load_previous(tmp_path) is not None
    for part in ("options", "versions", "machine", "methods"):
        methods.write_json(result | {part: ["model"]}, tmp_path)
        with pytest.raises(UsageError, match="is not a result of onetrip methods"):
            methods.load_previous(tmp_path)


@pytest.fixture
def as_worker(monkeypatch, tmp_path):
    """Lets a shell script stand in for the worker's interpreter."""

    def use(script):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("onetrip.methods.worker.sys.executable", str(path))

    return use


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -9 $$", "killed by signal 9"),
        ("echo something; echo the reason >&2; exit 3", "ended with status 3: the reason"),
        ("""echo '{"failed": "it said so"}' > /dev/fd/$3""", "it said so"),
    ],
    ids=["killed", "died", "answered"],
)
def test_a_worker_that_fails(options, as_worker, script, reason):
    as_worker(script)
    with pytest.raises(MethodFailed, match=reason):
        measure_isolated(options, METHODS["compile"], lambda what: None)


def test_a_worker_says_that_a_method_does_not_fit_as_a_session_does(options, break_method, monkeypatch):
    """With the name of the exception before it, it counted among onetrip's own failures."""
    break_method(monkeypatch, "sgd", MethodFailed("does not fit in memory: 7 bytes"))
    job = json.dumps({"options": vars(options), "method": "sgd", "threads": 1})
    monkeypatch.setattr("sys.stdin", io.StringIO(job))
    read_fd, write_fd = os.pipe()
    with pytest.raises(SystemExit):
        worker._serve(write_fd)
    with os.fdopen(read_fd) as answers:
        assert json.load(answers) == {"failed": "does not fit in memory: 7 bytes"}


@pytest.mark.slow
def test_a_worker_measures_in_a_process_of_its_own(options):
    told = []
    figures = measure_isolated(replace(options, model="tiny-bert"), METHODS["sgd"], told.append)
    assert figures["paired"] and figures["peak_memory"] > 0
    assert told[0] == "loss before" and told[-1] == "loss after, memory"
