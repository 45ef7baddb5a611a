"""Comparisons that several files look at."""

from __future__ import annotations

import pytest
from onetrip import anatomy

TINY_BERT = {"model": "tiny-bert", "batch_size": 2, "sequence_length": 16, "steps": 1, "warm_up": 0}


@pytest.fixture(scope="package")
def result() -> anatomy.Comparison:
    return anatomy.compare(anatomy.Options(**TINY_BERT, device="cpu"))


@pytest.fixture(scope="package")
def predicted() -> anatomy.Comparison:
    return anatomy.compare(anatomy.Options(**TINY_BERT, predict_only=True, columns=("eager", "patched")))


@pytest.fixture(scope="package")
def fitted() -> anatomy.Comparison:
    return anatomy.compare(anatomy.Options(**TINY_BERT, columns=("eager",), fits="4MB"))
