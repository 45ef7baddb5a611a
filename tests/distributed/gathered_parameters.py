"""Models whose parameters are empty while their modules do not run, for test_gathered_parameters.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from onetrip.patching import patch_model
from patching_distributed import assert_same_weights, batch, link_all, train
from tiny_models import MODELS, layers, llama
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class _Before(torch.autograd.Function):
    """The identity; calls a function before the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return grads[0], None


class Zero3:
    """DeepSpeed's ZeRO-3 (runtime/zero/parameter_offload.py) in one process: hooks around a module's forward and
    backward gather its parameters, which are empty at other times. Gradients are taken away as they come.

    units: classes whose modules are gathered whole, and whose children have no hooks (set_z3_leaf_modules).
    """

    def __init__(self, model: nn.Module, units: tuple[type, ...] = ()) -> None:
        self.values = {p: p.data for p in model.parameters()}
        self.users: dict[nn.Parameter, set[nn.Module]] = {p: set() for p in self.values}
        self.gradients: dict[nn.Parameter, Tensor] = {}
        for parameter in self.values:
            parameter.register_post_accumulate_grad_hook(self._take)
        self.release_all()
        self._register(model, units)

    def release_all(self) -> None:
        """At the end of a backward: modules whose inputs need no gradient have not been told."""
        for parameter, users in self.users.items():
            users.clear()
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        before = self.gradients.get(parameter)
        self.gradients[parameter] = parameter.grad if before is None else before + parameter.grad
        parameter.grad = None

    def _register(self, module: nn.Module, units: tuple[type, ...]) -> None:
        is_unit = isinstance(module, units)
        for child in () if is_unit else module.children():
            self._register(child, units)
        parameters = list(module.parameters(recurse=is_unit))

        def gather() -> None:
            for parameter in parameters:
                self.users[parameter].add(module)
                parameter.data = self.values[parameter]

        def release() -> None:
            for parameter in parameters:
                self.users[parameter].discard(module)
                if not self.users[parameter]:
                    parameter.data = torch.empty(0, dtype=parameter.dtype)

        def before_forward(_: nn.Module, arguments: tuple[Any, ...]) -> Any:
            gather()
            n_left = sum(isinstance(x, Tensor) and x.requires_grad for x in arguments)

            def count_down() -> None:
                nonlocal n_left
                n_left -= 1
                if n_left == 0:
                    release()

            return _mapped(arguments, count_down)

        def after_forward(_: nn.Module, __: Any, output: Any) -> Any:
            release()
            return _mapped(output, gather)

        module.register_forward_pre_hook(before_forward)
        module.register_forward_hook(after_forward)


def _mapped(value: Any, call: Callable[[], None]) -> Any:
    if isinstance(value, tuple):
        return tuple(_mapped(each, call) for each in value)
    return _Before.apply(value, call) if isinstance(value, Tensor) and value.requires_grad else value


def losses_and_gradients(model: Any, zero: Zero3 | None) -> list[tuple[str, Tensor]]:
    """Losses and gradients of four batches: sums find their norms in the first."""
    results = []
    for seed in range(4):
        model.zero_grad()
        ids = batch(seed)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        results.append((f"loss of batch {seed}", loss.detach()))
        for name, parameter in model.named_parameters():
            gradient = parameter.grad if zero is None else zero.gradients[parameter]
            results.append((f"{name}, batch {seed}", gradient.clone()))
        if zero is not None:
            zero.gradients.clear()
            zero.release_all()
    return results


def fsdp1() -> None:
    """The weights of one process that sees both batches. FSDP1 leaves each unit views of freed memory, or parameters
    that hold what this rank keeps."""
    warnings.simplefilter("ignore")  # deprecated, and slow on a CPU
    link_all()
    expected = llama(tied=True)
    train(expected, [batch(rank) for rank in range(dist.get_world_size())])
    for keeps_parameters in (False, True):
        for patched in ("before", "after"):
            model = llama(tied=True)
            if patched == "before":
                patch_model(model)
            policy = ModuleWrapPolicy({type(layers(model)[0])})
            options: Any = {"use_orig_params": keeps_parameters, "device_id": torch.device("cpu")}
            wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
            report = patch_model(wrapped)
            if patched == "after" and not keeps_parameters:
                assert {site.reason for site in report.skipped} == {"unsupported_device", "sdpa_in_use"}
            train(wrapped, [batch(dist.get_rank())])
            with FullyShardedDataParallel.summon_full_params(wrapped):
                assert_same_weights(model, expected, f"parameters kept: {keeps_parameters}, patched {patched} wrapping")


def deepspeed_zero3() -> None:
    """Patched before and after deepspeed.initialize, as DeepSpeed trains the unpatched model."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    link_all()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    for make in MODELS.values():
        for units in ((), (type(layers(make())[0]),)):
            results: dict[str, list[Tensor]] = {}
            for patched in ("never", "before", "after"):
                model = make()
                if patched == "before":
                    patch_model(model)
                if units:
                    deepspeed.utils.set_z3_leaf_modules(model, [type(layers(model)[0])])
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
                if patched == "after":
                    patch_model(model)
                found = results[patched] = []
                for seed in range(4):
                    ids = batch(10 * dist.get_rank() + seed)
                    loss = engine(input_ids=ids, labels=ids).loss
                    found.append(loss.detach())
                    engine.backward(loss)
                    engine.step()
                for parameter in model.parameters():
                    with deepspeed.zero.GatheredParameters([parameter]):
                        found.append(parameter.data.clone())
                engine.destroy()
                for ours, theirs in zip(found, results["never"], strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
