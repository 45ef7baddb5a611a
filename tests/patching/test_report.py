"""The report, and the arguments of patch_model."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from onetrip.patching import PatchedSite, SkippedSite, patch_model, patched, unpatch_model
from patching_cases import Tail
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.layers = nn.ModuleList([Tail(8), Tail(8)])
        self.odd = nn.LayerNorm((3, 8))
        self.last = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, x)
        return self.last(x)


@pytest.fixture
def model() -> Model:
    return Model().eval()


def names(sites: tuple[Any, ...]) -> list[str]:
    return [site.name for site in sites]


def test_sites_are_listed_in_the_order_of_the_model(model: Model) -> None:
    report = patch_model(model)
    assert report.patched == (
        PatchedSite("first", "LayerNorm", "layer_norm"),
        PatchedSite("layers.0", "Tail", "dropout_add_norm"),
        PatchedSite("layers.1", "Tail", "dropout_add_norm"),
        PatchedSite("last", "RMSNorm", "rms_norm"),
    )
    assert report.skipped == (SkippedSite("odd", "LayerNorm", "unsupported_shape", "normalises over 2 dimensions"),)
    assert repr(report) == "PatchReport(4 patched, 1 skipped)"


def test_calls_count_since_patching(model: Model) -> None:
    x = torch.randn(2, 8)
    first = patch_model(model)
    assert set(first.calls().values()) == {(0, 0)}
    model(x)
    model(x)
    second = patch_model(model)
    model.layers[0].norm.register_forward_hook(lambda *_: None)
    model(x)
    assert first.calls() == {"first": (3, 0), "layers.0": (2, 1), "layers.1": (3, 0), "last": (3, 0)}
    assert second.calls() == {"first": (1, 0), "layers.0": (0, 1), "layers.1": (1, 0), "last": (1, 0)}
    unpatch_model(model)
    model(x)
    assert first.calls()["last"] == (3, 0)


def test_dict_survives_json(model: Model) -> None:
    report = patch_model(model)
    model(torch.randn(2, 8))
    loaded = json.loads(json.dumps(report.to_dict()))
    assert loaded["patched"][1] == {
        "name": "layers.0", "module_class": "Tail", "pattern": "dropout_add_norm", "detail": "",
        "fused_calls": 1, "fallback_calls": 0,
    }  # fmt: skip
    assert loaded["skipped"] == [
        {"name": "odd", "module_class": "LayerNorm", "reason": "unsupported_shape"}
        | {"detail": "normalises over 2 dimensions"}
    ]


def test_summary_names_patterns_reasons_and_idle_sites(model: Model) -> None:
    report = patch_model(model)
    model.layers[0](torch.randn(2, 8), torch.randn(2, 8))
    text = str(report)
    assert text == report.summary()
    assert "4 sites patched" in text and "1 site skipped" in text
    (row,) = [line.split() for line in text.splitlines() if "dropout_add_norm" in line]
    assert row == ["dropout_add_norm", "Tail", "layers.0", "2", "1", "1"]
    assert "unsupported_shape" in text and "normalises over 2 dimensions" in text
    assert "\x1b" not in text and all(len(line) <= 120 for line in text.splitlines())


def test_columns_that_say_nothing_are_left_out(model: Model) -> None:
    """The calls of a model that has not run were "0 / 0 / never called 14"."""
    report = patch_model(model)
    assert "calls" not in str(report) and "never" not in str(report)
    model(torch.randn(2, 8))
    heads = str(report).splitlines()[2:4]
    assert [head.split() for head in heads] == [["fused"], ["pattern", "module", "class", "example", "sites", "calls"]]


def test_the_summary_says_what_was_patched_in_a_site() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = self.first(x + y)
            return self.last(x + y)

    model = Sums()
    for _ in range(2):  # as OnetripCallback does
        (row,) = [line.split() for line in str(patch_model(model)).splitlines() if "Sums" in line]
        assert row == ["add_norm", "2", "add_norm", "Sums", "(root)", "1"]


@pytest.mark.parametrize("fault", ["closed", "pipe", "no flush"])
def test_the_summary_is_text_whatever_standard_output_is(
    model: Model, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A training run logs it elsewhere."""
    report = patch_model(model)
    expected = str(report)
    read, write = os.pipe()
    os.close(read)
    stream: Any = os.fdopen(write, "w", buffering=1 << 16)
    if fault == "no flush":
        stream = SimpleNamespace(write=lambda text: None)
    elif fault == "closed":
        stream.close()
    else:
        stream.write("waiting")
    monkeypatch.setattr(sys, "stdout", stream)
    assert str(report) == expected
    monkeypatch.undo()
    with contextlib.suppress(BrokenPipeError, AttributeError):
        stream.close()


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_the_summary_can_be_written_in_every_encoding(
    model: Model, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Whatever standard output has: a log file may have another."""
    report = patch_model(model)
    model.layers[0](torch.randn(2, 8), torch.randn(2, 8))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    print(report)
    assert str(report).isascii()


def test_the_summary_is_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "encoder_of_images." * 5 + "norm"
    model = nn.Sequential()
    parent: nn.Module = model
    for part in name.split(".")[:-1]:
        parent.add_module(part, nn.Sequential())
        parent = getattr(parent, part)
    parent.add_module("norm", nn.LayerNorm(8))
    report = patch_model(model)
    monkeypatch.setenv("COLUMNS", "200")
    assert name in str(report)
    for columns in ("80", "40"):  # 80 is the least
        monkeypatch.setenv("COLUMNS", columns)
        lines = str(report).splitlines()
        assert 60 < max(map(len, lines)) <= 80
        folded = [line.split() for line in lines[4:]]
        parts = [word for line in folded for word in line if word not in ("layer_norm", "LayerNorm", "1")]
        assert "".join(parts) == name and all(part.endswith((".", "_", "norm")) for part in parts)


def test_a_model_without_sites_has_an_empty_report() -> None:
    report = patch_model(nn.Linear(2, 2))
    assert report.patched == report.skipped == () and report.calls() == {}
    assert str(report) == "0 sites patched"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["rms_norm"], ["last"]),
        (("layer_norm",), ["first", "layers.0.norm", "layers.1.norm"]),
        ({"dropout_add_norm", "rms_norm"}, ["layers.0", "layers.1", "last"]),
        ((pattern for pattern in ["dropout_add"]), []),
        ([], []),
    ],
    ids=["rms_norm", "layer_norm", "two", "generator-of-another", "none"],
)
def test_patterns_choose_what_is_patched(model: Model, patterns: Any, expected: list[str]) -> None:
    assert names(patch_model(model, patterns=patterns).patched) == expected


@pytest.mark.parametrize(
    ("exclude", "patched_", "excluded"),
    [
        (["layers.1"], ["first", "layers.0", "last"], ["layers.1", "layers.1.dropout", "layers.1.norm"]),
        (["layers"], ["first", "last"], [f"layers.{i}{part}" for i in (0, 1) for part in ("", ".dropout", ".norm")]),
        (["l*s.0", "last"], ["first", "layers.0.dropout", "layers.0.norm", "layers.1"], ["layers.0", "last"]),
        (
            ["*.norm"],
            ["first", "layers.0.dropout", "layers.1.dropout", "last"],
            ["layers.0", "layers.0.norm", "layers.1", "layers.1.norm"],
        ),
    ],
    ids=["name", "name-of-parent", "globs", "norm-inside-blocks"],
)
def test_exclude_leaves_modules_alone(
    model: Model, exclude: list[str], patched_: list[str], excluded: list[str]
) -> None:
    report = patch_model(model, exclude=exclude)
    assert names(report.patched) == patched_
    assert [site.name for site in report.skipped if site.reason == "excluded"] == excluded


def test_strict_raises_where_nothing_is_patched(model: Model) -> None:
    assert patch_model(model, strict=True).patched
    with pytest.raises(RuntimeError, match=r"patch_model: nothing was patched[\s\S]*unsupported_shape"):
        patch_model(nn.Sequential(nn.LayerNorm((3, 8))), strict=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"patterns": ["attention"]}, ValueError, "patterns must be among layer_norm, .*, got attention"),
        ({"patterns": ["layer_norm", "no_norm"]}, ValueError, "got no_norm"),
        ({"patterns": "layer_norm"}, TypeError, "iterable of names, got 'layer_norm'"),
        ({"attention": "sdpa"}, TypeError, "attention must be True, False or None, got 'sdpa'"),
        ({"attention": True, "patterns": ["rms_norm"]}, ValueError, r"patterns must name .*got \['rms_norm'\]"),
        ({"exclude": "first"}, TypeError, "iterable of names, got 'first'"),
        ({"exclude": ["frist"]}, ValueError, "got 'frist', which matches none"),
        ({"exclude": ["nothing.*"]}, ValueError, "got 'nothing.\\*', which matches none"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_patched(
    model: Model, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"patch_model: .*{message}"):
        patch_model(model, **options)
    with pytest.raises(error, match=message), patched(model, **options):
        pass
    assert type(model.first) is nn.LayerNorm


@pytest.mark.parametrize("wrong", [None, "bert-base-uncased", nn.Linear], ids=["None", "str", "class"])
def test_a_model_must_be_a_module(wrong: Any) -> None:
    for function in (patch_model, unpatch_model):
        with pytest.raises(TypeError, match=f"{function.__name__}: model must be a torch.nn.Module, got"):
            function(wrong)
    with pytest.raises(TypeError, match="patch_model: model must"), patched(wrong):
        pass


def test_the_text_is_a_text_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich displays tables instead of writing them."""
    report = patch_model(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    expected = str(report)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert "1 site patched" in expected and str(report) == expected
