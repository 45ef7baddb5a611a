"""Which cases the options mean, and what is rejected."""

import subprocess
import sys

import pytest
from onetrip.benchmarks.measure.providers import AGAINST
from onetrip.benchmarks.measure.results import SUITES, UsageError
from onetrip.benchmarks.runner import TAKES, Options, select
from onetrip.benchmarks.suites.optimizers import PROVIDERS


def ids(*, only: str | None = None, quick: bool = True, **words: list[str]) -> list[str]:
    return [case.id for cases in select(Options.parse(only, quick, **words)).values() for case in cases]


def test_without_options_every_suite_has_cases() -> None:
    assert set(select(Options.parse())) == set(SUITES)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"op": ["rms_norm"], "shape": ["7x5"]}, ["rms_norm-M7-N5-fp32"]),
        ({"op": ["softmax"], "only": "softmax-M*"}, [f"softmax-M{4 << 20 >> n}-N{1 << n}-fp32" for n in (6, 10, 16)]),
        ({"op": ["add_rms_norm"], "dtype": ["float16"]}, ["add_rms_norm-M4096-N1024-fp16"]),
        (
            {"op": ["layer_norm", "rms_norm"], "shape": ["7x5", "8x4"], "dtype": ["fp32", "bf16"]},
            [
                f"{op}-{shape}-{dtype}"
                for dtype in ("fp32", "bf16")
                for op in ("layer_norm", "rms_norm")
                for shape in ("M7-N5", "M8-N4")
            ],
        ),
        (
            {"op": ["bias_dropout_residual_layer_norm"], "shape": ["8x8"]},
            [f"bias_dropout_residual_layer_norm-p{p}-M8-N8-fp32" for p in ("0.1", "0")],
        ),
        ({"op": ["attention-L64-p0"], "dtype": ["bf16"]}, ["attention-L64-p0-M49152-N64-bf16"]),
        ({"op": ["adam"], "dtype": ["bf16"], "only": "bert"}, ["adam-bert_base-bf16", "adam-bert_base_clipped-bf16"]),
        ({"op": ["overhead"], "only": "overhead-softmax-grad"}, ["overhead-softmax-grad"]),
    ],
)
def test_operators_dtypes_and_shapes(words: dict[str, list[str]], expected: list[str]) -> None:
    assert sorted(ids(**words)) == sorted(expected)


def test_an_operator_is_not_its_overhead() -> None:
    assert not [name for name in ids(op=["layer_norm"]) if name.startswith("overhead")]


def test_passes_are_those_of_every_case() -> None:
    found = select(Options.parse(quick=True, **{"pass": ["both", "forward"]}))
    assert set(found) == {"row_norm", "softmax", "rotary", "glu", "moe", "cross_entropy", "attention"}
    assert {case.passes for cases in found.values() for case in cases} == {("forward", "forward_backward")}


@pytest.mark.parametrize(
    ("against", "suites"),
    [
        (["sdpa"], {"attention"}),
        (["chunked"], {"cross_entropy"}),
        (["torchao"], {"adam"}),
        (["liger"], {"row_norm", "softmax", "rotary", "glu", "moe", "cross_entropy", "attention", "overhead"}),
        (["eager"], {"row_norm", "softmax", "rotary", "glu", "moe", "cross_entropy", "attention", "overhead", "adam"}),
    ],
)
def test_suites_that_cannot_race_against_anyone_named_are_left_out(against: list[str], suites: set[str]) -> None:
    assert set(select(Options.parse(quick=True, against=against))) == suites


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            {"op": ["sofmax"]},
            "--op sofmax: unknown value; choose from row_norm, softmax, rotary, glu, moe, cross_entropy, attention",
        ),
        ({"op": ["sofmax"]}, "bias_dropout_residual_layer_norm, bias_dropout_residual_layer_norm-p0.1"),
        ({"dtype": ["int8"]}, "--dtype int8: unknown value; choose from fp32, fp16, bf16, float32, float16, bfloat16"),
        ({"pass": ["sideways"]}, "--pass sideways: unknown value; choose from forward, backward, both"),
        ({"against": ["cudnn"]}, "--against cudnn: unknown value; choose from eager, sdpa, chunked, compile"),
        ({"shape": ["4096"]}, "--shape 4096: must read ROWSxCOLS, for example 4096x1024"),
        ({"shape": ["0x64"]}, "--shape 0x64: must read ROWSxCOLS"),
        ({"op": ["attention"], "shape": ["8x64"]}, "attention has no --shape"),
        ({"op": ["default_patch"], "dtype": ["bf16"]}, "default_patch has no --dtype"),
        (
            {"op": ["adam"], "against": ["liger"]},
            "adam has no liger: --against takes eager, apex, ",
        ),
        ({"shape": ["8x8"], "against": ["sdpa"]}, "no suite has all of --quick --shape=8x8 --against=sdpa"),
        (
            {"only": "nothing", "op": ["add_rms_norm"]},
            "--only nothing: unknown case; choose from:\n  add_rms_norm-M4096",
        ),
    ],
)
def test_what_does_not_exist_is_rejected_with_what_does(words: dict[str, list[str]], message: str) -> None:
    with pytest.raises(UsageError) as error:
        ids(**words)
    assert message in str(error.value)


def test_options_keep_the_words_of_the_command_line() -> None:
    given = {"op": ["softmax", "adam"], "dtype": ["bf16", "float32"], "shape": ["3x5"], "pass": ["both", "backward"]}
    options = Options.parse("a*", True, **given, against=["compile", "cpu"])
    assert options.words == (
        "--quick", "--only=a*", "--op=softmax", "--op=adam", "--dtype=bf16", "--dtype=float32", "--shape=3x5",
        "--pass=both", "--pass=backward", "--against=compile", "--against=cpu",
    )  # fmt: skip
    assert options.passes == ("backward", "forward_backward")
    assert Options.parse().words == ()


@pytest.mark.slow
def test_an_operator_loads_no_other_suite() -> None:
    code = """
import sys
from onetrip.benchmarks.runner import Options, select
select(Options.parse(op=["layer_norm"], quick=True))
print([name for name in sys.modules if name.startswith("onetrip.benchmarks.suites.")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['onetrip.benchmarks.suites.row_norm']\n"


def test_every_library_of_an_optimizer_can_be_asked_for() -> None:
    keys = {provider.key for provider in PROVIDERS} - {"onetrip"}
    assert keys == set(TAKES["adam"]["against"]) and keys <= set(AGAINST)
    assert set(TAKES) <= set(SUITES)
