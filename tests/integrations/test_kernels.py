"""Layers for Hugging Face kernels: kernelize with a mapping, and the local repository that its loader reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onetrip.integrations import kernel_config, kernel_mapping
from onetrip.integrations.kernels import LAYERS, REPOSITORY, layers
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("kernels.layer")  # of the library: the repository's own folder kernels/ can be imported too
import kernels  # noqa: E402

llama = transformers.models.llama.modeling_llama


class RMSNorm(llama.LlamaRMSNorm):
    """In a class of its own: registering changes the class."""


class MLP(llama.LlamaMLP):
    pass


class Rotary(nn.Module):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return llama.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)  # type: ignore[no-any-return]


for cls, name in ((RMSNorm, "RMSNorm"), (MLP, "SwiGLUMLP"), (Rotary, "rotary_pos_emb")):
    kernels.replace_kernel_forward_from_hub(cls, name)


def case(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    if name == "RMSNorm":
        module: nn.Module = RMSNorm(64)
        nn.init.normal_(module.weight)
        return module.to(dtype), (torch.randn(3, 5, 64, dtype=dtype),)
    if name == "SwiGLUMLP":
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96)
        return MLP(config).to(dtype), (torch.randn(3, 5, 64, dtype=dtype),)
    unsqueeze_dim = 2 if name.endswith("2") else 1
    shapes = [(2, 4, 5, 8), (2, 1, 5, 8)]
    q, k = (torch.randn(s if unsqueeze_dim == 1 else (s[0], s[2], s[1], s[3]), dtype=dtype) for s in shapes)
    angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
    return Rotary(), (q, k, angles.cos().to(dtype), angles.sin().to(dtype), unsqueeze_dim)


def outputs_and_gradients(module: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
    found = module(*leaves)
    outputs = found if isinstance(found, tuple) else (found,)
    trained = [*leaves[: 2 if len(leaves) > 1 else 1], *module.parameters()]
    weights = [torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, trained, weights)]


@pytest.mark.parametrize("mode", ["TRAINING", "INFERENCE", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "rotary_pos_emb-2"])
def test_a_kernelized_module_computes_the_same(name: str, dtype: torch.dtype, mode: str) -> None:
    """Outputs and gradients of transformers' module; no fallback; the forward is ours; offline."""
    module, inputs = case(name, dtype)
    expected = outputs_and_gradients(module, inputs)
    chosen = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if mode == "compiled" else kernels.Mode[mode]
    with kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(module, mode=chosen, device="cpu", use_fallback=False)
    assert module.forward.__func__.__module__ == "onetrip.integrations.kernels.layers"
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for ours, theirs in zip(outputs_and_gradients(module, inputs), expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_rounded_where_its_class_rounds(weight_dtype: torch.dtype) -> None:
    """OLMo 2's multiplies before it rounds, and has the dtype of the product."""

    class After(transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm):
        pass

    module, x = After(64).to(weight_dtype), torch.randn(64, 64).bfloat16()
    nn.init.normal_(module.weight)
    expected = module(x)
    ours = layers.RMSNorm.forward(module, x)
    assert ours.dtype == expected.dtype
    assert float((ours != expected).float().mean()) < 0.02


def test_a_norm_of_another_formula_is_refused() -> None:
    class OneMore(RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return (1.0 + self.weight) * super().forward(x)

    with pytest.raises(TypeError, match="computes something else"):
        layers.RMSNorm.forward(OneMore(64), torch.randn(2, 64))


def test_a_rotation_by_half_as_many_columns_is_refused() -> None:
    q, table = torch.randn(1, 2, 5, 8), torch.randn(1, 5, 4)
    with pytest.raises(ValueError, match="must have the 8 columns of q, got 4"):
        layers.RotaryEmbedding().forward(q, q, table, table)


def test_kernelize_a_llama() -> None:
    """Registered as transformers registers them, on classes of a copy; the layers run, and the loss is the same."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    ids = torch.arange(20).view(2, 10)
    expected = model(ids, labels=ids).loss
    n_modules = 0
    for module in model.modules():
        if type(module) in (llama.LlamaRMSNorm, llama.LlamaMLP):
            module.__class__ = RMSNorm if type(module) is llama.LlamaRMSNorm else MLP
            n_modules += 1
    with kernels.use_kernel_mapping(kernel_mapping(), inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, use_fallback=False)
    ours = [m for m in model.modules() if "forward" in vars(m)]
    assert len(ours) == n_modules == 7
    torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def test_the_repository_is_what_the_loader_reads() -> None:
    loaded = kernels.get_local_kernel(REPOSITORY)
    for layer in LAYERS.values():
        assert issubclass(getattr(loaded.layers, layer), nn.Module)
    assert kernels.Metadata.read_from_file(REPOSITORY / "metadata.json").python_depends == []


def test_kernel_config() -> None:
    config = kernel_config()
    assert config.use_local_kernel
    assert config.kernel_mapping == {
        "RMSNorm": f"{REPOSITORY}:RMSNorm",
        "rotary_pos_emb": f"{REPOSITORY}:RotaryEmbedding",
    }
    with pytest.raises(ValueError, match=r"kernel_config: names must be among .*, got Softmax"):
        kernel_config(["Softmax"])


def test_transformers_reads_kernel_config() -> None:
    """Up to the device: transformers offers local kernels to accelerators only."""
    model = nn.Sequential(RMSNorm(8))
    config = kernel_config(["RMSNorm"])
    config.sanitize_kernel_mapping(model)
    with pytest.raises(ValueError, match="not registered"):
        kernel_config().sanitize_kernel_mapping(model)
