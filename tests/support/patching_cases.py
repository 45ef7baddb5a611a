"""Small modules to be patched, for the tests of patching."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from onetrip.patching import calls, links
from outcomes import Outcome, assert_agree, outcome, parameter_gradients, patched_pair
from torch import Tensor, nn

WIDTH = 16
compiles_transformers = pytest.mark.skipif(
    not hasattr(torch.compiler, "is_exporting"), reason="transformers 5 does not compile with torch 2.6"
)


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module.eval()


def inputs(n: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 5, WIDTH, generator=generator) for _ in range(n)]


def renames(**new: str) -> Callable[[Callable[..., Any]], Any]:
    """As transformers' deprecate_kwarg: old=new names of arguments."""

    def decorate(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **{new.get(name, name): value for name, value in kwargs.items()})

        return wrapper

    return decorate


def twice(function: Callable[..., Any]) -> Any:
    """A decorator whose wrapper changes the result."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return 2.0 * function(*args, **kwargs)

    return wrapper


def module_of(source: str, folder: Path) -> Any:
    """A Python module with this source, in a file of its own: patterns read files."""
    file = folder / "changed.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location("changed", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Norm(nn.Module):
    """Parts of the leaf norms below, which differ in names, cast orders and where eps comes from."""

    def __init__(self, bias: bool = False, weight: bool = True) -> None:
        super().__init__()
        if weight:
            self.gain = nn.Parameter(torch.ones(WIDTH))
        if bias:
            self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.epsilon = 1e-4


class LlamaLike(Norm):
    def forward(self, h: Tensor) -> Tensor:
        dtype = h.dtype
        h = h.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.gain * h.to(dtype)


class Block(nn.Module):
    """Parts of the blocks below; p is high, so that a mask in the wrong place shows."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.4)
        self.post = nn.LayerNorm(WIDTH)
        self.rms = LlamaLike()
        self.rate = 0.4


class OneExpression(Block):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.post(b + self.drop(self.proj(a)))


class Tail(nn.Module):
    """As BertSelfOutput, with a dropout that is on."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.25)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        hidden = self.dense(hidden)
        hidden = self.dropout(hidden)
        return self.norm(hidden + residual)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tails = nn.ModuleList([Tail(), Tail()])
        self.final = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for tail in self.tails:
            x = tail(x, residual=x)
        return self.final(x)


HIDDEN, HEADS, VOCABULARY = 32, 4, 61
COMMON = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**COMMON, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
GPT2 = {
    "n_embd": HIDDEN, "n_layer": 2, "n_head": HEADS, "vocab_size": VOCABULARY, "n_positions": 32,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
T5 = {
    "d_model": HIDDEN, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": HEADS, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "decoder_start_token_id": 0,
}  # fmt: skip
VIT = COMMON | {"image_size": 16, "patch_size": 8}
"""Sizes of tiny models of transformers."""


def tiny_model(model: str, config: str, options: dict[str, Any]) -> Any:
    """A model of these classes of transformers, the same in every call."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {config}")
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options))


def token_ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (2, 7), generator=torch.Generator().manual_seed(seed))


def padded_text(side: str = "right") -> dict[str, Tensor]:
    """Two rows, the second of which is padded."""
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, slice(5, None) if side == "right" else slice(2)] = 0
    return {"input_ids": token_ids(), "attention_mask": mask, "labels": token_ids(seed=1)}


def image() -> dict[str, Tensor]:
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": torch.tensor([0, 1])}


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


def gpt2(**options: Any) -> nn.Module:
    """A tiny GPT-2: dropouts in children, residual sums and norms in its blocks, a last sum read outside."""
    import transformers

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 61, "n_positions": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    model: nn.Module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | tokens | dropouts | options))
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # ones and zeros would hide a wrong weight or a missing bias
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


