"""PEFT: LoRA on a patched Llama. The adapters train; norms, gated products and rotary embeddings run fused.

python examples/lora_llama.py [steps]
"""

import sys
from pydoc_data.topics import topics

import onetrip
import torch
from onetrip.patching import PATTERNS
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def main(steps):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=384)  # fmt: skip
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=16, lora_alpha=64, target_modules="all-linear"))
    report = onetrip.patch_model(model, patterns=[*PATTERNS, "linear_cross_entropy"])
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=5e-3)

    text = torch.tensor(list("\n".join(topics.values()).encode()))
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - 128, (8, 1))
        rows = text[starts + torch.arange(128)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    print(report)  # with the number of calls of each kernel
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")

    merged = onetrip.unpatch_model(model).merge_and_unload().eval()
    prompt = torch.tensor([list(b"The statement")])
    print(bytes(merged.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)[0].tolist()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
