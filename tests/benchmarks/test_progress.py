"""How long the rest will take, and where that is said."""

import io

import pytest
from onetrip.benchmarks.run.runner import Reporter, Watch, duration


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_the_rest_is_estimated_from_the_weight_of_what_is_done() -> None:
    clock = _Clock()
    watch = Watch({"full": 6.0, "narrow": 1.0, "wide": 1.0}, clock)
    assert watch.remaining() is None
    assert watch.words() == "0/3"
    clock.seconds = 60.0
    watch.end("full")
    assert watch.remaining() == pytest.approx(20.0)
    assert watch.words() == "1/3, about 20 s left"
    clock.seconds = 70.0
    watch.end("narrow")
    assert watch.remaining() == pytest.approx(10.0)
    watch.end("wide")
    assert watch.remaining() == pytest.approx(0.0)
    assert watch.share == 1.0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1:00"), (185, "3:05"), (3723, "1:02:03")]
)
def test_durations_read_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize("silent", [False, True], ids=["shown", "silent"])
def test_off_a_terminal_each_case_is_a_line(silent: bool) -> None:
    stream, clock = io.StringIO(), _Clock()
    with Reporter(Watch({"a[1]": 1.0, "b": 1.0}, clock), stream, silent) as reporter:
        reporter.start("a[1]")
        clock.seconds = 5.0
        reporter.end("a[1]")
        reporter.start("b")
        reporter.end("b")
    expected = "a[1] (0/2)\nb (1/2, about 5 s left)\n"
    assert stream.getvalue() == ("" if silent else expected)
