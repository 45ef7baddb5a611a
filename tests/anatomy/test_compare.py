import json

import pytest
from onetrip import anatomy
from onetrip.anatomy.report import bar, format_bytes, format_change, format_speedup, render
from rich.console import Console


@pytest.fixture(scope="module")
def result():
    return anatomy.compare(anatomy.Options("tiny-bert", batch_size=2, sequence_length=16, steps=1, warm_up=1))


def test_patching_changes_what_is_saved_and_nothing_else(result):
    assert result.n_patched >= 4  # two blocks in each of two layers
    assert result.eager.loss == pytest.approx(result.patched.loss, abs=1e-5)
    assert result.patched.saved_activations < result.eager.saved_activations
    assert result.patched.peak_memory <= result.eager.peak_memory
    for name in ("weights", "gradients", "optimizer_states"):
        assert getattr(result.patched, name) == getattr(result.eager, name)
    assert result.patched_adamw8bit.optimizer_states < 0.3 * result.patched.optimizer_states
    assert result.patched_adamw8bit.saved_activations == result.patched.saved_activations
    assert "fused (onetrip)" in result.patched.operators_ms
    assert "fused (onetrip)" not in result.eager.operators_ms


def test_json_holds_both_and_the_ratios(result, tmp_path):
    read = json.loads(anatomy.write_json(result, tmp_path).read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["anatomy.json"]
    assert read["options"]["model"] == "tiny-bert"
    assert read["speedup"]["step"] == read["eager"]["step_ms"] / read["patched"]["step_ms"]
    assert read["saved_activations_ratio"] < 1
    assert len(read["patch_report"]["patched"]) == result.n_patched


def test_tables_fit_eighty_columns(result):
    console = Console(width=80)
    with console.capture() as capture:
        console.print(render(result))
    text = capture.get()
    for label in ("forward", "saved activations", "peak memory", "AdamW8bit", "contractions", "fused (onetrip)"):
        assert label in text
    assert "…" not in text


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
