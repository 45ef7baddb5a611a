import gc
from dataclasses import replace
from itertools import islice

import pytest
import torch
from onetrip import anatomy
from onetrip.anatomy.models import IGNORED_LABEL, first_word_id
from onetrip.methods import Recipe
from onetrip.methods.data import hashed_ids, make_data, prose, split_rows


def data_of(preset, **more):
    torch.manual_seed(0)
    return make_data(preset, anatomy.load_model(preset), **{"sequence_length": 16, "n_held_out": 4, "seed": 0} | more)


def first_samples(data, recipe, n):
    batches = list(islice(data.batches(recipe), n // recipe.batch_size))
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_words_are_hashed_into_the_vocabulary():
    ids = hashed_ids("\n".join(prose()), 300)
    assert len(ids) > 10_000
    assert ids.min() >= first_word_id(300) == 150 and ids.max() < 300
    the, cat = hashed_ids("The cat", 1 << 20).tolist()
    assert hashed_ids("cat the", 1 << 20).tolist() == [cat, the] and the != cat
    assert (the, cat) == (273238, 326096), "not the same ids as on other machines"


def test_prose_is_running_text():
    paragraphs = prose()
    assert sum(map(len, paragraphs)) > 100_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not any("****" in p or ">>>" in p or "::=" in p for p in paragraphs)


@pytest.mark.parametrize("preset", ["small", "tiny-gpt2", "tiny-t5", "tiny-vit"])
def test_the_samples_do_not_depend_on_how_they_are_batched(preset):
    data = data_of(preset)
    assert_same(first_samples(data, Recipe(8), 16), first_samples(data, Recipe(2), 16))


def test_workers_load_the_same_samples():
    data = data_of("small")
    recipe = replace(Recipe(4), workers=2)
    assert_same(first_samples(data, Recipe(4), 16), first_samples(data, recipe, 16))


@pytest.mark.parametrize("source", ["datasets", "datasets-stream"])
@pytest.mark.parametrize("preset", ["small", "tiny-gpt2"])
def test_the_datasets_library_gives_the_same_samples(preset, source, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    data = data_of(preset, sequence_length=2000, n_held_out=2)
    n = 2 * len(data.training.rows)  # past the end of the file
    n -= n % 4
    assert_same(first_samples(data, Recipe(4), n), first_samples(data, Recipe(4, source=source), n))
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_another_seed_gives_other_samples():
    a, b = (first_samples(data_of("small", seed=seed), Recipe(8), 8) for seed in (0, 1))
    assert not torch.equal(a["input_ids"], b["input_ids"])


def test_masked_words():
    data = data_of("small", sequence_length=64)
    batch = first_samples(data, Recipe(64), 64)
    labelled = batch["labels"] != IGNORED_LABEL
    assert labelled.any(dim=1).all()
    assert 0.12 < labelled.float().mean() < 0.18
    seen, hidden = batch["input_ids"][labelled], batch["labels"][labelled]
    mask_id = first_word_id(300) - 1
    assert 0.74 < (seen == mask_id).float().mean() < 0.86
    assert 0.05 < (seen == hidden).float().mean() < 0.16
    assert (batch["input_ids"][~labelled] != mask_id).all()


def test_the_same_row_is_masked_anew_when_it_comes_again():
    data = data_of("small")
    n = len(data.training.rows)
    once, again = (data.collate([data.training[index]]) for index in (0, n))
    assert torch.equal(data.training[0]["input_ids"], data.training[n]["input_ids"])
    assert not torch.equal(once["labels"], again["labels"])


@pytest.mark.parametrize("preset", ["small", "tiny-gpt2"])
def test_held_out_rows_are_not_trained_on(preset):
    data = data_of(preset)
    trained = {tuple(row.tolist()) for row in data.training.rows}
    assert len(data.held_out.rows) == 4
    assert not any(tuple(row.tolist()) in trained for row in data.held_out.rows)
    assert sum(len(batch["input_ids"]) for batch in data.held_out_batches(3)) == 4


@pytest.mark.parametrize(("length", "n_held_out"), [(128, 32), (512, 31), (4000, 3), (20_000, 1), (100_000, 1)])
def test_no_passage_of_what_is_held_out_is_trained_on(length, n_held_out):
    words = torch.arange(31_761)  # as many as prose() has, all of them different
    training, held_out = split_rows(words, length, 32, seed=0)
    assert training.shape[1] == held_out.shape[1] == length
    assert len(training) >= len(held_out) == n_held_out
    assert not set(training.flatten().tolist()) & set(held_out.flatten().tolist())


@pytest.mark.parametrize("preset", ["small", "tiny-gpt2", "tiny-t5", "tiny-vit", "tiny-llama", "tiny-mixtral"])
def test_models_take_the_batches(preset):
    torch.manual_seed(0)
    model = anatomy.load_model(preset)
    data = make_data(preset, model, 16, 4, 0)
    with torch.no_grad():
        assert torch.isfinite(model(**first_samples(data, Recipe(2), 2)).loss)


def test_images_show_their_label():
    data = data_of("tiny-vit")
    batch = first_samples(data, Recipe(16), 16)
    colours = batch["pixel_values"].mean(dim=(2, 3))
    same = [colours[batch["labels"] == label] for label in (0, 1)]
    between = (same[0].mean(0) - same[1].mean(0)).abs().max()
    assert between > 4 * max(each.std(0).max() for each in same)