class StackLayer(nn.Module):
    """As an OPT layer: the norm of its first sum stands in a branch, that of its second in the next layer."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), LlamaLike()
        self.mix, self.dense = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(p)
        self.norm_first = True

    def forward(self, h: Tensor, scale: float = 1.0) -> Tensor:
        residual = h
        h = self.first(h)
        h = self.mix(h) * scale
        h = residual + h
        residual = h
        if self.norm_first:
            h = self.second(h)
        h = self.dense(h)
        h = self.drop(h)
        return residual + h


class Stack(nn.Module):
    def __init__(self, n_layers: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([StackLayer(p) for _ in range(n_layers)])
        self.final = nn.LayerNorm(WIDTH)
        self.between: Callable[[Tensor], Tensor] | None = None
        self.call: Callable[..., Any] = lambda layer, h: layer(h)

    def forward(self, h: Tensor) -> Tensor:
        return self.final(self.states(h)[-1])

    def states(self, h: Tensor) -> list[Tensor]:
        states = [h]
        for layer in self.layers:
            h = self.call(layer, h)
            if self.between is not None:
                h = self.between(h)
            states.append(h)
        return states


def pair(**options: Any) -> tuple[Stack, Stack]:
    """A model and the same patched, its links made."""
    model, original, _ = patched_pair(randomised(Stack(**options)))
    outcome(model, *inputs())
    return original, model


def n_links(model: nn.Module) -> int:
    ids = {id(module) for module in model.modules()}
    return sum(site.link is not None for (owner, _), site in links._sites.items() if owner in ids)


def tiny_mixture(model_type: str, **sizes: Any) -> Any:
    """A configuration of transformers, of a mixture of experts."""
    import transformers

    common = {
        "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "num_experts": 4,
        "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    default = transformers.CONFIG_MAPPING[model_type]().to_dict()
    return transformers.CONFIG_MAPPING[model_type](**{k: v for k, v in common.items() if k in default} | sizes)


# Layers that read one tensor, as BERT's do, and a step through them with and without a shared gradient.
READERS_DROPOUT = 0.25


class Projections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.q(h) * self.k(h)) * self.v(h)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(READERS_DROPOUT), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.drop(h)
        return self.norm(h + residual)


class Expansion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.act = nn.Linear(WIDTH, WIDTH), nn.GELU()

    def forward(self, h: Tensor) -> Tensor:
        return self.act(self.dense(h))


class Layer(nn.Module):
    """As BERT's: both sums read what linear layers of other modules have read."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.mixed = Projections(), Output()
        self.expand, self.expanded = Expansion(), Output()
        self.between: Callable[[Tensor], Any] = lambda h: None
        self.side: list[Tensor] = []
        self.branch: Callable[[Tensor], Tensor] = lambda h: h

    def forward(self, h: Tensor) -> Tensor:
        mixed = self.branch(self.mix(h))
        self.between(h)
        h = self.mixed(mixed, h)
        expanded = self.branch(self.expand(h))
        self.between(h)
        return self.expanded(expanded, h)


class OutputWithoutNorm(Output):
    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        h = self.dense(h)
        h = self.drop(h)
        return h + residual


class BackwardInBackward(torch.autograd.Function):
    """The identity. Its backward runs another backward through the same graph."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, losses: list[Tensor]) -> Tensor:
        ctx.losses = losses
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if ctx.losses:
            ctx.losses.pop().backward(retain_graph=True)
        return grads[0], None


def step(model: nn.Module, x: Tensor) -> Outcome:
    """The output and every gradient; the same masks in every call."""
    torch.manual_seed(1)
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(2.0 * leaf)
    loss = y.square().sum()
    for module in model.modules():
        while getattr(module, "side", None):
            loss = loss + module.side.pop().sum()
    loss.backward()
    assert leaf.grad is not None
    return {"y": y.detach(), "x": leaf.grad} | parameter_gradients(model)


def without_sharing(compute: Callable[[], Any]) -> Any:
    smallest, calls.SMALLEST = calls.SMALLEST, 1 << 40
    try:
        return compute()
    finally:
        calls.SMALLEST = smallest


def assert_as_without(model: nn.Module, x: Tensor, relative: float = 1e-5) -> None:
    """The second step is the first in which single layers make readers."""
    expected = without_sharing(lambda: step(model, x))
    for _ in range(3):
        found = step(model, x)
        assert torch.equal(found["y"], expected["y"])
        assert_agree(found, expected, relative)
