"""DeepSpeed ZeRO-2: optimizer states (8 bits) and gradients sharded, a patched model. Configuration: zero2.json.

pip install deepspeed && deepspeed examples/zero2.py [steps] on GPUs, where it was not run yet; on a CPU
torchrun --nproc_per_node 2 examples/zero2.py [steps]
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import onetrip
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main(steps):
    import deepspeed

    settings = json.loads(Path(__file__).with_name("zero2.json").read_text())
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=384)  # fmt: skip
    model = LlamaForCausalLM(config)
    report = onetrip.patch_model(model)
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=2e-3)  # ZeRO hands it flat float32 partitions
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    text = torch.tensor(list("\n".join(topics.values()).encode()), device=engine.device)
    torch.manual_seed(1 + engine.global_rank)
    losses = []
    for _ in range(steps * engine.gradient_accumulation_steps()):
        starts = torch.randint(len(text) - 128, (8, 1), device=engine.device)
        rows = text[starts + torch.arange(128, device=engine.device)]
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    if engine.global_rank == 0:
        print(report)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    engine.destroy()


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]  # the launcher's
    main(int(arguments[0]) if arguments else 60)
