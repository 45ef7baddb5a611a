"""What a Triton kernel takes of a GPU that is not here: what would have been launched, compiled for it and counted."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from simulators import MULTIPROCESSORS

triton = pytest.importorskip("triton")
OPTIONS = ("num_warps", "maxnreg", "enable_fp_fusion")  # of a launch, not arguments of its kernel


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """Stands in for a kernel: keeps the arguments of a launch."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            bound = inspect.signature(self.kernel.fn).bind(*args, **kwargs)
            self.launches.append(Launch(self.kernel, bound.arguments, options))

        return launch


def recorded(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> list[Launch]:
    """What will be launched of the kernels in these modules, in place of launching it."""
    launches: list[Launch] = []
    for module in modules:
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    return launches


TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


def compiled(launch: Launch, capability: int, misaligned: tuple[str, ...] = ()) -> Any:
    """The kernel compiled as Triton's launcher would for these arguments, pointers being multiples of 16, but for the
    misaligned ones."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            constants[parameter.name] = value
            signature[parameter.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            if parameter.name not in misaligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type or "fp32"
    source: Any
    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    else:  # triton 3.2
        from triton.backends.compiler import AttrsDescriptor

        divisible = {"tt.divisibility": [index for (index,) in attributes], "tt.equal_to": []}
        attrs = AttrsDescriptor.from_dict({"arg_properties": divisible, "cls": "AttrsDescriptor"})
        signature = {name: type_ for name, type_ in signature.items() if type_ != "constexpr"}
        source = ASTSource(fn=launch.kernel, signature=signature, constants=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers a thread, bytes of stack, bytes of local memory)."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    assert found, usage
    return int(found[1]), int(found[2]), int(found[3])


def access_bytes(ptx: str, instruction: str) -> list[int]:
    """Bytes a lane moves in each access to global memory. instruction: "ld" or "st"."""
    found = re.findall(rf"\b{instruction}\.global[\w.:]*?(?:\.v(\d))?\.[a-z](\d+)\b", ptx)
    return [int(vector or 1) * int(bits) // 8 for vector, bits in found]


def resident_share(registers: int, num_warps: int, capability: int) -> float:
    """Share of the threads that a multiprocessor can hold for which it has registers and blocks."""
    multiprocessor = MULTIPROCESSORS[capability]
    warp_registers = -(-registers * 32 // 256) * 256  # allocated in units of 256
    programs = min(multiprocessor.registers // (warp_registers * num_warps), multiprocessor.blocks)
    return min(1.0, programs * num_warps * 32 / multiprocessor.threads)


class Measured(NamedTuple):
    share: float
    """Share of a multiprocessor's threads that can be resident."""
    spilled: int
    """Bytes a lane."""
    loads: list[int]
    """Bytes a lane moves, for each load instruction."""
    stores: list[int]
    line: str


def measure(case: Any, launch: Launch, capability: int) -> Measured:
    kernel = compiled(launch, capability)
    registers, stack, local = resources(kernel.asm["cubin"])
    num_warps = launch.options["num_warps"]
    share = resident_share(registers, num_warps, capability)
    loads, stores = (access_bytes(kernel.asm["ptx"], instruction) for instruction in ("ld", "st"))
    line = (
        f"{case!s:27} sm_{capability:<3} {launch.kernel.__name__:24} {num_warps:2} warps {registers:3} registers "
        f"{share:4.0%} resident, {stack + local} bytes spilled, "
        f"loads {sorted(set(loads))}, stores {sorted(set(stores))}"
    )
    print(line)
    return Measured(share, stack + local, loads, stores, line)
