import importlib
import json

import pytest
from onetrip import anatomy
from onetrip.anatomy.bytes import CLASSES
from onetrip.anatomy.html import page
from onetrip.anatomy.report import bar, format_bytes, format_change, format_speedup, render
from rich.console import Console


def of_tiny_bert(**options):
    return anatomy.Options("tiny-bert", batch_size=2, sequence_length=16, steps=1, warm_up=0, **options)


@pytest.fixture(scope="module")
def result():
    return anatomy.compare(of_tiny_bert(device="cpu"))


@pytest.fixture(scope="module")
def predicted():
    return anatomy.compare(of_tiny_bert(predict_only=True, columns=("eager", "patched")))


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


def test_peak_is_what_its_classes_sum_to(result):
    for column in result.columns.values():
        step = column.measured.bytes
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
    assert read["ratios"]["patched"]["speedup"]["step"] == steps["eager"]["step_ms"] / steps["patched"]["step_ms"]
    assert read["ratios"]["eager"]["peak"] == 1
    assert read["ratios"]["patched"]["saved_activations"] < 1
    assert {"temporaries", "caches", "buffers"} <= steps["eager"].keys()
    assert read["columns"]["eager"]["predicted"]["peak"] == pytest.approx(steps["eager"]["peak"], rel=0.05)
    assert read["formula"]["weights"] == steps["eager"]["weights"]
    assert len(read["patch_report"]["patched"]) == result.n_patched


def test_predicting_runs_nothing(predicted):
    assert all(column.measured is None and column.fit is None for column in predicted.columns.values())
    assert predicted.device.type == "cuda"  # the card that is not there
    assert predicted.n_patched >= 4
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
    import torch

    def broken(model):
        def forward(**batch):
            raise torch._dynamo.exc.BackendCompilerFailed(lambda: None, RuntimeError("no compiler found"), None)

        return forward

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(anatomy.UsageError, match=r"--columns compiled: torch\.compile failed here") as failed:
        anatomy.compare(of_tiny_bert(device="cpu", columns=("compiled",)))
    assert "\n" not in str(failed.value)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch):
    module = importlib.import_module("onetrip.anatomy.compare")
    monkeypatch.setattr(module, "free_bytes", lambda device: 10 << 20)
    monkeypatch.setattr(module, "_measure", lambda *_: pytest.fail("it was run"))
    with pytest.raises(anatomy.UsageError, match="does not fit on cpu") as refused:
        anatomy.compare(of_tiny_bert(device="cpu", columns=("eager",)))
    options = of_tiny_bert(device="cpu", columns=("eager",), predict_only=True)
    peak = anatomy.compare(options).columns["eager"].predicted.peak
    needed, missing = format_bytes(peak), format_bytes(peak - (10 << 20))
    assert f"take {needed}, 10.0 MiB are free, {missing} too little" in str(refused.value)


@pytest.fixture(scope="module")
def unpredictable(tmp_path_factory):
    """A folder with a model whose forward asks for data: fake tensors cannot follow it."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.LongformerConfig(attention_window=[8], vocab_size=100, max_position_embeddings=64, **sizes)
    folder = tmp_path_factory.mktemp("longformer")
    transformers.LongformerForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def test_what_cannot_be_predicted_is_measured(unpredictable, caplog):
    options = anatomy.Options(unpredictable, 2, 16, steps=1, warm_up=0, device="cpu", columns=("eager", "patched"))
    result = anatomy.compare(options)
    for column in result.columns.values():
        assert column.predicted is None
        assert column.unpredicted.startswith("DataDependentOutputException")
        assert column.measured.step_ms > 0
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render(result))
    assert "eager is not predicted: DataDependentOutputException" in capture.get()
    assert "eager is not predicted: DataDependentOutputException" in page(json.loads(json.dumps(result.to_dict())))
    assert caplog.records == []


@pytest.mark.parametrize("asked", [{"fits": "16GB"}, {"predict_only": True}])
def test_what_cannot_be_predicted_says_why(unpredictable, asked):
    with pytest.raises(anatomy.UsageError, match="cannot be predicted, eager: DataDependentOutput") as refused:
        anatomy.compare(anatomy.Options(unpredictable, 2, 16, **asked))
    assert "\n" not in str(refused.value)


def test_one_column_that_cannot_be_predicted_leaves_the_others_theirs(monkeypatch):
    module = importlib.import_module("onetrip.anatomy.compare")
    healthy = module.predict

    def predict(model, make_batch, make_optimizer, mode, **more):
        step = healthy(model, make_batch, make_optimizer, mode, **more)
        if more["context"] is module.nullcontext:
            raise RuntimeError("no rule\nfor it")
        return step

    monkeypatch.setattr(module, "predict", predict)
    columns = anatomy.compare(of_tiny_bert(device="cpu", columns=("eager", "patched"))).columns
    assert (columns["eager"].predicted, columns["eager"].unpredicted) == (None, "RuntimeError: no rule")
    assert columns["patched"].predicted is not None and columns["patched"].unpredicted == ""
    monkeypatch.setattr(module, "free_bytes", lambda device: 1 << 20)
    with pytest.raises(anatomy.UsageError, match="does not fit on cpu"):  # by its weights, gradients and states alone
        anatomy.compare(of_tiny_bert(device="cpu", columns=("eager",)))


def test_a_search_that_cannot_go_on_says_why(monkeypatch):
    module = importlib.import_module("onetrip.anatomy.compare")
    healthy = module.predict

    def predict(*arguments, peak_only, **more):
        if peak_only:
            raise RuntimeError("no rule")
        return healthy(*arguments, peak_only=peak_only, **more)

    monkeypatch.setattr(module, "predict", predict)
    with pytest.raises(anatomy.UsageError, match="cannot be predicted, eager: RuntimeError: no rule"):
        anatomy.compare(of_tiny_bert(columns=("eager",), fits="16GB"))


@pytest.mark.parametrize("which", ["result", "predicted"])
def test_tables_fit_eighty_columns(which, request):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render(request.getfixturevalue(which)))
    text = capture.get()
    labels = ["weights", "saved activations", "temporaries", "peak", "formula", "contractions"]
    measured = ["forward", "AdamW8bit", "fused (onetrip)", "not read, no GPU takes part", "predicted"]
    for label in labels + (measured if which == "result" else []):
        assert label in text
    assert "…" not in text


def test_tables_of_fits_fit_eighty_columns():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render(anatomy.compare(of_tiny_bert(columns=("eager",), fits="4MB"))))
    text = capture.get()
    assert "Does it fit 4MB (3.8 MiB), predicted for cuda" in text
    assert "no" in text.split() and "…" not in text


@pytest.mark.parametrize(("n", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.50 GiB")])
def test_format_bytes(n, text):
    assert format_bytes(n) == text


def test_verdicts():
    assert format_speedup(3.0, 2.0) == "1.50x"
    assert format_speedup(3.0, 0.0) == "-"
    assert format_change(4.0, 3.0) == "-25.0%"
    assert format_change(0.0, 3.0) == "-"


@pytest.mark.parametrize(("value", "drawn"), [(0, ""), (1, "█"), (8, "████████"), (0.5, "▌")])
def test_bar(value, drawn):
    assert bar(value, 8, width=8) == drawn
