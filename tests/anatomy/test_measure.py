import pytest
import torch
from onetrip import anatomy, ops
from torch import nn


@pytest.fixture
def w():
    return nn.Parameter(torch.rand(100))


def test_timed_step_trains_and_clears_gradients(w):
    before = w.detach().clone()
    optimizer = torch.optim.SGD([w], lr=1.0)
    step = anatomy.timed_step(lambda: (2 * w).sum(), optimizer, torch.device("cpu"))
    assert torch.equal(w.detach(), before - 2)
    assert w.grad is None
    assert step.loss == pytest.approx(float(2 * before.sum()))
    assert min(step.forward_ms, step.backward_ms, step.optimizer_ms) > 0
    assert step.step_ms == step.forward_ms + step.backward_ms + step.optimizer_ms


def tiny_bert():
    model = anatomy.load_model("tiny-bert").eval()
    return model, anatomy.make_batch(model, 2, 16)


def test_measure_step_of_a_model():
    model, batch = tiny_bert()
    n_bytes = 4 * sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator_state = torch.get_rng_state()
    calls = []
    step = anatomy.measure_step(model, batch, optimizer, steps=2, warm_up=1, progress=lambda *call: calls.append(call))

    assert step.weights == step.gradients == n_bytes
    assert step.optimizer_states == pytest.approx(2 * n_bytes, rel=1e-3)
    assert step.peak_memory >= step.gradients + step.saved_activations
    assert step.saved_activations > 0
    assert step.ms.keys() == {"forward", "backward", "optimizer", "step"}
    assert all(0 < ms.p20 <= ms.median <= ms.p80 for ms in step.ms.values())
    assert step.operators_ms["contractions"] > 0
    assert step.loss == pytest.approx(model(**batch).loss.item(), rel=1e-6)

    assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert calls[0][0] == 0 and calls[-1][:2] == (calls[0][1], calls[0][1])


def test_steps_must_be_positive():
    model, batch = tiny_bert()
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        anatomy.measure_step(model, batch, torch.optim.SGD(model.parameters()), steps=0)


def test_there_must_be_a_variant():
    with pytest.raises(ValueError, match="variants must not be empty"):
        anatomy.measure_variants(nn.Linear(2, 2), lambda: torch.zeros(()), {})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten::addmm", "contractions"),
        ("aten::mul", "element-wise, sums"),
        ("aten::scaled_dot_product_attention", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::native_layer_norm_backward", "normalisation"),
        ("aten::bernoulli_", "dropout"),
        ("aten::_log_softmax", "softmax, loss"),
        ("aten::copy_", "copies, fills"),
        ("aten::embedding_dense_backward", "embedding"),
        ("AddmmBackward0", "autograd's own"),
        ("autograd::engine::evaluate_function: MulBackward0", "autograd's own"),
        ("_RowNorm", "fused (onetrip)"),
        ("_RowNormBackward", "fused (onetrip)"),
        ("onetrip::row_norm", "fused (onetrip)"),
    ],
)
def test_operator_class(name, expected):
    assert anatomy.operator_class(name) == expected


def test_what_an_optimizers_step_does_is_one_class():
    w = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64)
    optimizer = torch.optim.AdamW([w])

    def step():
        ops.layer_norm(x @ w).square().sum().backward()
        optimizer.step()

    cpu = torch.device("cpu")
    _, with_step = anatomy.profile_run(step, cpu)
    assert {"contractions", "fused (onetrip)", "optimizer"} <= with_step.keys()
    w.grad = torch.ones_like(w)
    _, optimizer_alone = anatomy.profile_run(optimizer.step, cpu)
    assert optimizer_alone.keys() == {"optimizer"}
