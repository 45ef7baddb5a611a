"""How far a run is, and how long the rest will take."""

import io

import pytest
from onetrip.benchmarks.runner import Reporter


@pytest.mark.parametrize("silent", [False, True], ids=["shown", "silent"])
def test_off_a_terminal_each_case_is_a_line_with_an_estimate_by_weight(silent: bool) -> None:
    stream = io.StringIO()
    clock = [0.0]
    with Reporter({"a[1]": 1.0, "b": 1.0, "full": 6.0}, stream, silent, lambda: clock[0]) as reporter:
        for case, clock[0] in (("a[1]", 5.0), ("b", 15.0), ("full", 75.0)):
            reporter.start(case)
            reporter.end(case)
    expected = "a[1] (0/3)\nb (1/3)\nfull (2/3, about 0:01:00 left)\n"
    assert stream.getvalue() == ("" if silent else expected)
