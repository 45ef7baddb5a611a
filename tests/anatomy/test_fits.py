import re

import pytest
from onetrip import anatomy

GB = 10**9


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GB", 16 * GB),
        ("24GiB", 24 << 30),
        ("1.5 gb", 3 * GB // 2),
        ("800MB", 800 * 10**6),
    ],
)
def test_memory_size(text, expected):
    assert anatomy.memory_size(text) == expected


@pytest.mark.parametrize("text", ["", "16", "GB", "0GB", "-1GB", "16 GBs", "16KB", "A100-40GB"])
def test_what_is_no_size_raises(text):
    with pytest.raises(anatomy.UsageError, match=re.escape(f"--fits must be a size as 16GB or 24GiB, got {text}")):
        anatomy.memory_size(text)


def peaks(*terms):
    """The peak of a step is the largest of some lines: (resident, per sample) each. And the batch sizes asked for."""
    asked = []

    def peak_of(batch):
        asked.append(batch)
        return max(resident + slope * batch for resident, slope in terms)

    return peak_of, asked


@pytest.mark.parametrize(
    ("terms", "memory", "expected"),
    [
        pytest.param([(100, 10)], 109, 0, id="not-even-one"),
        pytest.param([(100, 10)], 110, 1, id="just-one"),
        pytest.param([(100, 10)], 129, 2, id="two"),
        pytest.param([(100, 10)], 1095, 99, id="a-line"),
        pytest.param([(300, 0), (100, 10)], 1095, 99, id="flat-at-first"),
        pytest.param([(300, 1), (100, 10)], 100_000, 9990, id="almost-flat-at-first"),
        pytest.param([(300, 0)], 1095, 1 << 20, id="flat-for-ever"),
        pytest.param([(50, 3), (0, 7), (-9000, 11)], 77_777, 7888, id="three-pieces"),
    ],
)
def test_largest_batch(terms, memory, expected):
    peak_of, asked = peaks(*terms)
    found, peak = anatomy.largest_batch(peak_of, memory)
    assert found == expected
    assert peak == (peak_of(found) if found else None)
    assert expected + 1 in asked or expected == 1 << 20  # the size above was asked, and does not fit


@pytest.mark.parametrize(
    ("terms", "memory", "expected", "most", "largest"),
    [
        pytest.param([(300, 1), (100, 10)], 100_000, 9990, 12, 1 << 15, id="a-line"),
        pytest.param([(300, 1), (-100_000, 100)], 1_200, 900, 16, 1 << 12, id="a-kink"),
        pytest.param([(62_000, 0), (50_000, 6_000)], 74_000, 4, 8, 16, id="small-sizes-take-the-same"),
    ],
)
def test_the_search_is_short_and_does_not_leap_far_beyond(terms, memory, expected, most, largest):
    peak_of, asked = peaks(*terms)
    assert anatomy.largest_batch(peak_of, memory)[0] == expected
    assert len(asked) <= most and max(asked) <= largest


@pytest.mark.slow
def test_fits_in_columns():
    result = anatomy.compare(anatomy.Options("tiny-bert", 4, 64, columns=("eager", "patched_adamw8bit"), fits="40MB"))
    for column in result.columns.values():
        assert column.measured is None
        assert column.fit.peak == column.predicted.peak
        assert column.fit.margin == 40 * 10**6 - column.fit.peak
        assert column.fit.fits == (column.fit.margin >= 0)
        assert column.fit.peak_at_largest <= 40 * 10**6
    eager, lean = (column.fit for column in result.columns.values())
    assert 0 < eager.largest_batch < lean.largest_batch
    again = anatomy.Options("tiny-bert", lean.largest_batch + 1, 64, columns=("patched_adamw8bit",), fits="40MB")
    above = anatomy.compare(again).columns["patched_adamw8bit"].fit
    assert not above.fits and above.margin < 0
    assert above.largest_batch == lean.largest_batch
