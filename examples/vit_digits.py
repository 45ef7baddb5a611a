"""A vision transformer on scikit-learn's 1,797 handwritten digits, patched, in half a minute on a CPU.

pip install scikit-learn && python examples/vit_digits.py [epochs]
"""

import sys

import onetrip
import torch
from sklearn.datasets import load_digits
from transformers import ViTConfig, ViTForImageClassification


def main(epochs):
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (1797, 1, 8, 8)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    test, train = order[:297], order[297:]

    config = ViTConfig(image_size=8, patch_size=2, num_channels=1, hidden_size=64, num_hidden_layers=4,
                       num_attention_heads=4, intermediate_size=128, num_labels=10)  # fmt: skip
    model = ViTForImageClassification(config)
    print(onetrip.patch_model(model))
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=2e-3)

    for epoch in range(epochs):
        model.train()
        for rows in train[torch.randperm(len(train))].split(100):
            model(pixel_values=images[rows], labels=labels[rows]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            logits = model.eval()(pixel_values=images[test]).logits
        accuracy = float((logits.argmax(-1) == labels[test]).float().mean())
        print(f"epoch {epoch + 1}: {accuracy:.1%} of the held-out digits are right")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
