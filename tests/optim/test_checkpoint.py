"""state_dict and load_state_dict, and imports from torch.optim and bitsandbytes."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onetrip.optim import Adam8bit, AdamW8bit
from optim_cases import bits_of, make_params, rejected, same, set_grads, snapshot, steps_taken, train, trained

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])


def through_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train_all_but(optimizer: torch.optim.Optimizer, frozen: list[int]) -> None:
    params = optimizer.param_groups[0]["params"]
    set_grads(params, 0)
    for i in frozen:
        params[i].grad = None
    optimizer.step()


@pytest.mark.promise("C1")
@pytest.mark.parametrize(
    "options",
    [{}, {"master_weight_bits": 24}, {"master_weight_bits": 32}, {"bf16_stochastic_round": True}],
    ids=["nearest", "24", "32", "stochastic"],
)
@DTYPES
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit], ids=["AdamW8bit", "Adam8bit"])
def test_resuming_is_training_on(cls, dtype, options):
    """C1: 20 steps are 10, save, load and 10, bit for bit; half precision casts no code."""
    whole = cls(make_params(dtype=dtype), lr=1e-2, **options)
    train(whole, range(10))
    params, state = snapshot(whole)
    state = through_torch_save(state)
    resumed = cls([torch.nn.Parameter(p.clone()) for p in params], lr=0.5)
    resumed.load_state_dict(state)
    train(whole, range(10, 20))
    train(resumed, range(10, 20))
    assert same(snapshot(resumed), snapshot(whole))


def test_what_is_saved_is_plain():
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, (str, int)) and plain(inner) for key, inner in value.items())
        if isinstance(value, (list, tuple)):
            return all(map(plain, value))
        return value is None or type(value) in (torch.Tensor, int, float, bool)

    assert plain(trained().state_dict()) and same(through_torch_save(trained().state_dict()), trained().state_dict())


def test_loading_into_an_optimizer_that_has_stepped_replaces_its_state():
    """The dictionary that was loaded, or the optimizer it came from, is not written to afterwards."""
    source, target = trained(), trained(steps=7)
    for p, q in zip(target.param_groups[0]["params"], source.param_groups[0]["params"], strict=True):
        p.data = q.detach().clone()
    state = source.state_dict()
    before = copy.deepcopy(state)
    target.load_state_dict(state)
    train(target, range(3, 6))
    assert same(state, before)
    train(source, range(3, 6))
    assert same(snapshot(target), snapshot(source))


def test_precision_of_a_checkpoint_is_kept():
    for saved, chosen in ((8, 32), (32, 8)):
        source, target = trained(optim_bits=saved), AdamW8bit(make_params(), optim_bits=chosen)
        state = source.state_dict()
        target.load_state_dict(state)
        assert same(target.state_dict()["state"], state["state"])


def test_parameters_without_state_and_names_and_initial_lr():
    params = [(f"layer.{i}", p) for i, p in enumerate(make_params())]
    source, target = AdamW8bit(params), AdamW8bit([(f"layer.{i}", p) for i, p in enumerate(make_params())], lr=0.3)
    torch.optim.lr_scheduler.ConstantLR(source)
    params[0][1].grad = torch.ones(64, 100)
    source.step()
    target.load_state_dict(through_torch_save(source.state_dict()))
    assert same(target.state_dict(), source.state_dict()) and list(target.state_dict()["state"]) == [0]
    assert target.param_groups[0]["initial_lr"] == 1e-3 and target.param_groups[0]["param_names"][1] == "layer.1"


@pytest.mark.promise("C4")
@pytest.mark.parametrize("loss", ["absent", "empty"])
def test_a_checkpoint_that_lost_a_state_is_told_from_one_that_never_had_it(loss):
    """A frozen parameter, or an expert that nothing was routed to, has no state, and torch writes nothing for it."""
    source = AdamW8bit(make_params())
    train_all_but(source, [1])
    state = copy.deepcopy(source.state_dict())
    assert state["n_states"] == 5 and 1 not in state["state"]
    AdamW8bit(make_params()).load_state_dict(state)
    if loss == "absent":
        del state["state"][0]
    else:
        state["state"][0] = {}
    optimizer = trained()
    with rejected(optimizer, ValueError, "state must have the 5 entries that .*, got 4; .* delete n_states"):
        optimizer.load_state_dict(state)
    with rejected(optimizer, ValueError, "n_states must be an int, got '5'"):
        optimizer.load_state_dict(state | {"n_states": "5"})
    del state["n_states"]  # on purpose then, as one resets a parameter; and as torch's own are
    optimizer.load_state_dict(state)
    assert 0 not in optimizer.state_dict()["state"]


def test_a_capturable_checkpoint_goes_on_on_the_cpu():
    """C3: of a GPU, with its tensor lr; this class's and torch's."""
    for source in (trained(lr=torch.tensor(0.125)), torch.optim.AdamW(make_params(), lr=torch.tensor(0.125))):
        train(source, range(3))
        state = copy.deepcopy(source.state_dict())
        state["param_groups"][0]["capturable"] = True
        optimizer = AdamW8bit(make_params())
        optimizer.load_state_dict(state)
        train(optimizer, range(3, 4))
        assert not optimizer.param_groups[0]["capturable"]


@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit], ids=["AdamW8bit", "Adam8bit"])
def test_checkpoints_of_a_torch_that_did_not_record_the_kind_of_decay_are_taken(cls):
    """torch 2.6: Adam's and AdamW's cannot be told apart, and each is what it is loaded into."""
    theirs = torch.optim.AdamW(make_params(), weight_decay=0.25)
    train(theirs, range(2))
    state = copy.deepcopy(theirs.state_dict())
    state["param_groups"][0].pop("decoupled_weight_decay", None)
    ours = cls(make_params())
    ours.load_state_dict(state)
    assert ours.param_groups[0]["decoupled_weight_decay"] == (cls is AdamW8bit)
    assert ours.param_groups[0]["weight_decay"] == 0.25
    train(ours, range(2, 3))


def test_loaded_under_inference_mode():
    """As evaluation code may: the states can be stepped outside."""
    source, target, plain = trained(), trained(), trained()
    with torch.inference_mode():
        target.load_state_dict(source.state_dict())
    assert not any(value.is_inference() for entry in target.state.values() for value in entry.values())
    train(target, range(3, 5))
    train(plain, range(3, 5))
    assert same(snapshot(target), snapshot(plain))


def test_hooks_of_torch_run():
    source, target, calls = trained(), AdamW8bit(make_params()), []
    source.register_state_dict_pre_hook(lambda _: calls.append("save-pre"))
    source.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    target.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["extra"]))
    target.register_load_state_dict_post_hook(lambda _: calls.append("load-post"))
    target.load_state_dict(source.state_dict())
    assert calls == ["save-pre", 1, "load-post"]


def test_a_pre_hook_may_load_states_by_name():
    """The recipe of torch's documentation: the hook fills in the dict of an optimizer that has no states yet."""

    def by_name(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        adapted = copy.deepcopy(optimizer.state_dict())
        names = given["param_groups"][0]["param_names"]
        for index, name in enumerate(adapted["param_groups"][0]["param_names"]):
            adapted["state"][index] = given["state"][names.index(name)]
        return adapted

    named = [(f"layer.{i}", p) for i, p in enumerate(make_params())]
    source, target = AdamW8bit(named), AdamW8bit([(name, p.detach().clone()) for name, p in reversed(named)])
    train(source, range(3))
    target.register_load_state_dict_pre_hook(by_name)
    target.load_state_dict(source.state_dict())
    for p, (_, q) in zip(target.param_groups[0]["params"], reversed(named), strict=True):
        assert same(target.state[p], source.state[q])


def change(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """What sets state_dict[path] to a value, to a function of the old value, or removes it (...)."""

    def apply(state: dict[str, Any]) -> None:
        inner: Any = state
        for key in path[:-1]:
            inner = inner[key]
        if to is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = to(inner[path[-1]]) if callable(to) else to

    return apply


DAMAGED = {
    "no-state": (change("state", to=...), "must have state and param_groups"),
    "no-groups": (change("param_groups", to=...), "must have state and param_groups"),
    "state-not-a-dict": (change("state", to=[]), "state must be a dict"),
    "another-model": (change("param_groups", 0, "params", to=[0, 1]), r"must have \[6\] parameters, got \[2\]"),
    "more-groups": (change("param_groups", to=lambda groups: groups * 2), r"must have \[6\] parameters, got \[6, 6\]"),
    "state-of-nobody": (change("state", 17, to={"step": 1}), r"got also \[17\]"),
    "lr": (change("param_groups", 0, "lr", to=-1.0), "lr must be >= 0"),
    "amsgrad": (change("param_groups", 0, "amsgrad", to=True), "without amsgrad"),
    "sgd": (change("param_groups", 0, "betas", to=...), r"param_groups must have \['betas'\]"),
    "l2": (change("param_groups", 0, "decoupled_weight_decay", to=False), "weight decay must be decoupled"),
    "missing-key": (change("state", 0, "exp_avg_scale", to=...), "state of parameter 0 must have"),
    "entry-not-a-dict": (change("state", 0, to=3), "state of parameter 0 must be a dict"),
    "swapped": (
        change("state", 0, "exp_avg_codes", to=lambda codes: codes.t()),
        r"shaped like its parameter, \(64, 100\)",
    ),
    "float-codes": (
        change("state", 0, "exp_avg_sq_codes", to=lambda codes: codes.float()),
        "exp_avg_sq_codes must be uint8 codes",
    ),
    "codes-no-tensor": (change("state", 0, "exp_avg_sq_codes", to=1), "exp_avg_sq_codes must be uint8 codes"),
    "short-scale": (change("state", 0, "exp_avg_scale", to=lambda scale: scale[:-1]), "must be 50 float32 scales"),
    "negative-scale": (
        change("state", 0, "exp_avg_sq_scale", to=lambda scale: -scale),
        "exp_avg_sq_scale must be >= 0",
    ),
    "negative-square": (change("state", 2, "exp_avg_sq", to=lambda v: -v), "exp_avg_sq must be >= 0"),
    "negative-step": (change("state", 3, "step", to=torch.tensor(-1.0)), "step must be one number >= 0, got -1.0"),
    "two-steps": (change("state", 3, "step", to=torch.ones(2)), "step must be one number >= 0"),
}


@pytest.mark.promise("C4")
@pytest.mark.parametrize(("damage", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_checkpoints_change_nothing(damage, message):
    state = copy.deepcopy(trained(steps=4).state_dict())
    damage(state)
    optimizer = trained()
    with rejected(optimizer, ValueError, f"^AdamW8bit.*{message}"):
        optimizer.load_state_dict(state)


@pytest.mark.promise("C6")
@DTYPES
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adam], ids=["AdamW", "Adam"])
def test_state_of_torchs_adam_is_taken(cls, dtype):
    """C6: quantised where this optimizer's precision is 8 bits, float32 elsewhere; the checkpoint's numbers count."""
    theirs = cls(make_params(dtype=dtype), lr=0.0625, betas=(0.7, 0.9), eps=1e-4, weight_decay=0.125)
    train(theirs, range(5))
    ours = {torch.optim.AdamW: AdamW8bit, torch.optim.Adam: Adam8bit}[cls](make_params(dtype=dtype))
    ours.load_state_dict(through_torch_save(theirs.state_dict()))
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"], group["optim_bits"]) == (0.0625, (0.7, 0.9), 0.125, 8)
    assert "foreach" not in group
    for p, q in zip(ours.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True):
        state, expected = ours.state[p], theirs.state[q]
        is_8bit = p.numel() >= 4096
        assert bits_of(state) == (8 if is_8bit else 32) and steps_taken(state) == 5.0
        for value, key in zip(ours.dequantized_state(p), ("exp_avg", "exp_avg_sq"), strict=True):
            wanted = expected[key].float()
            atol = 0.02 * float(wanted.abs().max()) if wanted.numel() else 0.0
            assert torch.allclose(value, wanted, rtol=0.06, atol=atol) if is_8bit else torch.equal(value, wanted)
    train(ours, range(5, 6))


def bitsandbytes_state(block: int, wrapped: bool) -> tuple[dict[str, Any], list[tuple[torch.Tensor, torch.Tensor]]]:
    """A state_dict laid out as bitsandbytes 0.50 does, with codes drawn at random, and its moments by its formulas."""
    entries, moments = {}, []
    maps = [torch.linspace(-1, 1, 256), torch.linspace(0, 1, 256)]
    for i, p in enumerate(make_params()):
        entry: dict[str, Any] = {"step": 7}
        quantized: dict[str, Any] = {}
        values = []
        for number, qmap in ((1, maps[0]), (2, maps[1])):
            if p.numel() < 4096:
                entry[f"state{number}"] = torch.rand(p.shape)
                values.append(entry[f"state{number}"])
                continue
            codes = torch.randint(0, 256, p.shape, dtype=torch.uint8)
            absmax = torch.rand(math.ceil(p.numel() / block)) + 0.1
            quantized |= {f"state{number}": codes, f"qmap{number}": qmap, f"absmax{number}": absmax}
            flat = [float(qmap[code] * absmax[e // block]) for e, code in enumerate(codes.view(-1).tolist())]
            values.append(torch.tensor(flat).view(p.shape))
        entries[i] = {**entry, "__bnb_optimizer_quant_state__": quantized} if wrapped else {**entry, **quantized}
        moments.append((values[0], values[1]))
    group = {"lr": 0.25, "betas": (0.7, 0.9), "eps": 1e-6, "weight_decay": 0.125, "alpha": 0.0, "t_alpha": None}
    return {"state": entries, "param_groups": [{**group, "params": list(range(6))}]}, moments


@pytest.mark.promise("C6")
@pytest.mark.parametrize("wrapped", [False, True], ids=["flat", "wrapped"])
@pytest.mark.parametrize("block", [256, 2048])
def test_bitsandbytes_state_is_taken(block, wrapped):
    """C6: dequantised by its own map and blocks, then quantised; small tensors are float32 in both."""
    state, moments = bitsandbytes_state(block, wrapped)
    optimizer = AdamW8bit(make_params())
    with rejected(optimizer, ValueError, "load_state_dict: .* got bitsandbytes'; call load_bitsandbytes_state_dict"):
        optimizer.load_state_dict(state)
    optimizer.load_bitsandbytes_state_dict(through_torch_save(state))
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.25, (0.7, 0.9), 1e-6, 0.125)
    assert "alpha" not in group and group["optim_bits"] == 8
    for p, wanted in zip(group["params"], moments, strict=True):
        assert steps_taken(optimizer.state[p]) == 7.0
        for value, moment in zip(optimizer.dequantized_state(p), wanted, strict=True):
            if p.numel() < 4096:
                assert torch.equal(value, moment)
            else:
                assert torch.allclose(value, moment, rtol=0.04, atol=0.01)
    train(optimizer, range(1))


@pytest.mark.promise("C6")
def test_the_real_bitsandbytes():
    """Its own optimizer, trained on the CPU, then this one from its checkpoint: the next steps go the same way."""
    bitsandbytes = pytest.importorskip("bitsandbytes", exc_type=ImportError)
    params = make_params([(64, 100), (8192,), (300,)])
    theirs = bitsandbytes.optim.AdamW8bit(params, lr=1e-2)
    try:
        train(theirs, range(5))
    except (NotImplementedError, RuntimeError) as error:
        pytest.skip(f"this bitsandbytes has no 8-bit step on the CPU: {error}")
    ours = AdamW8bit([torch.nn.Parameter(p.detach().clone()) for p in params])
    ours.load_bitsandbytes_state_dict(through_torch_save(theirs.state_dict()))
    assert ours.param_groups[0]["lr"] == 1e-2
    before = [p.detach().clone() for p in params]
    train(theirs, range(5, 7))
    train(ours, range(5, 7))
    for p, q, old in zip(params, ours.param_groups[0]["params"], before, strict=True):
        moved, theirs_moved = (q.detach() - old).view(-1), (p.detach() - old).view(-1)
        assert float(torch.nn.functional.cosine_similarity(moved, theirs_moved, dim=0)) > 0.98


def test_damaged_bitsandbytes_state_changes_nothing():
    for damage, message in (
        (change("state", 0, "state1", to=lambda codes: codes[:-1]), "state1 must have the parameter's 6400 elements"),
        (change("state", 0, "absmax2", to=lambda absmax: absmax[:-1]), "absmax2 must have one scale for each 256 or"),
        (change("state", 0, "qmap1", to=...), "qmap1 of 256 values"),
        (change("state", 0, "step", to=-1), "step must be one number >= 0"),
        (change("param_groups", 0, "params", to=[0]), "6 whole parameters, got 1 parameters"),
        (change("state", to=...), "must have state and param_groups"),
    ):
        state, _ = bitsandbytes_state(256, wrapped=False)
        damage(state)
        optimizer = trained()
        with rejected(optimizer, ValueError, message):
            optimizer.load_bitsandbytes_state_dict(state)
