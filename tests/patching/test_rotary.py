"""Rotary position embedding: functions of q, k, cos and sin, recognised by what they compute."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.patching import patch_model, unpatch_model
from onetrip.patching.forward import Forward, read_forward
from onetrip.patching.rotary import FoundRotation, read_rotations
from patching_cases import DECODER, function_module, tiny_model, written
from rotary_cases import halves, llama
from torch import Tensor, nn

BATCH, POSITIONS, HEADS, HEAD_DIM = 2, 5, 4, 8
transformers = pytest.importorskip("transformers")
INTERFACE = transformers.AttentionInterface()
INTERFACE["pair"] = lambda q, k: (q, k)
INTERFACE["library"] = lambda q, k: (q, k)
INTERFACE["library"].__module__ = "transformers.integrations.sdpa_attention"
Pair = tuple[Tensor, Tensor]


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def gpt_neox(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """The first columns of each head."""
    cos, sin, n = cos.unsqueeze(1), sin.unsqueeze(1), cos.shape[-1]
    q_rotated, k_rotated = llama(q[..., :n], k[..., :n], cos.squeeze(1), sin.squeeze(1))
    return torch.cat((q_rotated, q[..., n:]), dim=-1), torch.cat((k_rotated, k[..., n:]), dim=-1)


def cohere(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Pairs of neighbours, in float32."""
    dtype, cos, sin = q.dtype, cos.unsqueeze(1), sin.unsqueeze(1)
    q, k = q.float(), k.float()
    return (q * cos + pairs(q) * sin).to(dtype), (k * cos + pairs(k) * sin).to(dtype)


def glm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Pairs of neighbours, with tables made for halves."""
    cos = cos[..., : cos.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    sin = sin[..., : sin.shape[-1] // 2].repeat_interleave(2, dim=-1).unsqueeze(1)
    return q * cos + pairs(q) * sin, k * cos + pairs(k) * sin


def qwen_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    q_dtype, k_dtype = q.dtype, k.dtype
    q, k, cos, sin = q.float(), k.float(), cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    return (q * cos + halves(q) * sin).to(q_dtype), (k * cos + halves(k) * sin).to(k_dtype)


def back_to_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """As OLMo's: in the dtype of the tables, if that is the wider one."""
    q_rotated, k_rotated = llama(q, k, cos, sin)
    return q_rotated.to(q.dtype), k_rotated.to(k.dtype)


