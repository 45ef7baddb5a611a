"""GPUs by name: their memory, and the lower bound of a step's time."""

import importlib

import pytest
import torch
from onetrip import anatomy
from onetrip.anatomy.gpus import known
from onetrip.measure.traffic import ATTENTION, LOSS, OPTIMIZER, OUTSIDE, PRODUCT, Traffic, traffic

GB = 10**9


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("A100-40GB", 40 * GB),
        ("a100 40gb", 40 * GB),
        ("H200", 141 * GB),
        ("RTX-4090", 24 * GB),
        ("T4", 14 << 30),  # ECC takes one of its 16 GiB, driver and context another
        ("l4", 43 << 29),
        ("L40S", 44 << 30),
    ],
)
def test_memory_by_name(name, expected):
    assert anatomy.usable_bytes(known(name)) == expected


@pytest.mark.parametrize("name", ["A100", "Z9-1TB", "16GB"])
def test_unknown_names_list_the_gpus(name):
    with pytest.raises(anatomy.UsageError, match=f"--gpu: unknown GPU '{name}'; choose from .*H100-80GB"):
        known(name)


SPEED = anatomy.Speed(bandwidth=1e9, flops={"bfloat16": 1e12}, source="made up")


def counted(*operators):
    moved = Traffic()
    for phase, name, kind, read, written, flops in operators:
        moved.add(phase, name, kind, read, written, flops)
    return moved


def test_bound_takes_the_longer_of_bytes_and_flops():
    moved = counted(
        ("forward", "aten::add", OUTSIDE, 2_000_000, 1_000_000, 0),
        ("forward", "aten::_log_softmax", LOSS, 500_000, 500_000, 0),
        ("forward", "aten::mm", PRODUCT, 1_000_000, 1_000_000, 5_000_000_000),
        ("backward", "aten::mm", PRODUCT, 3_000_000, 1_000_000, 1_000_000_000),
        ("optimizer", "aten::_foreach_add_", OUTSIDE, 4_000_000, 2_000_000, 0),
    )
    bound = anatomy.lower_bound(moved, SPEED, "bfloat16")
    assert (bound.outside, bound.loss, bound.optimizer) == pytest.approx((3.0, 1.0, 6.0))
    assert bound.products == pytest.approx(5.0 + 4.0)  # by its rate, by its bytes
    assert bound.attention == 0.0
    assert bound.step == pytest.approx(3.0 + 1.0 + 9.0 + 6.0)
    assert bound.to_dict()["step"] == bound.step


def test_without_a_published_rate_products_have_no_bound():
    moved = counted(("forward", "aten::mm", PRODUCT, 1, 1, 1), ("forward", "aten::add", OUTSIDE, 1, 1, 0))
    bound = anatomy.lower_bound(moved, SPEED, "float16")
    assert bound.products is None and bound.step is None and bound.outside > 0.0


def test_a_faster_gpu_is_never_slower():
    w = torch.randn(64, 64, requires_grad=True)
    moved = traffic(lambda: torch.relu(w @ w).sum().backward())
    names = ("A100-40GB", "A100-80GB", "H100-80GB", "H200")
    steps = [anatomy.lower_bound(moved, anatomy.SPEEDS[name], "bfloat16").step for name in names]
    assert steps == sorted(steps, reverse=True) and steps[-1] > 0.0


def test_autocast_casts_what_is_saved_and_products_run_at_its_rate(monkeypatch):
    monkeypatch.setattr(importlib.import_module("onetrip.anatomy.compare"), "largest_batch", lambda *_: (1, 0))
    plain, cast = (
        anatomy.compare(anatomy.Options("tiny-bert", 2, 32, gpu="A100-40GB", columns=("eager",), autocast=dtype))
        for dtype in (None, "bfloat16")
    )
    (before,), (after,) = plain.columns.values(), cast.columns.values()
    assert after.predicted.weights == before.predicted.weights == after.predicted.gradients
    assert after.predicted.traffic.bytes(PRODUCT) < before.predicted.traffic.bytes(PRODUCT)
    speed, moved = anatomy.SPEEDS["A100-40GB"], after.predicted.traffic
    assert after.bound.products == anatomy.lower_bound(moved, speed, "bfloat16").products
    assert after.bound.products < anatomy.lower_bound(moved, speed, "float32").products


@pytest.fixture(scope="module")
def on_gpu():
    columns = ("eager", "patched", "patched_adamw8bit")
    return anatomy.compare(anatomy.Options("tiny-bert", 2, 32, "bfloat16", gpu="A100-40GB", columns=columns))


@pytest.mark.slow
def test_a_named_gpu_gets_fits_traffic_and_a_bound(on_gpu):
    eager, patched, lean = on_gpu.columns.values()
    assert on_gpu.device.type == "cuda" and eager.measured is None and eager.fit.fits
    assert eager.predicted.traffic.bytes(ATTENTION) > 0  # flash attention
    assert patched.predicted.traffic.outside() < eager.predicted.traffic.outside()
    assert patched.bound.outside < eager.bound.outside and patched.bound.products == pytest.approx(
        eager.bound.products, rel=0.01
    )
    assert lean.bound.optimizer < 0.5 * patched.bound.optimizer
    # Parameters and states are read and written, gradients read.
    moved = lean.predicted.traffic.bytes(phase=OPTIMIZER)
    assert moved == 2 * (lean.predicted.weights + lean.predicted.optimizer_states) + lean.predicted.gradients
    described = on_gpu.to_dict()["columns"]["patched"]
    assert described["predicted"]["traffic"]["outside"] == patched.predicted.traffic.outside()
    assert described["bound"]["step"] == patched.bound.step


@pytest.mark.slow
def test_fused_operators_are_in_the_traffic(on_gpu):
    eager, patched, _ = (column.predicted.traffic.by_operator() for column in on_gpu.columns.values())
    assert {"onetrip::row_norm", "onetrip::row_norm_backward"} <= patched.keys()
    assert not any(name.startswith("onetrip") for name in eager)
    assert "aten::native_layer_norm" in eager and "aten::native_layer_norm" not in patched
