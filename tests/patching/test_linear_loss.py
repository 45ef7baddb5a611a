"""linear_cross_entropy: a model's loss without its logits, and the logits where anything else asks for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.linear_loss import DeferredLogits
from outcomes import assert_agree, assert_equal, loss_outcome, patch_and_compare
from patching_cases import HIDDEN, VOCABULARY, build, compiles_transformers
from torch import Tensor, nn
from torch.nn import functional

transformers = pytest.importorskip("transformers")
BOTH = ("cross_entropy", "linear_cross_entropy")
"""The patterns of the loss: with the logits, and without."""
MODELS: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("llama", "gpt2", "bert", "roberta", "t5", "bart")},
    "distilbert": {},  # Its own forward has an activation, too.
    # Logits that are changed before the loss: capped by a tanh, multiplied; bart's are added to.
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
}


def made(name: str) -> tuple[Any, dict[str, Tensor]]:
    model, generator = build(name, **MODELS[name]), torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(3, VOCABULARY, (2, 9), generator=generator) for _ in range(2))
    labels[0, 3:] = -100
    if name == "bart":
        model.final_logits_bias.normal_(generator=generator)
    return model.train(), {"input_ids": ids, "labels": labels}


@pytest.fixture
def cross_entropies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the first argument of calls of ops.cross_entropy and ops.linear_cross_entropy."""
    from onetrip import ops

    seen: list[tuple[int, ...]] = []

    def watch(name: str) -> None:
        original: Callable[..., Tensor] = getattr(ops, name)

        def watched(rows: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(tuple(rows.shape))
            return original(rows, *args, **kwargs)

        monkeypatch.setattr(ops, name, watched)

    for name in BOTH:
        watch(name)
    return seen


@pytest.mark.parametrize("pattern", BOTH)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_the_unpatched_model_s(name: str, pattern: str, cross_entropies: list[tuple[int, ...]]) -> None:
    model, inputs = made(name)
    expected = loss_outcome(model, inputs)
    report = patch_model(model, patterns=[pattern])
    assert {site.module_class for site in report.patched} == {type(model).__name__, "Linear"}
    cross_entropies.clear()  # verification's
    assert_agree(loss_outcome(model, inputs), expected)
    assert cross_entropies == [(18, HIDDEN if pattern == "linear_cross_entropy" else VOCABULARY)]
    unpatch_model(model)
    assert_equal(loss_outcome(model, inputs), expected)


def test_it_is_patched_by_name_only() -> None:
    model, inputs = made("llama")
    assert all(site.pattern != "linear_cross_entropy" for site in patch_model(model).patched)
    assert isinstance(model(**inputs).logits, Tensor)


@pytest.mark.parametrize("pattern", BOTH)
def test_the_loss_of_an_excluded_output_layer_is_left_with_a_reason(pattern: str) -> None:
    """Its site fell back in every step."""
    model, inputs = made("distilbert")
    report = patch_model(model, patterns=[pattern, "bias_activation"], exclude=["vocab_projector"])
    assert {site.pattern for site in report.patched} == {"bias_activation"}
    (loss,) = (site for site in report.skipped if site.module_class == type(model).__name__)
    assert (loss.reason, loss.detail) == ("excluded", "the loss, whose output layer is excluded")
    model(**inputs)
    assert not any(fallen_back for _, fallen_back in report.calls().values())


def test_the_logits_are_computed_when_they_are_used() -> None:
    model, inputs = made("llama")
    expected = model(**inputs).logits
    patch_model(model, patterns=["linear_cross_entropy"])
    logits = model(**inputs).logits
    assert isinstance(logits, DeferredLogits) and logits.shape == expected.shape and logits.size(-1) == VOCABULARY
    assert "computed when used" in repr(logits)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    for use in (
        lambda y: y.detach().clone(),
        lambda y: y[..., :3],
        lambda y: y[0, 2, 5],
        lambda y: y[:, None],
        lambda y: y[:, :-1].tensor() if isinstance(y, DeferredLogits) else y[:, :-1],
        lambda y: torch.softmax(y, -1),
        lambda y: 2.0 * y + y,
        lambda y: (y / 3.0).tanh() * 3.0 - 1.0,
        lambda y: y * -2.0,
        lambda y: abs(y) // 0.5 + y % 2.0,
        lambda y: y.reshape(shape=(-1,)),
        lambda y: y.float(memory_format=torch.contiguous_format),
        lambda y: y.view(torch.int32),
        lambda y: y + torch.arange(9.0)[:, None],
        lambda y: functional.cross_entropy(torch.tanh(torch.tanh(y)).view(18, -1), torch.zeros(18).long()),
        lambda y: functional.cross_entropy((y * 2.0 + torch.ones(VOCABULARY)).view(18, -1), torch.zeros(18).long()),
        lambda y: y.view(-1, 1, VOCABULARY),
        lambda y: y.transpose(0, 1),
        lambda y: functional.cross_entropy(y, torch.zeros(2, VOCABULARY).long()),  # classes in the second dimension
        lambda y: functional.cross_entropy(y.view(-1, VOCABULARY), torch.zeros(18, VOCABULARY)),
        lambda y: functional.cross_entropy(y.view(18, -1), torch.zeros(18).long(), weight=torch.ones(VOCABULARY)),
    ):
        theirs, ours = use(expected), use(model(**inputs).logits)
        ours = ours.tensor() if isinstance(ours, DeferredLogits) else ours
        torch.testing.assert_close(ours, theirs)


def test_logits_after_the_optimizer_step_raise() -> None:
    model, inputs = made("llama")
    patch_model(model, patterns=["linear_cross_entropy"])
    output = model(**inputs)
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    with pytest.raises(RuntimeError, match="before the optimizer's step"):
        output.logits.argmax(-1)


@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_logits_first_read_without_grad_keep_their_graph(without_grad: Any) -> None:
    """An accuracy, then a loss of the logits beside the model's own."""
    model, inputs = made("llama")

    def gradient() -> Tensor:
        model.zero_grad()
        output = model(**inputs)
        with without_grad():
            output.logits.float().argmax(-1)
        (output.loss + output.logits.square().mean()).backward()
        return model.lm_head.weight.grad.clone()

    expected = gradient()
    patch_model(model, patterns=["linear_cross_entropy"])
    torch.testing.assert_close(gradient(), expected)


@pytest.mark.parametrize("pattern", BOTH)
def test_a_model_without_an_output_layer_is_left_alone(pattern: str) -> None:
    class Headless(nn.Linear):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

        def forward(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(input)

    assert patch_model(nn.Sequential(Headless(4, 4)), patterns=[pattern]).patched == ()


@pytest.mark.parametrize("pattern", BOTH)
@pytest.mark.parametrize("mode", ["evaluation", "no labels", "no_grad"])
def test_other_calls_return_a_tensor(mode: str, pattern: str) -> None:
    model, inputs = made("llama")
    report = patch_model(model.train(mode != "evaluation"), patterns=[pattern])
    given = {k: v for k, v in inputs.items() if k != "labels" or mode != "no labels"}
    with torch.set_grad_enabled(mode != "no_grad"):
        assert type(model(**given).logits) is Tensor
    assert report.calls()[""] == (0, 0)


@pytest.mark.parametrize("pattern", BOTH)
def test_positional_labels_and_the_signature(pattern: str) -> None:
    import inspect

    model, inputs = made("bert")
    before = inspect.signature(model.forward)
    names = list(before.parameters)
    patch_model(model, patterns=[pattern])
    assert inspect.signature(model.forward) == before
    given = [inputs.get(name) for name in names[: names.index("labels") + 1]]
    assert isinstance(model(*given).logits, DeferredLogits if pattern == "linear_cross_entropy" else Tensor)


@pytest.mark.parametrize("pattern", BOTH)
def test_num_items_in_batch_divides_the_sum(pattern: str) -> None:
    model, inputs = made("llama")
    inputs["num_items_in_batch"] = torch.tensor(7)
    patch_and_compare(model, lambda: loss_outcome(model, inputs), patterns=[pattern])


@pytest.mark.parametrize("name", ["llama", "bart", "bert", "t5"])
@pytest.mark.parametrize("pattern", BOTH)
def test_autocast(pattern: str, name: str) -> None:
    """Also where a float32 constant is added to the logits, and of logits that are read later."""
    model, inputs = made(name)
    if name == "bart":
        model.final_logits_bias.copy_(torch.arange(model.final_logits_bias.numel()) % 7)  # the same in bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**inputs)
        report = patch_model(model, patterns=[pattern])
        output = model(**inputs)
    assert all(counts == (1, 0) for counts in report.calls().values())
    assert output.loss.dtype == expected.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-2, atol=1e-2)
    logits = output.logits.detach()
    assert logits.dtype == expected.logits.dtype
    torch.testing.assert_close(logits, expected.logits.detach(), rtol=2e-2, atol=2e-2)


def test_a_constant_without_versions_is_added_in_float32() -> None:
    model, inputs = made("bart")
    with torch.inference_mode():
        model.final_logits_bias = torch.zeros(1, model.config.vocab_size)
    patch_model(model, patterns=["linear_cross_entropy"])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(**inputs).loss.isfinite()


def test_a_constant_that_autocast_would_round_is_added_in_float32() -> None:
    model, inputs = made("bart")
    report = patch_model(model, patterns=["linear_cross_entropy"])
    fused = []
    for scale in (1.0, 100.0, 1.0):
        model.final_logits_bias.copy_(scale * torch.linspace(0.0, 1.0, model.final_logits_bias.numel()))
        model.final_logits_bias.mul_(0.0 if scale == 1.0 else 1.0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**inputs).loss
        fused.append(report.calls()[""])
        expected = functional.cross_entropy(model(**inputs).logits.tensor().flatten(0, 1), inputs["labels"].flatten())
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-3)
    assert fused == [(1, 0), (2, 1), (4, 1)]  # the calls for the expected losses are fused


