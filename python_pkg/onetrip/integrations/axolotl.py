"""axolotl's plugin: `plugins: [onetrip.integrations.axolotl.OnetripPlugin]` in the YAML file."""

from __future__ import annotations

import logging
from typing import Any

from . import needs
from .trainer import OnetripCallback

with needs("pydantic"):
    from pydantic import BaseModel
with needs("axolotl"):
    from axolotl.integrations.base import BasePlugin


class OnetripArgs(BaseModel):
    """Keys that the plugin adds to axolotl's configuration: arguments of patch_model."""

    onetrip_patterns: list[str] | None = None
    onetrip_exclude: list[str] = []
    onetrip_attention: bool | None = None


class OnetripPlugin(BasePlugin):
    """Patches the model, adapters included, before training and restores it at the end."""

    def get_input_args(self) -> str:
        """Where axolotl finds OnetripArgs."""
        return f"{__name__}.OnetripArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[OnetripCallback]:
        return [
            OnetripCallback(
                log=logging.getLogger(__name__).info,
                patterns=cfg.onetrip_patterns,
                exclude=cfg.onetrip_exclude or (),
                attention=cfg.onetrip_attention,
            )
        ]
