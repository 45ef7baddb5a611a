"""Where the suite lies, and what it runs on."""

from __future__ import annotations

from pathlib import Path

from onetrip.environment import checkout as checkout
from onetrip.environment import header as header
from onetrip.environment import load_average as load_average

PACKAGE = Path(__file__).resolve().parents[1]