class Rotary(nn.Module):
    """q and k of (batch, positions, heads, head_dim), as projections make them."""

    n_columns = HEAD_DIM
    is_heads_first = True

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(2, 2)  # only a module with children can have a rotation

    def inputs(self, dtype: torch.dtype = torch.float32, table: torch.dtype | None = None) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        q, k = (torch.randn(BATCH, POSITIONS, n, HEAD_DIM, generator=generator) for n in (HEADS, HEADS // 2))
        if self.is_heads_first:
            q, k = q.transpose(1, 2), k.transpose(1, 2)
        cos, sin = (torch.randn(BATCH, POSITIONS, self.n_columns, generator=generator) for _ in range(2))
        return [q.to(dtype), k.to(dtype), cos.to(table or dtype), sin.to(table or dtype)]


class Llama(Rotary):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        attend = INTERFACE["pair"]
        q, k = llama(q, k, cos, sin)
        return attend(q, k)


class PositionsFirst(Rotary):
    is_heads_first = False


class InPart(Rotary):
    """The first columns of each head."""

    n_columns = n_rotated = HEAD_DIM // 2


class Packed(PositionsFirst):
    """Positions of all images in one dimension."""

    def inputs(self, dtype: torch.dtype = torch.float32, table: torch.dtype | None = None) -> list[Tensor]:
        return [x.flatten(0, 1) for x in super().inputs(dtype, table)]


def rotary(base: type[Rotary], body: str, arguments: str = "q, k, cos, sin") -> Any:
    return written(base, f'attend = INTERFACE["pair"]\n{textwrap.dedent(body).strip()}', globals(), arguments)


FUSED = {
    "Llama": Llama,
    "positions first": rotary(PositionsFirst, "q, k = llama(q, k, cos, sin, unsqueeze_dim=2); return attend(q, k)"),
    "NeoX": rotary(InPart, "q, k = gpt_neox(q, k, cos, sin); return attend(q, k)"),
    "Cohere": rotary(Rotary, "q, k = cohere(q, k, cos, sin); return attend(q, k)"),
    "Glm": rotary(Rotary, "q, k = glm(q, k, cos, sin); return attend(q, k)"),
    "Qwen-VL": rotary(PositionsFirst, "q, k = qwen_vision(q, k, cos, sin); return attend(q, k)"),
    "Qwen-VL, packed": rotary(Packed, "q, k = qwen_vision(q, k, cos, sin); return attend(q, k)"),
    "OLMo": rotary(Rotary, "q, k = back_to_dtype(q, k, cos, sin); return attend(q, k)"),
    # Sliced off in the forward.
    "Phi": rotary(
        InPart,
        "q_part, q_rest = q[..., : self.n_rotated], q[..., self.n_rotated :]; "
        "k_part, k_rest = k[..., : self.n_rotated], k[..., self.n_rotated :]; "
        "q_part, k_part = llama(q_part, k_part, cos, sin); "
        "q = torch.cat((q_part, q_rest), dim=-1); k = torch.cat((k_part, k_rest), dim=-1); return attend(q, k)",
    ),
}
each_rotation = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


def outcome(model: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Both results and the gradients of q and k."""
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    outputs = model(q, k, cos, sin)
    cotangents = [torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, (q, k), cotangents)]


@pytest.mark.parametrize("dtypes", [("float32", None), ("bfloat16", None), ("bfloat16", "float32")], ids=str)
@each_rotation
def test_results_have_the_bits_of_the_function(make: type[Rotary], dtypes: tuple[str, str | None]) -> None:
    """Results to the bit; gradients at least as near to those in float64: autograd rounds both products."""
    model, given = make(), [None if each is None else getattr(torch, each) for each in dtypes]
    inputs = model.inputs(*given)
    expected = outcome(model, *inputs)
    report = patch_model(model)
    assert [site.pattern for site in report.patched] == ["rotary"]
    ours = outcome(model, *inputs)
    assert [(x.dtype, x.shape) for x in ours] == [(x.dtype, x.shape) for x in expected]
    assert all(map(torch.equal, ours[:2], expected[:2]))
    exact = outcome(make(), *(x.double() for x in inputs))
    for one, other, truth in zip(ours[2:], expected[2:], exact[2:], strict=True):
        slack = torch.finfo(one.dtype).eps * truth.norm()
        assert (one - truth).norm() <= (other - truth).norm() + 0.05 * slack
    assert report.calls() == {"": (1, 0)}
    unpatch_model(model)
    assert type(model) is make and all(map(torch.equal, outcome(model, *inputs), expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@each_rotation
def test_training_under_autocast_gives_what_attention_would_cast(make: type[Rotary], dtype: torch.dtype) -> None:
    """Of float32 tables; float32 q and k are those of a norm, as in Qwen3. Without gradients a cache would have another
    dtype than it has unpatched."""
    model = make()
    inputs = model.inputs(dtype, torch.float32)
    expected = outcome(model, *inputs)
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        ours = outcome(model, *inputs)
        q, k, *tables = inputs
        assert [x.dtype for x in model(q, k.detach().requires_grad_(), *tables)] == [torch.bfloat16] * 2  # q is frozen
        assert [x.dtype for x in model(*inputs)] == [x.dtype for x in expected[:2]]
    assert [x.dtype for x in ours] == [torch.bfloat16, torch.bfloat16, dtype, dtype]
    assert all(torch.equal(x, y.bfloat16()) for x, y in zip(ours[:2], expected[:2], strict=True))
    assert all(torch.allclose(x.float(), y.float(), atol=2e-2) for x, y in zip(ours[2:], expected[2:], strict=True))


FOR_ATTENTION = {
    "transformers": "q, k = R; k, v = cache.update(k, v, self.i); return attend(self, q, k, v, scaling=q.shape[-1])",
    "views": "q, k = R; k = k[:, :1].expand(q.shape); return attend(q.transpose(1, 2).contiguous(), k)",
    "joined": "q, k = R; q = torch.cat((q, v), dim=-1); return attend(q, key=k)",
    "products": "q, k = R; return torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v",
    "read before": "y = self.dense(q) + 2 * k; q, k = R; return y + torch.matmul(q, k)",
}
FOR_OTHERS = {
    "a norm (HunYuan)": "q, k = R; q = self.dense(q); return attend(q, k)",
    "a norm of a view": "q, k = R; q = q.transpose(1, 2); q = self.dense(q); return attend(q, k)",
    "a norm of the cache's keys": "q, k = R; keys, v = cache.update(k, v, 0); return attend(q, self.dense(keys))",
    "a norm by another name": "norm = self.dense; q, k = R; q = norm(q); return attend(q, k)",
    "a factor (Ministral 3)": "q, k = R; q = q * v; return attend(q, k)",
    "a factor of a part": "q, k = R; return attend(q[..., :2] * v, k)",
    "an index": "q, k = R; return attend(v[q], k)",
    "a sum": "q, k = R; q += v; return attend(q, k)",
    "a sum of another name": "q, k = R; y = q; return attend(y + v, k)",
    "float32": "q, k = R; q = q.float(); return attend(q, k)",
    "its dtype": "q, k = R; return attend(q, k, q.dtype)",
    "returned": "q, k = R; return q, k",
    "returned at once": "return R",
    "one name": "both = R; return attend(*both)",
    "a function of the module": "q, k = R; return halves(q) @ k",
    "no attention function": "attend = attend or torch.sin; q, k = R; return attend(q, k)",
    "called": "q, k = R; return q(k)",
    "a method that is kept": "q, k = R; f = q.view; return attend(f(2), k)",
    "a method as an argument": "q, k = R; y = attend(q.view, k); return y @ v",
    "an update of its own": "q, k = R; k, v = self.update(k, v); return attend(q, k)",
    "an update of what is no cache": "d = {}; q, k = R; k, v = d.update(k, v); return attend(q, k)",
    "an update of the values": "q, k = R; v, k = cache.update(v, k, 0); return attend(q, k)",
    "another function of torch": "q, k = R; return torch.sin(q) @ k",
    "a callable without a hash": "q, k = R; return UNHASHABLE(q) @ k",
    "a generator": "q, k = R; return attend(*(x.sin() for x in (q, k)))",
    "a loop": """
        for _ in range(2):
            y = q.sin()
            q, k = R
        return attend(q, k)""",
}


class Unhashable(dict):
    def __call__(self, x: Tensor) -> Tensor:
        return x


UNHASHABLE = Unhashable()


@pytest.mark.parametrize(
    ("expected", "bodies"), [(True, FOR_ATTENTION), (False, FOR_OTHERS)], ids=["attention", "others"]
)
def test_who_reads_the_results(expected: bool, bodies: dict[str, str]) -> None:
    """Under autocast only what attention casts anyway may be rounded."""
    found = {}
    for name, body in bodies.items():
        model = rotary(Rotary, body.replace("R", "llama(q, k, cos, sin)", 1), "q, k, v, cos, sin, cache")
        forward = read_forward(model.forward)
        assert isinstance(forward, Forward)
        found[name] = [each.caches is not None for each in read_rotations(forward)]
    assert found == {name: [expected] for name in bodies}


def test_a_norm_after_the_rotation_reads_float32() -> None:
    """As unpatched, under autocast."""
    model = rotary(Rotary, "q, k = llama(q, k, cos, sin); q = self.norm(q); return attend(q, k)")()
    model.norm = nn.Identity()
    inputs = model.inputs(torch.bfloat16, torch.float32)
    expected = outcome(model, *inputs)
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, outcome(model, *inputs)[:2], expected[:2]))


class WithCache(Rotary):
    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, v: Tensor, cache: Any) -> Any:
        attend = INTERFACE.get_interface(self.config._attn_implementation, lambda q, k: (q, k))
        q, k = llama(q, k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, 0)
        return attend(q, k)


@pytest.mark.parametrize("implementation", ["library", "eager", "pair"])
@pytest.mark.parametrize("cache", [None, "DynamicCache", "StaticCache", "one's own"])
def test_float32_stays_for_a_user_s_attention_and_for_a_cache_of_given_memory(
    implementation: str, cache: str | None
) -> None:
    model = WithCache()
    model.config = SimpleNamespace(_attn_implementation=implementation)
    sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_hidden_layers": 1}
    options = {"max_cache_len": 2 * POSITIONS} if cache == "StaticCache" else {}
    own = type("DynamicCache", (transformers.DynamicCache,), {})  # may keep what it is given elsewhere
    used = cache and getattr(transformers, cache, own)(config=transformers.LlamaConfig(**sizes), **options)
    patch_model(model)
    q, k, *tables = model.inputs(torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rotated, _ = model(q.requires_grad_(), k, *tables, k.detach().float(), used)
    is_rounded = implementation != "pair" and cache in (None, "DynamicCache")
    assert rotated.dtype == (torch.bfloat16 if is_rounded else torch.float32)


def test_half_precision_is_left_as_it_is_under_autocast_to_another() -> None:
    model = Llama()
    patch_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        q, k, *tables = model.inputs(torch.float16)
        assert model(q.requires_grad_(), k, *tables)[0].dtype == torch.float16
        q, k, *tables = model.inputs(torch.bfloat16, torch.float32)
        with torch.no_grad():
            assert model(q.requires_grad_(), k, *tables)[0].dtype == torch.float32


@each_rotation
def test_compiles_without_a_break(make: type[Rotary]) -> None:
    model = make()
    inputs = model.inputs()
    expected = outcome(model, *inputs)
    patch_model(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(outcome(compiled, *inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


calls: list[Any] = []


def recorded(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    calls.append(q)
    return llama(q, k, cos, sin)


def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return llama(q, k, sin, cos)


def other_sign(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return q * cos.unsqueeze(1) - halves(q) * sin.unsqueeze(1), k * cos.unsqueeze(1) - halves(k) * sin.unsqueeze(1)


def only_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return llama(q, k, cos, sin)[0], k


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    q[:] = llama(q, k, cos, sin)[0]
    return q, llama(q, k, cos, sin)[1]


def scaled_in_large(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    if q.shape[-1] > 4:
        q = 2 * q
    return llama(q, k, cos, sin)


def conditional(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    q = 2 * q if q.shape[2] > 100 else q
    return llama(q, k, cos, sin)


def recorded_halves(x: Tensor) -> Tensor:
    calls.append(x)
    return halves(x)


def with_impure_helper(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + recorded_halves(q) * sin, k * cos + recorded_halves(k) * sin


@pytest.mark.parametrize(
    "function",
    [recorded, swapped, other_sign, only_q, in_place, scaled_in_large, conditional, with_impure_helper],
)
def test_what_resembles_a_rotation_is_none(function: Callable[..., Pair]) -> None:
    source = f"def forward(self, q, k, cos, sin):\n    return {function.__name__}(q, k, cos, sin)\n"

    def read(source: str) -> list[FoundRotation]:
        forward = read_forward(Llama.forward, source)
        assert isinstance(forward, Forward)
        return read_rotations(forward)

    assert read(source.replace(function.__name__, "llama"))
    assert not read(source) and not calls


def test_a_function_exchanged_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other libraries do after patch_model."""
    model = Llama()
    report = patch_model(model)
    monkeypatch.setattr(sys.modules[__name__], "llama", only_q_doubled)
    q, k, cos, sin = model.inputs()
    assert torch.equal(model(q, k, cos, sin)[0], 2 * q) and report.calls() == {"": (0, 1)}


def test_a_module_that_the_package_kernels_makes_of_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    model, made = Llama(), function_module(llama)
    monkeypatch.setattr(sys.modules[__name__], "llama", made)
    q, k, cos, sin = model.inputs()
    expected = model(q, k, cos, sin)
    report = patch_model(model)
    assert all(map(torch.equal, model(q, k, cos, sin), expected)) and report.calls() == {"": (1, 0)}
    made.forward = only_q_doubled  # as kernelize puts a kernel there
    assert torch.equal(model(q, k, cos, sin)[0], 2 * q) and report.calls() == {"": (1, 1)}


def only_q_doubled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    return 2 * q, k


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q, k, cos[:1], sin[:1]),
        lambda q, k, cos, sin: (q, k.double(), cos, sin),
        lambda q, k, cos, sin: (q, k[:, :, :1], cos[:, :1], sin[:, :1]),
        lambda q, k, cos, sin: (q[..., :2], k[..., :2], cos[..., :1], sin[..., :1]),
    ],
    ids=["one table", "dtypes", "shapes that broadcast", "one column"],
)
def test_other_arguments_compute_what_they_computed(change: Callable[..., tuple[Tensor, ...]]) -> None:
    model = Llama()
    inputs = change(*model.inputs())
    expected = model(*inputs)
    patch_model(model)
    assert all(map(torch.equal, model(*inputs), expected))


