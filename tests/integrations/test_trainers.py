"""axolotl and LLaMA-Factory, by stubs of their published interfaces (axolotl 0.21, llamafactory 0.9.5)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.patching import unpatch_model
from patching_cases import classes, gpt2

pytest.importorskip("transformers")


def install(monkeypatch: pytest.MonkeyPatch, path: str, **members: Any) -> None:
    """A module of these members, and the packages above it."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in members.items():
        setattr(sys.modules[path], name, value)


class BasePlugin:
    """axolotl.integrations.base.BasePlugin, whose hooks do nothing."""


class Config(dict):  # type: ignore[type-arg]
    """axolotl.utils.dict.DictDefault: None for keys that are not set."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


@pytest.fixture
def axolotl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("pydantic")
    install(monkeypatch, "axolotl.integrations.base", BasePlugin=BasePlugin)
    name = "onetrip.integrations.axolotl"
    yield import_module(name)
    sys.modules.pop(name)


def test_axolotl_finds_the_plugin_and_its_arguments(axolotl: Any) -> None:
    """As axolotl does: both by a dotted name; the arguments are merged into its pydantic configuration."""
    module, _, name = "onetrip.integrations.axolotl.OnetripPlugin".rpartition(".")
    plugin = getattr(import_module(module), name)()
    assert isinstance(plugin, BasePlugin)
    module, _, name = plugin.get_input_args().rpartition(".")
    arguments = getattr(import_module(module), name)
    found = arguments(onetrip_patterns=["rms_norm"], onetrip_attention=True).model_dump(exclude_none=True)
    assert found == {"onetrip_patterns": ["rms_norm"], "onetrip_exclude": [], "onetrip_attention": True}


@pytest.mark.parametrize(
    ("config", "patterns"),
    [({}, None), ({"onetrip_patterns": ["layer_norm"], "onetrip_exclude": ["transformer.h.0"]}, {"layer_norm"})],
    ids=["defaults", "options"],
)
def test_axolotl_trains_the_model_patched(axolotl: Any, config: dict[str, Any], patterns: Any) -> None:
    model = gpt2()
    (callback,) = axolotl.OnetripPlugin().add_callbacks_pre_trainer(Config(config), model)
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_begin(None, state, None, model=model)
    found = {site.pattern for site in callback.report.patched}
    assert found == patterns if patterns else len(found) > 2
    assert {site.reason for site in callback.report.skipped} >= ({"excluded"} if "onetrip_exclude" in config else set())
    callback.on_train_end(None, state, None, model=model)
    assert classes(model) == classes(gpt2())


class DeviceType(str, Enum):
    """llamafactory.v1.accelerator.helper.DeviceType."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def llamafactory(monkeypatch: pytest.MonkeyPatch, accelerator: str) -> tuple[Any, dict[str, Any]]:
    """(the module, what it has registered) by BaseKernel and register_kernel of
    llamafactory.v1.plugins.model_plugins.kernels."""
    registered: dict[str, Any] = {}

    class BaseKernel:
        _kernel_id: Any
        _device: Any

        @classmethod
        def check_deps(cls) -> bool:
            return accelerator in cls._device

    def register_kernel(kernel: Any) -> None:
        if accelerator in kernel._device:
            registered[kernel._kernel_id] = kernel

    kernels = "llamafactory.v1.plugins.model_plugins.kernels"
    install(monkeypatch, "llamafactory.v1.accelerator.helper", DeviceType=DeviceType)
    install(monkeypatch, f"{kernels}.base", BaseKernel=BaseKernel)
    install(monkeypatch, f"{kernels}.registry", register_kernel=register_kernel)
    name = "onetrip.integrations.llamafactory"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module, registered


def test_llamafactory_applies_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    _, registered = llamafactory(monkeypatch, "cpu")
    model = gpt2().eval()
    ids = torch.arange(8).view(1, 8)
    expected = model(ids).logits
    assert registered["onetrip"].apply(model=model) is model
    assert classes(model) != classes(gpt2())
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert classes(unpatch_model(model)) == classes(gpt2())


def test_llamafactory_on_another_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not registered, and an error where it is applied all the same."""
    module, registered = llamafactory(monkeypatch, "npu")
    assert registered == {}
    with pytest.raises(RuntimeError, match="OnetripKernel: the accelerator must be"):
        module.OnetripKernel.apply(model=gpt2())
