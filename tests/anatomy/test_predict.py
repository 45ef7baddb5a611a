"""What fake tensors predict is what a step on the CPU takes."""

import resource
from functools import partial

import pytest
import torch
from onetrip import anatomy, patched
from torch._subclasses.fake_tensor import FakeTensorMode

PROMISED = 0.05  # of peaks: kernels take room to work in, more with more threads
TOLERANCE = 1e-3  # of saved activations: equal to the byte in every case seen
EXACT = ("weights", "buffers", "gradients", "optimizer_states", "batch")
COLUMNS = ("eager", "patched", "patched_adamw8bit")


def faked(name, dtype=torch.float32):
    mode = FakeTensorMode()
    return anatomy.fake_copy(anatomy.load_model(name, weights=False), mode, dtype).train(), mode


def predicted(name, batch_size=2, sequence_length=16, optimizer="sgd", **how):
    model, mode = faked(name)
    batch = partial(anatomy.make_batch, model, batch_size, sequence_length)
    return anatomy.predict(model, batch, anatomy.OPTIMIZERS[optimizer], mode, **how)


@pytest.mark.parametrize(
    ("model", "batch_size", "sequence_length", "dtype", "optimizer"),
    [
        ("tiny-bert", 1, 64, "bfloat16", "adam8bit"),
        pytest.param("tiny-llama", 3, 24, "float32", "adamw", marks=pytest.mark.slow),
        pytest.param("tiny-gpt2", 3, 100, "float32", "sgd-momentum", marks=pytest.mark.slow),
        pytest.param("tiny-gemma", 2, 24, "float32", "adam", marks=pytest.mark.slow),
        pytest.param("tiny-t5", 2, 32, "bfloat16", "adamw", marks=pytest.mark.slow),
        pytest.param("tiny-vit", 2, 16, "float32", "sgd", marks=pytest.mark.slow),
        pytest.param("minilm", 2, 64, "float32", "adamw", marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value),
)
def test_prediction_is_what_is_measured(model, batch_size, sequence_length, dtype, optimizer):
    options = anatomy.Options(
        model, batch_size, sequence_length, dtype, optimizer, "cpu", steps=1, warm_up=0, columns=COLUMNS
    )
    result = anatomy.compare(options)
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


@pytest.mark.parametrize("name", ["tiny-bert", pytest.param("tiny-llama", marks=pytest.mark.slow)])
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
    step = predicted("llama-7b", 1, 512, "adamw", device_type="cuda", peak_only=True)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert step.weights == step.gradients == 4 * 6_738_415_616
    assert step.optimizer_states == pytest.approx(2 * step.weights, rel=1e-3)
    assert step.peak > 4 * step.weights
    assert (after - before) * 1024 < 1 << 30


def test_saved_activations_grow_with_the_batch_and_scores_are_not_kept_on_a_gpu():
    on_cpu = [predicted("tiny-gpt2", batch_size, 256).saved_activations for batch_size in (1, 2)]
    assert on_cpu[1] == pytest.approx(2 * on_cpu[0], rel=0.01)
    scores = 3 * 4 * 2 * 2 * 256**2  # float32, P, mask and dropped P: two layers, two heads
    on_gpu = predicted("tiny-gpt2", 1, 256, device_type="cuda").saved_activations
    assert on_gpu <= on_cpu[0] - 0.95 * scores


def test_patched_blocks_save_less_on_a_gpu_too():
    model, mode = faked("tiny-bert")
    predict = partial(
        anatomy.predict, model, partial(anatomy.make_batch, model, 2, 64), anatomy.OPTIMIZERS["sgd"], mode,
        device_type="cuda",
    )  # fmt: skip
    assert predict(context=partial(patched, model, verify=False)).saved_activations < predict().saved_activations


def test_fake_copies_share_what_the_model_shares():
    model, _ = faked("tiny-gpt2", torch.bfloat16)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_prediction_leaves_the_generator_alone():
    state = torch.get_rng_state()
    predicted("tiny-bert")
    assert torch.equal(torch.get_rng_state(), state)
