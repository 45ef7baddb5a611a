"""An embedding and an output layer that share their matrix: one gradient, without passes over the whole matrix."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.measure.traffic import traffic
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.linear import tied_embedding
from outcomes import (
    Outcome,
    assert_agree,
    assert_compiles,
    assert_equal,
    assert_obeys,
    parameter_gradients,
    patch_and_compare,
)
from patching_cases import HIDDEN, build, written
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH = 8192, 32  # as small as is worth it


class Tied(nn.Module):
    """A language model without a body."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh())


class Scaled(nn.Embedding):
    """As BART's."""

    scale: float | Tensor = 3.0

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.scale


class TwoTowers(Tied):
    """An encoder, a decoder and the output layer share one matrix, as T5's and BART's do."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Scaled(VOCABULARY, WIDTH)
        self.other.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).tanh() + self.other(ids.flip(0)) + self.embed(ids + 1))


def made(make: Callable[[], nn.Module] = Tied, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return make().to(dtype)


def some_ids(seed: int = 0) -> Tensor:
    """With tokens that come several times."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(3, 17, generator=generator) ** 3 * 40).long()


def gradients(model: nn.Module, ids: Tensor) -> Outcome:
    model.zero_grad()
    model(ids).float().square().mean().backward()
    return parameter_gradients(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("padding_idx", [None, 0, 7])
def test_the_gradient_is_the_unpatched_model_s(dtype: torch.dtype, padding_idx: int | None) -> None:
    model, ids = made(lambda: Tied(padding_idx), dtype), some_ids()
    expected_y, expected = model(ids), gradients(model, ids)
    report = patch_model(model)
    assert [(site.name, site.pattern) for site in report.patched] == [
        ("embed", "tied_embedding"),
        ("head", "tied_embedding"),
    ]
    assert torch.equal(model(ids), expected_y)
    assert_equal(gradients(model, ids), expected)  # the same sums, in the same order
    assert report.calls()["embed"] == (2, 0)
    assert torch.equal(gradients(unpatch_model(model), ids)["embed.weight"], expected["embed.weight"])


def test_one_matrix_of_two_embeddings_and_a_layer() -> None:
    model, ids = made(TwoTowers), some_ids()
    expected = gradients(model, ids)
    assert {site.name for site in patch_model(model).patched} == {"embed", "other", "head"}
    assert_agree(gradients(model, ids), expected, 1e-6)
    assert large_tensors(model, ids) == 0


def large_tensors(model: nn.Module, ids: Tensor) -> int:
    """How often backward adds, or makes the embedding's gradient, over the whole matrix."""
    table = VOCABULARY * WIDTH * 4
    found = traffic(lambda: gradients(model, ids)).operators.values()
    names = ("aten::add", "aten::add_", "aten::embedding_dense_backward")
    return sum(each.calls for each in found if each.name in names and each.bytes / each.calls >= table)


@pytest.mark.parametrize("scale", [1.0, 3.0, torch.tensor(1.0), torch.tensor([3.0])], ids=repr)
def test_an_embedding_is_not_multiplied_by_one(scale: float | Tensor) -> None:
    model, ids = made(TwoTowers), some_ids()
    model.other.scale = scale
    expected_y, expected = model(ids), gradients(model, ids)
    report = patch_model(model)
    assert "scaled_" in report.diff("other")
    assert torch.equal(model(ids), expected_y)
    assert_agree(gradients(model, ids), expected, 1e-6)
    found = traffic(lambda: model.other(ids)).operators.values()
    assert any(each.name == "aten::mul" for each in found) == (not isinstance(scale, float) or scale != 1.0)


def test_no_pass_over_the_matrix_is_left() -> None:
    model, ids = made(), some_ids()
    assert large_tensors(model, ids) == 2
    patch_model(model)
    assert large_tensors(model, ids) == 0


@pytest.mark.parametrize("patterns", [None, ("tied_embedding", "linear_cross_entropy")], ids=["default", "loss"])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5", "bart"])
def test_models_of_transformers(kind: str, patterns: Any) -> None:
    model = build(kind, vocab_size=VOCABULARY, tie_word_embeddings=True).train()
    ids = some_ids()
    table = next(p for p in model.parameters() if p.shape == (VOCABULARY, HIDDEN))

    def run() -> Tensor:
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        assert table.grad is not None
        return table.grad.clone()

    expected = run()
    report = patch_model(model, patterns=patterns)
    torch.testing.assert_close(run(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    embeddings = [site.name for site in report.patched if site.pattern == "tied_embedding"]
    assert sum(report.calls()[name][0] for name in embeddings) == (2 if kind in ("t5", "bart") else 1)
    found = traffic(run).operators.values()
    dense = [each for each in found if each.name == "aten::embedding_dense_backward"]
    assert sum(each.bytes for each in dense) < table.numel() * 4


@pytest.mark.parametrize("use", ["head alone", "embedding alone", "head twice", "stale alias"])
def test_readers_that_do_not_come_in_pairs(use: str) -> None:
    model, ids = made(), some_ids()
    hidden = torch.randn(5, WIDTH)

    def run(use: str) -> Outcome:
        model.zero_grad()
        if use == "head alone":
            loss = model.head(hidden).square().mean()
        elif use == "embedding alone":
            loss = model.embed(ids).square().mean()
        else:
            x = model.embed(ids)
            loss = (model.head(x) + model.head(2.0 * x)).square().mean()
        loss.backward()
        return parameter_gradients(model)

    orders = [use] if use != "stale alias" else ["embedding alone", "head alone", "embedding alone", "head twice"]
    expected = [run(each) for each in orders]
    patch_model(model)
    for each, theirs in zip(orders, expected, strict=True):
        assert_agree(run(each), theirs, 1e-6)


def test_an_embedding_without_its_layer_makes_no_endless_chain() -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    for _ in range(3 * tied_embedding._LONGEST):
        model.embed(ids)
    left = tied_embedding._aliases[id(model.embed)]
    assert left is not None and left.n_readers <= tied_embedding._LONGEST


CHANGES: dict[str, Callable[[Any], Any]] = {
    "replaced": lambda model: setattr(model.embed, "weight", nn.Parameter(torch.randn(VOCABULARY, WIDTH))),
    "moved": lambda model: setattr(model.embed.weight, "data", 2.0 * model.embed.weight.data),
    "frozen": lambda model: model.embed.weight.requires_grad_(False),
    "hooked": lambda model: model.head.register_forward_hook(lambda module, args, y: 2.0 * y),
}


@pytest.mark.parametrize("is_between", [False, True], ids=["before", "between the readers"])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_after_patching(name: str, is_between: bool) -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    theirs = unpatch_model(copy.deepcopy(model))

    def run(model: Any) -> Outcome:
        torch.manual_seed(1)
        if not is_between:
            CHANGES[name](model)
        x = model.embed(ids)
        if is_between:
            CHANGES[name](model)
        model.head(x).square().mean().backward()
        return parameter_gradients(model)

    assert_agree(run(model), run(theirs), 1e-6)


def test_backward_drops_an_alias_that_no_layer_read() -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    model.embed(ids).sum().backward()
    assert tied_embedding._aliases[id(model.embed)] is None


def test_a_trace_after_a_call_of_the_embedding_alone() -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    model.embed(ids)
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(model, (ids,))(ids), model(ids))


@pytest.mark.parametrize("is_patched", [True, False], ids=["patched", "unpatched again"])
def test_a_matrix_that_grows_after_a_call_of_the_embedding_alone(is_patched: bool) -> None:
    """As resize_token_embeddings does it: the parameter stays, and its node of the graph must not."""
    model, ids = made(), some_ids()
    patch_model(model)
    model.embed(ids)
    if not is_patched:
        unpatch_model(model)
    weight = model.embed.weight
    weight.data, weight.grad = torch.randn(VOCABULARY + 3, WIDTH), None
    # More tokens than are worth an alias.
    functional.linear(model.embed(ids.repeat(VOCABULARY, 1)[:VOCABULARY]).mean(0), weight).sum().backward()
    assert weight.grad is not None and weight.grad.shape == weight.shape


def test_another_dtype_after_patching() -> None:
    assert_obeys(lambda model: model.double(), made(), some_ids(), compute=gradients)


def test_ids_written_to_before_backward_raise_as_ever() -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    y = model(ids).sum()
    ids += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_many_tokens_and_small_matrices_are_left_to_torch() -> None:
    model = made()
    report = patch_model(model)
    model.embed(torch.randint(0, VOCABULARY, (VOCABULARY // 2 + 1,))).sum().backward()
    assert report.calls()["embed"] == (0, 0)


def test_without_gradients() -> None:
    model, ids = made(), some_ids()
    expected = model(ids)
    report = patch_model(model)
    with torch.no_grad():
        assert torch.equal(model(ids), expected)
    with torch.inference_mode():
        assert torch.equal(model(ids), expected)
    assert report.calls()["embed"] == (0, 0) and id(model.embed) not in tied_embedding._aliases


def test_autocast() -> None:
    model, ids = made(), some_ids()

    def run() -> Outcome:
        with torch.autocast("cpu", torch.bfloat16):
            return gradients(model, ids)

    patch_and_compare(model, run, relative=1e-6)


def test_second_derivatives() -> None:
    model, ids = made(), some_ids()

    def penalty() -> Outcome:
        model.zero_grad()
        (gradient,) = torch.autograd.grad(model(ids).square().mean(), model.embed.weight, create_graph=True)
        gradient.square().sum().backward()
        return parameter_gradients(model)

    patch_and_compare(model, penalty)


@pytest.mark.parametrize("reduction", ["logits", "loss"])
def test_a_graph_that_is_kept_gives_the_same_gradients_twice(reduction: str) -> None:
    from onetrip import ops

    model, ids = made(), some_ids()
    patch_model(model)
    x = model.embed(ids)
    if reduction == "logits":
        y = model.head(x).square().sum()
    else:
        y = ops.linear_cross_entropy(x.flatten(0, 1), tied_embedding.weight_of(model.head), ids.flatten())
    first, again = (torch.autograd.grad(y, model.embed.weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_compiles_without_a_break() -> None:
    assert_compiles(made(), some_ids(), compute=gradients)


def test_the_matrix_is_freed_with_the_model() -> None:
    model, ids = made(), some_ids()
    patch_model(model)
    model.embed(ids)  # leaves an alias
    watched = weakref.ref(model.embed.weight)
    storage = model.embed.weight.untyped_storage()._weak_ref()
    del model
    gc.collect()
    assert watched() is None and torch.UntypedStorage._expired(storage)


@pytest.mark.parametrize("is_leaf", [True, False])
def test_another_matrix_in_every_call(is_leaf: bool) -> None:
    """Each call's gradient is its own, and no matrix but the last is kept."""
    model, ids = made(), some_ids()
    patch_model(model)
    flat = torch.randn(VOCABULARY * WIDTH)
    storages = []
    for _ in range(4):
        leaf = (flat.view(VOCABULARY, WIDTH).clone() if is_leaf else flat.detach()).requires_grad_()
        weight = leaf if is_leaf else leaf.view(VOCABULARY, WIDTH)
        torch.func.functional_call(model.embed, {"weight": weight}, ids).sum().backward()
        assert leaf.grad is not None and float(leaf.grad.sum()) == ids.numel() * WIDTH
        if is_leaf:
            storages.append(leaf.untyped_storage()._weak_ref())
        del leaf, weight
    gc.collect()
    assert all(map(torch.UntypedStorage._expired, storages[:-1]))


def test_layers_that_share_nothing_are_no_sites() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(VOCABULARY, WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)})
    assert not patch_model(model).patched


def test_an_embedding_with_a_forward_of_its_own_is_left_alone() -> None:
    model, ids = made(), some_ids()
    body = "return functional.embedding(ids, 2.0 * self.weight)"
    model.embed.__class__ = written(nn.Embedding, body, globals(), "ids")
    report = patch_and_compare(model, lambda: gradients(model, ids), relative=1e-6)
    assert [site.name for site in report.patched] == ["head"]
