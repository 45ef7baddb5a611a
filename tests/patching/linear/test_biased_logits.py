"""A constant for each class as the bias of an output layer's product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip import anatomy
from onetrip.measure.traffic import traffic
from onetrip.patching import PATTERNS, calls, patch_model, patched, unpatch_model
from onetrip.patching.linear import biased_logits
from onetrip.patching.linear_loss import DeferredLogits
from outcomes import assert_agree, assert_compiles, assert_equal, assert_obeys, loss_outcome, outcome, patch_and_compare
from pairwise import pairwise
from patching_cases import SEQ2SEQ, WIDTH, randomised, tiny_model, token_ids, twice, written
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

N_CLASSES = 96


class Biasing(nn.Module):
    """Parts of the forwards below."""

    constant: Tensor

    def __init__(self, shape: tuple[int, ...] = (1, N_CLASSES), scale: float = 1.0, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, N_CLASSES, bias=bias)
        values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(2))
        self.register_buffer("constant", values)
        self.trained = nn.Parameter(values.clone())


BART = """
    logits = self.head(self.body(x).tanh())
    logits = logits + self.constant.to(logits.device)
    return logits"""
Moved = written(Biasing, BART, globals())
Added = written(Biasing, "h = self.body(x); logits = self.head(h[1:]); y = logits + self.constant; return y", globals())
Marian = written(Biasing, "logits = self.head(self.body(x)) + self.constant; return logits", globals())
Decorated = written(Biasing, BART, globals(), decorators=[twice])
FOUND = {"moved": Moved, "added": Added, "inline": Marian, "decorated": Decorated}
LEFT = {
    "read before": "raw = self.head(self.body(x)); logits = raw + self.constant; return logits + raw",
    "read by the move": "raw = self.head(self.body(x)); y = raw + self.constant.to(raw.device); return y * raw",
    "moved elsewhere": "logits = self.head(self.body(x)); logits = logits + self.constant.to(x.device); return logits",
    "in another dtype": "logits = self.head(self.body(x)); y = logits + self.constant.to(logits.dtype); return y",
    "subtracted": "logits = self.head(self.body(x)) - self.constant; return logits",
    "a parameter": "logits = self.head(self.body(x)) + self.trained; return logits",
    "by a tensor of the forward": "shift = x.mean(); logits = self.head(self.body(x)) + shift; return logits",
    "another statement between": """
        logits = self.head(self.body(x))
        x.zero_()
        logits = logits + self.constant
        return logits""",
    "in a loop": """
        total = 0.0
        logits = self.head(self.body(x))
        for _ in range(2):
            shifted = logits + self.constant
            total = total + shifted
        return total""",
}
PATTERN = ("biased_logits",)


def sums(run: Callable[[], Any]) -> int:
    """Bytes that sums of two tensors read and write."""
    return sum(each.bytes for each in traffic(run).operators.values() if each.name == "aten::add")


@pairwise(
    kind=FOUND,
    shape=[(1, N_CLASSES), (N_CLASSES,), (1, 1, N_CLASSES)],
    dtype=[torch.float32, torch.bfloat16, torch.float16],
    training=[False, True],
)
def test_the_product_adds_it(kind: Any, shape: Any, dtype: torch.dtype, training: bool, x: Tensor) -> None:
    model, x = randomised(kind(shape)).to(dtype).train(training), x.to(dtype)
    expected, before = outcome(model, x), sums(lambda: model(x))
    report = patch_model(model, patterns=PATTERN)
    assert [site.pattern for site in report.patched] == ["biased_logits"]
    found = outcome(model, x)
    assert report.calls() == {"": (1, 0)}
    assert_agree([found.pop("y")], [expected.pop("y")], 2 * torch.finfo(dtype).eps)
    assert_equal(found, expected)  # no gradient depends on the sum
    assert before and not sums(lambda: model(x))
    unpatch_model(model)
    assert type(model) is kind


@pairwise(kind=FOUND, dtype=[torch.float32, torch.bfloat16, torch.float16], grad=[False, True])
def test_zeros_give_the_same_values(kind: Any, dtype: torch.dtype, grad: bool, x: Tensor) -> None:
    model, x = randomised(kind(scale=0.0)).to(dtype), x.to(dtype)
    with torch.set_grad_enabled(grad):
        run = (lambda: outcome(model, x)) if grad else lambda: {"y": model(x)}
        report = patch_and_compare(model, run, relative=0, patterns=PATTERN)
    assert report.calls() == {"": (1, 0)}


def test_it_rounds_once(x: Tensor) -> None:
    """The sum rounds the product, and then the result."""
    model, x = randomised(Marian()).bfloat16(), x.bfloat16()
    hidden = model.body(x).float()
    exact = hidden @ model.head.weight.float().T + model.constant.float()
    errors = []
    for _ in range(2):
        errors.append(float((model(x).float() - exact).detach().norm()))
        patch_model(model, patterns=PATTERN)
    assert errors[1] < errors[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype, x: Tensor) -> None:
    """A float32 constant makes float32 logits of autocast's, which zeros only convert; one in its dtype does not."""
    model = randomised(Moved(scale=0.0)).to(dtype)
    model.body = nn.Identity()  # x is float32, as a norm's result
    with torch.autocast("cpu", torch.bfloat16):
        report = patch_and_compare(model, lambda: outcome(model, x), relative=0, patterns=PATTERN)
    assert report.calls() == {"": (1, 0)}
    for other, value in (({"dtype": torch.float64}, 0.0), ({}, 1.0)):
        unpatch_model(model)
        model.constant = torch.full((1, N_CLASSES), value, **other)
        with torch.autocast("cpu", torch.bfloat16):
            report = patch_and_compare(model, lambda: outcome(model, x), relative=0, patterns=PATTERN)
        assert report.calls() == {"": (0, 0)}


