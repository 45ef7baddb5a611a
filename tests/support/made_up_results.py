"""Results of every suite, with invented figures, for tests of tables, figures and pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onetrip.benchmarks.measure import results

RECORDED = Path(__file__).parents[1] / "benchmarks" / "recorded"
MACHINE = "test-cpu-2-cores"
CHECKED = {"passed": True, "detail": "", "largest_error": 1e-7}


def times(median_ms: float, gb_per_s: float = 10.0) -> dict[str, float]:
    return {
        "median_ms": median_ms,
        "p20_ms": 0.9 * median_ms,
        "p80_ms": 1.1 * median_ms,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / 20.0,
    }


def _timed(name: str, median_ms: float) -> dict[str, Any]:
    passes = {which: times(median_ms * part) for which, part in (("forward", 1), ("backward", 2))}
    return {
        "name": name,
        "check": CHECKED,
        **passes,
        "forward_backward": times(3 * median_ms),
        "saved_bytes": 8 << 20,
        "peak_bytes": 24 << 20,
    }


def _attention(length: int, dropout_p: float, dtype: str = "fp32") -> dict[str, Any]:
    contestants = {"torch eager": 9.0, "SDPA flash": 2.0 if length > 256 else 4.0, "onetrip cpu": 3.0}
    return {
        "case": f"attention-L{length}-p{dropout_p:g}",
        "operator": f"attention-L{length}-p{dropout_p:g}",
        "dropout_p": dropout_p,
        "dtype": dtype,
        "unavailable": {"SDPA cudnn": "is for CUDA"},
        "providers": [_timed(name, median * length / 64) for name, median in contestants.items()],
    }


def _training() -> dict[str, Any]:
    steps = {"eager": 30.0, "patched": 20.0}
    return {
        "case": "training-bert_base",
        "model": "bert_base",
        "n_layers": 12,
        "batch_size": 2,
        "dropout_p": 0.1,
        "sequence_length": 512,
        "patched_sites": 24,
        "loss_without_dropout": {"eager": 0.7, "patched": 0.7},
        "steps": {name: {**_timed(name, median), "matrix_products_ms": 12.0} for name, median in steps.items()},
    }


def _adam() -> dict[str, Any]:
    names = {"torch AdamW fused": (30.0, 8.0), "onetrip AdamW8bit": (10.0, 2.07)}
    providers = [
        {
            "name": name,
            "check": CHECKED,
            "step": times(median),
            "temporary_bytes": 0,
            "state_bytes_per_parameter": state,
        }
        for name, (median, state) in names.items()
    ]
    return {
        "case": "adam-bert_base-fp32",
        "model": "bert_base",
        "dtype": "fp32",
        "n_tensors": 199,
        "n_parameters": 109_482_240,
        "copy": times(1.0, 20.0),
        "providers": providers,
    }


def _stream(name: str) -> dict[str, Any]:
    providers = [
        {
            "name": who,
            "relative_rms": 0.02,
            "largest_update": 2.0,
            "largest_update_of_steps": [1.0, 2.0, 1.5, 1.2],
        }
        for who in ("onetrip AdamW8bit", "exact")
    ]
    return {"case": f"adam_streams-{name}", "stream": name, "n_steps": 40, "every": 10, "providers": providers}


def _language_model(seed: int) -> dict[str, Any]:
    providers = [
        {"name": name, "training_loss": [4.0 + seed / 10, 3.0, 2.5], "held_out_loss": 2.5 + seed / 100}
        for name in ("torch AdamW fused", "onetrip AdamW8bit")
    ]
    return {
        "case": f"adam_training-seed{seed}",
        "seed": seed,
        "n_steps": 150,
        "every": 50,
        "n_parameters": 1_049_184,
        "providers": providers,
    }


def _verified() -> list[dict[str, Any]]:
    return [
        {"case": "doctor", "status": "passed", "seconds": 12.3, "reason": ""},
        {"case": "sanitizers", "status": "skipped", "seconds": 0.0, "reason": "compute-sanitizer is not installed"},
        {"case": "gpu-tests", "status": "failed", "seconds": 99.0, "reason": "1 failed", "failures": ["test_a"]},
    ]


def recorded() -> results.Results:
    """What tests/benchmarks/recorded holds: operators, overhead, installation."""
    return results.read(RECORDED)[MACHINE]


def every_suite() -> results.Results:
    found = recorded()
    header = {key: value for key, value in found["row_norm"].items() if key not in ("suite", "cases")}
    cases = {
        "attention": [
            *(_attention(length, p) for length in (64, 256, 1024) for p in (0.0, 0.1)),
            *(_attention(length, 0.0, "bf16") for length in (64, 1024)),
        ],
        "training": [_training()],
        "adam": [_adam()],
        "adam_streams": [_stream(name) for name in ("gaussian", "six_decades", "sparse_rows", "outlier")],
        "adam_training": [_language_model(seed) for seed in range(2)],
        "everything": _verified(),
    }
    return found | {suite: {**header, "suite": suite, "cases": members} for suite, members in cases.items()}
