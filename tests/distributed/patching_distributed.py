"""Runs a patched model in several processes, for test_patched_models.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optim_distributed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from onetrip import ops
from onetrip.optim import AdamW8bit
from onetrip.patching import calls, links, patch_model
from onetrip.patching.linear import tied_embedding
from onetrip.patching.report import PatchReport
from patching_cases import gpt2
from tiny_models import bert, llama
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

PRELOAD = [
    *optim_distributed.PRELOAD,
    "onetrip.patching",
    "torch.distributed.tensor.parallel",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama")),
]

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


def link_all() -> None:
    """Also in the processes that start without conftest.py."""
    calls.SMALLEST = tied_embedding.SMALLEST = 0


def every_wrapper() -> None:
    """Train on this rank's batch; the weights must be those of one process that sees all batches, unpatched."""
    link_all()
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
        patch_with_loss(model)
    wrapped: Any = DistributedDataParallel(model) if kind == "ddp" else sharded(model)
    if patched == "after":
        patch_with_loss(wrapped)
    train(wrapped, [batch(dist.get_rank())])
    ids = {id(module) for module in model.modules()}
    n_links = sum(site.link is not None for (owner, _), site in links._sites.items() if owner in ids)
    assert n_links > 0 or kind == "fsdp2"  # whose wrapped layers have hooks
    parameters = model.named_parameters()
    return [(name, p.full_tensor() if isinstance(p, DTensor) else p) for name, p in parameters]


def callback_around_sharding() -> None:
    """What a Trainer does: the model is patched, then sharded; the report is that of the sharded model."""
    from onetrip.integrations import OnetripCallback
    from transformers import TrainerState

    link_all()
    expected = gpt2().train()
    train(expected, [batch(rank) for rank in range(dist.get_world_size())])
    model: Any = gpt2().train()
    n_sites = len(patch_model(gpt2().train()).patched)
    callback = OnetripCallback(log=None)
    given: Any = (None, TrainerState(), None, model)  # of Trainer: arguments, state, control
    callback.on_init_end(*given)
    sharded(model)
    callback.on_train_begin(*given)
    report = callback.report
    assert report is not None and len(report.patched) == n_sites and report.diff("transformer.h.0")
    train(model, [batch(dist.get_rank())])
    fused = [name for name, (n, fallbacks) in report.calls().items() if n and not fallbacks]
    assert len(fused) > n_sites // 2, report
    callback.on_train_end(*given)
    assert_same_weights(model, expected, "patched, then sharded")


def patch_with_loss(model: nn.Module) -> PatchReport:
    """All patterns, and the loss without logits."""
    names = ("add_norm", "dropout_add", "layer_norm", "shared_input", "bias_activation", "tied_embedding")
    return patch_model(model, patterns=[*names, "linear_cross_entropy"])


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


def as_one(policy: str) -> dict[str, float]:
    """How close 8-bit Adam's weights are to those of one process: another order of sums changes a code here and
    there."""
    return {"rtol": 5e-2, "atol": 2e-2} if policy == "mixed precision" else {"rtol": 1e-3, "atol": 2e-3}


def fsdp2_with_adamw8bit(folder: str) -> None:
    """Under each policy, patched before and after sharding: the weights of the unpatched model, sharded alike, and of
    one process. The checkpoint of a patched and sharded model is that of a plain one."""
    link_all()
    alone = gpt2().train()
    train(alone, [batch(rank) for rank in range(dist.get_world_size())], make=adamw8bit)
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
            assert_same_weights(model, alone, f"{name}, one process", **as_one(name))
    check_checkpoint(model, gpt2(), folder)


def check_checkpoint(model: nn.Module, plain: nn.Module, folder: str) -> None:
    """plain, of the same kind, loads the weights of the model."""
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(plain)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(plain, state)
    assert_same_weights(model, plain, "checkpoint", rtol=0.0, atol=0.0)


def parallelize(model: Any, sequence: bool, mesh: DeviceMesh) -> None:
    """Megatron's split of attention and MLP; with sequence, what lies between them is a DTensor sharded by positions,
    residual sums and norms included (Korthikanti et al. 2022)."""
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


def assert_same_steps(model: Any, expected: Any, what: str) -> None:
    """Losses and gradients of three batches: from the second on sums have found their norms."""
    for seed in range(3):
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(seed))
        theirs = loss_and_gradients(expected, ids)
        for name, tensor in loss_and_gradients(model, ids).items():
            where = f"{what}, step {seed}: {name}: "
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-3, atol=1e-5, msg=lambda text, w=where: w + text)