def test_what_fills_zeros_unseen_is_added(x: Tensor) -> None:
    """Tensor.data leaves no trace that could be asked for on a GPU without waiting for it."""
    model = randomised(Moved(scale=0.0))
    patch_model(model, patterns=PATTERN)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        before = model(x)
        model.constant.data.fill_(3.0)
        torch.testing.assert_close(model(x), before + 3.0, rtol=2**-7, atol=2**-7)


def test_a_buffer_of_an_inference_tensor(x: Tensor) -> None:
    model = randomised(Moved())
    with torch.inference_mode():
        model.constant = torch.ones(1, N_CLASSES)
    report = patch_and_compare(model, lambda: outcome(model, x), patterns=PATTERN)
    assert report.calls() == {"": (1, 0)}


@pytest.mark.parametrize("name", LEFT)
def test_forwards_that_are_left(name: str) -> None:
    assert not patch_model(written(Biasing, LEFT[name], globals())(), patterns=PATTERN).patched


@pytest.mark.parametrize("options", [{"bias": True}, {"shape": (1, 1)}, {"shape": (5, N_CLASSES)}], ids=str)
def test_layers_that_are_left(options: Any) -> None:
    assert not patch_model(Moved(**options), patterns=PATTERN).patched


def test_excluded() -> None:
    assert not patch_model(Moved(), patterns=PATTERN, exclude=("head",)).patched


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda model: model.head.register_forward_hook(lambda _, given, y: 3.0 * y),
    "a bias": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(N_CLASSES))),
    "another layer": lambda model: setattr(model, "head", nn.Sequential(model.head)),
    "a subclass": lambda model: setattr(model.head, "__class__", Doubling),
    "trained": lambda model: model.constant.requires_grad_(),
    "one number": lambda model: setattr(model, "constant", torch.ones(1)),
    "one for each position": lambda model: setattr(model, "constant", torch.randn(5, N_CLASSES)),
    "more dimensions": lambda model: setattr(model, "constant", torch.randn(1, 1, 1, N_CLASSES)),
    "a wider dtype": lambda model: setattr(model, "constant", model.constant.double()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching_run_the_sum(name: str, x: Tensor) -> None:
    report = assert_obeys(CHANGES[name], randomised(Moved()), x, patterns=PATTERN)
    assert report.calls() == {"": (0, 0)}


class Doubled(Tensor):
    """Tensors whose sum is another one."""

    def __radd__(self, other: Any) -> Tensor:
        return 2.0 * self.as_subclass(Tensor) + other

    def __add__(self, other: Any) -> Tensor:
        return 2.0 * self.as_subclass(Tensor) + other


@pytest.mark.parametrize("which", ["input", "constant"])
def test_tensors_of_a_user_s_class(which: str, x: Tensor) -> None:
    model = randomised(Marian())
    model.body = nn.Identity()
    if which == "input":
        x = x.as_subclass(Doubled)
    else:
        model.constant = model.constant.as_subclass(Doubled)
    report = patch_and_compare(model, lambda: {"y": model(x).detach()}, relative=0, patterns=PATTERN)
    assert report.calls() == {"": (0, 0)}


def test_compiled(x: Tensor) -> None:
    assert_compiles(randomised(Moved()), x, patterns=PATTERN)


def test_traced_and_transformed(x: Tensor) -> None:
    model = randomised(Moved())
    expected = model(x)
    report = patch_model(model, patterns=PATTERN)
    assert torch.equal(torch.jit.trace(model, x, check_trace=False)(x), expected)

    def with_constant(constant: Tensor) -> Any:
        return torch.func.functional_call(model, {"constant": constant}, x)

    found = torch.func.vmap(with_constant)(torch.stack([model.constant, 2.0 * model.constant]))
    torch.testing.assert_close(found, torch.stack([expected, expected + model.constant]))
    assert report.calls() == {"": (0, 0)}


def test_fake_tensors() -> None:
    mode = FakeTensorMode()
    model = anatomy.fake_copy(Moved(), mode, torch.bfloat16)
    with patched(model, patterns=PATTERN, verify=False) as report, mode:
        y = model(torch.empty(2, 5, WIDTH, dtype=torch.bfloat16))
    assert y.shape == (2, 5, N_CLASSES) and report.calls() == {"": (1, 0)}


def test_verification_adds_the_bias_in_small_products_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "SMALLEST", 2**18)
    monkeypatch.setattr(biased_logits, "_biased", lambda head, x, bias: head(x))
    report = patch_model(Moved(), patterns=PATTERN)
    assert [site.reason for site in report.skipped] == ["verify_failed"]


