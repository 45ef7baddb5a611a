import pytest
import torch
import transformers
from onetrip import anatomy
from onetrip.methods.data import make_data

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


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TINY_IMAGES = TINY | {"image_size": 32, "patch_size": 16}
CONFIGS = {
    "text beside images": lambda: transformers.Gemma3Config(
        text_config=TINY | {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 2000}, vision_config=TINY_IMAGES
    ),
    "any length": lambda: transformers.XLNetConfig(d_model=32, n_layer=1, n_head=2, d_inner=32, vocab_size=2000),
    "images of any size": lambda: transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1]),
    "images beside text": lambda: transformers.CLIPConfig(vision_config=TINY_IMAGES),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_of_other_shapes_train(name, tmp_path):
    CONFIGS[name]().save_pretrained(tmp_path)
    made = anatomy.load_model(str(tmp_path), weights=False)
    model = type(made)(made.config)
    assert torch.isfinite(model(**anatomy.make_batch(model, 2, 16)).loss)
    data = make_data(str(tmp_path), model, 16, 4, 0)
    assert (data.tokens == "images") is name.startswith("images")


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
