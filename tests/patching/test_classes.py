"""What patching leaves alone, and what a patched model goes through unharmed: copies, pickles, calls, meta modules."""

from __future__ import annotations

import copy
import io
import pickle
from abc import ABC, ABCMeta
from collections.abc import Callable
from typing import Any, ClassVar

import onetrip.patching.model
import pytest
import torch
import typing_extensions
from onetrip.patching import patch_model, patched, unpatch_model
from onetrip.patching.calls import is_plain
from onetrip.patching.classes import set_class
from patching_cases import WIDTH, ZOO, Model, Tail, build, classes
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that patching must not change, classes apart."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }


def test_instances_keep_their_state_and_classes_their_names(model: Model) -> None:
    before, keys, names = snapshot(model), list(model.state_dict()), [cls.__qualname__ for cls in classes(model)]
    model.final.register_forward_hook(lambda *_: None)
    before = snapshot(model)
    patch_model(model)
    assert snapshot(model) == before
    assert list(model.state_dict()) == keys
    assert [cls.__qualname__ for cls in classes(model)] == names
    assert isinstance(model.tails[0], Tail) and isinstance(model.final, nn.LayerNorm)


class Noise(nn.Module):
    """Draws from the global generator, as a norm and before the tail of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + torch.rand(())


class NoisyTail(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Noise()

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dropout(self.dense(self.noise(hidden))) + residual)


def test_patching_leaves_gradients_modes_and_random_state(model: Model, x: Tensor) -> None:
    model.noisy = NoisyTail()
    model.noisy(model(x), x).sum().backward()
    model.tails[0].train()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    patch_model(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    "context",
    [torch.no_grad, torch.inference_mode, lambda: torch.device("meta"), lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "default-device", "autocast"],
)
def test_patching_works_in_any_context(model: Model, context: Callable[[], Any]) -> None:
    with context():
        assert len(patch_model(model).patched) == 3


def test_library_classes_and_other_models_are_untouched(model: Model, x: Tensor) -> None:
    other, layer_norm, linear = copy.deepcopy(model), dict(vars(nn.LayerNorm)), dict(vars(nn.Linear))
    tail = dict(vars(Tail))
    patch_model(model)
    assert dict(vars(nn.LayerNorm)) == layer_norm and dict(vars(nn.Linear)) == linear and dict(vars(Tail)) == tail
    assert {type(other.final), type(other.tails[0])} == {nn.LayerNorm, Tail}
    fresh = Model()
    assert type(fresh.final) is nn.LayerNorm


def test_unpatching_restores_every_class(model: Model, x: Tensor) -> None:
    before, expected = classes(model), model(x)
    patch_model(model)
    assert classes(model) != before
    assert unpatch_model(model) is model
    assert classes(model) == before
    assert torch.equal(model(x), expected)
    assert classes(unpatch_model(model)) == before


def test_patching_twice_is_patching_once(model: Model) -> None:
    first = patch_model(model)
    before = classes(model)
    second = patch_model(model)
    assert classes(model) == before
    assert second.patched == first.patched and second.skipped == first.skipped


def test_context_manager_unpatches_on_exceptions(model: Model) -> None:
    before = classes(model)
    with pytest.raises(KeyError), patched(model) as report:
        assert len(report.patched) == 3 and classes(model) != before
        raise KeyError
    assert classes(model) == before


def test_context_manager_keeps_what_was_patched_before(model: Model) -> None:
    patch_model(model, patterns=["layer_norm"])
    before = classes(model)
    with patched(model):
        assert classes(model) != before
    assert classes(model) == before


def test_an_error_while_patching_undoes_the_sites_of_that_call(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_model(model, patterns=["layer_norm"])
    before = classes(model)

    def interrupted(module: nn.Module, cls: type) -> None:
        monkeypatch.undo()
        set_class(module, cls)
        assert classes(model) != before
        raise KeyboardInterrupt

    monkeypatch.setattr(onetrip.patching.model, "set_class", interrupted)
    with pytest.raises(KeyboardInterrupt):
        patch_model(model)
    assert classes(model) == before


def test_a_float64_model_is_left_alone(model: Model) -> None:
    report = patch_model(model.double())
    assert report.patched == () and {site.reason for site in report.skipped} == {"unsupported_dtype"}


def test_modules_of_one_kind_share_one_class(model: Model) -> None:
    patch_model(model)
    other = Model()
    patch_model(other)
    assert type(model.tails[0]) is type(model.tails[1]) is type(other.tails[0])


def test_deepcopy_is_patched_and_independent(model: Model, x: Tensor) -> None:
    report = patch_model(model)
    clone = copy.deepcopy(model)
    assert classes(clone) == classes(model)
    with torch.no_grad():
        clone.final.weight.zero_()
        clone.final.bias.fill_(2.0)
    assert torch.equal(clone(x), torch.full_like(x, 2.0))
    assert not torch.equal(model(x), clone(x))
    assert set(report.calls().values()) == {(1, 0)}
    assert classes(unpatch_model(clone)) == classes(Model())


def test_pickle_gives_the_original_classes(model: Model, x: Tensor) -> None:
    expected = model(x)
    patch_model(model)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        loaded = pickle.loads(pickle.dumps(model, protocol))
        assert classes(loaded) == classes(Model())
        assert torch.equal(loaded(x), expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert classes(torch.load(file, weights_only=False)) == classes(Model())


def test_replaced_children_are_honoured(model: Model, x: Tensor) -> None:
    report = patch_model(model)
    model.tails[0].norm = nn.Identity()
    model.tails[1].dense = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH))
    expected = unpatch_model(copy.deepcopy(model))(x)
    torch.testing.assert_close(model(x), expected)
    assert report.calls()["tails.0"] == (0, 1) and report.calls()["tails.1"] == (1, 0)


def test_a_forward_that_a_class_got_after_another_model_was_patched_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("llama").eval(), ZOO["llama"].inputs()
    patch_model(copy.deepcopy(model))
    original = type(model).forward

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, embeds=None, labels=None):
        output = original(self, input_ids, attention_mask, labels=labels)
        output.loss = 3.0 * output.loss
        return output

    monkeypatch.setattr(type(model), "forward", forward)
    expected = model(**inputs).loss
    patch_model(model)
    torch.testing.assert_close(model(**inputs).loss, expected)


@pytest.mark.parametrize("name", ["forward", "_old_forward", "_original_forward"])
def test_forwards_that_accelerate_keeps_are_the_originals_once_unpatched(model: Model, name: str) -> None:
    patch_model(model)
    tail = model.tails[0]
    vars(tail)[name] = tail.forward
    unpatch_model(model)
    assert vars(tail)[name].__func__ is Tail.forward


def test_a_residual_that_broadcasts_falls_back(model: Model, x: Tensor) -> None:
    tail = model.tails[0]
    expected = tail(x, x[:1, :1])
    report = patch_model(model)
    torch.testing.assert_close(tail(x, x[:1, :1]), expected)
    assert report.calls()["tails.0"] == (0, 1)


def test_dropout_follows_its_own_mode_and_p(model: Model, x: Tensor) -> None:
    report = patch_model(model)
    tail = model.tails[0]
    off = tail(x, x)
    tail.dropout.train()
    tail.dropout.p = 1.0
    torch.testing.assert_close(tail(x, x), tail.norm(x))
    tail.dropout.p = 0.0
    torch.testing.assert_close(tail(x, x), off)
    assert report.calls()["tails.0"] == (3, 0)


def test_eps_is_read_at_call_time(model: Model, x: Tensor) -> None:
    patch_model(model)
    model.final.eps = model.tails[0].norm.eps = 10.0
    torch.testing.assert_close(model(x), unpatch_model(copy.deepcopy(model))(x))


def test_calls_by_keyword(model: Model, x: Tensor) -> None:
    expected = model.tails[0](x, x)
    report = patch_model(model)
    torch.testing.assert_close(model.tails[0](residual=x, hidden=x), expected)
    assert report.calls()["tails.0"] == (1, 0)


class Recording(nn.Module):
    """Writes to dictionaries before and between what is patched."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model, self.stats = model, {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.stats["calls"] = 1
        self.model.tails[0].seen = self.stats
        return self.model(x)


