import importlib
import json
import re
import resource
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from onetrip import anatomy, measure, patched
from onetrip.anatomy import format_bytes
from onetrip.anatomy.bytes import CLASSES
from onetrip.anatomy.report import page, render
from onetrip.ops.attention import heads, recomputed
from torch._subclasses.fake_tensor import FakeTensorMode

COMPARE = importlib.import_module("onetrip.anatomy.compare")  # its package has a function of this name
PROMISED = 0.05  # of peaks: kernels take room to work in, more with more threads
TOLERANCE = 1e-3  # of saved activations: equal to the byte in every case seen
EXACT = ("weights", "buffers", "gradients", "optimizer_states", "batch")


def of_tiny_bert(**options):
    return anatomy.Options("tiny-bert", batch_size=2, sequence_length=16, steps=1, warm_up=0, **options)


@pytest.mark.slow
def test_linear_cross_entropy_is_a_column_of_its_own():
    options = anatomy.Options("tiny-llama", 8, 128, columns=("patched", "patched_loss"), predict_only=True)
    patched, loss = (column.predicted for column in anatomy.compare(options).columns.values())
    assert loss.traffic.outside() < patched.traffic.outside() and loss.peak < patched.peak
    assert "onetrip::linear_cross_entropy" in loss.traffic.by_operator()


@pytest.mark.slow
def test_patching_changes_what_is_saved_and_nothing_else(result):
    assert result.n_patched >= 4  # two blocks in each of two layers
    eager, patched, lean = (result.columns[name].measured for name in anatomy.Options("").columns)
    assert eager.loss == pytest.approx(patched.loss, abs=1e-5)
    assert patched.saved_activations < eager.saved_activations
    assert patched.peak_memory <= eager.peak_memory
    for name in ("weights", "gradients", "optimizer_states"):
        assert getattr(patched, name) == getattr(eager, name)
    assert lean.optimizer_states < 0.3 * patched.optimizer_states
    assert lean.saved_activations == patched.saved_activations
    assert "fused (onetrip)" in patched.operators_ms
    assert "fused (onetrip)" not in eager.operators_ms
    assert "optimizer" in lean.operators_ms


@pytest.mark.slow
def test_saved_activations_are_told_apart(result):
    eager, patched = (result.columns[name].measured.saved for name in ("eager", "patched"))
    for saved in (eager, patched):
        for place in (saved.by_module_class, saved.by_block, saved.by_operator_class):
            assert sum(place.values()) == saved.total
            assert list(place.values()) == sorted(place.values(), reverse=True)
    assert {"normalisation", "contractions"} <= eager.by_operator_class.keys()
    assert "normalisation" not in patched.by_operator_class and "fused (onetrip)" in patched.by_operator_class
    assert {"Linear", "BertSelfAttention"} <= eager.by_module_class.keys()
    assert any("*" in place for place in eager.by_block) and not any(part.isdigit() for part in eager.by_block)


@pytest.mark.slow
def test_peak_is_what_its_classes_sum_to(result):
    for column in result.columns.values():
        step = column.measured
        assert step.temporaries >= 0
        assert sum(getattr(step, name) for name in CLASSES) >= step.peak
        assert sum(column.predicted.at_peak.values()) == column.predicted.peak


