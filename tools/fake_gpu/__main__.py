"""Runs a command with the fake GPU: python -m tools.fake_gpu COMMAND..., from the repository's root.

For example: python -m tools.fake_gpu onetrip doctor, or python -m tools.fake_gpu python -m pytest -m gpu tests/ops
"""

from __future__ import annotations

import os
import sys

from .build import environment

if len(sys.argv) < 2:
    sys.exit(__doc__)
capability = int(os.environ.get("ONETRIP_FAKE_GPU_CAPABILITY", "9"))
os.execvpe(sys.argv[1], sys.argv[1:], os.environ | environment(capability))
