"""The sampler, with a made-up NVML: what it reads counts for the column that runs, and trouble never stops the run."""

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
import torch
from onetrip import anatomy
from onetrip.anatomy import gpu

CUDA = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    module = ModuleType("pynvml")
    module.closed = False
    module.NVMLError = NVMLError
    module.nvmlInit = lambda: None
    module.nvmlShutdown = lambda: setattr(module, "closed", True)
    module.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    module.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=80, memory=40)
    module.nvmlDeviceGetPowerUsage = lambda handle: 300_000
    module.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=5 << 30)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="of-the-GPU"))
    return module


def test_means_of_what_was_watched(nvml):
    sampler = gpu.Sampler(CUDA)
    watts, in_use = iter([100_000, 300_000]), iter([7 << 30, 6 << 30])
    nvml.nvmlDeviceGetPowerUsage = lambda handle: next(watts)
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=next(in_use))
    sampler.sample()  # nobody is watched, nothing is read
    with sampler.watching("eager"):
        sampler.sample()
        sampler.sample()
    assert sampler.summary("eager") == {
        "utilisation_percent": 80,
        "memory_utilisation_percent": 40,
        "power_watts": pytest.approx(200.0),
        "memory_in_use": 7 << 30,
        "samples": 2,
    }
    assert sampler.summary("patched") is None


def test_a_thread_reads_the_card_by_its_own_name(nvml):
    read = threading.Event()
    handles = []

    def rates(handle):
        handles.append(handle)
        read.set()
        return SimpleNamespace(gpu=1, memory=1)

    nvml.nvmlDeviceGetUtilizationRates = rates
    with gpu.Sampler(CUDA) as sampler, sampler.watching("step"):
        assert read.wait(30)
    assert nvml.closed
    assert handles[0] == "GPU-of-the-GPU"
    assert sampler.reason == ""
    assert not any(thread.name == "onetrip-nvml" for thread in threading.enumerate())


def test_what_cannot_be_read_is_said(nvml):
    def refuse(handle):
        raise NVMLError("Not Supported")

    nvml.nvmlDeviceGetPowerUsage = refuse
    sampler = gpu.Sampler(CUDA)
    with sampler.watching("eager"):
        sampler.sample()
    assert sampler.reason == "NVML: Not Supported"
    assert sampler.summary("eager") is None


def test_a_driver_that_is_not_there_is_said(nvml):
    def refuse():
        raise NVMLError("Driver Not Loaded")

    nvml.nvmlInit = refuse
    with gpu.Sampler(CUDA) as sampler:
        assert sampler.reason == "NVML: Driver Not Loaded"


def test_without_the_package_or_a_card(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert anatomy.Sampler(CUDA).reason == "nvidia-ml-py is not installed"
    with anatomy.Sampler(torch.device("cpu")) as sampler, sampler.watching("eager"):
        pass
    assert sampler.reason == "no GPU takes part"
    assert sampler.summary("eager") is None
