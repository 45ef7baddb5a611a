"""Wrong input: clear errors before anything has changed; and gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from onetrip import use_backend
from onetrip.optim import Adam8bit, AdamW8bit
from onetrip.reference.adam import code_map, thresholds
from optim_cases import give_grad, make_params, rejected, same, set_grads, snapshot, train
from torch import Tensor, nn

NAN = float("nan")
WRONG = [
    ("lr", -1.0, ValueError),
    ("lr", NAN, ValueError),
    ("lr", math.inf, ValueError),
    ("lr", "fast", TypeError),
    ("lr", torch.tensor([0.1, 0.2]), ValueError),
    ("lr", torch.tensor(-0.1), ValueError),
    ("lr", torch.tensor(1), ValueError),
    ("betas", (1.0, 0.999), ValueError),
    ("betas", (0.9, 1.0), ValueError),
    ("betas", (0.9, 0.99, 0.999), ValueError),
    ("betas", 0.9, ValueError),
    ("eps", -1e-8, ValueError),
    ("optim_bits", 4, ValueError),
    ("min_8bit_numel", -1, ValueError),
    ("lr", True, TypeError),
    ("lr", np.float32(-1.0), ValueError),
    ("lr", np.array(0.1), TypeError),
    ("betas", (False, 0.999), TypeError),
    ("weight_decay", False, TypeError),
    ("weight_decay", np.float64(NAN), ValueError),
    ("optim_bits", True, ValueError),
    ("optim_bits", 8.0, ValueError),
    ("min_8bit_numel", True, ValueError),
    ("maximize", 1, TypeError),
    ("capturable", "no", TypeError),
    ("master_weight_bits", 16, ValueError),
    ("master_weight_bits", 32.0, ValueError),
    ("bf16_stochastic_round", 1, TypeError),
]
IDS = [f"{argument}={str(value)[:20]}" for argument, value, _ in WRONG]


@pytest.mark.promise("adam B8")
@pytest.mark.parametrize("cls", [AdamW8bit, Adam8bit], ids=["AdamW8bit", "Adam8bit"])
@pytest.mark.parametrize(("argument", "value", "error"), WRONG, ids=IDS)
def test_wrong_arguments_are_refused_by_name(cls, argument, value, error):
    """B8, for the constructor, a group given to it, and a group added later."""
    message = rf"{cls.__name__}: {argument}(\[\d\])? must be .*, got"
    with pytest.raises(error, match=message):
        cls(make_params(), **{argument: value})
    with pytest.raises(error, match=message):
        cls([{"params": make_params(), argument: value}])
    optimizer = cls(make_params())
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": make_params(), argument: value})
    assert len(optimizer.param_groups) == 1


@pytest.mark.promise("adam B8")
@pytest.mark.parametrize(("argument", "value", "error"), WRONG, ids=IDS)
def test_a_value_that_turns_wrong_later_is_refused_at_the_step(argument, value, error):
    """A scheduler may write anything into a group."""
    optimizer = AdamW8bit(make_params())
    train(optimizer, range(1))
    before = snapshot(optimizer)
    right = optimizer.param_groups[0][argument]
    optimizer.param_groups[0][argument] = value
    with pytest.raises(error, match=rf"AdamW8bit: {argument}(\[\d\])? must be .*, got"):
        train(optimizer, range(1, 2))
    optimizer.param_groups[0][argument] = right
    assert same(snapshot(optimizer), before)


@pytest.mark.parametrize("key", ["lr", "betas", "optim_bits"])
def test_a_group_that_lost_a_key(key):
    optimizer = AdamW8bit([{"params": [p]} for p in make_params()[:2]])
    del optimizer.param_groups[1][key]
    with pytest.raises(ValueError, match=rf"^AdamW8bit: param_groups\[1\] must have '{key}'"):
        train(optimizer, range(1))


UNKNOWN = "AdamW8bit: params must be dense float32, float16 or bfloat16 tensors, got {} .* for parameter 1"


@pytest.mark.parametrize(
    "p",
    [torch.zeros(3, dtype=torch.complex64), torch.zeros(3, dtype=torch.float64), torch.zeros(3).to_sparse()],
    ids=["complex64", "float64", "sparse"],
)
def test_parameters_that_kernels_do_not_know_are_refused(p):
    with pytest.raises(TypeError, match=UNKNOWN.format(str(p.dtype)[6:])):
        AdamW8bit([nn.Parameter(torch.zeros(3)), nn.Parameter(p)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
def test_frozen_parameters_are_of_any_dtype(dtype):
    """As for torch.optim: model.parameters() of quantised weights with adapters. Only a gradient asks for a kernel."""
    optimizer = AdamW8bit([*make_params([(300,)]), nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)])
    trainable, frozen = optimizer.param_groups[0]["params"]
    for step in range(3):
        set_grads([trainable], step)
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert same(frozen.detach(), torch.ones(3, dtype=dtype)) and frozen not in optimizer.state
    frozen.grad = torch.ones(3, dtype=dtype)
    rejects(optimizer, TypeError, UNKNOWN.format(str(dtype)[6:]))


NUMPY = [
    ("lr", np.float32(0.5)),
    ("lr", np.float64(0.5)),
    ("betas", (np.float32(0.5), np.float64(0.75))),
    ("betas", [np.float16(0.5), 0.75]),
    ("weight_decay", np.float64(0.5)),
    ("optim_bits", np.int32(32)),
    ("min_8bit_numel", np.uint8(16)),
    ("maximize", np.bool_(True)),
]


@pytest.mark.parametrize(("argument", "value"), NUMPY, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("where", ["argument", "group", "later"])
def test_numbers_of_numpy_are_taken_as_pythons(where, argument, value):
    """NumPy numbers come from a configuration, or from a scheduler that computes with NumPy; what is saved is plain."""
    python = [x.item() if isinstance(x, np.generic) else x for x in (value if argument == "betas" else [value])]
    expected = AdamW8bit(make_params(), **{argument: tuple(python) if argument == "betas" else python[0]})
    if where == "argument":
        optimizer = AdamW8bit(make_params(), **{argument: value})
    elif where == "group":
        optimizer = AdamW8bit([{"params": make_params(), argument: value}])
    else:
        optimizer = AdamW8bit(make_params())
        optimizer.param_groups[0][argument] = value
    train(optimizer, range(2))
    train(expected, range(2))
    assert same(snapshot(optimizer), snapshot(expected))


def test_a_key_of_ones_own_with_a_number_of_numpy_is_saved_as_pythons():
    optimizer = AdamW8bit([{"params": make_params(), "temperature": np.float32(0.5)}])
    optimizer.param_groups[0]["lr"] = np.float64(0.25)
    group = optimizer.state_dict()["param_groups"][0]
    assert same([group["temperature"], group["lr"]], [0.5, 0.25])


def test_groups_of_another_adam_are_refused():
    with pytest.raises(ValueError, match="AdamW8bit: weight decay must be decoupled, got a group whose decay is L2"):
        AdamW8bit([{"params": make_params(), "decoupled_weight_decay": False}])
    with pytest.raises(ValueError, match="amsgrad must be False"):
        AdamW8bit([{"params": make_params(), "amsgrad": True}])


def rejects(optimizer: torch.optim.Optimizer, error: type[Exception], message: str) -> None:
    with rejected(optimizer, error, message):
        optimizer.step()


def _resized(p: Tensor, state: dict[str, Tensor]) -> None:
    """By hand, its state too."""
    for values in (p, *[value for key, value in state.items() if key != "step"]):
        values.data = values.data.view(-1)[:40].clone()


SPOILT: dict[str, tuple[Callable[[Tensor, dict[str, Tensor]], None], type[Exception], str]] = {
    "sparse": (
        lambda p, _: setattr(p, "grad", p.grad.to_sparse()),
        RuntimeError,
        "gradient of parameter 1 must be dense, got torch.sparse_coo",
    ),
    "shape": (
        lambda p, _: setattr(p.grad, "data", p.grad.view(10, 8)),
        ValueError,
        r"gradient of parameter 1 must have its shape, \(8, 10\), got \(10, 8\)",
    ),
    "numel": (_resized, ValueError, r"gradient of parameter 1 must have its shape, \(40,\), got \(8, 10\)"),
    "dtype": (
        lambda p, _: give_grad(p, p.grad.double()),
        TypeError,
        "gradient of parameter 1 must be float32, float16 or bfloat16, got float64",
    ),
    "param-dtype": (lambda p, _: setattr(p, "data", p.data.double()), TypeError, UNKNOWN.format("float64")),
}


@pytest.mark.promise("adam B5, B6, B12")
@pytest.mark.parametrize("stepped", [False, True], ids=["first-step", "later-step"])
@pytest.mark.parametrize(("spoil", "error", "message"), SPOILT.values(), ids=SPOILT)
def test_gradients_that_do_not_fit_change_nothing(spoil, error, message, stepped):
    """B5, B6, B12: the one wrong gradient is found before the right ones are used."""
    params = make_params([(5000,), (8, 10), (300,)])
    optimizer = AdamW8bit(params)
    if stepped:
        train(optimizer, range(1))
    set_grads(params, 1)
    spoil(params[1], optimizer.state.get(params[1], {}))
    rejects(optimizer, error, message)


@pytest.mark.parametrize("stepped", [False, True], ids=["first-step", "later-step"])
def test_messages_name_the_parameter_where_it_has_a_name(stepped):
    params = make_params([(5000,), (8, 10)])
    optimizer = AdamW8bit([{"params": [("embedding", params[0])]}, {"params": [("head.weight", params[1])]}])
    if stepped:
        train(optimizer, range(1))
    set_grads(params, 1)
    give_grad(params[1], params[1].grad.double())
    rejects(optimizer, TypeError, r"the gradient of parameter 1 \(head.weight\) must be float32, .*, got float64")


def test_parameters_on_the_meta_device_are_refused_at_the_step():
    params = [*make_params([(5000,)]), nn.Parameter(torch.zeros(3, device="meta"))]
    before = params[0].detach().clone()
    params[0].grad, params[1].grad = torch.ones(5000), torch.ones(3, device="meta")
    optimizer = AdamW8bit(params)
    with pytest.raises(TypeError, match="params must hold data, got one on meta for parameter 1"):
        optimizer.step()
    assert same(params[0].detach(), before) and not optimizer.state


@pytest.mark.promise("adam B10, B11")
def test_parameters_that_share_memory_are_refused():
    """B10: two updates of the same element would race."""
    base = torch.randn(8192)
    square = base[:4096].view(64, 64)
    for views in (
        (base, base),
        (base[:5000], base[4000:]),
        (base.view(64, 128)[1], base[100:200]),
        (square, square.t()),
        (square[:, :3], square[:, :3]),
        (square[:, :3], square[:, 2:6]),
        (square[:, :3], base[3:64], base[128:130]),  # the first one's span goes past the second
        (square[:, :3], base.bfloat16().new_tensor(0).set_(base.untyped_storage(), 131, (2,))),  # half an element
    ):
        params = [nn.Parameter(view) for view in views]
        set_grads(params, 0)
        rejects(AdamW8bit(params), ValueError, "AdamW8bit: parameters must not share memory")
    for views in ((base[:4096], base[4096:]), (square[:, :3], square[:, 3:]), (square[:, :3], base[3:64])):
        train(AdamW8bit([nn.Parameter(view) for view in views]), range(1))


def test_a_parameter_that_overlaps_itself_is_refused():
    p = nn.Parameter(torch.zeros(1, 3).expand(2, 3))
    p.grad = torch.ones(2, 3)
    rejects(AdamW8bit([p]), ValueError, "AdamW8bit: parameter 0 must not overlap itself")


def _cast(key: str, dtype: torch.dtype) -> Callable[[Tensor, dict[str, Any]], None]:
    return lambda _, state: state.update({key: state[key].to(dtype)})


STATE_DAMAGES: dict[str, tuple[Callable[[Tensor, dict[str, Any]], None], str]] = {
    "more": (lambda _, state: state.update(momentum=torch.zeros(1)), " must have the tensors that a step made"),
    "no-tensor": (lambda _, state: state.update(n_steps=1), " must have the tensors that a step made"),
    "shorter": (
        lambda _, state: state.update(exp_avg_codes=state["exp_avg_codes"][:100].clone()),
        r": exp_avg_codes must be uint8 of shape \(4096,\), contiguous on cpu, got uint8 of shape \(100,\)",
    ),
    "parameter-cut-in-place": (
        lambda p, _: setattr(p, "data", p.data[:40]),
        r": exp_avg_codes must be uint8 of shape \(40,\), .*, got uint8 of shape \(4096,\)",
    ),
    "strided": (
        lambda _, state: state.update(exp_avg_codes=state["exp_avg_codes"].repeat_interleave(2)[::2]),
        r": exp_avg_codes must be .*, contiguous on cpu, got uint8 of shape \(4096,\), strides \(2,\) on cpu",
    ),
    "codes-dtype": (_cast("exp_avg_codes", torch.float32), r": exp_avg_codes must be uint8 .*, got float32"),
    "step-dtype": (_cast("n_steps", torch.int64), r": n_steps must be float32 of shape \(\), .*, got int64"),
    "shorter-scale": (
        lambda _, state: state.update(exp_avg_scale=state["exp_avg_scale"][:1]),
        r": exp_avg_scale must be float32 of shape \(32,\), .*, got float32 of shape \(1,\)",
    ),
}


@pytest.mark.parametrize(("damage", "message"), STATE_DAMAGES.values(), ids=STATE_DAMAGES)
def test_a_state_that_does_not_fit_is_refused(damage, message):
    """Kernels read it by address, and would read or write beyond a tensor of another dtype or size."""
    params = make_params([(4096,), (10,)])
    optimizer = AdamW8bit(params)
    train(optimizer, range(1))
    params[0].grad = None
    damage(params[0], optimizer.state[params[0]])
    set_grads(params, 1)
    rejects(optimizer, ValueError, "AdamW8bit: state of parameter 0" + message)


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("bits", [8, 32])
def test_without_a_scaler_what_is_not_finite_propagates(value, bits):
    """As torch.optim: the element is lost; of 8-bit states its block, never a neighbour of the block."""
    params = make_params([(4096,)])
    optimizer = AdamW8bit(params, optim_bits=bits)
    train(optimizer, range(1))
    set_grads(params, 1)
    params[0].grad[200] = value
    optimizer.step()
    finite = params[0].detach().isfinite()
    lost = range(128, 256) if bits == 8 else (200,)
    assert not finite[200] or bits == 8
    train(optimizer, range(2, 3))
    finite = params[0].detach().isfinite()
    assert not finite[200] and not finite[list(lost)].any() and int((~finite).sum()) == len(lost)


@pytest.mark.promise("Q7")
@pytest.mark.parametrize("unscale", [False, True], ids=["fused", "unscaled-first"])
def test_grad_scaler(unscale):
    """Scaled gradients give the very step of plain ones (powers of two are exact); an overflow skips it and halves
    the scale."""
    params, expected = make_params(), make_params()
    optimizer, plain = AdamW8bit(params), AdamW8bit(expected)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(4):
        optimizer.zero_grad()
        set_grads(expected, step)
        for p, q in zip(params, expected, strict=True):
            weights = q.grad
            scaler.scale((p * weights).sum()).backward()
        if step == 2:
            params[0].grad[0] = math.inf
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if step != 2:
            plain.step()
    assert same(snapshot(optimizer), snapshot(plain)) and scaler.get_scale() == 512.0
    assert not hasattr(optimizer, "grad_scale")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "arguments",
    [{}, {"optim_bits": 32, "max_grad_norm": 1.0}, {"lr": torch.tensor(0.125)}],
    ids=["8", "32", "tensor-lr"],
)
@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("default", [torch.device("meta"), torch.bfloat16, torch.float64], ids=str)
@pytest.mark.promise("adam B9")
def test_torchs_default_device_and_dtype_change_nothing(default, name, arguments, tmp_path):
    """torch.set_default_device("cuda") put the tables of the host on the GPU: no step was possible."""
    with use_backend(name):
        expected = AdamW8bit(make_params(), **arguments)
        params = make_params()
        gradients = []
        for step in range(3):
            set_grads(params, step)
            gradients.append([p.grad if i or step < 2 else p.grad.bfloat16() for i, p in enumerate(params)])

        def steps(optimizer):
            for given in gradients:
                for p, grad in zip(optimizer.param_groups[0]["params"], given, strict=True):
                    give_grad(p, grad)
                optimizer.grad_scale, optimizer.found_inf = 2.0, torch.tensor(0.0, device="cpu")
                optimizer.step()

        steps(expected)
        code_map.cache_clear()
        thresholds.cache_clear()
        with default if isinstance(default, torch.device) else default_dtype(default):
            steps(optimizer := AdamW8bit(params, **arguments))
            optimizer.save_safetensors(tmp_path / "optimizer.safetensors")
            optimizer.load_safetensors(tmp_path / "optimizer.safetensors")
        assert same(snapshot(optimizer), snapshot(expected))


@pytest.mark.promise("Q4")
def test_zero_gradients_forever():
    """Q4: finite, and unchanged without weight decay."""
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = AdamW8bit(params, weight_decay=0.0)
    for _ in range(20):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert same([p.detach() for p in params], before)
