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
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .ops.common.backends import FAMILIES, KERNEL_DTYPES, use_backend
from .optim import AdamW8bit
from .optim.state import RESIDUAL
from .patching.activations.fused import FORMULAS
from .reference.glu import ACTIVATIONS
from .reference.philox import dropout_scale, keep_mask

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
_HALF = (torch.float16, torch.bfloat16)
_ULPS = {torch.float16: 1, torch.bfloat16: 1, torch.float32: 8, torch.float64: 64}


_ROWS, _VECTOR = ("rows", 0.0), ("vector", 0.0)


@dataclass(frozen=True)
class Kernel:
    """One call of a family, and what it stands for in PyTorch."""

    name: str
    family: str
    """Name in backends.FAMILIES."""
    inputs: dict[str, tuple[str, float]]
    """Name: "rows" or "vector", and the mean of its values."""
    fused: Callable[..., Tensor]
    """fused(**inputs)."""
    unfused: Callable[..., Tensor]
    """unfused(keep, **inputs): keep is the mask of what dropout keeps."""
    dropout_p: float = 0.0
    directions: ClassVar[tuple[str, ...]] = ("forward", "backward")

    def errors(
        self, device: torch.device, backend: str, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> Iterator[tuple[str, float, float]]:
        """(direction, error, allowed) of the output and of every gradient, for every shape."""
        for n_rows, n_cols in _SHAPES:
            generator = torch.Generator().manual_seed(n_cols)
            inputs = {
                name: _drawn(generator, mean, n_rows, n_cols).to(device, dtype)
                if shape == "rows"
                else _drawn(generator, mean, n_cols).to(device, parameter_dtype)
                for name, (shape, mean) in self.inputs.items()
            }
            keep = keep_mask((n_rows, n_cols), self.dropout_p, _RNG).to(device)
            with torch.no_grad():
                shape_of_y = self.unfused(keep, **{name: tensor.double() for name, tensor in inputs.items()}).shape
            dy = _drawn(generator, 0.0, *shape_of_y).to(device)
            yield from self._errors(inputs, keep, dy, backend)

    def _errors(
        self, inputs: dict[str, Tensor], keep: Tensor, dy: Tensor, backend: str
    ) -> Iterator[tuple[str, float, float]]:
        def gradients(dtype: torch.dtype | None, function: Callable[..., Tensor]) -> list[Tensor]:
            leaves = {name: t.detach().to(dtype or t.dtype).requires_grad_() for name, t in inputs.items()}
            with use_backend(backend):
                y = function(**leaves)
                y.backward(dy.to(y.dtype))
            return [y.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]

        unfused = partial(self.unfused, keep)
        truth = gradients(torch.float64, unfused)
        ours = gradients(None, self.fused)
        baselines = truth
        # Where torch lacks an operation for these dtypes on this device, exact values are the baseline: a stricter
        # bound.
        with suppress(RuntimeError):
            baselines = gradients(None, unfused)
        if len(ours) != len(truth):
            raise RuntimeError(f"{len(ours) - 1} gradients came back, {len(truth) - 1} were expected")
        for index, (exact, got, baseline) in enumerate(zip(truth, ours, baselines, strict=True)):
            unit = torch.finfo(got.dtype).eps * float(exact.abs().max())
            allowed = 2 * float((baseline.double() - exact).abs().max()) + _ULPS[got.dtype] * unit
            yield "backward" if index else "forward", float((got.double() - exact).abs().max()), allowed


def _drawn(generator: torch.Generator, mean: float, *shape: int) -> Tensor:
    return mean + torch.randn(*shape, dtype=torch.float64, generator=generator, device="cpu")


@dataclass(frozen=True)
class Adam:
    """Steps of AdamW8bit on parameters of a dtype with gradients of another."""

    name: str
    options: dict[str, Any]
    """Arguments of AdamW8bit, optim_bits among them."""
    parameter_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    rounding: float = 1.0
    """Error of rounding in units of the parameter's last place, at most."""
    family: ClassVar[str] = "adam"
    directions: ClassVar[tuple[str, ...]] = ("step",)

    def errors(
        self, device: torch.device, backend: str, dtype: torch.dtype, parameter_dtype: torch.dtype
    ) -> Iterator[tuple[str, float, float]]:
        """One figure: the root mean square of the error of the updates over that of exact ones. The parameter is 0
        before every step, so that afterwards it is the update."""
        n, beta1, beta2, eps = _ADAM_NUMEL, 0.9, 0.999, 1e-8
        p = torch.nn.Parameter(torch.zeros(n, dtype=parameter_dtype, device=device))
        p.grad = torch.zeros_like(p)
        optimizer = AdamW8bit([p], 1.0, (beta1, beta2), eps, 0.0, min_8bit_numel=0, **self.options)
        exp_avg = exp_avg_sq = torch.zeros(n, dtype=torch.float64, device="cpu")
        generator, wrong, right = torch.Generator().manual_seed(0), 0.0, 0.0
        for t in range(1, _ADAM_STEPS + 1):
            grad = torch.randn(n, generator=generator, device="cpu").to(dtype)
            g = grad.double()
            exp_avg, exp_avg_sq = exp_avg.lerp(g, 1 - beta1), exp_avg_sq.lerp(g * g, 1 - beta2)
            exact = exp_avg / (1 - beta1**t) / ((exp_avg_sq / (1 - beta2**t)).sqrt() + eps)
            p.grad.data = grad.to(device)  # an assignment of another dtype than the parameter's raises
            p.data.zero_()
            if RESIDUAL in optimizer.state[p]:
                optimizer.state[p][RESIDUAL].zero_()
            with use_backend(backend):
                optimizer.step()
            (update,) = optimizer.master_weights(torch.nn.ParameterList([p])).values()
            wrong += float((update.double().cpu() + exact).square().sum())
            right += float(exact.square().sum())
        rounding = torch.finfo(parameter_dtype).eps * self.rounding
        yield "step", (wrong / right) ** 0.5, rounding + (_ADAM_8BIT_ERROR if self.options["optim_bits"] == 8 else 1e-5)


def _row_norm(name: str, norm: str, alone: bool, dropout_p: float = 0.0) -> Kernel:
    """norm: "layer", "rms" or "" for none; alone: the norm of x, with nothing before it."""
    inputs = {"x": ("rows", 0.5)}
    if not alone:
        inputs |= {"residual": _ROWS, "bias": _VECTOR}
    if norm:
        inputs["weight"] = ("vector", 1.0)
    if norm == "layer":
        inputs["norm_bias"] = _VECTOR
    dropout: dict[str, Any] = {"dropout_p": dropout_p, "rng": _RNG}
    fused: Callable[..., Tensor] = partial(ops.bias_dropout_residual, **dropout)
    if norm and not alone:
        fused = partial(ops.bias_dropout_residual_norm, norm="layer" if norm == "layer" else "rms", eps=_EPS, **dropout)
    elif norm == "rms":
        fused = partial(ops.rms_norm, eps=_EPS)
    elif norm == "layer":
        fused = lambda x, weight, norm_bias: ops.layer_norm(x, weight, norm_bias, _EPS)  # noqa: E731

    def unfused(keep: Tensor, x: Tensor, **i: Tensor) -> Tensor:
        z = x if alone else i["residual"] + torch.where(keep, (x + i["bias"]) * dropout_scale(dropout_p), 0.0)
        if not norm:
            return z
        values = z.to(torch.promote_types(z.dtype, i["weight"].dtype))  # F.layer_norm wants one dtype
        if norm == "layer":
            return F.layer_norm(values, z.shape[-1:], i["weight"], i["norm_bias"], _EPS).to(z.dtype)
        return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + _EPS) * i["weight"]).to(z.dtype)

    return Kernel(name, "row_norm", inputs, fused, unfused, dropout_p)


