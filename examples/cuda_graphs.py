"""CUDA graphs: a whole training step, patched, with AdamW8bit(capturable=True), recorded once and replayed.

python examples/cuda_graphs.py [steps]              needs an NVIDIA GPU; on other machines it says so and exits
"""

import sys
import time

import onetrip
import torch
from transformers import BertConfig, BertForMaskedLM


def main(steps):
    if not torch.cuda.is_available():
        print("cuda_graphs: no CUDA device here, nothing was run")
        return
    torch.manual_seed(0)
    config = BertConfig(vocab_size=256, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                        intermediate_size=1024, hidden_dropout_prob=0.1)  # fmt: skip
    model = BertForMaskedLM(config).cuda().bfloat16().train()
    print(onetrip.patch_model(model))
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=1e-3, capturable=True)
    rows = torch.randint(256, (8, 128), device="cuda")  # the graph reads this tensor: copy each batch into it

    def step():
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # gradients, states and links between layers exist before the capture
        for _ in range(5):
            first = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for name, run in (("eager", step), ("graph", graph.replay)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
        print(f"{name}: {(time.perf_counter() - begin) / steps * 1e3:.2f} ms a step")
    print(f"loss {float(first):.3f} -> {float(loss):.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
