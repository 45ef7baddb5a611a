"""AdamW8bit and Adam8bit: all parameters in one step, two bytes of state each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from operator import is_
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from ..ops.common.backends import KERNEL_DTYPES
from ..reference.rounding import join
from . import checkpoint, sharding
from .foreign import IMPORTED, check_is_complete, check_is_state_dict, from_bitsandbytes, is_of_bitsandbytes
from .hyperparameters import Options, check_group, checked_max_grad_norm, number_on, plain
from .state import RESIDUAL, State, checked, dequantized, fitted, for_torch, new_state, uses_8bit
from .table import Member, StepTable, step_tables

_OF_TORCH = ("amsgrad", "foreach", "fused", "differentiable")  # keys of torch.optim.Adam's groups
_HINTS = {
    "fused": "fused must not be given: every step is one fused kernel",
    "foreach": "foreach must not be given: every step is one fused kernel",
    "amsgrad": "amsgrad must not be given: only torch.optim has it",
    "differentiable": "differentiable must not be given: only torch.optim has it",
    "block_wise": "block_wise must not be given: states are always quantised in blocks",
    "percentile_clipping": "percentile_clipping must not be given: max_grad_norm clips",
    "min_8bit_size": "min_8bit_size is called min_8bit_numel here",
    "is_paged": "is_paged must not be given: states stay on the device of their parameters",
}
"""What to do instead, for arguments of torch.optim's and bitsandbytes' optimizers."""
_OWN = ("optim_bits", "min_8bit_numel", "maximize", "capturable")


class Adam8bit(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015) with L2 decay and states of two bytes a parameter.

    params: as torch.optim takes them; float32, float16, bfloat16 in any mix, gradients too, dense; frozen ones are of
    any dtype. Each must be contiguous to be updated in place; others cost a contiguous copy that stays. weight_decay is
    added to the gradient, times the parameter. optim_bits: 8, or 32 for float32 states; parameters of fewer than
    min_8bit_numel elements have float32 states in any case. Precision is chosen at a parameter's first step, of the
    whole parameter when it is sharded, and kept. All arguments but capturable and max_grad_norm are keys of param
    groups too.
    lr: a number, or a float Tensor of one element. capturable: step() may be captured in a CUDA graph; lr then changes
    between replays where it is a float32 Tensor on the device.

    max_grad_norm: a number, inf to measure the norm alone, or None; the attribute may be changed at any time. The step
    scales gradients by min(1, max_grad_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does, norm being
    that of all gradients (of DTensors, over all ranks). It reads them once more and leaves them as they are.
    last_grad_norm is that norm, before clipping and without GradScaler's scale: 0-d float32, None before the first
    step. Where gradients are a rank's share of a larger model (DeepSpeed, FSDP1, pipeline stages), clip by what knows
    all ranks.

    master_weight_bits: 32 or 24. bfloat16 and float16 parameters then have master weights, 16 or 8 bits of state more:
    what a step cannot store in the parameter is kept there. With 32 bits the step is that of float32 weights, which
    master_weights() returns; with 24, updates below 2^-17 of a bfloat16 weight are lost; without, those below 2^-9. The
    bits of a state are kept, as its precision is. Writing to a parameter leaves its residual as it is, less than half
    of the last place; the step after a change to float32 drops it.
    bf16_stochastic_round: bfloat16 parameters are rounded up or down at random instead, with the probabilities that
    make the expectation right. The random bits are a function of the parameter's index, its step and the element, not
    of torch's generators, and repeat wherever no border between two ranks cuts a block of 128.

    A step waits for no device. It works with torch.amp.GradScaler, which skips a step whose gradients are not finite;
    without one they propagate as in torch.optim. The same inputs give the same bits, whatever the number of threads.
    Memory: 2 + 8/128 bytes of state a parameter of 8 bits, and 2 or 1 for a master weight. To continue with
    torch.optim, load state_dict_for_torch().

    Raises ValueError or TypeError for wrong arguments, here and at step(), before anything has changed; RuntimeError
    for sparse gradients.
    """

    _decoupled: ClassVar[bool] = False
    _name: ClassVar[str] = "Adam8bit"  # in messages
    _step_supports_amp_scaling = True  # torch.amp.GradScaler then hands over grad_scale and found_inf
    _options: Options | None = None
    # What the last step took: tables, parameters, what it read of the groups, states, and who had no state.
    _tables: list[StepTable] = []  # noqa: RUF012 (replaced, never changed in place)
    _params: list[Tensor] = []  # noqa: RUF012
    _grouping: list[tuple[Any, ...]] = []  # noqa: RUF012
    _entries: list[State] = []  # noqa: RUF012
    _outside: list[int] = []  # noqa: RUF012
    _indices: list[int] | None = None  # of parameters, where they are some of another optimizer's
    _max_grad_norm: float | None = None
    last_grad_norm: Tensor | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        optim_bits: int = 8,
        min_8bit_numel: int = 4096,
        maximize: bool = False,
        capturable: bool = False,
        master_weight_bits: int | None = None,
        bf16_stochastic_round: bool = False,
        max_grad_norm: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            name = next(iter(unknown))
            raise TypeError(f"{self._name}: {_HINTS.get(name, 'unknown argument {0!r}').format(name)}")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "optim_bits": optim_bits,
            "min_8bit_numel": min_8bit_numel,
            "maximize": maximize,
            "capturable": capturable,
            "master_weight_bits": master_weight_bits,
            "bf16_stochastic_round": bf16_stochastic_round,
            "decoupled_weight_decay": self._decoupled,  # as torch.optim.Adam records it
        }
        check_group(self._name, defaults, may_wait=True)
        self.max_grad_norm = max_grad_norm
        super().__init__(params, defaults)

    @property
    def max_grad_norm(self) -> float | None:
        return self._max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float | None) -> None:
        self._max_grad_norm = checked_max_grad_norm(self._name, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim; raises where a value of the group, or the dtype of a parameter that requires a gradient, is
        wrong; the group is not added then."""
        super().add_param_group(param_group)
        group = self.param_groups.pop()
        for key in ("amsgrad", "differentiable"):
            if group.get(key):
                raise ValueError(f"{self._name}: {key} must be False, got {group[key]!r}")
        first = sum(len(before["params"]) for before in self.param_groups)
        check_group(self._name, group, may_wait=True)
        self._check_decay(group)
        for i, p in enumerate(group["params"], first):
            if p.requires_grad:  # a frozen one is of any dtype, such as weights of 4 bits
                self._check_param(p, str(i))
        self.param_groups.append(group)

    def _check_param(self, p: Tensor, name: str) -> None:
        if p.dtype not in KERNEL_DTYPES or p.layout != torch.strided:
            raise TypeError(
                f"{self._name}: params must be dense float32, float16 or bfloat16 tensors, got {str(p.dtype)[6:]} "
                f"({p.layout}) for parameter {name}"
            )

    def _check_decay(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError for a group, given or loaded from a checkpoint, with weight decay of the other kind."""
        decoupled = group.get("decoupled_weight_decay", self._decoupled)
        if bool(decoupled) != self._decoupled and group["weight_decay"] != 0.0:
            wanted, got = ("L2", "decoupled") if decoupled else ("decoupled", "L2")
            raise ValueError(f"{self._name}: weight decay must be {wanted}, got a group whose decay is {got}")

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every parameter that has a gradient, in place.

        closure: reevaluates the model and returns the loss. Returns what it returned.
        """
        check_capture = getattr(self, "_accelerator_graph_capture_health_check", None)
        (check_capture or self._cuda_graph_capture_health_check)()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._options is None:
            self._options = Options(self._name, self._decoupled)
        groups = self._options.read(self.param_groups)
        params = list(self._every_parameter())
        if not self._prepare(params):
            self._rebuild(params)
        given = [getattr(self, "grad_scale", None), getattr(self, "found_inf", None)]
        if self.max_grad_norm is not None and self._tables:
            given[0] = self._clipping_scale(self.max_grad_norm, given[0])
        for table in self._tables:
            table.launch(groups, *(None if number is None else number_on(table.device, number) for number in given))
        return loss

    def _clipping_scale(self, max_grad_norm: float, grad_scale: Any) -> Any:
        """What gradients are to be divided by: grad_scale (1 where None), times a factor where their norm is above
        max_grad_norm."""
        if any(getattr(p, "_fsdp_flattened", False) for p in self._params):
            raise ValueError(
                f"{self._name}: max_grad_norm must be None for parameters of FullyShardedDataParallel, whose "
                f"clip_grad_norm_ knows all ranks, got {max_grad_norm}"
            )
        sums = [table.sum_of_squares() for table in self._tables]
        total = sums[0] if len(sums) == 1 else torch.stack([each.to(sums[0].device) for each in sums]).sum()
        scale = None if grad_scale is None else number_on(total.device, grad_scale)
        norm = total.sqrt() if scale is None else total.sqrt() / scale
        self.last_grad_norm = norm.float()
        if max_grad_norm == math.inf:
            return grad_scale
        factor = ((norm + 1e-6) / max_grad_norm).clamp(min=1.0)
        return factor if scale is None else factor * scale

    def _prepare(self, params: list[Tensor]) -> bool:
        """Brings the tables up to date. False where they are of other parameters or states, or those have changed."""
        return (
            self._grouping_now() == self._grouping
            and all(map(is_, params, self._params))
            and len(self.state) == len(self._entries)
            and all(map(is_, self.state.values(), self._entries))
            and all(params[i].grad is None for i in self._outside)
            and all(table.prepare() for table in self._tables)
        )

    @torch.inference_mode(False)  # states made there could not be written outside
    @torch.no_grad()
    def _rebuild(self, params: list[Tensor]) -> None:
        """New tables, of every parameter with a state or a gradient, and the states that are missing. Raises before
        anything has changed."""
        group_of = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        names = self._names()
        new: dict[Tensor, State] = {}

        def member(i: int) -> Member:
            p, group = params[i], self.param_groups[group_of[i]]
            if group["capturable"] and p.device.type == "cpu":
                raise ValueError(
                    f"{self._name}: capturable must be False for parameters on the CPU, got True for parameter "
                    f"{names[i]}"
                )
            self._check_param(p, names[i])
            if p.device.type == "meta":
                raise TypeError(f"{self._name}: params must hold data, got one on meta for parameter {names[i]}")
            known_state = new.get(p) or self.state.get(p)
            state = fitted(p, known_state or new_state(p, uses_8bit(group, p)), group["master_weight_bits"])
            if state is not known_state:
                new[p] = state
            index = i if self._indices is None else self._indices[i]
            random_bits = sharding.random_bits(p, index) if group["bf16_stochastic_round"] else None
            return Member(p, state, group_of[i], names[i], random_bits)

        present = [i for i, p in enumerate(params) if p.grad is not None]
        known = [i for i, p in enumerate(params) if p.grad is not None or self.state.get(p)]
        try:
            tables = step_tables(self._name, map(member, known))
        except (TypeError, ValueError):
            if known == present:
                raise
            known = present  # perhaps a parameter is wrong that does not step now
            tables = step_tables(self._name, map(member, known))
        for table in tables:
            table.prepare()
        self.state.update(new)
        self._params, self._grouping = params, self._grouping_now()
        self._outside = sorted(set(range(len(params))).difference(known))
        self._tables = tables
        self._entries = list(self.state.values())

    def _grouping_now(self) -> list[tuple[Any, ...]]:
        """What tables depend on: where a group ends, and how its parameters are rounded."""
        return [
            (len(group["params"]), group["master_weight_bits"], group["bf16_stochastic_round"])
            for group in self.param_groups
        ]

    def _names(self) -> list[str]:
        """Name of every parameter in messages: its index in state_dict, and its name where params had names."""
        names: list[str] = []
        for group in self.param_groups:
            of_group = group.get("param_names") or [None] * len(group["params"])
            names += [str(i) if name is None else f"{i} ({name})" for i, name in enumerate(of_group, len(names))]
        return names

    def dequantized_state(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """(exp_avg, exp_avg_sq) of a parameter, new float32 tensors shaped like it (of a sharded one, like its local
        part). Raises ValueError where it has not taken a step with this optimizer."""
        state = self.state.get(p)
        if not state:
            raise ValueError("dequantized_state: p must be a parameter that has taken a step, got one without state")
        return dequantized(p, state)

    @torch.no_grad()
    def master_weights(self, model: torch.nn.Module) -> dict[str, Any]:
        """model.state_dict() in float32: the master weights of parameters that have them (DTensors of sharded ones),
        other floating-point tensors cast, the rest as it is. What is float32 already shares memory with the model."""
        weights: dict[str, Any] = {}
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):  # a module's extra state
                weights[name] = value
            elif value not in self.state or RESIDUAL not in self.state[value]:
                weights[name] = value.detach().float() if value.is_floating_point() else value.detach()
            else:
                master = join(sharding.local(value.detach()), self.state[value][RESIDUAL])
                if sharding.is_sharded(value):
                    master = sharding.dtensor(master, value.device_mesh, value.placements, tuple(value.shape))  # type: ignore[attr-defined]
                weights[name] = master
        return weights

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim: tensors, numbers, lists and dicts, those of this optimizer, not copies. Of sharded
        parameters DTensors, which torch.distributed.checkpoint saves and reshards. n_states says how many parameters
        have a state (one that never had a gradient has none), so that a checkpoint that lost some is told from it."""
        packed = super().state_dict()
        packed["param_groups"] = [
            {key: plain(value) for key, value in group.items()} for group in packed["param_groups"]
        ]
        for index, p in enumerate(self._every_parameter()):
            if index in packed["state"]:
                packed["state"][index] = sharding.to_saved(p, packed["state"][index])
        packed["n_states"] = sum(map(bool, packed["state"].values()))
        return packed

    def state_dict_for_torch(self) -> dict[str, Any]:
        """state_dict() for torch.optim.AdamW, or torch.optim.Adam for Adam8bit: float32 moments, copied.

        Training continues from the dequantised moments. torch takes fused and foreach from the dict that it loads: set
        them in its param_groups, or get torch's defaults. Master weights are left out. torch cannot load state_dict()
        itself where states have 8 bits: it raises KeyError.
        """
        packed = self.state_dict()
        packed.pop("n_states", None)
        for group in packed["param_groups"]:
            for key in ("optim_bits", "min_8bit_numel", "master_weight_bits", "bf16_stochastic_round"):
                del group[key]
        for index, p in enumerate(self._every_parameter()):
            if state := self.state.get(p):
                packed["state"][index] = sharding.to_saved(p, for_torch(p, state))
        return packed

    def _every_parameter(self) -> Iterator[Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads a state_dict of this class, or of torch.optim's or torchao's Adam or AdamW.

        Moments of other classes are quantised where this optimizer's precision is 8 bits. Precision is otherwise the
        checkpoint's. Tensors are copied to their parameters' devices. capturable becomes False for parameters on the
        CPU.

        Raises ValueError where it is another model's, damaged or incomplete, and then has changed nothing.
        """
        where = f"{self._name}.load_state_dict"
        if isinstance(state_dict, Mapping):
            state_dict = dict(state_dict)
            check_is_complete(where, state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        check_is_state_dict(where, "state_dict", state_dict)
        if is_of_bitsandbytes(state_dict["state"]):
            raise ValueError(
                f"{where}: state_dict must be onetrip's, torch.optim's or torchao's, got bitsandbytes'; call "
                "load_bitsandbytes_state_dict"
            )
        loaded = self._loaded_groups(where, state_dict["param_groups"])
        saved = state_dict["state"]
        state: dict[Tensor, State] = {}
        remaining = dict(saved)
        for group, keys, is_ours in loaded:
            for p, key in zip(group["params"], keys, strict=True):
                entry = remaining.pop(key, None)
                if entry is not None and entry != {}:
                    which = f"{where}: state of parameter {key}"
                    state[p] = checked(which, p, entry, None if is_ours else group)
        if remaining:
            raise ValueError(
                f"{where}: state must be of the parameters in param_groups, got also {list(remaining)[:5]}"
            )
        fresh = self.state.__class__(dict)
        fresh.update(state)
        self.__setstate__({"state": fresh, "param_groups": [group for group, _, _ in loaded]})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_groups(self, where: str, saved: Any) -> list[tuple[dict[str, Any], list[Any], bool]]:
        """For each group: its values, its parameters' keys in the checkpoint, and whether this class has written it."""
        lengths = [len(group["params"]) for group in self.param_groups]
        try:
            got = [len(group["params"]) for group in saved]
        except (TypeError, KeyError) as error:
            raise ValueError(f"{where}: param_groups must be dicts with params, got {type(saved).__name__}") from error
        if lengths != got:
            raise ValueError(f"{where}: param_groups must have {lengths} parameters, got {got}")
        loaded = []
        for ours, given in zip(self.param_groups, saved, strict=True):
            group = deepcopy({key: value for key, value in given.items() if key != "params"})
            is_ours = "optim_bits" in group or "min_8bit_numel" in group
            needed = {*IMPORTED, *_OWN} if is_ours else set(IMPORTED)
            if missing := sorted(needed - set(group)):
                raise ValueError(f"{where}: param_groups must have {missing}, got {sorted(map(str, group))}")
            if group.get("amsgrad"):
                raise ValueError(f"{where}: param_groups must be of Adam without amsgrad, got amsgrad=True")
            if not is_ours:
                for key in _OF_TORCH:
                    group.pop(key, None)
            for key in (*self.defaults, "param_names"):
                if key in ours:
                    group.setdefault(key, ours[key])
            check_group(where, group, may_wait=True)
            self._check_decay(group)
            group["decoupled_weight_decay"] = self._decoupled
            if any(p.device.type == "cpu" for p in ours["params"]):
                group["capturable"] = False  # it was saved on a GPU
            loaded.append(({**group, "params": ours["params"]}, list(given["params"]), is_ours))
        return loaded

    def load_bitsandbytes_state_dict(self, state: Mapping[str, Any]) -> None:
        """A state_dict of bitsandbytes' Adam, AdamW and their 8-bit and paged kinds, block-wise: its states are
        dequantised, then quantised as this optimizer does; lr, betas, eps and weight_decay become the checkpoint's.

        bitsandbytes decays as AdamW in all of them. Raises ValueError where it is another model's or no such state,
        and then has changed nothing.
        """
        where = f"{self._name}.load_bitsandbytes_state_dict"
        self.load_state_dict(from_bitsandbytes(where, list(self._every_parameter()), state))

    def save_safetensors(self, path: str | Path) -> None:
        """state_dict() as one file that safetensors reads, its checksum in the metadata. The file appears whole or not
        at all: what was there before stays until then.

        Keys of your own in param groups may hold tensors, and what JSON does (tuples come back as lists): TypeError
        otherwise.
        """
        if any(sharding.is_sharded(p) for p in self.state):
            raise ValueError(
                "save_safetensors: parameters must be whole, got sharded ones; torch.distributed.checkpoint"
            )
        checkpoint.save(self.state_dict(), Path(path))

    def load_safetensors(self, path: str | Path) -> None:
        """What save_safetensors wrote. Raises ValueError where the file is damaged, cut or another model's, and then
        has changed nothing."""
        self.load_state_dict(checkpoint.load(Path(path)))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_max_grad_norm": self._max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables, self._params, self._grouping, self._entries, self._options = [], [], [], [], None


class AdamW8bit(Adam8bit):
    """AdamW (Loshchilov & Hutter 2019): weight decay is decoupled, p *= 1 - lr * weight_decay before each update; the
    rest as Adam8bit."""

    _decoupled = True
    _name = "AdamW8bit"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        optim_bits: int = 8,
        min_8bit_numel: int = 4096,
        maximize: bool = False,
        capturable: bool = False,
        master_weight_bits: int | None = None,
        bf16_stochastic_round: bool = False,
        max_grad_norm: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            optim_bits=optim_bits,
            min_8bit_numel=min_8bit_numel,
            maximize=maximize,
            capturable=capturable,
            master_weight_bits=master_weight_bits,
            bf16_stochastic_round=bf16_stochastic_round,
            max_grad_norm=max_grad_norm,
            **unknown,
        )
