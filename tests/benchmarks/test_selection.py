"""Which cases the options mean, and what is refused."""

import pytest
import torch
from onetrip.benchmarks.measure.checks import Truth, make_inputs
from onetrip.benchmarks.run.options import Options, UsageError
from onetrip.benchmarks.run.selection import TAKES, operators, select
from onetrip.benchmarks.suites import bench_overhead, softmax


def ids(*, only: str | None = None, quick: bool = True, **words: list[str]) -> list[str]:
    return [case.id for cases in select(Options.parse(only, quick, **words)).values() for case in cases]


def test_without_options_every_suite_has_cases() -> None:
    assert set(select(Options())) == set(operators())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"ops": ["rms_norm"], "shapes": ["7x5"]}, ["rms_norm-M7-N5-fp32"]),
        ({"ops": ["softmax"], "only": "softmax-M"}, [f"softmax-M{4 << 20 >> n}-N{1 << n}-fp32" for n in (6, 10, 16)]),
        ({"ops": ["add_rms_norm"], "dtypes": ["float16"]}, ["add_rms_norm-M4096-N1024-fp16"]),
        (
            {"ops": ["layer_norm", "rms_norm"], "shapes": ["7x5", "8x4"], "dtypes": ["fp32", "bf16"]},
            [
                f"{op}-{shape}-{dtype}"
                for dtype in ("fp32", "bf16")
                for op in ("layer_norm", "rms_norm")
                for shape in ("M7-N5", "M8-N4")
            ],
        ),
        (
            {"ops": ["bias_dropout_residual_layer_norm"], "shapes": ["8x8"]},
            [f"bias_dropout_residual_layer_norm-p{p}-M8-N8-fp32" for p in ("0.1", "0")],
        ),
        ({"ops": ["attention-L64-p0"], "dtypes": ["bf16"]}, ["attention-L64-p0-M49152-N64-bf16"]),
        ({"ops": ["adam"], "dtypes": ["bf16"], "only": "bert"}, ["adam-bert_base-bf16"]),
        ({"ops": ["overhead"], "only": "overhead-softmax-grad"}, ["overhead-softmax-grad"]),
    ],
)
def test_operators_dtypes_and_shapes(words: dict[str, list[str]], expected: list[str]) -> None:
    assert sorted(ids(**words)) == sorted(expected)


def test_an_operator_is_not_its_overhead() -> None:
    assert not [name for name in ids(ops=["layer_norm"]) if name.startswith("overhead")]


def test_passes_are_those_of_every_case() -> None:
    found = select(Options.parse(quick=True, passes=["both", "forward"]))
    assert set(found) == {"row_norm", "softmax", "attention"}
    assert {case.passes for cases in found.values() for case in cases} == {("forward", "forward_backward")}


@pytest.mark.parametrize(
    ("against", "suites"),
    [
        (["sdpa"], {"attention"}),
        (["torchao"], {"adam"}),
        (["liger"], {"row_norm", "softmax", "attention", "overhead"}),
        (["eager"], {"row_norm", "softmax", "attention", "overhead", "adam"}),
    ],
)
def test_suites_that_cannot_race_against_anyone_named_are_left_out(against: list[str], suites: set[str]) -> None:
    assert set(select(Options.parse(quick=True, against=against))) == suites


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"ops": ["sofmax"]}, "--op sofmax: no such operator; there are row_norm, softmax, attention"),
        ({"ops": ["sofmax"]}, "bias_dropout_residual_layer_norm, bias_dropout_residual_layer_norm-p0.1"),
        ({"dtypes": ["int8"]}, "--dtype int8: no such thing; there are fp32, fp16, bf16, float32, float16, bfloat16"),
        ({"passes": ["sideways"]}, "--pass sideways: no such thing; there are forward, backward, both"),
        ({"against": ["cudnn"]}, "--against cudnn: no such thing; there are eager, sdpa, compile"),
        ({"shapes": ["4096"]}, "--shape 4096: must read ROWSxCOLS, for example 4096x1024"),
        ({"shapes": ["0x64"]}, "--shape 0x64: must read ROWSxCOLS"),
        ({"ops": ["attention"], "shapes": ["8x64"]}, "attention has no --shape"),
        ({"ops": ["bert_blocks"], "dtypes": ["bf16"]}, "bert_blocks has no --dtype"),
        ({"ops": ["adam"], "against": ["liger"]}, "adam has no liger to race against: there are eager, bitsandbytes"),
        ({"shapes": ["8x8"], "against": ["sdpa"]}, "no suite has all of --quick --shape=8x8 --against=sdpa"),
        (
            {"only": "nothing", "ops": ["add_rms_norm"]},
            "--only nothing: no such case. There are:\n  add_rms_norm-M4096",
        ),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(words: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ids(**words)
    assert message in str(error.value)


def test_options_survive_the_way_to_pytest() -> None:
    words = {"quick": True, "ops": ["softmax", "adam"], "dtypes": ["bf16", "fp32"], "shapes": ["3x5"]}
    options = Options.parse("a*", **words, passes=["both", "backward"], against=["compile", "cpu"])
    assert options.words() == [
        "--quick", "--only=a*", "--op=softmax", "--op=adam", "--dtype=bf16", "--dtype=fp32", "--shape=3x5",
        "--pass=backward", "--pass=both", "--against=compile", "--against=cpu",
    ]  # fmt: skip
    assert options.partial
    assert not Options().partial


def test_suites_that_take_options_exist() -> None:
    assert set(TAKES) <= set(operators())


@pytest.mark.parametrize("n_rows", [1, 7, 8192, 3 * 8192])
def test_scaled_masked_softmax_takes_any_number_of_rows(n_rows: int) -> None:
    operator = softmax.ATTENTION_SOFTMAX[0.0]
    inputs = make_inputs(operator, n_rows, 16, torch.float32, torch.device("cpu"), seed=0)
    truth = Truth(operator, inputs)
    for form in (operator.eager, operator.fused):
        check = truth.check(form)
        assert check.passed, check.detail


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", bench_overhead.OPERATORS, ids=lambda operator: operator.name)
def test_every_operator_can_be_checked_on_the_shape_of_the_overhead(
    operator: softmax.Operator, dtype: torch.dtype
) -> None:
    shape = bench_overhead.N_ROWS, bench_overhead.N_COLS
    truth = Truth(operator, make_inputs(operator, *shape, dtype, torch.device("cpu"), seed=0))
    for form in (operator.eager, operator.fused):
        check = truth.check(form)
        assert check.passed, check.detail
