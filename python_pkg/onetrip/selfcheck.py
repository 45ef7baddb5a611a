"""A numeric check of every kernel on one device and backend: forward, every gradient, Adam's steps, against float64.

The truth is the unfused torch expression in float64 with the same dropout mask. A kernel passes where its largest error
is at most twice that of the unfused expression in the kernel's own dtypes, plus a few units in the last place of the
largest value. Of Adam the relative error of twenty updates is checked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .ops.common.backends import FAMILIES, KERNEL_DTYPES, use_backend
from .optim.table import StepTable
from .reference.adam import BLOCK, ZERO_CODE, Group, Slot
from .reference.glu import ACTIVATIONS
from .reference.philox import dropout_scale, keep_mask
from .reference.rounding import RESIDUALS, Rounding, join

_RNG = (0x0123456789ABCDEF, 8)
_EPS = 1e-5
_SHAPES = ((9, 257), (16, 1024))
"""One with an odd width (no 128-bit access can be aligned), one as models have them."""

DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16/fp32": (torch.bfloat16, torch.float32),
    "fp64": (torch.float64, torch.float64),
}
"""Name: dtypes of the activations and of the parameters."""

_ADAM_NUMEL, _ADAM_STEPS = 1001, 20
_ADAM_8BIT_ERROR = 0.03  # 0.015 to 0.023 with gradients of a normal distribution
_ROUNDING_ERRORS = {
    Rounding.NEAREST: 1.0,
    Rounding.RESIDUAL_8: 2**-8,
    Rounding.RESIDUAL_16: 2**-16,
    Rounding.STOCHASTIC: 1.0,
}
"""In units of the last place, at most."""

_ULPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 64}


Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Kernel:
    """One call of a family, and what it stands for in PyTorch."""

    name: str
    family: str
    """Name in backends.FAMILIES."""
    inputs: dict[str, tuple[str, float]]
    """Name: "rows" or "vector", and the mean of its values."""
    fused: Callable[[Inputs], Tensor]
    unfused: Callable[[Inputs, Tensor], Tensor]
    """unfused(inputs, keep): with the mask of what dropout keeps."""
    dropout_p: float = 0.0
    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")

    def errors(
        self, device: torch.device, backend: str, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> Iterator[tuple[str, float, float]]:
        """(direction, error, allowed) of every tensor that comes out, for every shape."""
        for n_rows, n_cols in _SHAPES:
            yield from _errors(device, backend, self, dtype, parameter_dtype, n_rows, n_cols)


@dataclass(frozen=True)
class Adam:
    """Steps of Adam on parameters of a dtype with gradients of another."""

    name: str
    is_8bit: bool
    rounding: Rounding = Rounding.NEAREST
    family: ClassVar[str] = "adam"
    directions: ClassVar[tuple[str, ...]] = ("step",)

    def errors(
        self, device: torch.device, backend: str, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> Iterator[tuple[str, float, float]]:
        """One figure: the root mean square of the error of the updates over that of exact ones. The parameter is 0
        before every step, so that afterwards it is the update."""
        n, beta1, beta2, eps = _ADAM_NUMEL, 0.9, 0.999, 1e-8
        p = torch.zeros(n, dtype=parameter_dtype, device=device)
        step = torch.zeros((), device=device)
        if self.is_8bit:
            exp_avg_codes = torch.full((n,), ZERO_CODE, dtype=torch.uint8, device=device)
            scale = torch.zeros(-(-n // BLOCK), device=device)
            slot = Slot(p, exp_avg_codes, torch.zeros_like(exp_avg_codes), scale, scale.clone(), step, 0)
        else:
            zeros = torch.zeros(n, device=device)
            slot = Slot(p, zeros, zeros.clone(), None, None, step, 0)
        if self.rounding in RESIDUALS:
            slot = slot._replace(residual=torch.zeros(n, dtype=RESIDUALS[self.rounding], device=device))
        elif self.rounding is Rounding.STOCHASTIC:
            slot = slot._replace(random_bits=(0, 0))
        table, group = StepTable.of_slots([slot]), Group(1.0, beta1, beta2, eps, 0.0, True, False)
        exp_avg = exp_avg_sq = torch.zeros(n, dtype=torch.float64, device="cpu")
        generator, wrong, right = torch.Generator().manual_seed(0), 0.0, 0.0
        for t in range(1, _ADAM_STEPS + 1):
            grad = torch.randn(n, generator=generator, device="cpu").to(dtype)
            g = grad.double()
            exp_avg, exp_avg_sq = exp_avg.lerp(g, 1 - beta1), exp_avg_sq.lerp(g * g, 1 - beta2)
            exact = exp_avg / (1 - beta1**t) / ((exp_avg_sq / (1 - beta2**t)).sqrt() + eps)
            for tensor in (p, slot.residual):
                if tensor is not None:
                    tensor.zero_()
            with use_backend(backend):
                table.step([grad.to(device)], [group])
            update = p if slot.residual is None else join(p, slot.residual)
            wrong += float((update.double().cpu() + exact).square().sum())
            right += float(exact.square().sum())
        rounding = torch.finfo(parameter_dtype).eps * _ROUNDING_ERRORS[self.rounding]
        yield "step", (wrong / right) ** 0.5, rounding + (_ADAM_8BIT_ERROR if self.is_8bit else 1e-5)

    def takes(self, parameter_dtype: torch.dtype) -> bool:
        if self.rounding is Rounding.STOCHASTIC:
            return parameter_dtype is torch.bfloat16
        return self.rounding is Rounding.NEAREST or parameter_dtype.itemsize == 2


def _row_norm(name: str, norm: str, alone: bool, dropout_p: float = 0.0) -> Kernel:
    """norm: "layer", "rms" or "" for none; alone: the norm of x, with nothing before it."""
    inputs = {"x": ("rows", 0.5)}
    if not alone:
        inputs |= {"residual": ("rows", 0.0), "bias": ("vector", 0.0)}
    if norm:
        inputs["weight"] = ("vector", 1.0)
    if norm == "layer":
        inputs["norm_bias"] = ("vector", 0.0)

    def fused(i: Inputs) -> Tensor:
        if alone:
            if norm == "layer":
                return ops.layer_norm(i["x"], i["weight"], i["norm_bias"], _EPS)
            return ops.rms_norm(i["x"], i["weight"], _EPS)
        if not norm:
            return ops.bias_dropout_residual(i["x"], i["residual"], i["bias"], dropout_p=dropout_p, rng=_RNG)
        return ops.bias_dropout_residual_norm(
            i["x"],
            i["residual"],
            i["weight"],
            i.get("norm_bias"),
            bias=i["bias"],
            dropout_p=dropout_p,
            norm="layer" if norm == "layer" else "rms",
            eps=_EPS,
            rng=_RNG,
        )

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        z = i["x"]
        if not alone:
            z = i["residual"] + torch.where(keep, (z + i["bias"]) * dropout_scale(dropout_p), 0.0)
        if not norm:
            return z
        weight, norm_bias = i["weight"], i.get("norm_bias")
        dtype = torch.promote_types(z.dtype, weight.dtype)  # F.layer_norm wants one dtype
        if norm == "layer":
            return F.layer_norm(z.to(dtype), z.shape[-1:], weight, norm_bias, _EPS).to(z.dtype)
        values = z.to(dtype)
        return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + _EPS) * weight).to(z.dtype)

    return Kernel(name, "row_norm", inputs, fused, unfused, dropout_p)


def _softmax(name: str, dropout_p: float = 0.0, *, masked: bool = False) -> Kernel:
    """masked: with a scale, a causal mask, and a vector added to every row, which gets its gradient."""
    options: dict[str, Any] = {"scale": 0.5, "causal": True} if masked else {}

    def fused(i: Inputs) -> Tensor:
        return ops.softmax(i["scores"], i.get("mask"), dropout_p=dropout_p, rng=_RNG, **options)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        values = i["scores"]
        if masked:
            values = values * 0.5 + i["mask"].to(values.dtype)
            n_rows, n_cols = values.shape
            visible = torch.ones_like(keep).tril(n_cols - n_rows)
            values = values.masked_fill(~visible, -torch.inf)
        return torch.where(keep, torch.softmax(values, -1) * dropout_scale(dropout_p), 0.0)

    inputs = {"scores": ("rows", 0.0)} | ({"mask": ("vector", 0.0)} if masked else {})
    return Kernel(name, "softmax", inputs, fused, unfused, dropout_p)


_UNFUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
    "relu": F.relu,
}


def _glu(activation: str) -> Kernel:
    def fused(i: Inputs) -> Tensor:
        return ops.glu(i["gate"], i["up"], activation)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        return _UNFUSED[activation](i["gate"]) * i["up"]

    return Kernel(f"glu, {activation}", "glu", {"gate": ("rows", 0.0), "up": ("rows", 0.0)}, fused, unfused)


def _packed_glu(activation: str) -> Kernel:
    def halves(i: Inputs) -> Tensor:
        """The rows, less the last column of an odd width: then no two rows follow each other in memory."""
        return i["gate_up"][:, : i["gate_up"].shape[1] // 2 * 2]

    def fused(i: Inputs) -> Tensor:
        return ops.glu_packed(halves(i), activation)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        gate, up = halves(i).chunk(2, -1)
        return _UNFUSED[activation](gate) * up

    return Kernel(f"packed glu, {activation}", "glu", {"gate_up": ("rows", 0.0)}, fused, unfused)


def _bias_activation(activation: str) -> Kernel:
    def fused(i: Inputs) -> Tensor:
        return ops.bias_activation(i["x"], i["bias"], activation)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        return _UNFUSED[activation](i["x"] + i["bias"])

    return Kernel(f"bias+{activation}", "glu", {"x": ("rows", 0.0), "bias": ("vector", 0.0)}, fused, unfused)


def _rotary(name: str, *, interleaved: bool) -> Kernel:
    """The rows are positions of one head; of an odd width the last column is copied."""

    def tables(q: Tensor) -> tuple[Tensor, Tensor]:
        n_positions, n_pairs = q.shape[0], q.shape[1] // 2
        frequencies = 1e4 ** -(torch.arange(n_pairs, dtype=torch.float64, device="cpu") / n_pairs)
        angles = torch.arange(n_positions, device="cpu")[:, None] * frequencies
        angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
        return angles.cos().to(q), angles.sin().to(q)

    def fused(i: Inputs) -> Tensor:
        q, k = i["q"], i["k"]
        rotated = ops.rotary_embedding(q[None, None], k[None, None], *tables(q), interleaved=interleaved)
        return torch.cat(rotated).flatten(0, 2)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        cos, sin = tables(i["q"])
        x = torch.stack((i["q"], i["k"]))
        n = cos.shape[-1]
        part, rest = x[..., :n], x[..., n:]
        first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        turned = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
        return torch.cat((part * cos + turned * sin, rest), -1).flatten(0, 1)

    return Kernel(name, "rotary", {"q": ("rows", 0.0), "k": ("rows", 0.0)}, fused, unfused)


def _moe(name: str) -> Kernel:
    """Two experts a token: the sum of what they return for it, and its rows for them."""

    def order(i: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows by expert, places of each token's, their weights, which of all choices each row is)."""
        n_tokens = i["x"].shape[0]
        perm = (torch.arange(2 * n_tokens, device=i["x"].device) * 7919 % (2 * n_tokens + 1)).argsort()
        return torch.cat((i["x"], i["y"])), perm.argsort().view(-1, 2), i["weights"][: 2 * n_tokens].view(-1, 2), perm

    def fused(i: Inputs) -> Tensor:
        y, places, weights, _ = order(i)
        return torch.cat((ops.moe_combine(y, places, weights), ops.moe_dispatch(i["x"], places)))

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        y, places, weights, perm = order(i)
        return torch.cat(((y[places] * weights.unsqueeze(-1)).sum(1), i["x"].repeat_interleave(2, 0)[perm]))

    inputs = {"x": ("rows", 0.0), "y": ("rows", 0.0), "weights": ("vector", 0.0)}
    return Kernel(name, "moe", inputs, fused, unfused)


