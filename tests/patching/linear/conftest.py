"""The model of the tests of readers."""

from __future__ import annotations

from typing import Any

import pytest
from onetrip.patching import patch_model
from patching_cases import Layer, randomised
from torch import nn


@pytest.fixture
def model() -> Any:
    """Two layers as BERT's, patched."""
    model = randomised(nn.Sequential(Layer(), Layer())).train()
    patch_model(model)
    return model
