"""The CUDA kernels of row_norm, run thread by thread on the CPU under AddressSanitizer and UBSan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.gpusim.harness import (
    Pair,
    assert_same_bits,
    assert_same_outputs,
    build,
    check_calls,
    missing_tool,
    run,
    run_calls,
    run_to_same_bits,
)
from tools.gpusim.row_norm import Call, calls

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))]

# float16 is compiled with float32 only; by itself it runs on the fake GPU and as machine code.
PAIRS: dict[str, Pair] = {
    "f32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "f16-f32": (torch.float16, torch.float32),
    "bf16-f32": (torch.bfloat16, torch.float32),
}
# Rows x columns: both sides of every boundary of the table of paths, odd widths, and enough rows for several blocks,
# several groups in a block and a last group without a row.
SIZES = [
    (5, 1), (300, 3), (19, 63), (700, 64), (33, 128), (70, 129), (140, 256), (36, 257), (33, 512),
    (40, 136), (20, 513), (140, 768), (9, 1000), (5, 1023), (70, 1024), (25, 1280), (7, 1792), (3, 4097),
    (3, 4096), (2, 8193), (2, 16384), (6, 16391),
]  # fmt: skip
# Mixed dtypes differ from float32 in how x is loaded: every kernel, half of the sizes. Two kinds of the widest rows, of
# thousands of fibers each.
CHOSEN_SIZES = {
    "f32": [*SIZES[:-3], (6, 16391)],
    "bf16": [*SIZES[:-1], (9, 192), (17, 200), (7, 384), (5, 392), (3, 776), (2, 2304)],
    "f16-f32": SIZES[::2],
    "bf16-f32": [*SIZES[1::2], (33, 512)],
}

# Calls at large sizes.
LARGE = ("rms_norm_offset", "block", "block_centred", "block_float32_y")


@pytest.fixture
def driver() -> Callable[[str], Path]:
    """The driver of a pair of dtypes, compiled when it is first asked for."""
    return lambda name: build("row_norm", [PAIRS[name]])


def _id(value: str | int | tuple[int, int]) -> str:
    return f"M{value[0]}-N{value[1]}" if isinstance(value, tuple) else str(value)


def in_turn(n_cols: Sequence[int], first: int = 0) -> pytest.MarkDecorator:
    """Each width once, the pairs of dtypes in turn."""
    pairs = itertools.islice(itertools.cycle(PAIRS), first, None)
    return pytest.mark.parametrize(("n_cols", "pair"), list(zip(n_cols, pairs, strict=False)))


def check_forwards(driver: Path, chosen: list[Call], folder: Path) -> None:
    for call, actual in zip(chosen, run(driver, [call.forward_case() for call in chosen], folder), strict=True):
        call.check_forward(actual)


@pytest.mark.parametrize(
    ("pair", "size"), [(pair, size) for pair, sizes in CHOSEN_SIZES.items() for size in sizes], ids=_id
)
def test_matches_reference(driver, pair: str, size: tuple[int, int], tmp_path: Path) -> None:
    # Every thread order and kind of call at the small sizes; wide rows are thousands of fibers each.
    large = size[0] * size[1] > 8000
    chosen = calls(PAIRS[pair], *size, orders=(4,) if large else (0, 3, 4, 5))
    if large:
        chosen = [call for call in chosen if call.name in LARGE]
    outputs = run_calls(driver(pair), chosen, tmp_path)
    # A GPU without asynchronous copies: other kernels, other parts of the rows. A row has the same bits.
    others = run(driver(pair), [replace(call, copies=False).backward_case() for call in chosen], tmp_path)
    for call, (forward, backward), elsewhere in zip(chosen, outputs, others, strict=True):
        call.check_forward(forward)
        call.check_backward(backward)
        call.check_backward(elsewhere)
        for name in {"dx", "dresidual"} & elsewhere.keys():
            assert_same_bits(f"{call.name} {name}", elsewhere[name], backward[name])


@in_turn([40, 200, 768, 1024, 4096, 8193])
def test_sums_that_are_asked_to_be_are_the_same_bits_on_every_gpu(
    driver, pair: str, n_cols: int, tmp_path: Path
) -> None:
    chosen = [
        call for call in calls(PAIRS[pair], 300 if n_cols < 300 else 21, n_cols, orders=(4,)) if call.name in LARGE
    ]
    for call in chosen:
        gpus = [replace(call, gpu_independent=True, copies=copies).backward_case() for copies in (True, False)]
        later, earlier = run(driver(pair), gpus, tmp_path)
        call.check_backward(later)
        assert_same_outputs(call.name, earlier, later)


# A single block's width, the least and the most of every number of blocks, and warps that are not shared out evenly.
@in_turn([9216, 12288, 16384, 16392, 20000, 32768, 40000, 65536])
def test_rows_in_clusters_match_reference(driver, pair: str, n_cols: int, tmp_path: Path) -> None:
    chosen = [call for call in calls(PAIRS[pair], 3, n_cols, orders=(4,)) if call.name != "block_no_norm"]
    check_forwards(driver(pair), chosen, tmp_path)


@pytest.mark.parametrize("pair", ["f32", "bf16"])
def test_rows_in_clusters_in_every_order_of_threads(driver, pair: str, tmp_path: Path) -> None:
    chosen = [replace(call, row_padding=8) for call in calls(PAIRS[pair], 8, 9216, orders=(0, 3, 4, 5))]
    check_forwards(driver(pair), chosen, tmp_path)


@in_turn([10240, 9216, 12288, 16384], first=1)
def test_a_cluster_gives_the_same_bits_as_a_block(driver, pair: str, n_cols: int, tmp_path: Path) -> None:
    for call in calls(PAIRS[pair], 3, n_cols, orders=(4,)):
        both = [replace(call, clusters=clusters).forward_case() for clusters in (True, False)]
        assert_same_outputs(call.name, *run(driver(pair), both, tmp_path))


@in_turn([16392, 16392, 32768, 32768])
def test_wide_rows_match_reference_without_clusters(driver, pair: str, n_cols: int, tmp_path: Path) -> None:
    chosen = [replace(call, clusters=False) for call in calls(PAIRS[pair], 2, n_cols, orders=(4,))]
    check_forwards(driver(pair), chosen, tmp_path)


# Two orders of threads where only rows are summed. 2048 blocks of threads add up the parts of the parameters' gradients
# of 65,536 columns, which takes the simulator 10 s an order.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_cols", "has_parameters", "orders"), [(65_536, True, (4,)), (262_144, False, (0, 4))], ids=["N65536", "N262144"]
)
def test_rows_far_wider_than_shared_memory(driver, n_cols: int, has_parameters: bool, orders, tmp_path: Path) -> None:
    present = dict.fromkeys(("bias", "weight", "norm_bias"), has_parameters)
    options = {"residual": True, "dropout_p": 0.1, "store_z": True, "dz": True, "orders": orders, "clusters": False}
    call = Call("wide", 2, n_cols, PAIRS["f32"], **present, **options)
    check_calls(driver("f32"), [call], tmp_path)


# None: y has x's dtype.
SAME_BITS = [
    *(("f32", None), ("bf16", None), ("f16-f32", None), ("bf16", torch.float32), ("bf16-f32", torch.float32)),
    *(("f32", torch.bfloat16), ("f32", torch.float16)),
]


def _of_each_size() -> list[object]:
    """Wide rows, which take seconds, with every other pair of dtypes in turn."""
    sizes = [(9, 64), (9, 256), (5, 768), (5, 1024), (20, 4104), (9, 8200), (3, 16400)]
    found = []
    for (i, types), (j, size) in itertools.product(enumerate(SAME_BITS), enumerate(sizes)):
        is_left = size[1] > 4000 and (i + j) % 2
        found.append(pytest.param(*types, size, marks=[pytest.mark.exhaustive] if is_left else []))
    return found


@pytest.mark.parametrize(("pair", "y_dtype", "size"), _of_each_size(), ids=_id)
def test_same_bits_wherever_tensors_lie(
    driver, pair: str, y_dtype: torch.dtype | None, size: tuple[int, int], tmp_path: Path
) -> None:
    # Without clusters, which take aligned rows only.
    options = {"residual": True, "bias": True, "dropout_p": 0.25, "store_z": True, "dz": True, "orders": (3,)}
    aligned = Call("aligned", *size, PAIRS[pair], **options, y_dtype=y_dtype, clusters=False)
    layouts = [
        aligned,
        replace(aligned, name="one element off", shift=1),
        replace(aligned, name="padded rows", row_padding=8),
        replace(aligned, name="odd row stride", row_padding=3),
    ]
    run_to_same_bits(driver(pair), layouts, tmp_path)


# Both sides of where a row takes more blocks, up to six rows a part: every stage is filled again.
@pytest.mark.parametrize(
    ("pair", "n_rows", "n_cols", "dz", "kilobytes"),
    [
        ("f32", 35, 4104, True, (227, 48)),
        ("bf16", 83, 4104, False, (227, 96)),
        ("bf16-f32", 20, 6000, True, (227, 96, 64)),
        ("f32", 5, 8192, False, (227, 163)),
        ("bf16", 5, 8192, True, (227, 163, 96)),
        ("bf16", 45, 8200, True, (227, 48)),
        ("f32", 20, 8200, False, (227, 64)),
        ("f16-f32", 9, 9000, True, (227, 96, 64)),
        ("f32", 9, 16384, True, (227,)),
        ("bf16", 22, 20000, False, (227,)),
        pytest.param("bf16", 11, 40000, True, (227,), marks=pytest.mark.exhaustive),
        pytest.param("f32", 2, 65536, False, (227,), marks=pytest.mark.exhaustive),
    ],
)
def test_wide_gradients_do_not_depend_on_the_gpu(
    driver, pair: str, n_rows: int, n_cols: int, dz: bool, kilobytes: tuple[int, ...], tmp_path: Path
) -> None:
    """A GPU with little shared memory copies fewer rows ahead, or none, and one may have no clusters of blocks."""
    call = Call(
        "wide", n_rows, n_cols, PAIRS[pair], residual=True, bias=True, dropout_p=0.1, store_z=True, dz=dz, orders=(0,)
    )
    call = replace(call, gpu_independent=True)
    # The first has the split kernels: with 32 KB no stage fits where a block has the row to itself either.
    gpus = [replace(call, clusters=False, shared_limit=32 * 1024)]
    gpus += [replace(call, shared_limit=limit * 1024) for limit in kilobytes]
    first, *others = run(driver(pair), [gpu.backward_case() for gpu in gpus], tmp_path)
    call.check_backward(first)
    for gpu, other in zip(gpus[1:], others, strict=True):
        assert_same_outputs(f"{gpu.shared_limit} bytes", other, first)


@pytest.mark.parametrize("pair", ["f32", "bf16", "bf16-f32"])
def test_wide_rows_do_not_depend_on_shared_memory(driver, pair: str, tmp_path: Path) -> None:
    """A GPU with little shared memory keeps less of z there; the results are the same bits."""
    block = {"residual": True, "bias": True, "dropout_p": 0.1, "orders": (0,), "clusters": False}
    for store_z, center_z in ((False, False), (True, False), (True, pair != "bf16")):
        call = Call("wide", 2, 33000, PAIRS[pair], **block, store_z=store_z, center_z=center_z)
        limits = (227 * 1024, 163 * 1024, 96 * 1024, 48 * 1024, 16 * 1024)
        cases = [replace(call, shared_limit=limit).forward_case() for limit in limits]
        first, *others = run(driver(pair), cases, tmp_path)
        call.check_forward(first)
        for limit, other in zip(limits[1:], others, strict=True):
            assert_same_outputs(f"{limit} bytes", other, first)


@pytest.mark.parametrize(
    ("pair", "size"),
    [
        *(("f32", (35, 4104)), ("bf16", (20, 8200)), ("bf16-f32", (35, 4104))),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("f32", (20, 8200)), ("bf16", (35, 4104)), ("bf16-f32", (20, 8200)))
        ),
    ],
    ids=_id,
)
def test_wide_gradients_of_every_call(driver, pair: str, size: tuple[int, int], tmp_path: Path) -> None:
    """Every kind of call, aligned and not; with little memory, so that rows wait for those before them."""
    aligned = [replace(call, shared_limit=96 * 1024) for call in calls(PAIRS[pair], *size, orders=(4,))]
    chosen = [*aligned, *(replace(call, shift=1) for call in aligned)]
    outputs = run(driver(pair), [call.backward_case() for call in chosen], tmp_path)
    for call, output in zip(chosen, outputs, strict=True):
        call.check_backward(output)
    for call, output, unaligned in zip(aligned, outputs, outputs[len(aligned) :], strict=False):
        assert_same_outputs(call.name, unaligned, output)


@pytest.mark.parametrize("clusters", [True, False], ids=["clusters", "split"])
@pytest.mark.parametrize("size", [(35, 4104), (20, 8200)], ids=_id)
def test_wide_gradients_under_every_order_of_threads(
    driver, size: tuple[int, int], clusters: bool, tmp_path: Path
) -> None:
    call = Call("orders", *size, PAIRS["bf16"], residual=True, bias=True, dropout_p=0.1, store_z=True, dz=True)
    # Without clusters, and too little memory for a stage where a block has the row to itself.
    call = replace(call, clusters=clusters, shared_limit=(96 if clusters else 32) * 1024)
    (outputs,) = run(driver("bf16"), [call.backward_case()], tmp_path)
    call.check_backward(outputs)


@pytest.mark.parametrize("n_cols", [1000, 20000])
def test_dropping_everything_gives_zero(driver, n_cols: int, tmp_path: Path) -> None:
    call = Call("p1", 3, n_cols, PAIRS["f32"], norm=0, bias=True, dropout_p=1.0, nan_where_dropped=True)
    ((forward, backward),) = run_calls(driver("f32"), [call], tmp_path)
    for tensor in (forward["z"], backward["dx"], backward["dbias"]):
        assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize(("n_cols", "clusters"), [(100, True), (1000, True), (20000, True), (20000, False)])
def test_variance_survives_a_large_mean(driver, n_cols: int, clusters: bool, tmp_path: Path) -> None:
    """mean / std = 1e4 in float32: a one-pass sum of squares would lose all of the variance."""
    call = Call("offset", 3, n_cols, PAIRS["f32"], weight=False, norm_bias=False, clusters=clusters)
    case = call.forward_case()
    x, shift = case.inputs["x"]
    case.inputs["x"] = (x + 1e4, shift)
    (outputs,) = run(driver("f32"), [case], tmp_path)
    rows = (x + 1e4).double().view(3, n_cols)
    expected = torch.nn.functional.layer_norm(rows, (n_cols,))
    torch_error = (torch.nn.functional.layer_norm(rows.float(), (n_cols,)).double() - expected).abs().max()
    assert (outputs["y"].double() - expected).abs().max() <= 2 * torch_error + 1e-5
