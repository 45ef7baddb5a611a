"""Who gets a number, and how it is measured."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from onetrip.benchmarks.measure import side_by_side
from onetrip.benchmarks.measure.cases import PASSES, Case, Operator, Provider, Session, Skip, selects
from onetrip.benchmarks.measure.providers import EAGER
from onetrip.benchmarks.measure.side_by_side import SideBySide, measure, needed_bytes, shortage
from onetrip.benchmarks.measure.timing import last_level_cache_bytes, summarise
from onetrip.benchmarks.suites import attention, row_norm, softmax
from torch import Tensor

CPU = torch.device("cpu")
DROPOUT = row_norm.BIAS_DROPOUT_RESIDUAL_LAYER_NORM[0.1]


class _CountingClock:
    """Every call takes one millisecond more than the one before."""

    def __init__(self) -> None:
        self.evictions = 0
        self._milliseconds = 0.0

    def evict(self) -> None:
        self.evictions += 1

    def time(self, function: Callable[[], object]) -> tuple[float, object]:
        self._milliseconds += 1.0
        return self._milliseconds, function()

    def captured(self, function: Callable[[], object]) -> Callable[[], object] | None:
        return None


class _ReplayingClock(_CountingClock):
    """Captures what it is told it can."""

    def __init__(self, impossible: str = "") -> None:
        super().__init__()
        self.captures = 0
        self._impossible = impossible

    def captured(self, function: Callable[[], object]) -> Callable[[], object]:
        self.captures += 1
        function()
        if self._impossible:
            raise RuntimeError(self._impossible)
        return lambda: None


def _side_by_side(
    operator: Operator,
    *providers: Provider,
    full: bool = True,
    wanted: tuple[str, ...] = (),
    clock: _CountingClock | None = None,
) -> SideBySide:
    case = Case(operator, 64, 48, torch.float32, full, wanted)
    return SideBySide(case, list(providers), CPU, clock or _CountingClock())


def _provider(name: str, function: Callable[..., object]) -> Provider:
    return Provider(name, lambda operator: function)


def failures(compared: SideBySide) -> dict[str, str]:
    return {c.provider.name: c.check.detail for c in compared._candidates if not c.check.passed}


def _wrong_output(**inputs: Tensor) -> Tensor:
    return row_norm.LAYER_NORM.eager(**inputs) + 1e-3


def _wrong_gradient(x: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight * 2 - weight.detach(), norm_bias)


def _not_a_number(**inputs: Tensor) -> Tensor:
    return row_norm.LAYER_NORM.eager(**inputs) * float("nan")


def _raises(**inputs: Tensor) -> Tensor:
    raise RuntimeError("no compiler here")


class _InPlaceBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        result = grad.clone()
        grad.zero_()
        return result


def _writes_into_its_gradient(**inputs: Tensor) -> Tensor:
    return _InPlaceBackward.apply(row_norm.LAYER_NORM.eager(**inputs))


def _writes_into_its_input(x: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    y = row_norm.LAYER_NORM.eager(x=x.clone(), weight=weight, norm_bias=norm_bias)
    x.detach()[0, 0] += 1.0
    return y


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_wrong_output, "output 0"),
        (_wrong_gradient, "dweight"),
        (_not_a_number, "not finite"),
        (_raises, "RuntimeError: no compiler here"),
        (_writes_into_its_gradient, "writes into what it is given: gradient of output 0"),
        (_writes_into_its_input, "writes into what it is given: x"),
    ],
    ids=["wrong-output", "wrong-gradient", "nan", "raises", "writes-gradient", "writes-input"],
)
def test_a_provider_that_fails_its_check_gets_no_number(function: Callable[..., Tensor], reason: str) -> None:
    compared = _side_by_side(row_norm.LAYER_NORM, EAGER, _provider("onetrip broken", function))
    compared.round()
    right, wrong = compared.record()["providers"]
    assert right["check"]["passed"]
    assert right["forward"]["samples"] == 1
    assert not wrong["check"]["passed"]
    assert reason in wrong["check"]["detail"]
    assert set(wrong) == {"name", "check"}
    assert failures(compared) == {"onetrip broken": wrong["check"]["detail"]}


def test_a_provider_that_cannot_be_bound_is_reported_and_the_others_are_measured() -> None:
    def bind(operator: Operator) -> Callable[..., Tensor]:
        raise AttributeError("module has no attribute 'layer_norm'")

    compared = _side_by_side(row_norm.LAYER_NORM, Provider("too old", bind), EAGER)
    compared.round()
    old, eager = compared.record()["providers"]
    assert old["check"]["detail"] == "AttributeError: module has no attribute 'layer_norm'"
    assert eager["forward"]["samples"] == 1


def test_what_a_provider_wrote_into_does_not_harm_the_next_one() -> None:
    compared = _side_by_side(row_norm.LAYER_NORM, _provider("rude", _writes_into_its_input), EAGER)
    assert set(failures(compared)) == {"rude"}


def test_a_provider_that_reuses_the_memory_of_its_outputs_passes_its_check() -> None:
    """As a CUDA graph does: each call overwrites what the one before returned."""
    memory = torch.empty(64, 48)

    def reuses(scores: Tensor, mask: Tensor) -> Tensor:
        y = softmax.ATTENTION_SOFTMAX[0.1].eager(scores=scores, mask=mask)
        memory.copy_(y.detach())
        return _InMemory.apply(y, memory)

    assert failures(_side_by_side(softmax.ATTENTION_SOFTMAX[0.1], EAGER, _provider("graph", reuses))) == {}


class _InMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, y: Tensor, memory: Tensor) -> Tensor:
        return memory.detach()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _drops_too_much(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x + bias, 0.2) * (0.8 / 0.9), (x.shape[-1],), weight, norm_bias)


def _forgets_to_scale(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    return F.layer_norm(residual + F.dropout(x + bias, 0.1) * 0.9, (x.shape[-1],), weight, norm_bias)


class _OtherMaskInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return F.dropout(x, 0.1)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return F.dropout(grad, 0.1)


def _redraws_in_backward(x: Tensor, residual: Tensor, bias: Tensor, weight: Tensor, norm_bias: Tensor) -> Tensor:
    return F.layer_norm(residual + _OtherMaskInBackward.apply(x + bias), (x.shape[-1],), weight, norm_bias)


@pytest.mark.parametrize("function", [_drops_too_much, _forgets_to_scale, _redraws_in_backward])
def test_wrong_dropout_fails_the_check(function: Callable[..., Tensor]) -> None:
    assert set(failures(_side_by_side(DROPOUT, EAGER, _provider("onetrip broken", function)))) == {"onetrip broken"}


def test_an_unavailable_provider_is_named_with_its_reason_and_never_bound() -> None:
    def bind(operator: Operator) -> Callable[..., Tensor]:
        raise AssertionError("bound")

    compared = _side_by_side(row_norm.RMS_NORM, EAGER, Provider("elsewhere", bind, lambda device: "needs a GPU"))
    compared.round()
    record = compared.record()
    assert record["unavailable"] == {"elsewhere": "needs a GPU"}
    assert [entry["name"] for entry in record["providers"]] == ["torch eager"]


@pytest.mark.parametrize("full", [True, False], ids=["full", "width"])
def test_providers_take_turns_and_every_timed_call_starts_cold(full: bool) -> None:
    clock = _CountingClock()
    twins = [Provider(name, EAGER.bind) for name in ("first", "second")]
    compared = SideBySide(Case(row_norm.RMS_NORM, 8, 8, torch.float32, full), twins, CPU, clock)
    compared.warm_up()
    clock.evictions, clock._milliseconds = 0, 0.0
    compared.round()
    compared.round()
    passes = 3 if full else 2
    assert clock.evictions == clock._milliseconds == 2 * (2 * passes + 2)  # 2 rounds of 2 providers and 2 copies
    first, second = compared.record()["providers"]
    assert first["forward"]["samples"] == second["forward"]["samples"] == 2
    # The first provider opens the first round, the second one the second: both medians are the same.
    assert first["forward"]["median_ms"] == second["forward"]["median_ms"]
    assert ("forward_backward" in first) is ("saved_bytes" in first) is full


class _SlowClock(_CountingClock):
    """Every call takes three seconds."""

    def time(self, function: Callable[[], object]) -> tuple[float, object]:
        return 3e3, function()


@pytest.mark.parametrize(("untimed_s", "calls_to_warm_up"), [(0.0, 2), (20.0, 0)], ids=["unknown", "known as slow"])
def test_who_takes_seconds_a_call_is_hardly_warmed_up_and_timed_three_times(
    untimed_s: float, calls_to_warm_up: int
) -> None:
    calls: list[str] = []

    def norm(**inputs: Tensor) -> Tensor:
        calls.append("")
        return row_norm.RMS_NORM.eager(**inputs)

    compared = _side_by_side(row_norm.RMS_NORM, _provider("slow", norm), clock=_SlowClock())
    compared._candidates[0].untimed_s = untimed_s
    calls.clear()
    compared.warm_up()
    assert len(calls) == calls_to_warm_up  # forward before backward, and both in one
    for _ in range(9):
        compared.round()
    assert [compared.record()["providers"][0][name]["samples"] for name in PASSES] == [3, 3, 3]


@pytest.mark.parametrize("full", [True, False], ids=["full", "width"])
def test_what_passes_as_its_twin_and_raises_itself_gets_no_number(full: bool) -> None:
    def bind(operator: Operator) -> Callable[..., object]:
        return operator.eager if operator.dropout_p == 0.0 else _raises

    operator = attention.cases(quick=True)[1].operator
    assert operator.twin is not None
    compared = SideBySide(Case(operator, 128, attention.WIDTH, torch.float32, full), [Provider("half", bind)], CPU)
    assert failures(compared) == {"half": "RuntimeError: no compiler here"}


@pytest.mark.parametrize("wanted", [PASSES[:1], PASSES[1:2], PASSES[2:], PASSES[::2]], ids="+".join)
def test_only_the_passes_that_were_asked_for_are_recorded(wanted: tuple[str, ...]) -> None:
    compared = _side_by_side(row_norm.RMS_NORM, EAGER, wanted=wanted)
    compared.round()
    assert tuple(name for name in PASSES if name in compared.record()["providers"][0]) == wanted


def test_kernels_alone_of_full_cases_are_timed_by_replays_of_a_capture() -> None:
    small = _ReplayingClock()
    _side_by_side(row_norm.RMS_NORM, EAGER, full=False, clock=small).replay(rounds=1)
    assert small.captures == 0
    clock = _ReplayingClock()
    compared = _side_by_side(row_norm.RMS_NORM, EAGER, clock=clock)
    compared.round()
    clock.evictions = 0
    compared.replay(rounds=5)
    (record,) = compared.record()["providers"]
    assert clock.captures == 2
    assert clock.evictions == 10
    assert {name: figures["samples"] for name, figures in record["graph"].items()} == {
        "forward": 5,
        "forward_backward": 5,
    }
    assert record["graph"]["forward"]["gb_per_s"] > 0
    assert record["forward"]["samples"] == 1


def test_what_cannot_be_captured_keeps_its_other_figures() -> None:
    compared = _side_by_side(row_norm.RMS_NORM, EAGER, clock=_ReplayingClock("operation not permitted"))
    compared.round()
    compared.replay(rounds=5)
    (record,) = compared.record()["providers"]
    assert record["no_graph"] == "RuntimeError: operation not permitted"
    assert "graph" not in record
    assert record["forward_backward"]["samples"] == 1


def test_bandwidth_is_the_declared_bytes_over_the_median() -> None:
    compared = _side_by_side(row_norm.LAYER_NORM, EAGER)
    compared.round()
    compared.replay(rounds=5)  # on a CPU there is none
    record = compared.record()
    forward = record["providers"][0]["forward"]
    assert not {"graph", "no_graph"} & set(record["providers"][0])
    assert forward["gb_per_s"] == pytest.approx(record["least_bytes"]["forward"] / forward["median_ms"] / 1e6)
    assert forward["share_of_copy"] == pytest.approx(forward["gb_per_s"] / record["copy"]["gb_per_s"])
    assert record["copy"]["gb_per_s"] == pytest.approx(2 * 64 * 48 * 4 / record["copy"]["median_ms"] / 1e6)


@pytest.mark.parametrize(("spare", "fits"), [(0, True), (-1, False)], ids=["fits", "one byte short"])
def test_a_case_that_does_not_fit_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, spare: int, fits: bool
) -> None:
    """Attention's scores count: the system would end the whole run, where memory is short."""
    (case,) = [case for case in attention.cases() if selects("attention-L16384-p0-M*-fp32", case.id)]
    truth = 3 * 16384 * 16384 * 8
    given = 16384 * attention.WIDTH * (14 * 4 + 7 * 8)
    monkeypatch.setattr(side_by_side, "free_bytes", lambda device: truth + given + spare)
    monkeypatch.setattr(SideBySide, "__init__", lambda *arguments: pytest.fail("measured"))
    outcome, words = (pytest.fail.Exception, "measured") if fits else (Skip, "needs at least 6.1 GiB")
    with pytest.raises(outcome, match=words):
        measure(case, Session(CPU))


