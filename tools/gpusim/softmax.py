"""softmax calls as simulator cases, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from onetrip.reference import softmax as reference
from onetrip.reference.philox import keep_mask
from onetrip.reference.softmax import BackwardOperands, MaskLayout, Operands, SoftmaxPlan
from torch import Tensor

from tools.gpusim.harness import DTYPE_CODES, ORDERS, RNG, Case, Outputs, RowsCall

MASK_CODES = {**DTYPE_CODES, torch.bool: 3}
ALL = (True, True, True, True)


@dataclass(frozen=True)
class Call(RowsCall):
    """One call, forward and backward. The rows are those of scores [n_batch, n_heads, n_queries, n_cols]."""

    dims: tuple[int, int, int]
    """n_batch, n_heads, n_queries."""
    n_cols: int
    dtype: torch.dtype
    mask: torch.dtype | None = None
    mask_has: tuple[bool, bool, bool, bool] = ALL
    """Which of the four dimensions the mask has; it is broadcast along the others."""
    mask_order: tuple[int, int, int] = (0, 1, 2)
    """How the mask's rows lie in memory, slowest first."""
    mask_padding: int = 0
    """Elements between the rows of the mask."""
    causal: bool = False
    scale: float = 0.7
    store_p: bool = True
    special: tuple[float, ...] = ()
    """Put into the scores here and there; the rows 1, 4, 7, ... of a float mask are -Inf where there is any."""
    wants_dscores: bool = True

    @property
    def n_rows(self) -> int:
        return self.dims[0] * self.dims[1] * self.dims[2]

    def plan(self) -> SoftmaxPlan:
        return SoftmaxPlan(self.scale, self.causal, self.dropout_p, self.dropout_p > 0 and self.store_p)

    def layout(self) -> MaskLayout | None:
        if self.mask is None:
            return None
        width = self.n_cols if self.mask_has[3] else 1
        strides = [0, 0, 0]
        step = width + self.mask_padding
        for k in reversed(self.mask_order):
            if self.mask_has[k]:
                strides[k] = step
                step *= self.dims[k]
        return MaskLayout((1, *self.dims), (0, *strides), 1 if self.mask_has[3] else 0)

    @lru_cache(maxsize=32)  # noqa: B019  the calls are few and small
    def tensors(self) -> dict[str, Tensor]:
        """Random inputs, the same for every layout of the same call."""
        generator = torch.Generator().manual_seed(self.n_rows * 100003 + self.n_cols)
        rows = (self.n_rows, self.n_cols)
        scores = 3 * torch.randn(rows, generator=generator)
        for i, value in enumerate(self.special):
            scores.view(-1)[i * 37 % scores.numel()] = value
        drawn = {"scores": scores.to(self.dtype), "dy": torch.randn(rows, generator=generator).to(self.dtype)}
        layout = self.layout()
        if layout is not None:
            assert self.mask is not None
            sizes = (*self.dims, self.n_cols)
            shape = [size if there else 1 for size, there in zip(sizes, self.mask_has, strict=True)]
            # Drawn in the order of the elements, so that padding changes no value.
            values, hidden = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) < 0.3
            hidden.view(-1, shape[3])[1::3] = True
            is_bool = self.mask == torch.bool
            mask = ~hidden if is_bool else torch.where(hidden, float("-inf"), values).to(self.mask)
            extent = 1 + sum((n - 1) * s for n, s in zip(layout.sizes, layout.strides, strict=True))
            extent += (self.n_cols - 1) * layout.col_stride
            storage = torch.full((extent,), False if is_bool else float("nan"), dtype=self.mask)
            storage.as_strided(shape, (*layout.strides[1:], layout.col_stride)).copy_(mask)
            drawn["mask"] = storage
        return drawn

    def _numbers(self) -> dict[str, float]:
        numbers: dict[str, float] = {
            "n_rows": self.n_rows,
            "n_cols": self.n_cols,
            "dtype": DTYPE_CODES[self.dtype],
            "scale": self.scale,
            "n_queries": self.dims[2] if self.causal else 0,
        }
        stride = self.n_cols + self.row_padding
        numbers |= {f"{name}_row_stride": stride for name in ("scores", "dy", "p")}
        layout = self.layout() or MaskLayout((1, 1, 1, self.n_rows), (0, 0, 0, 0), 0)
        numbers |= {f"mask_rows.sizes.{k}": size for k, size in enumerate(layout.sizes)}
        numbers |= {f"mask_rows.strides.{k}": step for k, step in enumerate(layout.strides)}
        numbers["mask_rows.col_stride"] = layout.col_stride
        if self.mask is not None:
            numbers["mask_type"] = MASK_CODES[self.mask]
        return numbers | self.common_numbers()

    def forward_case(self) -> Case:
        tensors = self.tensors()
        inputs = self.inputs({name: tensors[name] for name in ("scores", "mask") if name in tensors})
        outputs = {"y": self.output((self.n_rows, self.n_cols), self.dtype)}
        if self.plan().store_p:
            outputs["p"] = self.output((self.n_rows, self.n_cols), self.dtype)
        return Case("forward", self._numbers(), inputs, outputs, self.orders)

    @lru_cache(maxsize=32)  # noqa: B019  the calls are few and small
    def reference_forward(self) -> tuple[Tensor, Tensor | None]:
        """In float64, of the values that the kernel gets."""
        tensors = self.tensors()
        return reference.forward(
            Operands(tensors["scores"].double(), tensors.get("mask"), self.layout(), self.dims[2]), RNG, self.plan()
        )

    def saved(self) -> Tensor:
        """What backward gets: y, or the probabilities with the mask in their sign."""
        y, p = self.reference_forward()
        return (y if p is None else p).to(self.dtype)

    def backward_case(self) -> Case:
        # What causality hides is not looked at.
        hidden = self.hidden()
        given = {"dy": self.tensors()["dy"], "p": self.saved()}
        inputs = self.inputs({name: tensor.masked_fill(hidden, float("nan")) for name, tensor in given.items()})
        outputs = {}
        if self.wants_dscores:
            outputs["dscores"] = self.output((self.n_rows, self.n_cols), self.dtype)
        layout = self.layout()
        if layout is not None and self.mask != torch.bool:
            outputs["dmask"] = self.output((layout.n_mask_rows, self.n_cols), torch.float32)
        return Case("backward", self._numbers(), inputs, outputs, self.orders)

    def reference_backward(self) -> dict[str, Tensor]:
        """In float64, of the values that the kernel gets."""
        wants_dmask = self.mask not in (None, torch.bool)
        dscores, dmask = reference.backward(
            BackwardOperands(self.tensors()["dy"].double(), self.saved().double(), self.layout(), self.dims[2]),
            self.plan(),
            True,
            wants_dmask,
        )
        gradients = {"dscores": dscores if self.wants_dscores else None, "dmask": dmask}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def hidden(self) -> Tensor:
        """Bool [n_rows, n_cols]: the columns that causality hides."""
        query = torch.arange(self.n_rows) % self.dims[2]
        hidden = torch.arange(self.n_cols)[None, :] > query[:, None] + (self.n_cols - self.dims[2])
        return hidden if self.causal else torch.zeros_like(hidden)

    def check_forward(self, outputs: Outputs) -> None:
        """y and p within scorecard N1's bound and one rounding; exact zeros where dropped, hidden or masked."""
        y, p = self.reference_forward()
        hidden = self.hidden()
        for name, actual in outputs.items():
            expected = y if name == "y" else p
            assert expected is not None
            # Not looked at: NaN or 0, as the row is.
            expected = expected.masked_fill(hidden, 0.0)
            bits = actual.view({2: torch.int16, 4: torch.int32}[actual.itemsize])
            assert not bits[hidden].any(), f"{self.name}: {name} is not +0 where causality hides"
            rounding = 0.0 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps / 2
            self.assert_close(name, actual, expected, relative=rounding + 2e-6, absolute=1e-7)
            if name == "y" and self.dropout_p > 0:
                dropped = ~keep_mask(tuple(actual.shape), self.dropout_p, RNG)
                assert not bits[dropped].any(), f"{self.name}: y is not +0 where dropped"
            if name == "p":
                visible = ~hidden & ~torch.isnan(expected)
                same = torch.equal(torch.signbit(actual)[visible], torch.signbit(expected)[visible])
                assert same, f"{self.name}: signs of p are not the dropout mask"

    def check_backward(self, outputs: Outputs) -> None:
        """Against float64: one rounding of the gradient's dtype, and float32 sums."""
        expected = self.reference_backward()
        assert set(expected) == set(outputs)
        for name, actual in outputs.items():
            terms = self.n_rows / actual.shape[0]
            relative = torch.finfo(actual.dtype).eps
            self.assert_close(name, actual, expected[name], relative, absolute=2e-6 * terms**0.5)