FUSED: dict[tuple[bool, str], set[str]] = {
    (False, "before"): {"rms_norm", "add_norm", "gated_mlp", "rotary", "cross_entropy"},
    (False, "after"): {"rms_norm", "cross_entropy"},  # sharded parameters are left alone
    (True, "before"): {"gated_mlp", "rotary"},  # norms, residual sums and the loss get DTensors: the original code runs
    (True, "after"): set(),
}
"""By sequence parallelism, and patched before or after parallelize_module."""


def tensor_parallel() -> None:
    """Loss and gradients of one process, unpatched; every later step too, when sums have found their norms."""
    link_all()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = llama()
    for sequence in (False, True):
        for patched in ("before", "after"):
            model = llama()
            if patched == "before":
                patch_model(model)
            parallelize(model, sequence, mesh)
            report = patch_model(model)
            assert_same_steps(model, expected, f"sequence {sequence}, patched {patched}")
            fused = {site.pattern for site in report.patched if report.calls()[site.name][0] > 0}
            assert fused == FUSED[sequence, patched], (sequence, patched, fused)


def parallelize_bert(model: Any, sequence: bool, mesh: DeviceMesh) -> None:
    """As parallelize, of a model whose norms follow its sums in one module, and whose linear layers have biases."""
    between: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if sequence else {}
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    layer: dict[str, Any] = {f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    layer["intermediate.dense"] = ColwiseParallel()
    layer |= {f"{name}.dense": RowwiseParallel(**between) for name in ("attention.output", "output")}
    if sequence:
        norm = SequenceParallel(use_local_output=False)
        layer |= {f"{name}.LayerNorm": norm for name in ("attention.output", "output")}
        layer |= {name: PrepareModuleInput(**gathered) for name in ("attention.self", "intermediate")}
        embeddings = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1), use_local_output=False
        )
        transform = PrepareModuleInput(**gathered, use_local_output=True)
        parallelize_module(model, mesh, {"bert.embeddings": embeddings, "cls.predictions.transform": transform})
    for each in model.bert.encoder.layer:
        parallelize_module(each, mesh, layer)


def tensor_parallel_bert() -> None:
    """Loss and gradients of one process, unpatched. And operators do not take DTensors."""
    operators_reject_dtensors()
    link_all()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    expected = bert()
    for sequence in (False, True):
        model = bert()
        report = patch_model(model)
        parallelize_bert(model, sequence, mesh)
        assert_same_steps(model, expected, f"sequence {sequence}")
        fused = {site.pattern for site in report.patched if report.calls()[site.name][0] > 0}
        assert fused >= {"bias_activation", "layer_norm"} and ("dropout_add_norm" in fused) == (not sequence), fused


def fsdp2_and_tensor_parallel(folder: str) -> None:
    """Two by two processes: the weights of one process under AdamW8bit, and a checkpoint that a plain model loads."""
    link_all()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    alone = llama()
    train(alone, [batch(0), batch(1)], make=adamw8bit)
    for name in ("float32", "mixed precision"):
        policies, model = POLICIES[name], llama()
        report = patch_model(model)
        parallelize(model, False, mesh["tensor"])
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["data"], **policies)
        fully_shard(model, mesh=mesh["data"], **policies)
        train(model, [batch(mesh["data"].get_local_rank())], make=adamw8bit)
        assert_same_weights(model, alone, name, **as_one(name))
        fused = {site.pattern for site in report.patched if report.calls()[site.name][0] > 0}
        assert fused == FUSED[False, "before"], fused
    check_checkpoint(model, llama(), folder)


def operators_reject_dtensors() -> None:
    """torch raises, as it knows no sharding of the operators: no kernel reads one shard as the whole."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, weight = (distribute_tensor(torch.randn(*shape), mesh, [Replicate()]) for shape in ((4, 8), (8,)))
    matrix, labels = torch.randn(8, 8), torch.arange(4)
    group = {"process_group": mesh.get_group(), "n_classes": 8 * dist.get_world_size()}
    for call in (
        lambda: ops.layer_norm(x, weight, weight),
        lambda: ops.rms_norm(x.to_local(), weight),
        lambda: ops.bias_dropout_residual_norm(x, x, weight, weight),
        lambda: ops.softmax(x),
        lambda: ops.glu(x, x),
        lambda: ops.bias_activation(x, weight, "gelu"),
        lambda: ops.cross_entropy(x, labels),
        lambda: ops.linear_cross_entropy(x, matrix, labels),
        lambda: ops.linear_cross_entropy(x, matrix, labels, **group),
        lambda: ops.linear_cross_entropy(x.to_local(), distribute_tensor(matrix, mesh, [Replicate()]), labels, **group),
    ):
        with pytest.raises(RuntimeError, match=r"DTensor|sharding strategy"):  # NotImplementedError is one
            call()
