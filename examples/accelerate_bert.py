"""Accelerate: a patched BERT and AdamW8bit in a loop with mixed precision and gradient accumulation.

python examples/accelerate_bert.py [steps]          or: accelerate launch examples/accelerate_bert.py
"""

import sys
from pydoc_data.topics import topics

import onetrip
import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

LENGTH = 128


def dataset():
    """Half of the rows are bytes of Python's reference, the other half the same bytes shuffled: which is which?"""
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    shuffled = rows[:, torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0))]
    labels = torch.arange(2).repeat_interleave(len(rows))
    return torch.utils.data.TensorDataset(torch.cat([rows, shuffled]), labels)


def main(steps):
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = BertConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=512, max_position_embeddings=LENGTH)  # fmt: skip
    model = BertForSequenceClassification(config)
    report = onetrip.patch_model(model)  # before prepare, which stores the model's forward
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=5e-4)
    loader = torch.utils.data.DataLoader(dataset(), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    accelerator.print(report)
    losses = []
    for _, (input_ids, labels) in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=input_ids, labels=labels).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    accelerator.print(f"loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f}")
    onetrip.unpatch_model(accelerator.unwrap_model(model))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
