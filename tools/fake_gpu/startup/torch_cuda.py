"""What torch.cuda has in a build with CUDA, for the device of torch_device.cpp."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch_device

TOTAL_MEMORY = 3 << 30
MAJOR = int(os.environ["ONETRIP_FAKE_GPU_CAPABILITY"])
BLOCK_SHARED = {7: 96 << 10, 8: 163 << 10, 9: 227 << 10}[MAJOR]
PROPERTIES = SimpleNamespace(
    name="fake GPU",
    major=MAJOR,
    minor=0,
    total_memory=TOTAL_MEMORY,
    multi_processor_count=2,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=BLOCK_SHARED,
    shared_memory_per_multiprocessor=BLOCK_SHARED + (0 if MAJOR == 7 else 1 << 10),
    L2_cache_size=1 << 20,
    is_integrated=0,
    is_multi_gpu_board=0,
    gcnArchName="",
    uuid="00000000-0000-0000-0000-000000000000",
)
CUDA = int(torch._C._autograd.DeviceType.CUDA)


class Stream:
    """A number: what runs on it has run."""

    numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(self.numbers) if stream_id is None else stream_id
        self.device, self.device_index, self.device_type = torch.device("cuda", 0), 0, CUDA
        self.priority = priority

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


class Event:
    """When it was recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.seconds - self.seconds) * 1e3

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class CUDAGraph:
    """What was captured, to be done again."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured: Any = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        torch_device.begin_capture()

    def capture_end(self) -> None:
        self.captured = torch_device.end_capture()

    def replay(self) -> None:
        self.captured.replay()

    def reset(self) -> None:
        self.captured = None

    def pool(self) -> tuple[int, int]:
        return 0, 1


def _memory_stats(_: int) -> dict[str, Any]:
    now, peak = torch_device.allocated(), torch_device.peak()
    of_all = {"current": now, "peak": peak, "allocated": peak, "freed": peak - now}
    return {name: {"all": of_all} for name in ("allocated_bytes", "reserved_bytes")}


class _SyncMode:
    value = 0

    @classmethod
    def set(cls, mode: int) -> None:
        cls.value = mode
        torch_device.set_sync_mode(mode)


def _nothing(*_: Any) -> None: ...


# Functions of torch._C, less "_cuda_". Those that return a value are distinct objects: Dynamo registers some by
# identity.
FUNCTIONS = {
    "init": _nothing,
    "isInBadFork": lambda: False,
    "getDeviceCount": lambda: 1,
    "getDevice": lambda: 0,
    "setDevice": lambda index: None,
    "exchangeDevice": lambda index: 0,
    "maybeExchangeDevice": lambda index: 0,
    "getArchFlags": lambda: f"sm_{MAJOR}0",
    "getAllocatorBackend": lambda: "native",
    "getCurrentRawStream": lambda index: torch_device.current_stream(),
    "getCurrentStream": lambda index: (torch_device.current_stream(), 0, CUDA),
    "getDefaultStream": lambda index: (0, 0, CUDA),
    "setStream": lambda stream_id, device_index, device_type: torch_device.set_current_stream(stream_id),
    "isCurrentStreamCapturing": torch_device.is_capturing,
    "synchronize": _nothing,
    "sleep": _nothing,
    "set_sync_debug_mode": _SyncMode.set,
    "get_sync_debug_mode": lambda: _SyncMode.value,
    "memoryStats": _memory_stats,
    "resetPeakMemoryStats": lambda index: torch_device.reset_peak(),
    "resetAccumulatedMemoryStats": _nothing,
    "emptyCache": _nothing,
}


def _mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_MEMORY - torch_device.allocated(), TOTAL_MEMORY


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).clone().untyped_storage()


def install() -> None:
    """torch.cuda is as if this torch had been built with CUDA."""
    cuda: Any = torch.cuda
    for name, function in FUNCTIONS.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._host_emptyCache = _nothing  # type: ignore[attr-defined]
    cuda._exchange_device, cuda._maybe_exchange_device = FUNCTIONS["exchangeDevice"], FUNCTIONS["maybeExchangeDevice"]
    cuda._is_in_bad_fork = FUNCTIONS["isInBadFork"]
    cuda._initialized = True
    cuda._get_device_properties = lambda index: PROPERTIES
    for module in (cuda, cuda.memory):
        module.mem_get_info = _mem_get_info
    for module in (cuda, cuda.graphs):
        module.is_current_stream_capturing = torch_device.is_capturing
        module.CUDAGraph = CUDAGraph
    for module in (cuda, cuda.streams):
        module.Stream, module.Event = Stream, Event
    torch.UntypedStorage.clone = _clone  # type: ignore[method-assign]
    # Threads of autograd's that still let go of Python's objects when Python ends would end the process with an error.
    atexit.register(time.sleep, 0.2)
    cuda.default_generators = (torch.Generator("cuda"),)
    torch_device.keep_default_generator()
