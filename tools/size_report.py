"""What the repository weighs: python -m tools.size_report

Lines of the product, of the benchmarks, and of tests and tools; files of ours that one benchmark case imports; calls
between files in an eager call of a patched block and in a steady step of AdamW8bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "product": (("csrc", "kernels", "python_pkg"), 22_500),
    "benchmarks": (("benchmarks",), 6_000),
    "tests and tools": (("tests", "tools"), 26_000),
}
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".j2")
CASE = ("--op", "layer_norm", "--shape", "64x64", "--dtype", "fp32", "--quick")
FILES_OF_A_CASE, CALLS = 30, 8

BENCH = f"""
import sys
from onetrip.cli import main
sys.argv = ["onetrip", "bench", *{CASE!r}, "--output", sys.argv[1]]
try:
    main()
except SystemExit:
    pass
folders = [{str(ROOT / "python_pkg")!r}, {str(ROOT / "benchmarks")!r}, {str(ROOT / "kernels")!r}]
files = {{getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}}
ours = sorted(file for file in files if any(file.startswith(folder) for folder in folders) and file.endswith(".py"))
print(*("FILE " + file for file in ours), sep="\\n")
"""


def lines(folders: tuple[str, ...]) -> int:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sum(len(path.read_text().splitlines()) for path in paths)


def files_of_a_case() -> list[str]:
    """Files of ours that are imported in the process of one benchmark case."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", BENCH, folder], capture_output=True, text=True, cwd=folder)
    found = [line.removeprefix(f"FILE {ROOT}/") for line in done.stdout.splitlines() if line.startswith("FILE ")]
    if not any(file.startswith("benchmarks/") for file in found):
        sys.exit(f"the benchmark case failed:\n{done.stderr}")
    return found


def calls_between_files(function: Callable[[], Any]) -> list[str]:
    """The Python calls during function() from one file into another one that is ours."""
    ours = tuple(str(ROOT / folder) for folder in ("python_pkg", "kernels"))
    found = []

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        caller = frame.f_back
        if event == "call" and caller is not None:
            file = frame.f_code.co_filename
            if file.startswith(ours) and file != caller.f_code.co_filename:
                found.append(f"{Path(file).name}:{frame.f_code.co_qualname}")

    sys.setprofile(watch)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def calls_of_a_block() -> list[str]:
    """Calls between files in bias + dropout + residual + LayerNorm: BERT's output block, patched, in training."""
    import onetrip
    import torch
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertOutput

    block = BertOutput(BertConfig(hidden_size=64, intermediate_size=128)).train()
    model = torch.nn.Sequential()
    model.add_module("output", block)
    onetrip.patch_model(model)
    hidden, residual = torch.randn(2, 8, 128), torch.randn(2, 8, 64)
    for _ in range(3):
        block(hidden, residual)
    return calls_between_files(lambda: block(hidden, residual))


def calls_of_a_step() -> list[str]:
    import torch
    from onetrip.optim import AdamW8bit

    params = [torch.nn.Parameter(torch.randn(128, 128)) for _ in range(4)]
    optimizer = AdamW8bit(params)
    for param in params:
        param.grad = torch.randn_like(param)
    for _ in range(5):
        optimizer.step()
    return calls_between_files(optimizer.step)


def main() -> int:
    rows = [(f"lines of {name}", lines(folders), most) for name, (folders, most) in PARTS.items()]
    files = files_of_a_case()
    counted = {
        "files of ours imported for one benchmark case": (files, FILES_OF_A_CASE),
        "of them in benchmarks/": ([file for file in files if file.startswith("benchmarks/")], FILES_OF_A_CASE),
        "calls between files in a patched block": (calls_of_a_block(), CALLS),
        "calls between files in a step of AdamW8bit": (calls_of_a_step(), CALLS),
    }
    for name, (found, most) in counted.items():
        if "--verbose" in sys.argv:
            print(f"{name}:", *found, sep="\n  ")
        rows.append((name, len(found), most))
    for name, found, most in rows:
        print(f"{name:45} {found:7,} {'' if found <= most else f'(more than {most:,})'}".rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main())
