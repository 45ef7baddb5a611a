"""The header of every recorded result."""

from __future__ import annotations

import json

import onetrip
import pytest
import torch
from onetrip import environment

CPU = {"device": "cpu", "cpu": "Test CPU", "cpu_count": 2, "torch_threads": 2, "cpu_level": "avx512"}
HEADER = {
    "date": "2026-01-02T03:04:05+00:00",
    "commit": {"id": "0123456789abcdef", "modified": False},
    "versions": {"python": "3.11.7", "triton": "absent"},
    "machine": CPU,
}


def test_the_header_names_machine_versions_commit_and_is_json():
    header = json.loads(json.dumps(environment.header(torch.device("cpu"))))
    assert list(header) == ["date", "commit", "versions", "machine"]
    assert header["versions"]["onetrip"] == onetrip.__version__ and header["versions"]["torch"] == torch.__version__
    assert header["machine"]["device"] == "cpu" and header["machine"]["torch_threads"] == torch.get_num_threads()
    assert set(environment.describe(header)) == {"measured", "machine", "versions", "commit"}


def test_a_header_in_words():
    assert environment.describe(HEADER) == {
        "measured": "2026-01-02",
        "machine": "Test CPU, 2 cores, 2 threads, kernels: avx512",
        "versions": "python 3.11.7",
        "commit": "0123456789ab",
    }
    assert environment.describe(HEADER | {"machine": CPU | {"device": "cuda", "gpu": "GPU"}})["machine"] == "GPU"


def test_changes_and_the_absence_of_a_commit_are_said():
    changed = HEADER | {"commit": {"id": "0123456789abcdef", "modified": True}}
    assert environment.describe(changed)["commit"] == "0123456789ab with changes"
    assert environment.describe(HEADER | {"commit": None})["commit"] == "none (no checkout)"


def test_a_cpu_held_to_fewer_instructions_is_another_machine(monkeypatch):
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    free = environment.machine(torch.device("cpu"))["id"]
    assert free.replace("-", "").isalnum()  # the name of a folder
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert environment.machine(torch.device("cpu"))["id"] == f"{free}-avx2"


@pytest.mark.parametrize(("given", "modified"), [("0123456789abcdef", False), ("0123456789abcdef-dirty", True)])
def test_without_a_repository_the_commit_is_the_one_that_was_named(monkeypatch, given, modified):
    monkeypatch.setattr(environment, "checkout", lambda: None)
    monkeypatch.setenv("ONETRIP_COMMIT", given)
    assert environment.commit() == {"id": "0123456789abcdef", "modified": modified}
    monkeypatch.setenv("ONETRIP_COMMIT", "")
    assert environment.commit() is None
