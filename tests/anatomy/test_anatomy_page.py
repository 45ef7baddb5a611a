"""anatomy.html says what the JSON says; a headless browser shows its figure, silently and without the network."""

import json
from pathlib import Path

import browser
import pytest
from onetrip.anatomy.report import page, sections
from onetrip.html import Cell, Figure, Table


@pytest.fixture(params=["result", "fitted"])
def read_back(request):
    return json.loads(json.dumps(request.getfixturevalue(request.param).to_dict()))


@pytest.mark.slow
def test_sections_tell_all_that_was_found(read_back):
    options, eager = read_back["options"], read_back["columns"]["eager"]
    (section,) = sections(read_back)
    tables = {part.caption: part for part in section.parts if isinstance(part, Table)}
    assert "tiny-bert, 2 x 16, float32" in section.title
    assert all("tiny-bert, 2 x 16, float32" in caption for caption in tables)  # pages can be joined
    assert sum(isinstance(part, Figure) for part in section.parts) == 1
    captions = " ".join(tables)
    assert "Memory" in captions and "Saved activations by place in the model" in captions
    assert "Read and written by a step" in captions and "Read and written outside products by operator" in captions
    assert ("Does it fit" in captions) == (options["fits"] is not None)
    assert ("Time by class of operator" in captions) == (options["fits"] is None)
    memory = tables["Memory, tiny-bert, 2 x 16, float32"]
    saved = next(row for row in memory.rows if row[0] == "saved activations")
    assert saved[2].value == (eager["measured"] or eager["predicted"])["saved_activations"]


@pytest.mark.slow
def test_what_only_a_gpu_has(result):
    changed = json.loads(json.dumps(result.to_dict()))
    gpu = {"utilisation_percent": 71.0, "memory_utilisation_percent": 30.0, "power_watts": 412.0, "samples": 9}
    gpu["memory_in_use"] = 5 << 30
    changed["columns"]["eager"]["measured"] |= {"caches": 3 << 20, "gpu": gpu}
    tables = {part.caption.split(",")[0]: part for part in sections(changed)[0].parts if isinstance(part, Table)}
    assert tables["GPU by NVML"].rows == [("eager", 71.0, 412.0, Cell(5 << 30, "5.00 GiB"), 9)]
    (caches,) = (row for row in tables["Memory"].rows if row[0] == "caches")
    assert caches[2].text == "3.0 MiB"
    unchanged = next(part for part in sections(result.to_dict())[0].parts if isinstance(part, Table))
    assert not any(row[0] == "caches" for row in unchanged.rows)


@pytest.mark.slow
@pytest.mark.skipif(browser.executable() is None, reason=f"no browser is installed: {', '.join(browser.NAMES)}")
def test_page_in_a_browser(read_back, tmp_path):
    written = tmp_path / "anatomy.html"
    written.write_text(page(read_back))
    with browser.Browser(written, tmp_path / "profile") as opened:
        assert opened.evaluate("document.title") == "onetrip anatomy tiny-bert"
        assert opened.complaints == []
        assert [url for url in opened.requests if not url.startswith("data:")] == []
        (figure,) = opened.evaluate("""[...document.querySelectorAll("figure svg")].map(svg => {
          const box = svg.getBoundingClientRect();
          return [box.width, box.height, svg.querySelectorAll("text").length];
        })""")
        assert figure[0] > 400 and figure[1] > 60 and figure[2] > 5
        opened.resize(420, 900)
        assert opened.evaluate("document.documentElement.scrollWidth") <= 420


def test_the_committed_record_has_a_page():
    record = Path(__file__).parents[2] / "benchmarks" / "results" / "amd-epyc-2-cores-avx2" / "anatomy.json"
    (section,) = sections(json.loads(record.read_text()))
    (times,) = (part for part in section.parts if isinstance(part, Table) and part.caption.startswith("Time of"))
    assert all(row[2].value > 0.0 for row in times.rows)