def test_json_holds_the_columns_and_the_ratios(result, tmp_path):
    written = anatomy.write(result, tmp_path)
    assert [path.name for path in written] == ["anatomy.json", "anatomy.html"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["anatomy.html", "anatomy.json"]
    read = json.loads(written[0].read_text())
    assert {"date", "commit", "versions", "machine"} <= read.keys()
    assert read["options"]["model"] == "tiny-bert"
    steps = {name: column["measured"] for name, column in read["columns"].items()}
    assert (
        read["ratios"]["patched"]["speedup"]["step"]
        == steps["eager"]["ms"]["step"]["median"] / steps["patched"]["ms"]["step"]["median"]
    )
    assert read["ratios"]["eager"]["peak"] == 1
    assert read["ratios"]["patched"]["saved_activations"] < 1
    assert {"temporaries", "caches", "buffers"} <= steps["eager"].keys()
    assert read["columns"]["eager"]["predicted"]["peak"] == pytest.approx(steps["eager"]["peak"], rel=0.05)
    assert len(read["patch_report"]["patched"]) == result.n_patched


def test_predicting_runs_nothing(predicted):
    assert all(column.measured is None and column.fit is None for column in predicted.columns.values())
    assert predicted.device.type == "cuda"
    assert predicted.n_patched >= 4
    eager, patched = (column.predicted for column in predicted.columns.values())
    assert patched.saved_activations < eager.saved_activations
    read = predicted.to_dict()
    assert read["ratios"] == {}
    assert read["gpu"] == "nothing was run"


@pytest.mark.slow
def test_compiled_column():
    result = anatomy.compare(of_tiny_bert(device="cpu", columns=("eager", "compiled")))
    eager, compiled = result.columns["eager"].measured, result.columns["compiled"].measured
    assert result.columns["compiled"].predicted is None
    assert compiled.loss == pytest.approx(eager.loss, abs=1e-4)
    assert compiled.weights == eager.weights
    assert compiled.saved_activations > 0
    assert "compiled (torch)" in compiled.saved.by_operator_class
    assert "compiled (torch)" in compiled.operators_ms


def test_compiler_that_fails_is_a_line(monkeypatch):
    def backend(*_):
        raise RuntimeError("no compiler found")

    fails = torch.compile(torch.neg, backend=backend)

    def broken(model):
        return lambda **batch: fails(torch.ones(1))

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(anatomy.UsageError, match=r"--columns compiled: torch\.compile failed here") as failed:
        anatomy.compare(of_tiny_bert(device="cpu", columns=("compiled",)))
    assert "\n" not in str(failed.value)


def test_a_model_that_does_not_fit_raises_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr(COMPARE, "free_bytes", lambda device: 10 << 20)
    monkeypatch.setattr(COMPARE, "_measure", lambda *_: pytest.fail("it was run"))
    with pytest.raises(anatomy.UsageError, match="does not fit on cpu") as error:
        anatomy.compare(of_tiny_bert(device="cpu", columns=("eager",)))
    options = of_tiny_bert(device="cpu", columns=("eager",), predict_only=True)
    peak = anatomy.compare(options).columns["eager"].predicted.peak
    needed, missing = format_bytes(peak), format_bytes(peak - (10 << 20))
    said = f"take {needed}, 10.0 MiB are free, {missing} too little; --predict-only shows it without running it"
    assert said in str(error.value)


def test_the_states_of_both_optimizers_count_in_every_column(monkeypatch):
    """Those that patched columns shared were once counted in no other column, unless eager was one."""
    monkeypatch.setattr(COMPARE, "free_bytes", lambda device: 129)
    steps = {"patched_loss": (100, 40), "patched_adamw8bit": (90, 10)}
    predicted = {name: SimpleNamespace(peak=peak, optimizer_states=n) for name, (peak, n) in steps.items()}
    with pytest.raises(anatomy.UsageError, match="predicted to take 130 B, 129 B are free, 1 B too little"):
        COMPARE._check_memory(predicted, None, torch.device("cpu"))


@pytest.fixture(scope="module")
def unpredictable(tmp_path_factory):
    """A folder with a model whose forward asks for data: fake tensors cannot follow it."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LongformerConfig(attention_window=[8], vocab_size=100, max_position_embeddings=64, **sizes)
    folder = tmp_path_factory.mktemp("longformer")
    transformers.LongformerForMaskedLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_what_cannot_be_predicted_is_measured(unpredictable, caplog, printed):
    options = anatomy.Options(unpredictable, 2, 16, steps=1, warm_up=0, device="cpu", columns=("eager", "patched"))
    result = anatomy.compare(options)
    for column in result.columns.values():
        assert column.predicted is None
        assert column.unpredicted.startswith("DataDependentOutputException")
        assert column.measured.ms["step"].median > 0
    assert "eager is not predicted: DataDependentOutputException" in printed(render(result.to_dict()))
    assert "eager is not predicted: DataDependentOutputException" in page(json.loads(json.dumps(result.to_dict())))
    assert caplog.records == []


@pytest.mark.parametrize("asked", [{"fits": "16GB"}, {"predict_only": True}])
def test_what_cannot_be_predicted_says_why(unpredictable, asked):
    with pytest.raises(anatomy.UsageError, match="cannot be predicted, eager: DataDependentOutput") as error:
        anatomy.compare(anatomy.Options(unpredictable, 2, 16, **asked))
    assert "\n" not in str(error.value)


def break_predictions(monkeypatch, which):
    """Those raise for whose keyword arguments which() holds."""
    healthy = COMPARE.predict

    def predict(*arguments, **more):
        step = healthy(*arguments, **more)
        if which(more):
            raise RuntimeError("no rule\nfor it")
        return step

    monkeypatch.setattr(COMPARE, "predict", predict)


@pytest.mark.slow
def test_one_column_that_cannot_be_predicted_leaves_the_others_theirs(monkeypatch):
    break_predictions(monkeypatch, lambda more: more["context"] is nullcontext)
    columns = anatomy.compare(of_tiny_bert(device="cpu", columns=("eager", "patched"))).columns
    assert (columns["eager"].predicted, columns["eager"].unpredicted) == (None, "RuntimeError: no rule")
    assert columns["patched"].predicted is not None and columns["patched"].unpredicted == ""
    monkeypatch.setattr(COMPARE, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(anatomy.UsageError, match="does not fit on cpu"):  # by its weights, gradients and states alone
        anatomy.compare(of_tiny_bert(device="cpu", columns=("eager",)))


def test_a_search_that_cannot_go_on_says_why(monkeypatch):
    break_predictions(monkeypatch, lambda more: more["peak_only"])
    with pytest.raises(anatomy.UsageError, match="cannot be predicted, eager: RuntimeError: no rule"):
        anatomy.compare(of_tiny_bert(columns=("eager",), fits="16GB"))


@pytest.mark.parametrize("which", ["result", "predicted"])
def test_tables_hold_every_figure(which, request, printed):
    text = printed(render(request.getfixturevalue(which).to_dict()))
    labels = ["weights", "saved activations", "temporaries", "peak", "contractions", "predicted", "outside products"]
    measured = ["forward", "AdamW8bit", "fused (onetrip)", "not read: no GPU takes part", "measured", "p20", "p80"]
    for label in labels + (measured if which == "result" else []):
        assert label in text


@pytest.mark.parametrize("width", [48, 160])
@pytest.mark.parametrize("which", ["result", "predicted", "fitted"])
def test_tables_obey_columns(which, width, request, printed):
    """Once columns that could not wrap were cut off on narrow consoles."""
    printed(render(request.getfixturevalue(which).to_dict()), width)


def test_nothing_fits_where_the_weights_do_not(fitted, printed):
    fit = fitted.columns["eager"].fit
    assert (fit.fits, fit.largest_batch, fit.peak_at_largest) == (False, 0, None)
    text = printed(render(fitted.to_dict()))
    assert "Does it fit 4MB (3.8 MiB), predicted for cuda" in text
    assert "no" in text.split()


def with_times(result, slowdown=None, **ms):
    """The result with these milliseconds of the eager step."""
    measured = replace(result.columns["eager"].measured, cpu_slowdown=slowdown)
    measured = replace(measured, ms=measured.ms | {"step": measure.Spread(**ms)} if ms else measured.ms)
    return replace(result, columns={"eager": replace(result.columns["eager"], measured=measured)})


def test_percentiles_stand_beside_the_median(result, printed):
    changed = with_times(result, median=20.0, p20=18.25, p80=31.5)
    (line,) = (line for line in printed(render(changed.to_dict())).splitlines() if line.split()[:1] == ["step"])
    assert re.findall(r"[\d.]+ ms", line) == ["20.0 ms", "18.2 ms", "31.5 ms"]
    assert changed.to_dict()["columns"]["eager"]["measured"]["ms"]["step"] == {
        "median": 20.0,
        "p20": 18.25,
        "p80": 31.5,
    }


@pytest.mark.parametrize(("slowdown", "is_said"), [(1.5, True), (1.05, False), (None, False)])
def test_load_of_other_processes_is_said(result, slowdown, is_said, printed):
    changed = with_times(result, slowdown)
    text, on_page = printed(render(changed.to_dict())), page(json.loads(json.dumps(changed.to_dict())))
    words = "Other processes slowed the timed steps"
    for shown in (" ".join(text.split()), on_page):
        assert (words in shown) == (f"{words} 1.5x" in shown) == is_said


def test_load_is_measured_around_the_timed_steps(result):
    slowdowns = {column.measured.cpu_slowdown for column in result.columns.values()}
    assert len(slowdowns) == 1 and all(value is None or value >= 1.0 for value in slowdowns)


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.50 GiB")])
def test_format_bytes(n, text):
    assert format_bytes(n) == text


def assert_predicted(result):
    """What fake tensors predict is what a step on the CPU takes."""
    for name, column in result.columns.items():
        said, was = column.predicted, column.measured
        assert was.saved_activations > 0 and was.gradients > 0
        for part in EXACT:
            assert getattr(said, part) == getattr(was, part), (name, part)
        assert said.saved_activations == pytest.approx(was.saved_activations, rel=TOLERANCE), name
        assert said.peak == pytest.approx(was.peak, rel=PROMISED), name
        for place in ("by_operator_class", "by_module_class", "by_block"):
            found = getattr(was.saved, place)
            assert getattr(said.saved, place).keys() == found.keys(), (name, place)
            assert sum(found.values()) == was.saved_activations


def faked(name, dtype=torch.float32):
    mode = FakeTensorMode()
    return anatomy.fake_copy(anatomy.load_model(name, weights=False), mode, dtype).train(), mode


def prediction(name, batch_size=2, sequence_length=16, optimizer="sgd", **how):
    model, mode = faked(name)
    batch = partial(anatomy.make_batch, model, batch_size, sequence_length)
    return anatomy.predict(model, batch, anatomy.OPTIMIZERS[optimizer], mode, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch_size", "sequence_length", "dtype", "optimizer", "autocast"),
    [
        ("tiny-bert", 1, 64, "bfloat16", "adam8bit", None),
        ("tiny-bert", 2, 64, "float32", "sgd", "bfloat16"),
        ("tiny-llama", 2, 48, "float32", "adamw", "float16"),
        ("tiny-gpt2", 3, 100, "float32", "sgd-momentum", None),
        ("tiny-gemma", 2, 24, "float32", "adam", None),
        ("tiny-t5", 2, 32, "bfloat16", "adamw", None),
        ("tiny-vit", 2, 16, "float32", "sgd", None),
    ],
    ids=lambda value: str(value),
)
def test_prediction_is_what_is_measured(model, batch_size, sequence_length, dtype, optimizer, autocast):
    sizes = (model, batch_size, sequence_length, dtype, optimizer, "cpu")
    assert_predicted(anatomy.compare(anatomy.Options(*sizes, steps=1, warm_up=0, autocast=autocast)))


def test_prediction_is_what_is_measured_of_tiny_bert(result):
    assert_predicted(result)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-llama"])
def test_fused_attention_is_predicted(name):
    fake, mode = faked(name)
    model = anatomy.load_model(name)
    for each in (fake, model):
        each.set_attn_implementation("eager")
    batch = anatomy.make_batch(model, 2, 48)
    sgd = anatomy.OPTIMIZERS["sgd"]
    with patched(model) as report:
        assert any("softmax" in site.pattern for site in report.patched)
        was = anatomy.measure_step(model, batch, sgd(model.parameters()), steps=1, warm_up=0)
    make = partial(anatomy.make_batch, fake, 2, 48)
    context = partial(patched, fake, verify=False)
    said = anatomy.predict(fake, make, sgd, mode, context=context)
    assert said.saved_activations == pytest.approx(was.saved_activations, rel=TOLERANCE)
    assert said.peak == pytest.approx(was.peak, rel=PROMISED)
    assert said.saved_activations < anatomy.predict(fake, make, sgd, mode).saved_activations


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_cut_of_attention_stands_for_those_alike(monkeypatch, dtype):
    options = anatomy.Options(
        "tiny-bert", 37, 512, dtype, columns=("patched",), predict_only=True, device="cpu", steps=1, warm_up=0
    )

    def predicted():
        return anatomy.compare(options).columns["patched"].predicted

    n_cuts = []

    def every_cut(cuts, key):
        n_cuts.append(len(cuts))
        return cuts

    said = predicted()
    for module in (heads, recomputed):
        monkeypatch.setattr(module, "each_of", every_cut)
    of_all = predicted()
    assert min(n_cuts) > 4
    assert said.traffic.to_dict() == of_all.traffic.to_dict() and said.peak == of_all.peak


def test_frozen_parameters_have_no_gradients_and_states():
    """As Marian's positions, and all but the adapters of PEFT."""
    (fake, mode), model = faked("tiny-gpt2"), anatomy.load_model("tiny-gpt2")
    for each in (fake, model):
        each.requires_grad_(False)
        each.transformer.h[1].mlp.requires_grad_(True)
    adam = anatomy.OPTIMIZERS["adamw"]
    was = anatomy.measure_step(
        model, anatomy.make_batch(model, 2, 48), adam(model.transformer.h[1].mlp.parameters()), steps=1, warm_up=0
    )
    said = anatomy.predict(fake, partial(anatomy.make_batch, fake, 2, 48), adam, mode)
    assert 0 < said.gradients == was.gradients < said.weights
    assert said.optimizer_states == was.optimizer_states
    assert said.saved_activations == pytest.approx(was.saved_activations, rel=TOLERANCE)
    assert said.peak == pytest.approx(was.peak, rel=PROMISED)


@pytest.mark.slow
def test_a_7b_model_takes_no_gigabyte_to_examine():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = prediction("llama-7b", 1, 512, "adamw", device_type="cuda", peak_only=True)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert step.weights == step.gradients == 4 * 6_738_415_616
    assert step.optimizer_states == pytest.approx(2 * step.weights, rel=1e-3)
    assert step.peak > 4 * step.weights
    assert (after - before) * 1024 < 1 << 30


def test_saved_activations_grow_with_the_batch_and_scores_are_not_kept_on_a_gpu():
    on_cpu = [prediction("tiny-gpt2", batch_size, 256).saved_activations for batch_size in (1, 2)]
    assert on_cpu[1] == pytest.approx(2 * on_cpu[0], rel=0.01)
    scores = 3 * 4 * 2 * 2 * 256**2  # float32, P, mask and dropped P: two layers, two heads
    on_gpu = prediction("tiny-gpt2", 1, 256, device_type="cuda").saved_activations
    assert on_gpu <= on_cpu[0] - 0.95 * scores


def test_fake_copies_share_what_the_model_shares():
    model, _ = faked("tiny-gpt2", torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_prediction_leaves_the_generator_alone():
    state = torch.get_rng_state()
    prediction("tiny-bert")
    assert torch.equal(torch.get_rng_state(), state)
