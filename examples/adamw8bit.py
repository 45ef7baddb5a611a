"""The optimizer alone: AdamW8bit in place of torch.optim.AdamW, in a model that is not patched.

python examples/adamw8bit.py [steps]
"""

import sys

import torch
from onetrip.optim import AdamW8bit
from torch import nn


def train(make_optimizer, steps):
    """(losses, bytes of optimizer state, number of parameters) of a network that learns a random linear classifier."""
    torch.manual_seed(0)
    truth = torch.randn(64, 2)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2))
    optimizer = make_optimizer(model.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(256, 64)
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    states = optimizer.state_dict()["state"].values()
    tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    return losses, sum(t.nbytes for t in tensors), sum(p.numel() for p in model.parameters())


def main(steps):
    for cls in (torch.optim.AdamW, AdamW8bit):
        losses, n_bytes, n_parameters = train(lambda parameters, cls=cls: cls(parameters, lr=1e-3), steps)
        print(
            f"{cls.__name__}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {n_bytes / n_parameters:.2f} bytes a parameter"
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
