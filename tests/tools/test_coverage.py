"""What patch_model can read and fuse of transformers, as recorded: the survey, README, and docs/coverage.md."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from onetrip import patch_model
from torch import nn

transformers = pytest.importorskip("transformers")
attention = pytest.importorskip("tools.coverage.attention")
coverage = pytest.importorskip("tools.coverage.__main__")
from tools.coverage import tiny  # noqa: E402
from tools.coverage.check import TOO_LONG, opportunities  # noqa: E402
from tools.coverage.inputs import supplied  # noqa: E402
from tools.coverage.page import page, totals  # noqa: E402
from tools.coverage.trace import trace  # noqa: E402

ROOT = Path(__file__).parents[2]
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "transformers-5.24.0.json").read_text())
FOLDERS = ("bert", "bloom", "deberta_v2", "gptj", "xlnet")


@pytest.mark.skipif(
    transformers.__version__ != RECORDED["versions"]["transformers"], reason="recorded with another version"
)
def test_survey_of_a_few_folders():
    files = [file for file in attention.modeling_files() if file.parent.name in FOLDERS]
    found = attention.survey(files)
    assert (found["eager_functions"], found["eager_functions_read"]) == (2, 1)  # BERT's, and not GPT-J's
    assert (found["own_softmax_folders"], found["own_softmax_folders_read"]) == (3, 2)
    for kind, modules in (("eager_functions", {"modeling_gptj"}), ("own_softmax", {"modeling_xlnet"})):
        refused = found["refused"][kind]
        assert {name.partition(".")[0] for name in refused} == modules
        assert refused.items() <= RECORDED["refused"][kind].items()


def test_readme_says_what_is_recorded():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{RECORDED['eager_functions_read']} of the {RECORDED['eager_functions']} in transformers 5.24.0" in text
    assert f"in {RECORDED['own_softmax_folders_read']} of {RECORDED['own_softmax_folders']} model folders" in text


def test_the_page_is_the_record_s():
    assert (ROOT / "docs" / "coverage.md").read_text() == page(RECORDED)


def test_nothing_recorded_is_wrong():
    results = totals(RECORDED["types"])["results"]
    assert results.keys() <= {"ok", "not_run"} and results["ok"] > 200


def test_a_sweep_resumes_and_runs_again_what_is_named(tmp_path, monkeypatch):
    rows, ran = tmp_path / "rows.jsonl", []
    done = [name for name in transformers.CONFIG_MAPPING if name != "t5"]
    rows.write_text("".join(json.dumps({"type": name, "result": "not_run"}) + "\n" for name in done))
    monkeypatch.setattr(coverage, "check", lambda name, smallest: ran.append(name) or {"type": name, "result": "ok"})
    for words in ([], ["bark"]):
        assert coverage.main(["--rows", str(rows), *words]) == 0
    assert ran == ["t5", "bark"]
    assert [name for name, row in coverage.read_rows(rows).items() if row["result"] == "ok"] == ["bark", "t5"]


def test_a_type_that_takes_too_long_is_tried_again_smaller(tmp_path, monkeypatch):
    slow = {"type": "t5", "result": "not_run", "why": f"unpatched: {TOO_LONG}"}
    monkeypatch.setattr(coverage, "check", lambda name, smallest: slow if not smallest else slow | {"result": "ok"})
    coverage.sweep(tmp_path / "rows.jsonl", ["t5"])
    assert coverage.read_rows(tmp_path / "rows.jsonl")["t5"]["result"] == "ok"


class NeedsLabels(nn.Module):
    """Has defaults that it cannot run with."""

    config = transformers.BertConfig(hidden_size=8)

    def forward(self, x, inputs_embeds=None, timesteps=None, unused=None):
        if timesteps is None:
            raise ValueError("You have to specify timesteps")
        return x + inputs_embeds.sum()


def test_inputs_are_supplied_that_an_error_names():
    model, inputs = NeedsLabels(), {"x": torch.ones(2)}
    for name in ("timesteps", "inputs_embeds"):
        with pytest.raises((ValueError, AttributeError)) as caught:
            model(**inputs)
        inputs = supplied(model, inputs, caught.value)
        assert list(inputs)[-1] == name
    assert model(**inputs).shape == (2,)
    assert supplied(model, inputs, ValueError("another")) is None


def test_a_config_in_another_stays_whole():
    """Channels are capped everywhere, and the backbone keeps its feature maps, of as many layers as there are."""
    configs = dict(tiny.configs("depth_anything"))
    backbone = configs["capped"].backbone_config
    assert (backbone.num_hidden_layers, backbone.out_indices, backbone.reshape_hidden_states) == (
        4,
        [1, 2, 3, 4],
        False,
    )
    assert max(configs["capped"].neck_hidden_sizes) <= 32
    assert len(configs["by name"].backbone_config.out_indices) == 1


class Block(nn.Module):
    """A sum, a dropout and a norm, at choice."""

    def __init__(self, forward):
        super().__init__()
        self.dense, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0)
        self.embedding, self.position = nn.Embedding(5, 8), nn.Parameter(torch.ones(1, 8))
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


TRACED = {
    "a sum and its norm": (lambda m, x: m.norm(x + m.dense(x)), {"add_norm": 1}),
    "a view of the sum": (lambda m, x: m.norm((x + m.dense(x)).view(-1, 8)), {"add_norm": 1}),
    "a sum that two norms read": (lambda m, x: [m.norm(y) for y in [x + m.dense(x)] * 2], {"add_norm": 1}),
    "a dropout of p = 0": (lambda m, x: x + m.drop(m.dense(x)), {"dropout_add": 1}),
    "all three": (lambda m, x: m.norm(m.drop(m.dense(x)) + x), {"add_norm": 1, "dropout_add": 1}),
    "something between": (lambda m, x: m.norm(2 * (x + m.dense(x))) + 2 * m.drop(x), {}),
    "a position": (lambda m, x: m.norm(x + m.position.expand_as(x)), {}),
    "embeddings": (lambda m, x: m.norm(m.embedding(x.long()[:, 0]) + m.embedding(x.long()[:, 1])), {}),
    "an embedding's dropout": (lambda m, x: m.drop(m.embedding(x.long()[:, 0])) + m.dense(x), {}),
    "other shapes": (lambda m, x: m.norm(x + m.dense(x)[:1]), {}),
}


@pytest.mark.parametrize("name", TRACED)
def test_opportunities_are_counted(name):
    forward, expected = TRACED[name]
    block, x = Block(forward).train(), torch.ones(2, 8)
    assert Counter(pair.kind for pair in trace(block, lambda: block(x))) == expected


class Tail(Block):
    """As the tail of a BERT layer, and what `run` computes."""

    def forward(self, x):
        x = x + self.drop(self.dense(x))
        y = self.norm(x)
        return y, self.run(self, x)


def test_a_patched_model_shows_what_is_left():
    """The pair of the rewritten forward is gone; that of a function it calls is left, with its place and reason."""
    block, x = Tail(TRACED["all three"][0]).train(), torch.ones(2, 8)
    del block.embedding  # sums beside an embedding are not rewritten
    before = trace(block, lambda: block(x))
    assert Counter(pair.kind for pair in before) == {"add_norm": 2, "dropout_add": 2}
    report = patch_model(block)
    left = trace(block, lambda: block(x))
    found = opportunities(before, left, block, report)
    assert {kind: (each["traced"], each["fused"]) for kind, each in found.items()} == {
        "add_norm": (2, 1),
        "dropout_add": (2, 1),
    }
    assert list(found["add_norm"]["left"]) == ["Tail -> LayerNorm: sum not linked to its norm"]


def test_the_record_is_json_with_a_line_per_type():
    found = {"schema": 1, "patch_seconds": {"a": 1.0}, "types": [{"type": "a"}, {"type": "b"}]}
    assert json.loads(coverage.written(found)) == found
    assert '\n  {"type": "b"}\n' in coverage.written(found)