def _labels(rows: Tensor, n_classes: int) -> Tensor:
    """One row is ignored."""
    labels = torch.arange(rows.shape[0], device=rows.device) * 7919 % n_classes
    labels[1] = -100
    return labels


def _cross_entropy(name: str, softcap: float | None = None, label_smoothing: float = 0.0, z: float = 0.0) -> Kernel:
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": "none"}

    def fused(i: Inputs) -> Tensor:
        labels = _labels(i["logits"], i["logits"].shape[1])
        return ops.cross_entropy(i["logits"], labels, softcap=softcap, lse_square_scale=z, **options)

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        t, labels = i["logits"], _labels(i["logits"], i["logits"].shape[1])
        if softcap is not None:
            t = softcap * torch.tanh(t / softcap)
        return F.cross_entropy(t, labels, **options) + z * t.logsumexp(-1).masked_fill(labels == -100, 0.0).square()

    return Kernel(name, "cross_entropy", {"logits": ("rows", 0.0)}, fused, unfused)


def _linear_cross_entropy(name: str, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Kernel:
    """call(hidden, weight, labels) of onetrip.ops. As many classes as rows; hidden is scaled, so that logits are about
    1."""

    def fused(i: Inputs) -> Tensor:
        return call(i["hidden"] / 32, i["weight"], _labels(i["hidden"], len(i["weight"])))

    def unfused(i: Inputs, keep: Tensor) -> Tensor:
        logits = F.linear(i["hidden"] / 32, i["weight"])
        return F.cross_entropy(logits, _labels(logits, logits.shape[1]), reduction="sum").view(1)

    return Kernel(name, "cross_entropy", {"hidden": ("rows", 0.0), "weight": ("rows", 0.0)}, fused, unfused)


def _summed(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return ops.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_rows=4).view(1)


def _logprobs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    kept = tokens != -100
    found = ops.linear_logprobs(hidden, weight, tokens.clamp_min(0))
    assert isinstance(found, Tensor)
    return -torch.where(kept, found, 0.0).sum().view(1)


KERNELS: tuple[Kernel | Adam, ...] = (
    _row_norm("layer_norm", "layer", True),
    _row_norm("rms_norm", "rms", True),
    *(
        _row_norm("bias+" + ("dropout+" if p else "") + "residual" + (f"+{norm}" if norm else ""), norm, False, p)
        for norm, p in itertools.product(("", "layer", "rms"), (0.0, 0.1))
    ),
    _softmax("softmax"),
    _softmax("scale+mask+softmax", masked=True),
    _softmax("scale+mask+softmax+dropout", 0.1, masked=True),
    *(_glu(activation) for activation in ACTIVATIONS),
    _packed_glu("silu"),
    *(_bias_activation(activation) for activation in ACTIVATIONS),
    _rotary("rotary", interleaved=False),
    _rotary("rotary, interleaved", interleaved=True),
    _moe("moe"),
    _cross_entropy("cross_entropy"),
    _cross_entropy("cross_entropy, smoothed and capped", 5.0, 0.1, 0.01),
    _linear_cross_entropy("linear cross_entropy", _summed),
    _linear_cross_entropy("linear logprobs", _logprobs),
    Adam("adam, 8-bit states", True),
    Adam("adam, 32-bit states", False),
    Adam("adam, master weights of 24 bits", False, Rounding.RESIDUAL_8),
    Adam("adam, master weights of 32 bits", False, Rounding.RESIDUAL_16),
    Adam("adam, stochastic rounding", False, Rounding.STOCHASTIC),
)


@dataclass(frozen=True)
class Check:
    """The outcome for one kernel, one combination of dtypes and one direction; the worst of all shapes and tensors."""

    device: str
    backend: str
    kernel: str
    dtype: str
    direction: str
    error: float
    """Largest absolute error of the tensor that came nearest to its bound, or passed it."""
    allowed: float
    failure: str
    """What was raised instead of a result; "" where there was one."""

    @property
    def passed(self) -> bool:
        return not self.failure and self.error <= self.allowed  # not a number never passes

    def __str__(self) -> str:
        what = self.failure or f"error {self.error:.2e}, allowed {self.allowed:.2e}"
        return f"{self.device}, {self.backend}, {self.kernel}, {self.dtype}, {self.direction}: {what}"

    def to_dict(self) -> dict[str, Any]:
        # JSON has no NaN and no infinity.
        finite = {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in asdict(self).items()}
        return {**finite, "passed": self.passed}


def cases(backend: str) -> Iterator[tuple[Kernel | Adam, str]]:
    """What run_check is to be called with for one backend: kernels and names of DTYPES."""
    own = [kernel for kernel in KERNELS if backend == "reference" or kernel.family in FAMILIES[backend]]
    for kernel, (name, (dtype, parameter_dtype)) in itertools.product(own, DTYPES.items()):
        if isinstance(kernel, Adam) and not kernel.takes(parameter_dtype):
            continue
        if dtype in KERNEL_DTYPES or (backend == "reference" and isinstance(kernel, Kernel)):
            yield kernel, name


def run_check(device: torch.device, backend: str, kernel: Kernel | Adam, dtype_name: str) -> tuple[Check, ...]:
    """A check of each direction. Whatever a kernel raises becomes a failure; torch's generators are not touched."""
    errors = dict.fromkeys(kernel.directions, (0.0, 0.0))
    failure = ""
    try:
        for direction, error, allowed in kernel.errors(device, backend, *DTYPES[dtype_name]):
            if not _share(error, allowed) <= _share(*errors[direction]):
                errors[direction] = (error, allowed)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    return tuple(
        Check(str(device), backend, kernel.name, dtype_name, direction, *found, failure)
        for direction, found in errors.items()
    )


def _share(error: float, allowed: float) -> float:
    return error / allowed if allowed else error


def _errors(
    device: torch.device,
    backend: str,
    kernel: Kernel,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    n_rows: int,
    n_cols: int,
) -> Iterator[tuple[str, float, float]]:
    """(direction, error, allowed) of the output and of every gradient."""
    generator = torch.Generator().manual_seed(n_cols)

    def values(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
        drawn = torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")
        return (mean + drawn).to(dtype).to(device)

    inputs = {
        name: values(n_rows, n_cols, dtype=dtype, mean=mean)
        if shape == "rows"
        else values(n_cols, dtype=parameter_dtype, mean=mean)
        for name, (shape, mean) in kernel.inputs.items()
    }
    keep = keep_mask((n_rows, n_cols), kernel.dropout_p, _RNG).to(device)
    with torch.no_grad():
        shape = kernel.unfused({name: tensor.double() for name, tensor in inputs.items()}, keep).shape
    dy = values(*shape, dtype=torch.float64)

    def gradients(dtype: torch.dtype | None, fused: bool) -> list[Tensor]:
        leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
        with use_backend(backend):
            y = kernel.fused(leaves) if fused else kernel.unfused(leaves, keep)
            y.backward(dy.to(y.dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]

    truth = gradients(torch.float64, fused=False)
    ours = gradients(None, fused=True)
    unfused: list[Tensor] = truth
    # Where torch lacks an operation for these dtypes on this device, exact values are the baseline: a stricter bound.
    with suppress(RuntimeError):
        unfused = gradients(None, fused=False)
    if len(ours) != len(truth):
        raise RuntimeError(f"{len(ours) - 1} gradients came back, {len(truth) - 1} were expected")
    for index, (exact, got, baseline) in enumerate(zip(truth, ours, unfused, strict=True)):
        unit = torch.finfo(got.dtype).eps * float(exact.abs().max())
        allowed = 2 * float((baseline.double() - exact).abs().max()) + _ULPS[got.dtype] * unit
        yield "backward" if index else "forward", float((got.double() - exact).abs().max()), allowed
