"""A process ends when its own code ends: onetrip leaves no thread, no atexit callback and no finalizer behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import atexit, os, threading, weakref
import torch
from transformers import BertConfig, BertModel

def at_exit():
    modules = [str(f.func.__module__) for f in weakref.finalize._registry.values() if f.atexit]
    return {
        "callbacks": atexit._ncallbacks(),
        "Python threads": threading.enumerate(),
        "native threads": len(os.listdir("/proc/self/task")),
        "finalizers": [name for name in modules if not name.startswith("torch.")],
    }

model = BertModel(BertConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128))
batch = torch.zeros(2, 8, dtype=torch.long)
model(batch).last_hidden_state.sum().backward()
torch.optim.AdamW(model.parameters()).step()
before = at_exit()
import onetrip
print(len(onetrip.patch_model(model).patched) > 0)
optimizer = onetrip.optim.AdamW8bit(model.parameters(), min_8bit_numel=256)
for _ in range(2):
    model(batch).last_hidden_state.sum().backward()
    optimizer.step()
after = at_exit()
for name in before:
    print(name, "as before" if before[name] == after[name] else f"{before[name]} -> {after[name]}")
"""


@pytest.mark.slow
@pytest.mark.promise("exit")
def test_nothing_of_ours_runs_when_a_process_ends():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = ["callbacks", "Python threads", "native threads", "finalizers"]
    assert done.stdout.splitlines() == ["True", *(f"{name} as before" for name in names)]
