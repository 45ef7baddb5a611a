"""csrc/common/device_guard.h: a launch on another GPU than the thread's makes no context and leaves none changed."""

from __future__ import annotations

import subprocess


def test_device_guard(host_program) -> None:
    ran = subprocess.run([host_program("device_guard")], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
