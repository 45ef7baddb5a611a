import sys

import pytest
import torch
import transformers
from onetrip import anatomy
from onetrip.methods import Options
from onetrip.methods.data import make_data
from onetrip.methods.session import Session

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


BERT = TINY | {"vocab_size": 2000}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 2000}
CLASSIFIERS = {
    "classes": ("BertForSequenceClassification", BERT | {"num_labels": 3}),
    "regression": ("BertForSequenceClassification", BERT | {"num_labels": 1}),
    "several classes a row": (
        "BertForSequenceClassification", BERT | {"num_labels": 4, "problem_type": "multi_label_classification"}
    ),
    "the last token is read": (
        "GPT2ForSequenceClassification", {"n_embd": 32, "n_layer": 1, "n_head": 2, "pad_token_id": 0}
    ),
    "the end is read": ("T5ForSequenceClassification", T5 | {"decoder_start_token_id": 0, "num_labels": 3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_saved_classifier_is_trained_as_one(name, tmp_path):
    saved_as, arguments = CLASSIFIERS[name]
    model = getattr(transformers, saved_as)
    model = model(model.config_class(**arguments))
    model.save_pretrained(tmp_path)
    loaded = anatomy.load_model(str(tmp_path)).to(torch.bfloat16)
    assert type(loaded) is type(model)
    loss = loaded(**anatomy.make_batch(loaded, 2, 16)).loss
    loss.backward()
    assert loss > 0.0
    with pytest.raises(anatomy.UsageError, match=f"no text with labels for {saved_as}"):
        Session(Options(str(tmp_path)))


def test_a_decoder_without_a_padding_token_classifies_no_batches(tmp_path):
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=2000, bos_token_id=0, eos_token_id=0)
    transformers.GPT2ForSequenceClassification(config).save_pretrained(tmp_path)
    loaded = anatomy.load_model(str(tmp_path))
    assert anatomy.make_batch(loaded, 1, 16)["input_ids"].shape == (1, 16)
    with pytest.raises(anatomy.UsageError, match=r"GPT2ForSequenceClassification .* pad_token_id"):
        anatomy.make_batch(loaded, 2, 16)


@pytest.mark.parametrize("architectures", [None, ["BertModel"]])
def test_a_model_saved_without_a_head_is_given_one(architectures, tmp_path):
    transformers.BertConfig(**BERT, architectures=architectures).save_pretrained(tmp_path)
    assert type(anatomy.load_model(str(tmp_path), weights=False)).__name__ == "BertForMaskedLM"


def test_another_head_than_the_saved_one_is_not_taken_silently(tmp_path):
    transformers.BertConfig(**BERT, architectures=["BertForQuestionAnswering"]).save_pretrained(tmp_path)
    with pytest.raises(anatomy.UsageError, match=r"saved as BertForQuestionAnswering.*: BertForMaskedLM, Bert"):
        anatomy.load_model(str(tmp_path))


@pytest.mark.parametrize("name", ["transformers", "tokenizers"])
def test_what_cannot_be_imported_is_named(name, monkeypatch):
    class Finder:
        @staticmethod
        def find_spec(wanted, *_):
            if wanted == "transformers":
                raise ImportError(f"no {name} here\nand more", name=name)

    monkeypatch.delitem(sys.modules, "transformers")
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    said = "needs transformers: pip" if name == "transformers" else "cannot be imported: no tokenizers here$"
    with pytest.raises(anatomy.UsageError, match=said):
        anatomy.load_model("tiny-bert")


def test_devices_are_named_as_torch_names_them():
    for device in ("cpu", "cpu:0", torch.device("cpu")):
        assert anatomy.Options("bert-base", device=device).torch_device().type == "cpu"
    assert anatomy.Options("bert-base", device="cuda:12", predict_only=True).torch_device().type == "cuda"
    for device in ("tpu", "cpu:1", "cuda:", "cuda:00", "cuda:-1"):
        with pytest.raises(anatomy.UsageError, match="--device must be auto, cpu, cuda or cuda:N, got"):
            anatomy.Options("bert-base", device=device).torch_device()