def test_compiles_where_dictionaries_are_changed(model: Model, x: Tensor) -> None:
    """Dynamo then rejects to read a class's __dict__."""
    recording = Recording(model)
    expected = recording(x)
    assert {site.pattern for site in patch_model(model).patched} == {"dropout_add_norm", "layer_norm"}
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(recording, fullgraph=True, backend="aot_eager")(x), expected)


def test_a_class_on_top_of_a_patched_one_is_not_plain(model: Model) -> None:
    """It inherits all of the patched class's attributes, and may compute anything."""
    patch_model(model)
    assert is_plain(model.final, nn.LayerNorm)
    model.final.__class__ = type("Top", (type(model.final),), {})
    assert not is_plain(model.final, nn.LayerNorm)


def test_torch_jit_script_says_that_a_module_is_patched(model: Model) -> None:
    """And compiles it again once it is not."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(model.tails[0].norm))
    for root, pattern in ((module, "layer_norm"), (model.tails[1], "dropout_add_norm")):
        torch.jit.script(root)
        patch_model(root)
        with pytest.raises(RuntimeError, match=rf"patched by onetrip \(pattern {pattern}\).*unpatch_model"):
            torch.jit.script(root)
        torch.jit.script(unpatch_model(root))


def test_shared_modules_are_one_site(x: Tensor) -> None:
    norm = nn.LayerNorm(WIDTH)
    model = nn.Sequential(norm, norm, nn.Sequential(norm))
    report = patch_model(model)
    assert [site.name for site in report.patched] == ["0"]
    model(x)
    assert report.calls() == {"0": (3, 0)}


def test_a_block_takes_over_a_norm_patched_before(model: Model, x: Tensor) -> None:
    expected = model(x)
    leaves = patch_model(model, patterns=["layer_norm"])
    assert {site.pattern for site in leaves.patched} == {"layer_norm"} and len(leaves.patched) == 3
    report = patch_model(model)
    torch.testing.assert_close(model(x), expected)
    calls = report.calls()
    assert calls["tails.0"] == (1, 0) and calls["tails.0.norm"] == (0, 0)


def test_meta_modules_are_patched_as_others_are(x: Tensor) -> None:
    with torch.device("meta"):
        model = Model().eval()
    report = patch_model(model)
    reference, other = Model().eval(), Model().eval()
    assert report.patched == patch_model(other).patched
    model.load_state_dict(reference.state_dict(), assign=True)
    clone = copy.deepcopy(model)
    for patched_model in (model, clone):
        torch.testing.assert_close(patched_model(x), reference(x))
    assert set(report.calls().values()) == {(1, 0)}
    assert classes(model) == classes(clone) == classes(other)
    assert classes(unpatch_model(model)) == classes(reference)


def test_a_dead_module_leaves_no_counter() -> None:
    from onetrip.patching import calls

    before = len(calls._counters)
    model = Model()
    report = patch_model(model)
    assert len(calls._counters) == before + 3
    del model
    assert len(calls._counters) == before
    assert set(report.calls().values()) == {(0, 0)}


def test_torchscript_is_left_alone_and_the_rest_is_patched():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.LayerNorm(8))), nn.LayerNorm(8))
    report = patch_model(model)
    assert [site.name for site in report.patched] == ["1"]
    assert [(site.name, site.reason) for site in report.skipped] == [("0.0", "unknown_forward")]


class Registered(Tail):
    """Its subclasses must have names, which must differ."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, name: str) -> None:
        if name in cls.known:
            raise TypeError(f"{name} is taken")
        cls.known[name] = cls


