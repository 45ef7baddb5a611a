"""transformers' Trainer: patched by OnetripCallback, AdamW8bit, bfloat16, gradient accumulation, and resuming.

    python examples/trainer_bert.py [steps]

Trains a small BERT on masked bytes of Python's own reference, and once more from the checkpoint of half-way.
"""

import sys
import tempfile
from pydoc_data.topics import topics

import torch
from onetrip.integrations import OnetripCallback
from onetrip.optim import trainer_optimizer
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

MASK, IGNORED = 0, -100
text = torch.tensor(list("\n".join(topics.values()).encode()))


class MaskedBytes(torch.utils.data.Dataset):
    """Rows of 128 bytes, 15% of them masked: the same ones in each epoch."""

    def __len__(self):
        return len(text) // 128

    def __getitem__(self, i):
        labels = text[i * 128 : i * 128 + 128]
        masked = torch.rand(128, generator=torch.Generator().manual_seed(i)) < 0.15
        return {"input_ids": labels.masked_fill(masked, MASK), "labels": labels.masked_fill(~masked, IGNORED)}


def make_trainer(folder, steps):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=512, max_position_embeddings=128)  # fmt: skip
    args = TrainingArguments(
        folder, max_steps=steps, save_steps=steps // 2, logging_steps=max(1, steps // 10), report_to=[], seed=0,
        per_device_train_batch_size=8, gradient_accumulation_steps=2, bf16=True, learning_rate=1e-3, weight_decay=0.01,
        disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    return Trainer(
        model=BertForMaskedLM(config),
        args=args,
        train_dataset=MaskedBytes(),
        callbacks=[OnetripCallback()],
        optimizer_cls_and_kwargs=trainer_optimizer(args),
    )


def main(steps):
    with tempfile.TemporaryDirectory() as folder:
        whole = make_trainer(folder, steps)
        whole.train()
        losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
        resumed = make_trainer(folder, steps)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{steps // 2}")
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; weights of the resumed training differ by {difference:.1e}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
