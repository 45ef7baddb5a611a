from pathlib import Path

import pytest
from onetrip import html, methods
from onetrip.benchmarks.show import docs_page, html_page
from onetrip.methods.report import memory_words, render, speed_words
from onetrip.methods.runs import judged


@pytest.fixture
def result(figures):
    entries = []
    for name in ("baseline", *methods.METHODS, "combined"):
        method = methods.METHODS.get(name)
        entries.append(
            {
                "name": name,
                "family": "",
                "title": method.title if method else name.capitalize(),
                "said": dict(zip(("speed", "memory"), method.said if method else ("", ""), strict=True)),
                "own": False,
                "parts": ["fused-kernels", "adamw8bit"] if name == "combined" else [],
                "status": "measured",
                **figures,
            }
        )
    by_name = {entry["name"]: entry for entry in entries}
    by_name["bf16"]["samples_per_s_ratio"] = {"median": 1.31, "p20": 1.2, "p80": 1.4}
    by_name["checkpointing"] |= {
        "samples_per_s_ratio": {"median": 0.75, "p20": 0.7, "p80": 0.8},
        "peak_memory": 60 << 20,
    }
    by_name["batch-4x"]["peak_memory"] = 350 << 20
    by_name["sgd"]["loss"] = None
    by_name["fused-kernels"]["fallback_calls"] = 3
    by_name["fp16"] |= {"status": "skipped", "reason": "needs a CUDA device"}
    by_name["zero"] |= {"status": "failed", "reason": "ImportError: <broken>"}
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "commit": None,
        "versions": {"torch": "2.13.0"},
        "machine": {"device": "cpu", "cpu": "A CPU", "cpu_count": 2, "torch_threads": 2, "cpu_level": "avx2"},
        "options": {"batch_size": 8, "sequence_length": 128, "dtype": "float32", "steps": 20},
        "model": {"name": "tiny-bert", "parameters": 1_000_000},
        "data": {"tokens": "hashed words", "held_out_samples": 32},
        "interrupted": False,
        "methods": judged(entries, n_steps=20),
    }


def entry(result, name):
    return next(entry for entry in result["methods"] if entry["name"] == name)


def test_words(result):
    assert speed_words(entry(result, "bf16")) == "yes, 1.31x"
    assert speed_words(entry(result, "checkpointing")) == "slower, 0.75x"
    assert speed_words(entry(result, "preloading")) == "no, 1.00x"
    assert memory_words(entry(result, "checkpointing")) == "yes, -40%"
    assert memory_words(entry(result, "batch-4x")) == "more, +250%"
    assert memory_words(entry(result, "preloading")) == "no"


def test_tables_hold_every_figure(result, printed):
    text = printed(render(result))
    for words in (*methods.METHODS, "yes, 1.31x", "350.0M", "skipped", "needs a CUDA device"):
        assert words in text
    assert "Combined: fused-kernels + adamw8bit." in text
    assert "Fused kernels: 3 calls of patched modules ran transformers' own code." in " ".join(text.split())
    assert "interrupted" not in text
    assert "interrupted" in printed(render(result | {"interrupted": True, "methods": []}))


def test_page(result, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = methods.write_page(result, tmp_path).read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["methods.html"]
    assert "yes, 1.31x" in page and "<svg" in page and "3 calls of patched modules" in page and "&lt;broken&gt;" in page
    (section,) = methods.sections(result)
    captions = [part.caption for part in section.parts if not isinstance(part, str)]
    assert len(captions) == len(set(captions)) == 4 and all("tiny-bert" in caption for caption in captions)
    verdicts = next(part for part in section.parts if isinstance(part, html.Table))
    assert verdicts.rows[0][0] == "Batch size 2x" and len(verdicts.rows) == len(methods.METHODS) - 1


def test_recorded_beside_the_benchmarks_it_is_a_section_of_their_page_and_document(result, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    methods.write_json(result, tmp_path / "a-machine")
    page = Path(html_page.write(tmp_path)["path"]).read_text()
    assert "<h2>Methods of training: tiny-bert</h2>" in page and "yes, 1.31x" in page
    document = docs_page.render({"a-machine": {}}, tmp_path)
    assert "\nmethods: 2026-01-01" in document
    assert "### What each method does, tiny-bert" in document and "### Figures of each method, tiny-bert" in document
    assert "1.0 M parameters, batch 8 x 128" in document and "| yes, 1.31x |" in document


def test_page_of_a_run_without_comparisons(result):
    pytest.importorskip("jinja2")
    only_baseline = result | {"methods": result["methods"][:1], "interrupted": True}
    (section,) = methods.sections(only_baseline)
    assert not any(isinstance(part, html.Figure) for part in section.parts)


@pytest.mark.parametrize("width", [48, 80])
def test_tables_obey_columns(result, width, printed):
    """Once columns that could not wrap were cut off on narrow consoles."""
    printed(render(result), width)