class Final(Registered, name="final"):
    def __init_subclass__(cls) -> None:
        raise TypeError("Final is final")


class OfALibrary(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.norm = nn.Dropout(0.25), nn.LayerNorm(WIDTH)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Registered.known[cls.__name__] = cls

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dropout(hidden) + residual)


class InALibrary(OfALibrary):
    """Adds nothing."""


class Registry(type):
    def __init__(cls, name: str, bases: Any, namespace: Any) -> None:
        super().__init__(name, bases, namespace)
        Registered.known[name] = cls


class AbstractRegistry(Registry, ABCMeta):
    """Of classes that isinstance asks."""


class OfAMetaclass(Tail, metaclass=Registry):
    """Patched under its name, it would be found there later."""


class OfAnAbstractMetaclass(Tail, metaclass=AbstractRegistry):
    pass


class Protocol(typing_extensions.Protocol):
    pass


class Abstract(Tail, ABC, Protocol):
    pass


@pytest.mark.parametrize("make", [OfAMetaclass, OfAnAbstractMetaclass])
def test_classes_that_a_metaclass_makes_are_left(make: type[nn.Module]) -> None:
    before = dict(Registered.known)
    report = patch_model(nn.Sequential(make(), Abstract()))
    assert {site.name for site in report.patched} == {"0.dropout", "0.norm", "1"}
    assert [site.detail for site in report.skipped if site.name == "0"] == [
        "its metaclass sees every class that is made, a patched one too"
    ]
    assert Registered.known == before


@pytest.mark.parametrize("make", [Final, InALibrary])
def test_subclass_hooks_of_users_do_not_see_patched_classes(make: type[nn.Module], x: Tensor) -> None:
    before, model = dict(Registered.known), make().eval()
    expected = model(x, x)
    assert "" in {site.name for site in patch_model(model).patched}
    torch.testing.assert_close(model(x, x), expected)
    assert Registered.known == before and type(model).__bases__ == (make,)
    assert type(model).forward.__code__.co_name == make.forward.__code__.co_name  # a library may have wrapped it


class OfAFunction(Tail):
    forward = torch.add


class OfAProperty(Tail):
    @property
    def forward(self) -> Any:
        return self.norm


@pytest.mark.parametrize("make", [OfAFunction, OfAProperty])
def test_a_forward_without_a_signature_is_left_alone(make: type[nn.Module]) -> None:
    assert [site.name for site in patch_model(nn.Sequential(make(), nn.LayerNorm(WIDTH))).patched][-2:] == [
        "0.norm",
        "1",
    ]


class LazyTail(Tail):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.LazyLinear(WIDTH)


def test_lazy_parameters_are_reported_until_they_have_a_shape(x: Tensor) -> None:
    model = nn.ModuleDict({"tail": LazyTail(), "norm": nn.LayerNorm(WIDTH)})
    report = patch_model(model)
    assert "norm" in {site.name for site in report.patched}
    assert [site.name for site in report.skipped] == ["", "tail", "tail.dense"]
    assert {site.detail for site in report.skipped} == {
        "lazy parameters have no shape yet: run the model once, then patch it"
    }
    model["tail"](x, x)
    assert "tail" in {site.name for site in patch_model(model).patched}
