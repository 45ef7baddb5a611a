"""A plain PyTorch loop: a model of one's own, patched; AdamW8bit; a schedule; saving and loading.

python examples/plain_loop.py [steps]
"""

import sys
import tempfile

import onetrip
import torch
from torch import nn


class Block(nn.Module):
    """Post-norm, as in BERT: the sum, its dropout and its norm become one kernel, bias and GELU another."""

    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.norm = nn.Dropout(dropout), nn.LayerNorm(width)

    def forward(self, x):
        h = self.down(nn.functional.gelu(self.up(x)))
        return self.norm(x + self.dropout(h))


def main(steps):
    """Learns a random linear map: the blocks have to get out of the way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(128) for _ in range(4)), nn.Linear(128, 128))
    truth = torch.randn(128, 128) / 128**0.5
    print(onetrip.patch_model(model))

    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    losses = []
    for _ in range(steps):
        x = torch.randn(256, 128)
        loss = nn.functional.mse_loss(model(x), x @ truth)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    with (
        tempfile.NamedTemporaryFile() as file
    ):  # the checkpoint of an unpatched model and of a patched one are the same
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file.name)
        checkpoint = torch.load(file.name, weights_only=True)
    onetrip.unpatch_model(model).load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
