"""Utilisation and power of a GPU while steps run, by NVML (package nvidia-ml-py)."""

from __future__ import annotations

import importlib
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_SECONDS_BETWEEN_SAMPLES = 0.02
_MILLIWATTS = 1e-3


class Sampler:
    """Reads one GPU in a thread from `with` to its end; what it reads counts for the name that is being watched.

    reason: why nothing is read, in plain words; "" where something is. NVML's utilisation is the share of its last
    sampling period (1/6 to 1 second) in which any kernel ran: steps that are short beside it show their neighbours'.
    """

    def __init__(self, device: torch.device) -> None:
        self.reason = ""
        self._samples: dict[str, list[tuple[float, float, float, int]]] = {}
        self._watched: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if device.type != "cuda":
            self.reason = "no GPU takes part"
            return
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.reason = "nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            # By its UUID: CUDA_VISIBLE_DEVICES renumbers torch's devices, not NVML's.
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError as error:
            self.reason = f"NVML: {error}"

    def __enter__(self) -> Sampler:
        if not self.reason:
            self._thread = threading.Thread(target=self._run, name="onetrip-nvml", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.sample()
            self._stop.wait(_SECONDS_BETWEEN_SAMPLES)

    def sample(self) -> None:
        """One reading, for the name that is being watched."""
        name = self._watched
        if name is None:
            return
        try:
            rates = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            watts = _MILLIWATTS * self._nvml.nvmlDeviceGetPowerUsage(self._handle)
            in_use = self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used
        except self._nvml.NVMLError as error:
            self.reason = f"NVML: {error}"
            self._stop.set()
            return
        self._samples.setdefault(name, []).append((rates.gpu, rates.memory, watts, in_use))

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        self._watched = name
        try:
            yield
        finally:
            self._watched = None

    def summary(self, name: str) -> dict[str, float] | None:
        """Means of what was read for the name, and the most memory in use; None where nothing was.

        memory_in_use is the whole GPU's: torch's cache, the CUDA context and other processes are part of it.
        """
        samples = self._samples.get(name)
        if not samples:
            return None
        used, memory, watts, in_use = zip(*samples, strict=True)
        return {
            "utilisation_percent": statistics.fmean(used),
            "memory_utilisation_percent": statistics.fmean(memory),
            "power_watts": statistics.fmean(watts),
            "memory_in_use": max(in_use),
            "samples": len(samples),
        }
