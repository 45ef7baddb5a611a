"""What a wheel of onetrip may hold, and how large it may be: python tools/wheel_contents.py WHEEL ...

python tools/wheel_contents.py --installed checks the import of the installed package, as the build of wheels does.
"""

from __future__ import annotations

import re
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 30_000_000
"""Bytes."""
FOLDERS = {"onetrip": "python_pkg/onetrip", "onetrip/kernels": "kernels/triton", "onetrip/benchmarks": "benchmarks"}
SUFFIXES = (".py", ".j2", ".typed", "metadata.json")
LIBRARY = re.compile(r"onetrip/_native\.[\w-]+\.so")
METADATA = re.compile(
    r"onetrip-[\w.+]+\.dist-info/(METADATA|WHEEL|RECORD|top_level\.txt|entry_points\.txt|licenses/LICENSE|LICENSE)"
)
IMPORTED = """
import sys, time, torch
before, start = set(sys.modules), time.process_time()
import onetrip
seconds = time.process_time() - start
assert seconds < 0.3, f"import onetrip takes {seconds:.2f} s beyond torch"
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not loaded & {"transformers", "triton", "matplotlib", "rich", "typer", "jinja2"}, loaded
from onetrip import _native
print("onetrip", onetrip.__version__, _native.cpu_level(), "CUDA kernels:", _native.cuda_architectures() or "none")
print(f"imported in {seconds:.2f} s beyond torch")
"""


def sources() -> set[str]:
    """Names in the wheel of every Python file, template and marker in the source tree."""
    return {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.name.endswith(SUFFIXES) and not {"results", "__pycache__"} & set(path.parts)
    }


def faults(names: Iterable[str], size: int) -> list[str]:
    """What is wrong with a wheel of these names and this size in bytes."""
    found, expected = {name for name in names if not name.endswith("/")}, sources()  # auditwheel lists folders too
    libraries = {name for name in found if LIBRARY.fullmatch(name)}
    unknown = sorted(name for name in found - expected - libraries if not METADATA.fullmatch(name))
    return [
        *([f"{size:,} bytes, at most {LARGEST:,} allowed"] if size > LARGEST else []),
        *(f"not in the list of allowed files: {name}" for name in unknown),
        *(f"missing: {name}" for name in sorted(expected - found)),
        *([f"must hold one native library, has {len(libraries)}"] if len(libraries) != 1 else []),
    ]


def main(arguments: list[str]) -> int:
    if arguments == ["--installed"]:
        exec(IMPORTED, {})
        return 0
    if not arguments:
        print(__doc__)
        return 2
    failed = False
    for wheel in map(Path, arguments):
        found = faults(zipfile.ZipFile(wheel).namelist(), wheel.stat().st_size)
        failed |= bool(found)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {'; '.join(found) or 'as expected'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