def test_what_the_allocator_keeps_of_the_case_before_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 << 30, 16 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 13 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1 << 30)
    case = Case(row_norm.RMS_NORM, 1 << 24, 8, torch.float32, full=True)
    assert needed_bytes(case) == 8 << 30
    assert shortage(case, torch.device("cuda")) == ""
    larger = Case(row_norm.RMS_NORM, 1 << 26, 8, torch.float32, full=True)
    assert "14.0 GiB are free (18.0 GiB too much)" in shortage(larger, torch.device("cuda"))


def test_percentiles() -> None:
    assert summarise([float(value) for value in range(101)], "us") == {
        "median_us": 50.0,
        "p20_us": 20.0,
        "p80_us": 80.0,
        "samples": 101,
    }
    assert summarise([3.0], "ms") == {"median_ms": 3.0, "p20_ms": 3.0, "p80_ms": 3.0, "samples": 1}


def test_the_last_level_cache_is_larger_than_a_core_could_hide() -> None:
    assert last_level_cache_bytes() >= 1 << 20


def test_a_warm_operator_is_timed_right_after_a_call_with_the_same_inputs() -> None:
    clock, calls = _CountingClock(), []

    def function(**inputs: Tensor) -> Tensor:
        calls.append(inputs["x"].data_ptr())
        return row_norm.LAYER_NORM.eager(**inputs)

    compared = _side_by_side(row_norm.LAYER_NORM.warm(), _provider("counted", function), full=False, clock=clock)
    calls.clear()
    clock.evictions = 0
    compared.round()
    assert clock.evictions == 0  # nor for the two copies
    assert len(calls) == 3 and len(set(calls)) == 1  # before forward, forward, before backward
