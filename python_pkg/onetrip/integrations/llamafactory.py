"""LLaMA-Factory's kernel "onetrip": import this module, then name it in the configuration.

kernel_config: {name: auto, include_kernels: onetrip}
"""

from __future__ import annotations

from typing import Any

from onetrip import patch_model

from . import needs

with needs("llamafactory"):
    from llamafactory.v1.accelerator.helper import DeviceType
    from llamafactory.v1.plugins.model_plugins.kernels.base import BaseKernel
    from llamafactory.v1.plugins.model_plugins.kernels.registry import register_kernel


class OnetripKernel(BaseKernel):
    """All that patch_model finds in the model."""

    _kernel_id = "onetrip"
    _device = (DeviceType.CPU, DeviceType.CUDA)

    @classmethod
    def apply(cls, **kwargs: Any) -> Any:
        """Patches and returns kwargs["model"]. Raises RuntimeError on devices without kernels of onetrip."""
        if not cls.check_deps():
            raise RuntimeError(f"{cls.__name__}: the accelerator must be one of cpu, cuda")
        model = kwargs["model"]
        patch_model(model)
        return model


register_kernel(OnetripKernel)  # not as a decorator: it returns None on other devices
