"""The formula beside fake tensors, which test_predict.py holds against measurement."""

from functools import partial

import pytest
import torch
import transformers
from onetrip import anatomy
from onetrip.anatomy.models import PRESETS
from torch._subclasses.fake_tensor import FakeTensorMode

BATCH, SEQUENCE = 4, 64


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["tiny-bert", "tiny-gpt2", "tiny-llama", "tiny-llama, grouped heads", "tiny-vit"])
def test_formula_is_within_five_percent(name, attention, dtype, device_type):
    model_type, head, arguments = PRESETS[name.split(",")[0]]
    if "grouped heads" in name:
        arguments = {**arguments, "num_key_value_heads": 1, "intermediate_size": 512, "vocab_size": 512}
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    auto_class = getattr(transformers, f"AutoModelFor{head}")
    with torch.device("meta"):
        model = auto_class.from_config(config, attn_implementation=attention)
    mode = FakeTensorMode()
    model = anatomy.fake_copy(model, mode, getattr(torch, dtype)).train()
    batch = partial(anatomy.make_batch, model, BATCH, SEQUENCE)
    step = anatomy.predict(model, batch, anatomy.OPTIMIZERS["sgd"], mode, device_type=device_type)
    n_parameters = sum(p.numel() for p in model.parameters())
    by_hand = anatomy.formula(model.config, n_parameters, BATCH, SEQUENCE, dtype, "sgd", device_type)
    assert by_hand.weights == step.weights
    assert by_hand.gradients == step.gradients
    assert by_hand.saved_activations == sum(by_hand.terms.values())
    assert by_hand.saved_activations == pytest.approx(step.saved_activations, rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_parameter"),
    [("adamw", 8), ("adam", 8), ("sgd", 0), ("sgd-momentum", 4), ("adamw8bit", 2.0625), ("adam8bit", 2.0625)],
)
def test_states_of_optimizers(optimizer, bytes_a_parameter):
    config = transformers.AutoConfig.for_model("t5")
    by_hand = anatomy.formula(config, 1 << 20, 1, 1, "float32", optimizer, "cpu")
    assert by_hand.optimizer_states == bytes_a_parameter * (1 << 20)


def test_families_without_a_formula_say_so():
    by_hand = anatomy.formula(transformers.AutoConfig.for_model("t5"), 100, 1, 1, "bfloat16", "adamw", "cpu")
    assert by_hand.weights == 200
    assert by_hand.saved_activations is None
    assert by_hand.terms == {}
