"""Entries of the tables of recorded results: the number that sorts, and the text that is read."""

from __future__ import annotations

from typing import Any

from onetrip.html import Cell

_MIB = 1 << 20
Times = dict[str, Any]
"""A pass of a provider: median_ms, p20_ms, p80_ms, gb_per_s, share_of_copy."""


def three_digits(value: float) -> str:
    """Three significant digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def milliseconds(times: Times | None) -> Cell | None:
    """The median, and the 20th and 80th percentile in brackets."""
    if times is None:
        return None
    median, p20, p80 = (three_digits(times[name]) for name in ("median_ms", "p20_ms", "p80_ms"))
    return Cell(times["median_ms"], f"{median} ({p20}–{p80})")


def microseconds(times: Times | None) -> Cell | None:
    if times is None:
        return None
    return Cell(times["median_us"], f"{times['median_us']:.1f} ({times['p20_us']:.1f}–{times['p80_us']:.1f})")


def of_copy(times: Times | None) -> Cell | None:
    return None if times is None else Cell(times["share_of_copy"], f"{100 * times['share_of_copy']:.0f}%")


def percent(value: float | None) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.0f}%")


def gigabytes(times: Times | None) -> Cell | None:
    return None if times is None else Cell(times["gb_per_s"], f"{times['gb_per_s']:.1f}")


def ratio(value: float | None) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.2f}x")


def mib(count: int | None) -> Cell | None:
    return None if count is None else Cell(count, f"{count / _MIB:.1f}")


def error(value: float | None) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.0e}")


def fixed(value: float | None, digits: int) -> Cell | None:
    return None if value is None else Cell(value, f"{value:.{digits}f}")
