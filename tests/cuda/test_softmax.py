"""The CUDA kernels of softmax, run thread by thread on the CPU under AddressSanitizer and UBSan."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tools.gpusim.harness import build, check_calls, missing_tool, run, run_calls, run_to_same_bits
from tools.gpusim.softmax import Call, calls

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing_tool() is not None, reason=str(missing_tool()))]

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# (batch, heads, queries) x columns: both sides of every boundary of the table of paths, odd widths, several rows and
# row groups a block, a last group without a row, and causality with more and with fewer queries than keys.
SIZES = [
    ((2, 3, 5), 1), ((2, 2, 40), 3), ((3, 2, 9), 8), ((2, 3, 7), 9), ((2, 3, 11), 49), ((2, 2, 33), 64),
    ((1, 3, 5), 129), ((2, 2, 9), 256), ((2, 2, 5), 257), ((2, 1, 9), 512), ((2, 2, 3), 513), ((1, 2, 5), 1000),
    ((2, 2, 3), 1024), ((2, 1, 2), 1025), ((1, 2, 2), 2049), ((2, 1, 2), 5000), ((2, 1, 1), 8200),
]  # fmt: skip
WIDE = [((2, 1, 2), 16392), ((1, 2, 2), 16391), ((1, 1, 2), 32768), ((2, 1, 1), 32769)]


@pytest.fixture
def driver() -> Callable[[str], Path]:
    """The driver of a dtype, compiled when it is first asked for."""
    return lambda name: build("softmax", [[DTYPES[name]]])


def _id(size: tuple[tuple[int, int, int], int]) -> str:
    return f"{'x'.join(map(str, size[0]))}-N{size[1]}"


def in_turn(n_cols: Sequence[int]) -> pytest.MarkDecorator:
    """Each width once, the dtypes in turn."""
    return pytest.mark.parametrize(("n_cols", "dtype"), list(zip(n_cols, itertools.cycle(DTYPES), strict=False)))


@pytest.mark.parametrize("size", SIZES, ids=_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_reference(driver, dtype: str, size: tuple[tuple[int, int, int], int], tmp_path: Path) -> None:
    # Every thread order at the small sizes.
    orders = (0, 3, 4, 5) if size[1] <= 1100 else (4,)
    check_calls(driver(dtype), calls(DTYPES[dtype], *size, orders=orders), tmp_path)


@pytest.mark.parametrize("size", WIDE, ids=_id)
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_rows_match_reference(driver, dtype: str, size: tuple[tuple[int, int, int], int], tmp_path: Path) -> None:
    chosen = [replace(call, clusters=False) for call in calls(DTYPES[dtype], *size, orders=(4,))]
    check_calls(
        driver(dtype), [call for call in chosen if call.name in ("padding", "bias_transposed", "causal")], tmp_path
    )


# A single block's width, the least and the most of every number of blocks, and warps that are not shared out evenly.
# The masks of "bias_of_batch" and "bias_transposed" have a row for every row of the scores.
@in_turn([9216, 12288, 16384, 16392, 20000, 32768, 40000, 65536])
def test_rows_in_clusters_match_reference(driver, dtype: str, n_cols: int, tmp_path: Path) -> None:
    chosen = calls(DTYPES[dtype], (2, 1, 2), n_cols, orders=(4,))
    if n_cols > 20000:  # thousands of fibers a row
        chosen = [call for call in chosen if call.name in ("padding", "bias_of_batch", "causal")]
    check_calls(driver(dtype), chosen, tmp_path)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_rows_in_clusters_in_every_order_of_threads(driver, dtype: str, tmp_path: Path) -> None:
    chosen = calls(DTYPES[dtype], (2, 2, 2), 9216, orders=(0, 3, 4, 5))
    check_calls(driver(dtype), [replace(call, row_padding=8) for call in chosen], tmp_path)


@in_turn([8704, 9216, 12288, 16384])
def test_a_cluster_gives_the_same_bits_as_a_block(driver, dtype: str, n_cols: int, tmp_path: Path) -> None:
    for call in calls(DTYPES[dtype], (2, 1, 2), n_cols, orders=(4,)):
        run_to_same_bits(driver(dtype), [call, replace(call, clusters=False)], tmp_path)


@pytest.mark.parametrize("n_visible", [-1, 3000, 9000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_causality_hides_whole_blocks_of_a_cluster(driver, dtype: str, n_visible: int, tmp_path: Path) -> None:
    """The first rows of many queries; with more queries than keys the first of them see nothing."""
    n_rows, n_cols = 4, 9216
    call = Call("causal", (1, 1, n_rows), n_cols, DTYPES[dtype], scale=1.0, orders=(0, 4))
    cases = [call.forward_case(), call.backward_case()]
    hidden = torch.arange(n_cols)[None, :] >= torch.arange(n_rows)[:, None] + n_visible
    for case in cases:
        case.numbers["n_queries"] = n_cols + 1 - n_visible
        for name, (tensor, shift) in case.inputs.items():
            case.inputs[name] = (tensor.view(n_rows, n_cols).masked_fill(hidden, float("nan")).flatten(), shift)
    forward, backward = run(driver(dtype), cases, tmp_path)
    given = {
        name: call.tensors()[name].double().masked_fill(hidden, fill)
        for name, fill in (("scores", float("-inf")), ("dy", 0.0))
    }
    y = torch.softmax(given["scores"], dim=1).nan_to_num(0.0)
    p = call.saved().double().masked_fill(hidden, 0.0)
    g = p * (given["dy"] - (p * given["dy"]).sum(dim=1, keepdim=True))
    step = torch.finfo(DTYPES[dtype]).eps
    for actual, expected in ((forward["y"], y), (backward["dscores"], g)):
        assert not actual[hidden].any()
        assert ((actual.double() - expected).abs() <= step * expected.abs() + 1e-6).all()


# Many rows share few rows of the mask: in parts with partial sums, joined in the block, a warp a row and several.
@pytest.mark.parametrize("size", [((40, 2, 1), 8), ((700, 1, 1), 20), ((70, 1, 2), 700), ((41, 1, 1), 5001)], ids=_id)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_gradient_of_a_shared_mask(driver, dtype: str, size: tuple[tuple[int, int, int], int], tmp_path: Path) -> None:
    common = {"dims": size[0], "n_cols": size[1], "dtype": DTYPES[dtype], "mask": torch.float32, "orders": (3, 4)}
    shared = Call("shared", **common, mask_has=(False, True, True, True), dropout_p=0.1)
    chosen = [shared, replace(shared, name="without dscores", wants_dscores=False, shift=1)]
    chosen.append(replace(shared, name="of all rows", mask_has=(False, False, False, True)))
    outputs = run(driver(dtype), [call.backward_case() for call in chosen], tmp_path)
    for call, actual in zip(chosen, outputs, strict=True):
        call.check_backward(actual)


def test_gradient_of_a_shared_mask_of_wide_rows(driver, tmp_path: Path) -> None:
    call = Call("wide", (19, 1, 1), 8201, torch.bfloat16, mask=torch.float32, mask_has=(False, True, True, True))
    (outputs,) = run(driver("bf16"), [replace(call, orders=(4,)).backward_case()], tmp_path)
    call.check_backward(outputs)


@pytest.mark.parametrize("size", [((2, 2, 3), 64), ((2, 2, 3), 1024), ((2, 1, 2), 16392), ((1, 1, 2), 32776)], ids=_id)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_same_bits_wherever_tensors_lie(
    driver, dtype: str, size: tuple[tuple[int, int, int], int], tmp_path: Path
) -> None:
    # Without clusters, which take aligned rows only.
    aligned = Call(
        "aligned", *size, DTYPES[dtype], mask=torch.bfloat16, mask_has=(True, False, True, True), causal=True,
        dropout_p=0.25, orders=(3,), clusters=False,
    )  # fmt: skip
    layouts = [
        aligned,
        replace(aligned, name="one element off", shift=1),
        replace(aligned, name="padded rows", row_padding=8, mask_padding=8),
        replace(aligned, name="odd row stride", row_padding=3, mask_padding=3),
    ]
    run_to_same_bits(driver(dtype), layouts, tmp_path)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_wide_rows_do_not_depend_on_shared_memory(driver, dtype: str, tmp_path: Path) -> None:
    """A GPU with little shared memory keeps less of a row there; the results are the same bits."""
    call = Call(
        "wide", (2, 1, 1), 33000, DTYPES[dtype], mask=torch.float32, mask_has=(False, True, True, True), orders=(0,),
        clusters=False,
    )  # fmt: skip
    limits = (227 * 1024, 163 * 1024, 96 * 1024, 48 * 1024)
    gpus = [replace(call, name=f"{limit} bytes", shared_limit=limit) for limit in limits]
    forward, backward = run_to_same_bits(driver(dtype), gpus, tmp_path)
    call.check_forward(forward)
    call.check_backward(backward)


@pytest.mark.parametrize(("n_cols", "clusters"), [(5, True), (300, True), (33000, True), (33000, False)])
def test_largest_values_and_masks(driver, n_cols: int, clusters: bool, tmp_path: Path) -> None:
    """Scores of +-finfo.max, and rows hidden by a finite mask (finfo.min), which are ordinary numbers."""
    largest = torch.finfo(torch.float32).max
    call = Call("max", (1, 2, 2), n_cols, torch.float32, mask=torch.float32, scale=1.0, orders=(4,), clusters=clusters)
    case = call.forward_case()
    scores = torch.randn(4, n_cols, generator=torch.Generator().manual_seed(n_cols))
    mask = torch.zeros(4, n_cols)
    scores[0, 1], scores[1] = largest, -largest
    mask[2], mask[3, 1:] = -largest, -largest
    case.inputs |= {"scores": (scores.flatten(), 0), "mask": (mask.flatten(), 0)}
    (outputs,) = run(driver("f32"), [case], tmp_path)
    expected = torch.softmax((scores + mask).double(), dim=1)
    assert (outputs["y"].double() - expected).abs().max() <= 1e-6


@pytest.mark.parametrize(("n_cols", "clusters"), [(7, True), (1000, True), (33000, True), (33000, False)])
def test_dropping_everything_gives_zero(driver, n_cols: int, clusters: bool, tmp_path: Path) -> None:
    call = Call("p1", (1, 1, 3), n_cols, torch.float32, dropout_p=1.0, orders=(4,), clusters=clusters)
    ((forward, backward),) = run_calls(driver("f32"), [call], tmp_path)
    for tensor in (forward["y"], backward["dscores"]):
        assert torch.equal(tensor, torch.zeros_like(tensor))
    assert torch.signbit(forward["p"]).all()


def test_probabilities_need_not_be_stored(driver, tmp_path: Path) -> None:
    call = Call("inference", (1, 2, 3), 100, torch.float16, dropout_p=0.2)
    with_p, without = run(driver("f16"), [replace(call, store_p=s).forward_case() for s in (True, False)], tmp_path)
    assert torch.equal(with_p["y"], without["y"])