@pytest.mark.parametrize("pattern", BOTH)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(use_reentrant: bool, pattern: str) -> None:
    model, inputs = made("llama")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    patch_and_compare(model, lambda: loss_outcome(model, inputs), patterns=[pattern])


@compiles_transformers
@pytest.mark.parametrize("pattern", BOTH)
def test_torch_compile_runs_the_original(pattern: str) -> None:
    model, inputs = made("llama")
    expected = model(**inputs).loss
    patch_model(model, patterns=[pattern])
    torch.testing.assert_close(torch.compile(model, backend="eager")(**inputs).loss, expected)


@pytest.mark.parametrize("pattern", BOTH)
def test_a_hooked_output_layer_is_called(pattern: str, cross_entropies: list[tuple[int, ...]]) -> None:
    model, inputs = made("llama")
    expected = loss_outcome(model, inputs)
    patch_model(model, patterns=[pattern])
    cross_entropies.clear()
    model.lm_head.register_forward_hook(lambda module, args, y: 2.0 * y)
    doubled = unpatch_model(copy.deepcopy(model))
    assert_agree(loss_outcome(model, inputs), loss_outcome(doubled, inputs))
    assert cross_entropies == [] and not torch.equal(loss_outcome(model, inputs)["loss"], expected["loss"])


