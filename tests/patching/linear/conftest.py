"""The model of the tests of readers."""

from __future__ import annotations

from typing import Any

import pytest
from onetrip.patching import patch_model
from patching_cases import TAIL_DROPOUT, Layer, randomised
from torch import nn


@pytest.fixture(params=[TAIL_DROPOUT, 0.0], ids=["dropout", "no dropout"])
def model(request: pytest.FixtureRequest) -> Any:
    """Two layers as BERT's, patched."""
    model = randomised(nn.Sequential(Layer(), Layer())).train()
    for layer in model:
        layer.mixed.dropout.p = layer.expanded.dropout.p = request.param
    patch_model(model)
    return model
