import pytest
from onetrip.measure import Spread
from onetrip.methods import memory_verdict, speed_verdict
from onetrip.methods.verdict import paired_ratio, unpaired_ratio

ENOUGH = 20


@pytest.mark.parametrize(
    ("median", "p20", "p80", "verdict"),
    [
        pytest.param(1.30, 1.20, 1.40, "yes", id="clearly-faster"),
        pytest.param(1.30, 0.99, 1.60, "no", id="faster-but-one-step-in-five-is-not"),
        pytest.param(1.015, 1.01, 1.02, "no", id="surely-faster-but-by-nothing-worth-it"),
        pytest.param(1.00, 0.95, 1.05, "no", id="the-same"),
        pytest.param(0.99, 0.985, 0.995, "no", id="surely-slower-but-by-nothing"),
        pytest.param(0.90, 0.80, 1.01, "no", id="slower-but-one-step-in-five-is-not"),
        pytest.param(0.70, 0.60, 0.80, "slower", id="clearly-slower"),
    ],
)
def test_speed(median, p20, p80, verdict):
    assert speed_verdict(Spread(median, p20, p80), ENOUGH) == verdict


def test_few_steps_give_no_verdict():
    fast = Spread(3.0, 2.9, 3.1)
    assert speed_verdict(fast, 4) == "unknown"
    assert speed_verdict(fast, 5) == "yes"


@pytest.mark.parametrize("drift", [0.08, -0.08])
def test_a_difference_no_larger_than_two_baselines_is_no_difference(drift):
    assert speed_verdict(Spread(1.07, 1.05, 1.09), ENOUGH, drift) == "no"
    assert speed_verdict(Spread(0.93, 0.91, 0.95), ENOUGH, drift) == "no"
    assert speed_verdict(Spread(1.10, 1.05, 1.15), ENOUGH, drift) == "yes"


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(0.5, "yes"), (0.98, "yes"), (0.995, "no"), (1.0, "no"), (1.005, "no"), (1.5, "more")]
)
def test_memory(ratio, verdict):
    assert memory_verdict(ratio) == verdict


def test_paired_ratio_cancels_what_slows_both():
    baseline = [1.0, 1.0, 5.0, 1.0, 9.0]
    twice_as_fast = [seconds / 2 for seconds in baseline]
    assert paired_ratio(baseline, twice_as_fast, samples_factor=1.0) == Spread(2.0, 2.0, 2.0)
    assert paired_ratio(baseline, baseline, samples_factor=4.0) == Spread(4.0, 4.0, 4.0)


def test_unpaired_ratio_bears_the_noise_of_both():
    ratio = unpaired_ratio(Spread(10.0, 8.0, 12.5), Spread(20.0, 16.0, 25.0))
    assert ratio == Spread(2.0, 16.0 / 12.5, 25.0 / 8.0)
