"""The bytes that an operator declares, and the two forms that it gives."""

import pytest
import torch
from onetrip.benchmarks.measure.cases import PASSES, Operator, selects
from onetrip.benchmarks.measure.checks import Truth, make_inputs
from onetrip.benchmarks.runner import Options, runnable
from onetrip.benchmarks.show import targets
from onetrip.benchmarks.suites import attention, overhead, row_norm, softmax

N_ROWS, N_COLS, ITEMSIZE = 6, 40, 2
MATRIX, VECTOR = N_ROWS * N_COLS * ITEMSIZE, N_COLS * ITEMSIZE
OPERATORS = {operator.name: operator for operator in (*row_norm.FUSED, *row_norm.SINGLE)}

# Forward: read the inputs, write y, write z. Backward: read dy (and dz, z, weight), write the gradients.
DECLARED = {
    "layer_norm": (2 * MATRIX + 2 * VECTOR, 3 * MATRIX + 3 * VECTOR),
    "rms_norm": (2 * MATRIX + VECTOR, 3 * MATRIX + 2 * VECTOR),
    "bias_dropout_residual_layer_norm-p0.1": (4 * MATRIX + 3 * VECTOR, 4 * MATRIX + 4 * VECTOR),
    "bias_dropout_residual_layer_norm-p0": (4 * MATRIX + 3 * VECTOR, 3 * MATRIX + 4 * VECTOR),
    "bias_dropout_residual-p0.1": (3 * MATRIX + VECTOR, 2 * MATRIX + VECTOR),
    "add_rms_norm": (4 * MATRIX + VECTOR, 4 * MATRIX + 2 * VECTOR),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_declared_bytes_are_those_of_one_trip(name: str) -> None:
    least = OPERATORS[name].least_bytes(N_ROWS, N_COLS, ITEMSIZE)
    assert (least.forward, least.backward) == DECLARED[name]
    assert least.forward_backward == sum(DECLARED[name])


def test_what_causality_hides_need_not_be_read() -> None:
    hidden = 3 + 2 + 1  # of 4 queries, 8 keys
    least = softmax.CAUSAL_SOFTMAX.least_bytes(4, 8, 2)
    assert least.forward == least.backward == 2 * (3 * 32 - 2 * hidden)


def assert_both_forms_pass(operator: Operator, n_rows: int, n_cols: int, dtype: torch.dtype = torch.float32) -> None:
    truth = Truth(operator, make_inputs(operator, n_rows, n_cols, dtype, torch.device("cpu"), seed=0))
    for form in (operator.eager, operator.fused):
        check = truth.check(form)
        assert check.passed, check.detail


@pytest.mark.parametrize("operator", [*OPERATORS.values(), softmax.CAUSAL_SOFTMAX], ids=lambda operator: operator.name)
def test_both_forms_of_an_operator_pass_the_check(operator: Operator) -> None:
    assert_both_forms_pass(operator, 64, 80)


@pytest.mark.parametrize("n_rows", [7, 8192, 3 * 8192])
def test_scaled_masked_softmax_takes_any_number_of_rows(n_rows: int) -> None:
    assert_both_forms_pass(softmax.ATTENTION_SOFTMAX[0.0], n_rows, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", overhead.OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_can_be_checked_on_the_shape_of_the_overhead(operator: Operator, dtype: torch.dtype) -> None:
    assert_both_forms_pass(operator, overhead.N_ROWS, overhead.N_COLS, dtype)


def test_a_gradient_that_happens_to_be_zero_is_not_taken_for_a_dropped_element() -> None:
    operator = row_norm.BIAS_DROPOUT_RESIDUAL
    inputs = make_inputs(operator, 64, 48, torch.float32, torch.device("cpu"), seed=0)
    inputs.grad_outputs[0][0] = 0.0
    check = Truth(operator, inputs).check(operator.eager)
    assert check.passed, check.detail


def test_widths_of_the_targets_are_all_measured_at_the_same_size() -> None:
    for operator in row_norm.SINGLE:
        cases = [c for c in row_norm.cases() if c.operator is operator and c.dtype == torch.float32]
        assert [case.n_cols for case in cases] == [64, 128, 256, 512, 768, 1024, 2048, 4096, 8192, 16384]
        assert all(4_190_000 < case.n_rows * case.n_cols <= 4 << 20 for case in cases)


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize("module", [row_norm, softmax])
def test_ids_of_cases_are_unique(module, on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_a_gpu)
    ids = [case.id for case in module.cases()]
    assert len(set(ids)) == len(ids)


def test_a_gpu_is_asked_for_large_tensors_and_for_every_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = {case.id for case in row_norm.cases()}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    added = [case for case in row_norm.cases() if case.id not in elsewhere]
    assert not [case for case in row_norm.cases(quick=True) if case.id not in elsewhere]
    layer_norm = [case for case in added if case.operator is row_norm.LAYER_NORM and case.dtype == torch.bfloat16]
    assert {case.n_cols for case in layer_norm if case.n_rows * case.n_cols * 2 == 64 << 20} == {
        1 << k for k in range(8, 17)
    }
    assert {(1, 64), (1, 65536), (1024, 8192), (32768, 64), (32768, 8192)} <= {
        (case.n_rows, case.n_cols) for case in layer_norm
    }
    assert all(case.passes == PASSES for case in added)


def test_a_warm_target_is_the_worst_of_its_shapes_and_dtypes() -> None:
    shapes = [(shape, dtype) for shape in row_norm.WARM_SHAPES for dtype in ("fp32", "bf16")]
    cases = [
        {
            "operator": "warm_layer_norm",
            "dtype": dtype,
            "n_rows": shape[0],
            "n_cols": shape[1],
            "providers": [
                {"name": "torch eager", "backward": {"median_ms": 1.05 if shape == (256, 768) else 1.3}},
                {"name": "onetrip cpu", "backward": {"median_ms": 1.0}},
            ],
        }
        for shape, dtype in shapes
    ]
    [found] = [
        found
        for found in targets.verdicts({"row_norm": {"machine": {"device": "cpu"}, "cases": cases}})
        if found.reached is not None
    ]
    assert (found.measured, found.reached) == (f"1.05x (shape 256 x 768 fp32, the worst of {len(shapes)})", False)


@pytest.mark.parametrize(
    ("pattern", "selected"),
    [
        (None, True),
        ("rms", True),
        ("rms_norm-M*-bf16", True),
        ("layer", False),
        ("rms_norm-M*-fp32", False),
        ("layer,", False),
        ("layer,rms", True),
    ],
)
def test_a_pattern_is_a_glob_or_a_part(pattern: str | None, selected: bool) -> None:
    assert selects(pattern, "rms_norm-M4096-N1024-bf16") is selected


@pytest.mark.parametrize(
    ("dtype", "device", "asked_for", "runs"),
    [
        ("fp32", "cpu", [], True),
        ("bf16", "cpu", [], False),
        ("bf16", "cpu", ["bf16"], True),
        ("bf16", "cuda", [], True),
    ],
)
def test_attention_in_half_precision_is_for_a_gpu_or_asked_for(dtype, device, asked_for, runs, monkeypatch):
    """Flash kernels have no float32: in float32 only eager, SDPA's other backends and onetrip are compared."""
    monkeypatch.setattr(attention, "multiplies_bfloat16_in_vectors", lambda: False)
    cases = [case for case in attention.cases() if selects(f"attention-L64-p0-M*-{dtype}", case.id)]
    found, skipped = runnable({"attention": cases}, torch.device(device), Options.parse(dtype=asked_for))
    assert found == {"attention": cases if runs else []}
    assert runs or "--dtype bf16" in skipped[0]
    monkeypatch.setattr(attention, "multiplies_bfloat16_in_vectors", lambda: True)
    assert runnable({"attention": cases}, torch.device(device), Options.parse(dtype=asked_for))[0] == {
        "attention": cases
    }