ROWS, VOCABULARY = 2 * 7, 20000
"""As many that tied_embedding takes the matrix."""
CLASSES = ("Bart", "Marian", "Pegasus", "MBart", "Blenderbot", "PLBart")


def seq2seq(name: str, scale: float = 0.0) -> tuple[Any, dict[str, Tensor]]:
    """A model with its inputs. scale: of its constant."""
    cls = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "decoder_start_token_id": 2}
    no_dropout = {"attention_dropout": 0.0, "activation_dropout": 0.0}
    model = tiny_model(cls, SEQ2SEQ | sizes | no_dropout).train()
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2)).mul_(scale)
    return model, {"input_ids": token_ids(), "labels": token_ids(seed=1)}


@pytest.mark.parametrize("patterns", [PATTERN, PATTERNS, (*PATTERNS, "linear_cross_entropy")], ids=len)
@pytest.mark.parametrize("name", CLASSES)
def test_models_of_transformers(name: str, patterns: tuple[str, ...]) -> None:
    """The same values, and logits that are read and written once less, but where they are not computed."""
    model, inputs = seq2seq(name)

    def step() -> Any:
        return loss_outcome(model, inputs)

    def train() -> None:
        model.zero_grad()
        model(**inputs).loss.backward()

    patch_model(model, patterns=[each for each in patterns if each != "biased_logits"])
    expected, before = step(), sums(train)
    unpatch_model(model)
    report = patch_model(model, patterns=patterns)
    assert "biased_logits_" in report.diff("")
    found = step()
    n_saved = 0 if "linear_cross_entropy" in patterns else 2 * ROWS * VOCABULARY + VOCABULARY
    assert before - sums(train) == 4 * n_saved
    if "tied_embedding" in patterns:  # two embeddings' rows are added to the output layer's gradient
        dense = [each.bytes for each in traffic(train).operators.values() if "embedding_dense" in each.name]
        assert 0 < sum(dense) < model.lm_head.weight.numel()
        assert report.calls()["lm_head"][0] == 3
    assert_equal(found, expected)


