"""onetrip in other libraries: each part imports its library at first use.

OnetripCallback: transformers' Trainer.  kernel_mapping, kernel_config: Hugging Face kernels.
onetrip.integrations.axolotl.OnetripPlugin: axolotl.  onetrip.integrations.llamafactory: LLaMA-Factory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kernels import kernel_config, kernel_mapping
    from .trainer import OnetripCallback

__all__ = ["OnetripCallback", "kernel_config", "kernel_mapping"]

_MODULES = {"OnetripCallback": "trainer", "kernel_config": "kernels", "kernel_mapping": "kernels"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@contextmanager
def needs(package: str) -> Iterator[None]:
    """Imports in this block say what to install where the package is missing or too old."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        message = f"onetrip.integrations: {package} must be installed: pip install --upgrade {package} ({error})"
        raise ImportError(message, name=package) from error