def test_gradients_of_the_tables() -> None:
    model, inputs = Llama(), Llama().inputs()
    leaves = [x.requires_grad_() for x in inputs]
    expected = torch.autograd.grad(sum(y.square().sum() for y in model(*leaves)), leaves)
    patch_model(model)
    ours = torch.autograd.grad(sum(y.square().sum() for y in model(*leaves)), leaves)
    torch.testing.assert_close(ours, expected)


def test_sdpa_beside_a_rotation_is_reported_and_replaced_on_demand() -> None:
    """What is left of an attention is a skipped site; attention=True takes it after the default patch_model, too."""
    model = tiny_model("LlamaForCausalLM", DECODER | {"num_hidden_layers": 1}).eval()
    cls = type(model.model.layers[0].self_attn)
    tokens = torch.arange(10).view(2, 5)
    expected = model(tokens).logits
    report = patch_model(model)
    name = "model.layers.0.self_attn"
    assert {site.name: site.pattern for site in report.patched}[name] == "rotary"
    assert [(site.name, site.reason) for site in report.skipped] == [(name, "sdpa_in_use")]
    report = patch_model(model, attention=True)
    found = {site.name: (site.pattern, site.detail) for site in report.patched}
    assert found[name] == ("attention_softmax", "and rotary") and not report.skipped
    torch.testing.assert_close(model(tokens).logits, expected)
    assert all(back == 0 for _, back in report.calls().values())
    assert patch_model(model).patched == patch_model(model).patched
    assert type(unpatch_model(model).model.layers[0].self_attn) is cls