@pytest.mark.parametrize("pattern", BOTH)
def test_trainer_trains_and_evaluates(pattern: str, tmp_path: Any) -> None:
    def trained(patch: bool) -> tuple[list[float], float]:
        model, inputs = made("llama")
        if patch:
            patch_model(model, patterns=[pattern])
        rows = [{name: tensor[i] for name, tensor in inputs.items()} for i in range(2)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, report_to=[], logging_steps=1, use_cpu=True, save_strategy="no", seed=0
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        trainer.train()
        return [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.evaluate()["eval_loss"]

    (ours, evaluated), (theirs, expected) = trained(True), trained(False)
    assert ours == pytest.approx(theirs, rel=1e-5) and evaluated == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("pattern", BOTH)
def test_a_model_whose_own_forward_has_more_to_fuse(pattern: str, cross_entropies: list[tuple[int, ...]]) -> None:
    """DistilBERT's calls an activation before the output layer."""
    model, inputs = made("distilbert")
    expected = loss_outcome(model, inputs)
    report = patch_model(model, patterns=[pattern, "bias_activation"])
    (site,) = (site for site in report.patched if site.name == "")
    assert (site.pattern, site.detail) == (pattern, "and bias_activation") and "activation" in report.diff("")
    cross_entropies.clear()
    assert_agree(loss_outcome(model, inputs), expected)
    assert len(cross_entropies) == 1 and report.calls()[""] == (2, 0)
    assert loss_outcome(unpatch_model(model), inputs)["loss"] == expected["loss"]
