"""The recorded traffic of patched models: a change that moves more bytes shows here."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
traffic = pytest.importorskip("tools.traffic")

RECORD = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "traffic.json").read_text())


SLOW = [
    pytest.param(shape, marks=pytest.mark.slow) for shape in ("Llama with LoRA", "Qwen3-MoE", "GPT-2 under autocast")
]


@pytest.mark.parametrize("shape", ["BERT", "Llama", *SLOW])
def test_patched_models_move_no_more_bytes_than_recorded(shape):
    recorded = RECORD["traffic"]["cpu"][shape]
    base = traffic.traffic_of(shape, "cpu", unpatched=True)
    patched = traffic.traffic_of(shape, "cpu")
    assert base.outside() == pytest.approx(recorded["unpatched"]["outside"], rel=0.1)  # releases of transformers differ
    assert patched.outside() / base.outside() <= recorded["ratios"]["default"] + 0.005


def test_the_record_names_its_machine_versions_and_commit():
    assert {"date", "commit", "versions", "machine", "shapes", "options"} <= RECORD.keys()
    for shapes in RECORD["traffic"].values():
        assert shapes.keys() == {*traffic.ALL_SHAPES}
        for found in shapes.values():
            for way in traffic.WAYS:
                ratio = found[way]["outside"] / found["unpatched"]["outside"]
                assert found["ratios"][way] == pytest.approx(ratio, abs=1e-4)
