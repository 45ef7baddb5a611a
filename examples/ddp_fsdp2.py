"""Several processes: DDP or FSDP2 by torchrun, patched, with AdamW8bit. GPUs where there are any, else gloo on the CPU.

    torchrun --nproc-per-node 2 examples/ddp_fsdp2.py ddp [steps]
    torchrun --nproc-per-node 2 examples/ddp_fsdp2.py fsdp2 [steps]

FSDP2 computes in bfloat16 from float32 shards and saves a checkpoint that any number of processes can load.
"""

import os
import sys
import tempfile
from pydoc_data.topics import topics

import onetrip
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


def main(kind, steps):
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights everywhere
    config = LlamaConfig(vocab_size=256, hidden_size=128, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, intermediate_size=384)  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    report = onetrip.patch_model(model)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = onetrip.optim.AdamW8bit(model.parameters(), lr=2e-3)

    text = torch.tensor(list("\n".join(topics.values()).encode()), device=device)
    torch.manual_seed(1 + dist.get_rank())  # other rows on each
    losses = []
    for _ in range(steps):
        rows = text[torch.randint(len(text) - 128, (8, 1), device=device) + torch.arange(128, device=device)]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(float(mean))
    if dist.get_rank() == 0:
        print(report)
        print(f"{kind} on {dist.get_world_size()} processes: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if kind == "fsdp2":
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    dist.barrier()  # no thread of gloo holds a tensor when Python ends
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("ddp", "fsdp2"):
        sys.exit("usage: torchrun --nproc-per-node 2 examples/ddp_fsdp2.py {ddp,fsdp2} [steps]")
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 60)