@pytest.mark.parametrize("name", CLASSES)
def test_under_autocast_the_loss_reads_logits_to_which_zeros_are_added(name: str) -> None:
    """In autocast's dtype: the same values, also of the float32 logits that the model returns, and half of the bytes
    that the loss and its gradient take. Zeros that change are added again."""
    model, inputs = seq2seq(name)

    @torch.autocast("cpu", torch.bfloat16)
    def step() -> Any:
        return loss_outcome(model, inputs)

    def loss_bytes() -> int:
        found = traffic(step).operators.values()
        return sum(each.bytes for each in found if "cross_entropy" in each.name)

    expected, before = (patch_model(model, patterns=("cross_entropy",)), step())[1], loss_bytes()
    unpatch_model(model)
    report = patch_model(model, patterns=("cross_entropy", *PATTERN))
    found, after = step(), loss_bytes()
    assert found["logits"].dtype == torch.float32 and after < 0.6 * before
    assert report.calls()[""] == (4, 0)  # the loss and the sum, twice
    assert_agree(found, expected, 1e-6)  # the shared weight's gradients are summed in another order
    model.final_logits_bias[0, 0] = 1.0
    assert loss_bytes() == before and report.calls()[""] == (5, 0)
    changed = step()
    unpatch_model(model)
    patch_model(model, patterns=("cross_entropy",))
    assert_agree(changed, step(), 1e-6)


@pytest.mark.parametrize("patterns", [PATTERN, ("tied_embedding", *PATTERN), PATTERNS], ids=len)
@pytest.mark.parametrize("name", ["Bart", "Marian"])
def test_other_constants_than_zeros(name: str, patterns: tuple[str, ...]) -> None:
    model, inputs = seq2seq(name, scale=1.0)
    report = patch_and_compare(model, lambda: loss_outcome(model, inputs), patterns=patterns)
    assert all(report.calls()[site.name][0] for site in report.patched if site.name in ("", "lm_head"))


@pytest.mark.parametrize("name", ["Bart", "Marian"])
def test_logits_that_are_deferred(name: str) -> None:
    """The loss has the constant, and so have logits that are read after it."""
    model, inputs = seq2seq(name, scale=1.0)
    expected = model(**inputs)
    report = patch_model(model, patterns=("linear_cross_entropy", *PATTERN))
    found = model(**inputs)
    assert isinstance(found.logits, DeferredLogits) and report.calls()["lm_head"] == (1, 0)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits.tensor(), expected.logits)
    model.eval()
    assert isinstance(model(**inputs).logits, Tensor)


def test_a_model_in_a_reentrant_checkpoint_has_its_constant() -> None:
    """Its logits are not deferred, nor where backward computes them again."""
    model, inputs = seq2seq("Marian", scale=1.0)
    given = torch.randn(2, 7, SEQ2SEQ["d_model"])

    def run(hidden: Tensor) -> tuple[Tensor, Tensor]:
        found = model(inputs_embeds=hidden, labels=inputs["labels"])
        return found.loss, found.logits

    def step(compute: Callable[[Tensor], tuple[Tensor, Tensor]]) -> list[Tensor]:
        hidden = given.clone().requires_grad_()
        loss, logits = compute(hidden)
        loss.backward()
        assert hidden.grad is not None
        return [loss.detach(), logits.detach(), hidden.grad]

    expected = step(run)
    patch_model(model, patterns=("linear_cross_entropy", *PATTERN))
    assert_agree(step(lambda hidden: checkpoint(run, hidden, use_reentrant=True)), expected)
