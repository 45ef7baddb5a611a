"""Runs a patched model in several processes, for tests/distributed/test_patched_models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from onetrip.optim import AdamW8bit
from onetrip.patching import links, patch_model
from patching_cases import gpt2
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

Optimizer = Callable[[Any], torch.optim.Optimizer]


def batch(rank: int) -> Tensor:
    return torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(rank))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw8bit(parameters: Any) -> torch.optim.Optimizer:
    """8 bits for the matrices. eps: the gradient of a key's bias is rounding noise, which Adam would scale up."""
    return AdamW8bit(parameters, lr=1e-2, eps=1e-3, min_8bit_numel=256)


def train(model: nn.Module, batches: list[Tensor], n_steps: int = 4, make: Optimizer = sgd) -> None:
    """Steps on the mean loss of the batches."""
    optimizer = make(model.parameters())
    for _ in range(n_steps):
        optimizer.zero_grad()
        losses: list[Any] = [model(input_ids=ids, labels=ids).loss / len(batches) for ids in batches]
        for loss in losses:
            loss.backward()
        optimizer.step()


def every_wrapper() -> None:
    """Train on this rank's batch; the weights must be those of one process that sees both batches, unpatched."""
    links.SMALLEST = 0  # also in the processes that start without conftest.py
    expected = gpt2().train()
    train(expected, [batch(rank) for rank in range(dist.get_world_size())])
    for kind in ("ddp", "fsdp2"):
        for patched in ("before", "after"):
            for (name, ours), theirs in zip(_trained(kind, patched), expected.parameters(), strict=True):
                what = f"{kind}, patched {patched} wrapping: {name}: "
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, w=what: w + text)


def _trained(kind: str, patched: str) -> list[tuple[str, Tensor]]:
    """The weights of a wrapped model after training, gathered."""
    model: Any = gpt2().train()
    if patched == "before":
        patch_model(model)
    if kind == "ddp":
        wrapped: Any = DistributedDataParallel(model)
    else:
        for layer in model.transformer.h:
            fully_shard(layer)
        wrapped = fully_shard(model)
    if patched == "after":
        patch_model(wrapped)
    train(wrapped, [batch(dist.get_rank())])
    ids = {id(module) for module in model.modules()}
    n_links = sum(site.link is not None for (owner, _), site in links._sites.items() if owner in ids)
    assert n_links > 0 or kind == "fsdp2"  # whose wrapped layers have hooks
    parameters = model.named_parameters()
    return [(name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in parameters]


def assert_same_weights(ours: nn.Module, theirs: nn.Module, what: str, rtol: float = 1e-3, atol: float = 1e-5) -> None:
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        pair = [each.full_tensor() if isinstance(each, DTensor) else each for each in (p, q)]
        torch.testing.assert_close(*pair, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{what}: {n}: {text}")


def sharded(model: Any, **policies: Any) -> Any:
    for layer in model.transformer.h:
        fully_shard(layer, **policies)
    return fully_shard(model, **policies)


POLICIES: dict[str, dict[str, Any]] = {
    "float32": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def fsdp2_with_adamw8bit(folder: str) -> None:
    """Under each policy, patched before and after sharding: the weights of the unpatched model, sharded alike. The
    checkpoint of a patched and sharded model is that of a plain one."""
    links.SMALLEST = 0
    rows = [batch(dist.get_rank())]
    for name, policies in POLICIES.items():
        expected = sharded(gpt2().train(), **policies)
        train(expected, rows, make=adamw8bit)
        close = {"rtol": 5e-2, "atol": 2e-2} if name == "mixed precision" else {"rtol": 1e-3, "atol": 5e-4}
        for patched in ("before", "after"):
            model: Any = gpt2().train()
            if patched == "before":
                patch_model(model)
            model = sharded(model, **policies)
            if patched == "after":
                patch_model(model)
            train(model, rows, make=adamw8bit)
            assert_same_weights(model, expected, f"{name}, patched {patched} sharding", **close)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    plain = gpt2()
    state = get_model_state_dict(plain)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(plain, state)
    assert_same_weights(model, plain, "checkpoint", rtol=0.0, atol=0.0)


def ddp_with_adamw8bit() -> None:
    """The weights of one process that sees all batches, within what another order of sums does to a code."""
    links.SMALLEST = 0
    expected = gpt2().train()
    train(expected, [batch(rank) for rank in range(dist.get_world_size())], make=adamw8bit)
    model = gpt2().train()
    patch_model(model)
    train(DistributedDataParallel(model), [batch(dist.get_rank())], make=adamw8bit)
    assert_same_weights(model, expected, "ddp", rtol=1e-3, atol=2e-3)


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape), alpha=0.05)
    return model


def parallelize(model: Any, sequence: bool) -> None:
    """Megatron's split of attention and MLP; with sequence, what lies between them is a DTensor sharded by positions,
    residual sums and norms included (Korthikanti et al. 2022)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    between: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    layer: dict[str, Any] = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    layer |= {name: RowwiseParallel(**between) for name in ("self_attn.o_proj", "mlp.down_proj")}
    if sequence:
        norm = SequenceParallel(use_local_output=False)
        layer |= {"input_layernorm": norm, "post_attention_layernorm": norm}
        layer["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        )
        layer["mlp"] = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        outside = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **between),
            "model.norm": norm,
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, outside)
    for each in model.model.layers:
        parallelize_module(each, mesh, layer)


def loss_and_gradients(model: Any, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


FUSED: dict[tuple[bool, str], set[str]] = {
    (False, "before"): {"rms_norm", "add_norm", "gated_mlp", "rotary"},
    (False, "after"): {"rms_norm"},  # sharded parameters are left alone
    (True, "before"): {"gated_mlp", "rotary"},  # norms and residual sums get DTensors: the original code runs
    (True, "after"): set(),
}
"""By sequence parallelism, and patched before or after parallelize_module."""


def tensor_parallel() -> None:
    """Loss and gradients of one process, unpatched; every later step too, when sums have found their norms."""
    links.SMALLEST = 0
    expected = llama()
    for sequence in (False, True):
        for patched in ("before", "after"):
            model = llama()
            if patched == "before":
                patch_model(model)
            parallelize(model, sequence)
            report = patch_model(model)
            for seed in range(3):
                ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
                theirs = loss_and_gradients(expected, ids)
                for name, tensor in loss_and_gradients(model, ids).items():
                    what = f"sequence {sequence}, patched {patched}, step {seed}: {name}: "
                    torch.testing.assert_close(
                        tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda text, w=what: w + text
                    )
            fused = {site.pattern for site in report.patched if report.calls()[site.name][0] > 0}
            assert fused == FUSED[sequence, patched], (sequence, patched, fused)