def calls(dtype: torch.dtype, dims: tuple[int, int, int], n_cols: int, orders: tuple[int, ...] = ORDERS) -> list[Call]:
    """What the operator does, at one size."""
    common = {"dims": dims, "n_cols": n_cols, "dtype": dtype, "orders": orders}
    infinite = (float("nan"), float("inf"), float("-inf"))
    return [
        Call("plain", **common),
        Call(
            "padding", **common, mask=torch.bool, mask_has=(True, False, False, True), dropout_p=0.1, special=infinite
        ),
        Call("bool", **common, mask=torch.bool, mask_has=(True, False, True, True), special=(float("nan"),)),
        Call("bias", **common, mask=torch.float32, mask_has=(False, True, True, True), dropout_p=0.3),
        Call("bias_transposed", **common, mask=torch.bfloat16, mask_order=(2, 0, 1), causal=True),
        Call("bias_of_keys", **common, mask=torch.float16, mask_has=(False, False, False, True), special=infinite),
        Call("bias_of_batch", **common, mask=torch.float32, mask_has=(True, False, True, True), mask_padding=8),
        Call("mask_of_queries", **common, mask=torch.bool, mask_has=(True, True, True, False)),
        Call("causal", **common, causal=True, dropout_p=0.1, rng_in_memory=True, special=infinite),
    ]