def _softmax(name: str, dropout_p: float = 0.0, *, masked: bool = False) -> Kernel:
    """masked: with a scale, a causal mask, and a vector added to every row, which gets its gradient."""

    def unfused(keep: Tensor, scores: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            n_rows, n_cols = scores.shape
            visible = torch.ones_like(keep).tril(n_cols - n_rows)
            scores = (scores * 0.5 + mask.to(scores.dtype)).masked_fill(~visible, -torch.inf)
        return torch.where(keep, torch.softmax(scores, -1) * dropout_scale(dropout_p), 0.0)

    options: dict[str, Any] = {"scale": 0.5, "causal": True} if masked else {}
    inputs = {"scores": _ROWS} | ({"mask": _VECTOR} if masked else {})
    fused = partial(ops.softmax, dropout_p=dropout_p, rng=_RNG, **options)
    return Kernel(name, "softmax", inputs, fused, unfused, dropout_p)


def _glu(activation: str) -> Kernel:
    def unfused(keep: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return FORMULAS[activation](gate) * up

    inputs = {"gate": _ROWS, "up": _ROWS}
    return Kernel(f"glu, {activation}", "glu", inputs, partial(ops.glu, activation=activation), unfused)


def _packed_glu(activation: str) -> Kernel:
    def halves(gate_up: Tensor) -> Tensor:
        """The rows, less the last column of an odd width: then no two rows follow each other in memory."""
        return gate_up[:, : gate_up.shape[1] // 2 * 2]

    def fused(gate_up: Tensor) -> Tensor:
        return ops.glu_packed(halves(gate_up), activation)

    def unfused(keep: Tensor, gate_up: Tensor) -> Tensor:
        gate, up = halves(gate_up).chunk(2, -1)
        return FORMULAS[activation](gate) * up

    return Kernel(f"packed glu, {activation}", "glu", {"gate_up": _ROWS}, fused, unfused)


def _bias_activation(activation: str) -> Kernel:
    def unfused(keep: Tensor, x: Tensor, bias: Tensor) -> Tensor:
        return FORMULAS[activation](x + bias)

    fused = partial(ops.bias_activation, activation=activation)
    return Kernel(f"bias+{activation}", "glu", {"x": _ROWS, "bias": _VECTOR}, fused, unfused)


def _softcap() -> Kernel:
    def unfused(keep: Tensor, x: Tensor) -> Tensor:
        return 2.0 * torch.tanh(x / 2.0)

    return Kernel("softcap", "glu", {"x": _ROWS}, lambda x: ops.softcap(x, 2.0), unfused)


def _rotary(name: str, *, interleaved: bool) -> Kernel:
    """The rows are positions of one head; of an odd width the last column is copied."""

    def tables(q: Tensor) -> tuple[Tensor, Tensor]:
        n_positions, n_pairs = q.shape[0], q.shape[1] // 2
        frequencies = 1e4 ** -(torch.arange(n_pairs, dtype=torch.float64, device="cpu") / n_pairs)
        angles = torch.arange(n_positions, device="cpu")[:, None] * frequencies
        angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
        return angles.cos().to(q), angles.sin().to(q)

    def fused(q: Tensor, k: Tensor) -> Tensor:
        rotated = ops.rotary_embedding(q[None, None], k[None, None], *tables(q), interleaved=interleaved)
        return torch.cat(rotated).flatten(0, 2)

    def unfused(keep: Tensor, q: Tensor, k: Tensor) -> Tensor:
        cos, sin = tables(q)
        x = torch.stack((q, k))
        n = cos.shape[-1]
        part, rest = x[..., :n], x[..., n:]
        first, second = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        turned = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
        return torch.cat((part * cos + turned * sin, rest), -1).flatten(0, 1)

    return Kernel(name, "rotary", {"q": _ROWS, "k": _ROWS}, fused, unfused)


def _moe() -> Kernel:
    """Two experts a token: the sum of what they return for it, and its rows for them."""

    def order(x: Tensor, y: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows by expert, places of each token's, their weights, which of all choices each row is)."""
        n_tokens = x.shape[0]
        perm = (torch.arange(2 * n_tokens, device=x.device) * 7919 % (2 * n_tokens + 1)).argsort()
        return torch.cat((x, y)), perm.argsort().view(-1, 2), weights[: 2 * n_tokens].view(-1, 2), perm

    def fused(x: Tensor, **i: Tensor) -> Tensor:
        y, places, weights, _ = order(x, **i)
        return torch.cat((ops.moe_combine(y, places, weights), ops.moe_dispatch(x, places)))

    def unfused(keep: Tensor, x: Tensor, **i: Tensor) -> Tensor:
        y, places, weights, perm = order(x, **i)
        return torch.cat(((y[places] * weights.unsqueeze(-1)).sum(1), x.repeat_interleave(2, 0)[perm]))

    return Kernel("moe", "moe", {"x": _ROWS, "y": _ROWS, "weights": _VECTOR}, fused, unfused)


def _labels(rows: Tensor, n_classes: int) -> Tensor:
    """One row is ignored."""
    labels = torch.arange(rows.shape[0], device=rows.device) * 7919 % n_classes
    labels[1] = -100
    return labels


def _cross_entropy(name: str, softcap: float | None = None, label_smoothing: float = 0.0, z: float = 0.0) -> Kernel:
    options: dict[str, Any] = {"label_smoothing": label_smoothing, "reduction": "none"}

    def fused(logits: Tensor) -> Tensor:
        labels = _labels(logits, logits.shape[1])
        return ops.cross_entropy(logits, labels, softcap=softcap, lse_square_scale=z, **options)

    def unfused(keep: Tensor, logits: Tensor) -> Tensor:
        t = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        labels = _labels(logits, logits.shape[1])
        return F.cross_entropy(t, labels, **options) + z * t.logsumexp(-1).masked_fill(labels == -100, 0.0).square()

    return Kernel(name, "cross_entropy", {"logits": _ROWS}, fused, unfused)


def _linear_cross_entropy(name: str, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Kernel:
    """call(hidden, weight, labels) of onetrip.ops. As many classes as rows; hidden is scaled, so that logits are about
    1."""

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        return call(hidden / 32, weight, _labels(hidden, len(weight)))

    def unfused(keep: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden / 32, weight)
        return F.cross_entropy(logits, _labels(logits, logits.shape[1]), reduction="sum").view(1)

    return Kernel(name, "cross_entropy", {"hidden": _ROWS, "weight": _ROWS}, fused, unfused)


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
    _softcap(),
    _rotary("rotary", interleaved=False),
    _rotary("rotary, interleaved", interleaved=True),
    _moe(),
    _cross_entropy("cross_entropy"),
    _cross_entropy("cross_entropy, smoothed and capped", 5.0, 0.1, 0.01),
    _linear_cross_entropy("linear cross_entropy", _summed),
    _linear_cross_entropy("linear logprobs", _logprobs),
    Adam("adam, 8-bit states", {"optim_bits": 8}),
    Adam("adam, 32-bit states", {"optim_bits": 32}),
    Adam("adam, master weights of 24 bits", {"optim_bits": 32, "master_weight_bits": 24}, _HALF, 2**-8),
    Adam("adam, master weights of 32 bits", {"optim_bits": 32, "master_weight_bits": 32}, _HALF, 2**-16),
    Adam("adam, stochastic rounding", {"optim_bits": 32, "bf16_stochastic_round": True}, _HALF[1:]),
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
        if isinstance(kernel, Adam) and parameter_dtype not in kernel.parameter_dtypes:
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
