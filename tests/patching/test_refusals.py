"""What must not be fused, however much it looks like a pattern."""

import torch
from onetrip.patching import patch_model
from torch import nn


class Block(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.dense, self.dropout, self.norm = nn.Linear(8, 8), nn.Dropout(1.0, inplace=inplace), nn.LayerNorm(8)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(hidden)
        hidden = self.dropout(hidden)
        return self.norm(hidden + residual)


def test_an_in_place_dropout_is_called_not_fused():
    report = patch_model(nn.ModuleDict({"block": Block(inplace=True)}))
    assert [site.pattern for site in report.patched] == ["add_norm"]


def test_a_dropout_made_in_place_later_falls_back():
    model = nn.ModuleDict({"block": Block(inplace=False)}).train()
    report = patch_model(model)
    model["block"].dropout.inplace = True
    model["block"](torch.randn(2, 8), torch.randn(2, 8))
    assert report.calls() == {"block": (0, 1)}


def test_torchscript_is_left_alone_and_the_rest_is_patched():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.LayerNorm(8))), nn.LayerNorm(8))
    report = patch_model(model)
    assert [site.name for site in report.patched] == ["1"]
    assert [(site.name, site.reason) for site in report.skipped] == [("0.0", "unknown_forward")]
