"""A causal language model with linear cross-entropy: the loss over a large vocabulary without its logits.

    python examples/causal_lm.py [steps]

The vocabulary is 32,768 pairs of bytes. Prints what a step saves for backward: unpatched, patched, and patched
with the loss fused.
"""

import sys
from pydoc_data.topics import topics

import onetrip
import torch
from onetrip.measure import saved_bytes
from onetrip.patching import PATTERNS
from transformers import Qwen3Config, Qwen3ForCausalLM


def main(steps):
    torch.manual_seed(0)
    text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")))
    tokens = text[: len(text) // 2 * 2].view(-1, 2) @ torch.tensor([256, 1])
    config = Qwen3Config(vocab_size=2**15, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
                         num_key_value_heads=2, intermediate_size=384, tie_word_embeddings=True)  # fmt: skip
    model = Qwen3ForCausalLM(config)

    def loss():
        rows = tokens[torch.randint(len(tokens) - 128, (8, 1)) + torch.arange(128)]
        return model(input_ids=rows, labels=rows).loss

    kept = {"unpatched": saved_bytes(loss, list(model.parameters()))}
    onetrip.patch_model(model)
    kept["patched"] = saved_bytes(loss, list(model.parameters()))
    onetrip.unpatch_model(model)
    print(onetrip.patch_model(model, patterns=[*PATTERNS, "linear_cross_entropy"]))
    kept["loss without logits"] = saved_bytes(loss, list(model.parameters()))
    for name, n_bytes in kept.items():
        print(f"saved for backward, {name}: {n_bytes / 2**20:.1f} MiB")

    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        value = loss()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
