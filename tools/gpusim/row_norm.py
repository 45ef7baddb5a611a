"""row_norm calls as simulator cases, and what the reference makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from onetrip.reference import row_norm as reference
from onetrip.reference.philox import keep_mask
from onetrip.reference.row_norm import NORM_LAYER, NORM_NONE, NORM_RMS, BackwardOperands, Dtypes, Operands, RowNormPlan
from torch import Tensor

from tools.gpusim.harness import DTYPE_CODES, ORDERS, RNG, Case, Outputs, Pair, RowsCall


@dataclass(frozen=True)
class Call(RowsCall):
    """One call of the family, forward and backward."""

    n_rows: int
    n_cols: int
    pair: Pair
    norm: int = NORM_LAYER
    residual: bool = False
    bias: bool = False
    weight: bool = True
    norm_bias: bool = True
    parameter_dtype: torch.dtype = torch.float32
    n_dtype: torch.dtype = torch.float32
    y_dtype: torch.dtype | None = None
    """None: x's."""
    weight_offset: float = 0.0
    nan_where_dropped: bool = False
    store_z: bool = False
    center_z: bool = False
    dz: bool = False
    copies: bool = True
    """Whether the GPU has asynchronous copies; without, it has no clusters either."""
    gpu_independent: bool = False
    """Whether gradients of parameters are summed alike on every GPU."""

    def plan(self) -> RowNormPlan:
        return RowNormPlan(
            norm=self.norm,
            eps=1e-5,
            weight_offset=self.weight_offset,
            dropout_p=self.dropout_p,
            z_dtype=self.pair[1],
            n_dtype=self.n_dtype,
            y_dtype=self.y_dtype or self.pair[0],
            store_z=self.store_z or self.norm == NORM_NONE,
            center_z=self.center_z,
            store_stats=self.norm != NORM_NONE,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Random inputs, the same for every layout of the same call."""
        generator = torch.Generator().manual_seed(self.n_rows * 100003 + self.n_cols)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        rows, cols = self.n_rows, self.n_cols
        x_dtype, z_dtype = self.pair
        drawn = {
            "x": random(rows, cols).to(x_dtype),
            "residual": (random(rows, cols) + 0.5).to(z_dtype),
            "bias": random(cols).to(self.parameter_dtype),
            "weight": (1 + 0.5 * random(cols)).to(self.parameter_dtype),
            "norm_bias": random(cols).to(self.parameter_dtype),
            "dy": random(rows, cols).to(self.y_dtype or x_dtype),
            "dz": random(rows, cols).to(z_dtype),
        }
        if self.nan_where_dropped:
            drawn["x"][~keep_mask((rows, cols), self.dropout_p, RNG)] = float("nan")
        absent = {name for name in ("residual", "bias", "weight", "norm_bias") if not getattr(self, name)}
        if self.norm == NORM_NONE:
            absent |= {"weight", "norm_bias", "dy"}
        elif not self.dz:
            absent.add("dz")
        return {name: tensor for name, tensor in drawn.items() if name not in absent}

    def _numbers(self) -> dict[str, float]:
        plan = self.plan()
        dtypes = {"x": self.pair[0], "residual": self.pair[1], "z": plan.z_dtype, "n": plan.n_dtype, "y": plan.y_dtype}
        dtypes |= dict.fromkeys(("bias", "weight", "norm_bias"), self.parameter_dtype)
        stride = self.n_cols + self.row_padding
        numbers: dict[str, float] = {
            "n_rows": self.n_rows,
            "n_cols": self.n_cols,
            "norm": plan.norm,
            "eps": plan.eps,
            "weight_offset": plan.weight_offset,
            "center_z": int(plan.center_z),
            "copies": int(self.copies),
            "gpu_independent": int(self.gpu_independent),
        }
        numbers |= {f"{name}_dtype": DTYPE_CODES[dtype] for name, dtype in dtypes.items()}
        numbers |= {f"{name}_row_stride": stride for name in ("x", "residual", "dy", "dz", "z")}
        return numbers | self.common_numbers()

    def forward_case(self) -> Case:
        plan = self.plan()
        tensors = {name: tensor for name, tensor in self.tensors().items() if name not in ("dy", "dz")}
        matrix = (self.n_rows, self.n_cols)
        outputs = {}
        if plan.norm != NORM_NONE:
            outputs["y"] = self.output(matrix, plan.y_dtype)
            outputs["rstd"] = self.output((self.n_rows,), torch.float32)
            if plan.norm == NORM_LAYER and not plan.center_z:
                outputs["mean"] = self.output((self.n_rows,), torch.float32)
        if plan.store_z:
            outputs["z"] = self.output(matrix, plan.z_dtype)
        return Case("forward", self._numbers(), self.inputs(tensors), outputs, self.orders)

    def reference_forward(self) -> dict[str, Tensor | None]:
        plan, tensors = self.plan(), self.tensors()
        y, z, mean, rstd = reference.forward(Operands(*map(tensors.get, Operands._fields)), RNG, plan)
        return {"y": y, "z": z, "mean": mean if plan.norm == NORM_LAYER else None, "rstd": rstd}

    def backward_case(self) -> Case:
        plan, tensors = self.plan(), self.tensors()
        saved = self._saved()
        inputs = {name: tensors[name] for name in ("dy", "dz", "weight") if name in tensors}
        inputs |= {name: tensor for name, tensor in saved.items() if tensor is not None}
        matrix, vector = (self.n_rows, self.n_cols), (self.n_cols,)
        outputs = {"dx": self.output(matrix, self.pair[0])}
        if self.residual:
            outputs["dresidual"] = self.output(matrix, self.pair[1])
        for name in ("bias", "weight", "norm_bias"):
            if name in tensors:
                outputs["d" + name] = self.output(vector, self.parameter_dtype)
        assert plan.norm == NORM_NONE or "z" in inputs
        return Case("backward", self._numbers(), self.inputs(inputs), outputs, self.orders)

    def _saved(self) -> dict[str, Tensor | None]:
        plan, tensors = self.plan(), self.tensors()
        if plan.norm == NORM_NONE:
            return {}
        operands = Operands(*map(tensors.get, Operands._fields))
        _, z, mean, rstd = reference.forward(operands, RNG, plan._replace(store_z=True))
        return {"z": z, "mean": mean, "rstd": rstd}

    def reference_backward(self) -> dict[str, Tensor]:
        """In float64, of the values that the kernel gets."""
        plan, tensors = self.plan(), self.tensors()

        def wide(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.double()

        given = tensors | self._saved()
        operands = BackwardOperands(*(wide(given.get(name)) for name in BackwardOperands._fields))
        wanted = Dtypes(*(torch.float64 if name in tensors else None for name in Operands._fields))
        gradients = reference.backward(operands, RNG, plan._replace(z_dtype=torch.float64), wanted)
        return {name: gradient for name, gradient in gradients._asdict().items() if gradient is not None}

    def check_forward(self, outputs: Outputs) -> None:
        """z to the bit; y to one rounding of its dtypes; mean and rstd to float32 accuracy."""
        plan = self.plan()
        expected = self.reference_forward()
        for name, actual in outputs.items():
            wanted = expected[name]
            assert wanted is not None and not wanted.isnan().any()
            if name == "z" and not plan.center_z:
                assert torch.equal(actual, wanted), f"{self.name}: z differs"
                continue
            other = plan.n_dtype if name == "y" else torch.float32
            step = max(torch.finfo(dtype).eps for dtype in (actual.dtype, other))
            self.assert_close(name, actual, wanted.double(), relative=2 * step, absolute=4e-6)

    def check_backward(self, outputs: Outputs) -> None:
        """Against float64: one rounding of the gradient's dtype, and float32 sums."""
        expected = self.reference_backward()
        assert set(expected) == set(outputs)
        for name, actual in outputs.items():
            terms = self.n_rows if actual.dim() == 1 else 1
            largest = max(1.0, float(expected[name].abs().max()))
            step = torch.finfo(actual.dtype).eps
            assert not expected[name].isnan().any()
            self.assert_close(name, actual, expected[name], relative=step, absolute=3e-6 * largest * terms**0.5)


def calls(pair: Pair, n_rows: int, n_cols: int, orders: tuple[int, ...] = ORDERS) -> list[Call]:
    """What the family does, at one size: every norm, every optional tensor present and absent."""
    x_dtype, z_dtype = pair
    common = {"n_rows": n_rows, "n_cols": n_cols, "pair": pair, "orders": orders}
    block = {**common, "residual": True, "bias": True, "dropout_p": 0.1, "store_z": True}
    chosen = [
        Call("layer_norm", **common, parameter_dtype=x_dtype),
        Call("rms_norm", **common, norm=NORM_RMS, norm_bias=False, n_dtype=x_dtype, y_dtype=torch.float32),
        Call("rms_norm_offset", **block, norm=NORM_RMS, norm_bias=False, weight_offset=1.0, dz=True),
        Call("block", **block),
        Call("block_no_norm", **block, norm=NORM_NONE, rng_in_memory=True, nan_where_dropped=True),
        Call("no_weight", **common, norm=NORM_RMS, weight=False, norm_bias=False, y_dtype=z_dtype),
    ]
    if z_dtype == x_dtype != torch.float32:
        chosen.append(Call("block_of_one_dtype", **block, parameter_dtype=z_dtype))
        chosen.append(Call("block_float32_y", **block, y_dtype=torch.float32, dz=True))
    if z_dtype == torch.float32:
        chosen.append(Call("block_centred", **block, y_dtype=torch.float32, center_z=True, dz=True))
    return chosen
