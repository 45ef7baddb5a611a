"""docs/tuning.md has the table of what is recorded."""

from __future__ import annotations

import json

import pytest

from tools.sass import count_instructions


@pytest.mark.slow
def test_page_has_the_record() -> None:
    record = json.loads(count_instructions.RECORDED.read_text())
    page = count_instructions.PAGE.read_text()
    assert count_instructions.render(page, record) == page
    assert [(row["operator"], row["direction"], row["n_cols"]) for row in record["kernels"]] == [
        (counted.operator, counted.direction, counted.n_cols) for counted in count_instructions.cases()
    ]
