import pytest
import torch
from onetrip import anatomy

PUBLISHED_MILLIONS = {
    "distilbert-base": 67.0,
    "bert-base": 109.5,
    "bert-large": 335.2,
    "roberta-base": 124.7,
    "gpt2": 124.4,
    "gpt2-medium": 354.8,
    "gpt2-large": 774.0,
    "gpt2-xl": 1557.6,
    "llama-1b": 1235.8,
    "llama-7b": 6738.4,
    "llama-8b": 8030.3,
    "mistral-7b": 7241.7,
    "mixtral-8x7b": 46702.8,
    "t5-small": 60.5,
    "vit-base": 85.8,
}


@pytest.mark.parametrize("name", anatomy.PRESETS)
def test_every_preset_builds(name):
    model = anatomy.load_model(name, weights=False)
    assert {p.device.type for p in model.parameters()} == {"meta"}  # no preset is too large to be built
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    assert (
        millions == pytest.approx(PUBLISHED_MILLIONS[name], rel=5e-3) if name in PUBLISHED_MILLIONS else millions < 30
    )


@pytest.mark.parametrize("name", [name for name in anatomy.PRESETS if name.startswith("tiny-")])
def test_batch_trains(name):
    torch.manual_seed(0)
    model = anatomy.load_model(name)
    batch = anatomy.make_batch(model, 2, 16)
    loss = model(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.equal(value, anatomy.make_batch(model, 2, 16)[key]) for key, value in batch.items())


def test_masked_model_predicts_some_positions_of_every_row():
    labels = anatomy.make_batch(anatomy.load_model("tiny-bert"), 64, 128)["labels"]
    wanted = labels != -100
    assert wanted.any(dim=1).all()
    assert 0.1 < wanted.float().mean() < 0.2


def test_images_have_the_weights_dtype():
    batch = anatomy.make_batch(anatomy.load_model("tiny-vit").to(torch.bfloat16), 2, 16)
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert batch["pixel_values"].shape == (2, 3, 224, 224)


def test_local_folder_keeps_weights_and_head(tmp_path):
    model = anatomy.load_model("tiny-gpt2")
    model.save_pretrained(tmp_path)
    loaded = anatomy.load_model(str(tmp_path))
    assert type(loaded) is type(model)
    state = loaded.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_folder_without_config(tmp_path):
    with pytest.raises(anatomy.UsageError, match=r"without a config\.json"):
        anatomy.load_model(str(tmp_path))


def test_model_without_a_head_to_train(tmp_path):
    from transformers import CLIPTextConfig

    CLIPTextConfig().save_pretrained(tmp_path)
    with pytest.raises(anatomy.UsageError, match="none of the heads"):
        anatomy.load_model(str(tmp_path))
