"""Which module imports which; how large a folder, a file and a list of parameters may be; what is installed."""

from __future__ import annotations

import ast
import runpy
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python_pkg" / "onetrip"

# The modules of onetrip that each module may import; "" stands for the package's own top level.
ALLOWED = {
    "reference": set(),
    "kernels": {"reference"},
    "ops": {"kernels", "_native", "reference"},
    "nn": {"ops", "reference"},
    "optim": {"ops", "reference"},
    "patching": {"cpu_advice", "html", "nn", "ops", "terminal"},
    "measure": {"ops", "reference"},
    "integrations": {"", "ops"},
    "anatomy": {"", "environment", "html", "measure", "nn", "ops", "optim", "patching", "terminal"},
}
ALLOWED["methods"] = {*ALLOWED["anatomy"], "anatomy", "processes"}
# Other packages that may be imported at the top of a file; anything else only inside functions.
EAGER = {"torch", "__future__", *sys.stdlib_module_names}
EXTRA = {
    "kernels": {"triton"},
    "cli.py": {"rich", "typer"},
    "command_line.py": {"typer"},
    "doctor.py": {"rich"},
    "terminal.py": {"rich"},
    "anatomy": {"rich"},
    "methods": {"rich"},
    "integrations": {"transformers", "pydantic", "axolotl", "llamafactory"},  # each file is imported at its first use
}


def source_files() -> list[tuple[str, Path]]:
    """(module, file) of everything that is installed."""
    files = [(path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.rglob("*.py")]
    return files + [("kernels", path) for path in (ROOT / "kernels" / "triton").rglob("*.py")]


def imports(path: Path, package: Sequence[str]) -> list[tuple[str, bool]]:
    """(absolute module, whether at the top level) of every import, importlib.import_module's literals included.
    package: of the file, for its relative imports."""
    tree = ast.parse(path.read_text())
    lazy = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(scope, ast.If) and ast.unparse(scope.test) == "TYPE_CHECKING")
        for node in ast.walk(scope)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            is_package = module in ("onetrip", "onetrip.benchmarks")
            names = [f"{module}.{alias.name}" for alias in node.names] if is_package else [module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        found += [(name, id(node) not in lazy) for name in names]
    return found


@pytest.mark.parametrize(
    ("module", "path"), source_files(), ids=lambda value: value if isinstance(value, str) else value.stem
)
def test_modules_import_only_what_they_may(module, path):
    package = ["onetrip", module] if module == "kernels" else ["onetrip", *path.relative_to(PACKAGE).parts[:-1]]
    for name, eager in imports(path, package):
        top, *rest = name.split(".")
        if top == "onetrip":
            target = rest[0] if rest else ""
            if not (PACKAGE / target).exists() and target not in ("kernels", "_native", "benchmarks"):
                target = "" if not (PACKAGE / f"{target}.py").exists() else target
            assert target != "benchmarks" or module == "cli.py", f"{path.name} imports {name}"
            if module in ALLOWED and target != module:
                assert target in ALLOWED[module], f"{path.name} ({module}) must not import {name}"
        elif eager:
            allowed = EAGER | EXTRA.get(module, set())
            assert top in allowed, f"{path.name} must import {name} inside the functions that need it"
        assert top not in ("tests", "tools", "benchmarks"), f"{path.name} imports {name}"
        if top == "transformers":
            knowing = ("patching", "integrations", "anatomy", "methods", "cli.py")
            assert module in knowing, f"{path.name} knows transformers"


def test_the_import_rules_see_violations(tmp_path):
    """The parser above, on imports it must find."""
    (file := tmp_path / "x.py").write_text(
        "import onetrip.patching\ndef f():\n    import triton\n    importlib.import_module('transformers')\n"
    )
    found = imports(file, ["onetrip", "kernels"])
    assert ("onetrip.patching", True) in found and ("triton", False) in found and ("transformers", False) in found
    file.write_text("from .. import show\nfrom ..measure.cases import Case\nfrom onetrip.benchmarks import command\n")
    names = ["onetrip.benchmarks.show", "onetrip.benchmarks.measure.cases", "onetrip.benchmarks.command"]
    assert [name for name, _ in imports(file, ["onetrip", "benchmarks", "suites"])] == names


# Each folder or file of benchmarks/ imports only what follows it. bench_cases.py is a file of pytest's.
LAYERS = ("__main__", "bench_cases", "command", "full_run", "runner", "show", "suites", "measure")


def benchmark_files() -> list[Path]:
    return sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", benchmark_files(), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_benchmarks_import_downward_only(path):
    parts = path.relative_to(ROOT / "benchmarks").with_suffix("").parts
    if parts == ("__init__",):
        return
    assert parts[0] in LAYERS, f"benchmarks/{parts[0]} has no place in LAYERS"
    for name, _ in imports(path, ["onetrip", "benchmarks", *parts[:-1]]):
        if name.startswith("onetrip.benchmarks."):
            target = name.split(".")[2]
            if target in LAYERS and target != parts[0]:
                assert LAYERS.index(target) > LAYERS.index(parts[0]), f"{'/'.join(parts)} must not import {name}"


SOURCE_FOLDERS = ("csrc", "kernels", "python_pkg", "benchmarks", "tests", "tools", "examples", "docker")
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh", ".j2", ".sh")


def all_sources() -> list[Path]:
    found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCE_SUFFIXES]
    return sorted([*found, *ROOT.glob("*.py")])


def test_a_folder_holds_at_most_20_source_files():
    sizes = Counter(path.parent for path in all_sources())
    assert not {str(folder.relative_to(ROOT)): size for folder, size in sizes.items() if size > 20}


def test_a_file_has_at_most_500_lines():
    sizes = {path: len(path.read_text().splitlines()) for path in all_sources()}
    assert not {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 500}


# More than 12: commands, whose parameters are their options; another library's signature; an
# optimizer's options.
MANY_PARAMETERS = {
    "benchmarks/command.py": {"bench"},
    "python_pkg/onetrip/cli.py": {"anatomy", "methods", "bench"},
    "tests/benchmarks/test_libraries.py": {"layer_norm_fn"},
    "python_pkg/onetrip/optim/adam.py": {"__init__"},
}


def test_a_function_has_at_most_12_parameters():
    """Triton's kernels apart: their parameters are the kernel's arguments."""
    found = []
    for path in all_sources():
        name = str(path.relative_to(ROOT))
        if path.suffix != ".py" or name.startswith("kernels/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
                if count > 12 and node.name not in MANY_PARAMETERS.get(name, ()):
                    found.append(f"{name}: {node.name} has {count}")
    assert not found


MAKES_TENSORS = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"}
MAKES_TENSORS |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def test_what_makes_a_tensor_names_its_device():
    """Without one it lies where torch.set_default_device says. methods/ runs in processes of its own."""
    found = []
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in MAKES_TENSORS}:
                is_named = any(keyword.arg == "device" for keyword in node.keywords)
                if not is_named and path.parent != PACKAGE / "methods":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found


def test_what_is_installed(monkeypatch):
    """Every package of python_pkg, benchmarks and kernels/triton, and nothing of tools/ and tests/."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: given.update(arguments))
    roots = runpy.run_path(str(ROOT / "setup.py"))["PACKAGE_ROOTS"]
    assert {*roots.values()} == {"python_pkg/onetrip", "benchmarks", "kernels/triton"}
    # A folder without __init__.py would be left out.
    files = [
        (name, path.relative_to(ROOT / folder))
        for name, folder in roots.items()
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert set(given["packages"]) == {".".join([name, *path.parent.parts]) for name, path in files}
    project = (ROOT / "pyproject.toml").read_text().replace('"', "")
    assert all(f"\n{name} = {folder}" in project for name, folder in roots.items())
    assert not {"tools", "tests"} & set((ROOT / "MANIFEST.in").read_text().split())


def test_tests_of_the_product_use_the_simulators_through_one_helper():
    allowed = {"tests/support/simulators.py"}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name not in allowed and not name.startswith(("tests/cuda/", "tests/tools/")):
            names = [imported for imported, _ in imports(path, [])]
            assert not [imported for imported in names if imported.partition(".")[0] == "tools"], name


def test_kernels_folder_is_no_package():
    """With an __init__.py it would shadow Hugging Face's `kernels` for everybody who works in the repository."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_native_sources_know_no_torch():
    # One module and its headers.
    of_python = {"bindings.cpp", "arguments.h", "operands.h", "tensor_look.h"}
    of_python |= {path.name for path in (ROOT / "csrc/eager").iterdir()}
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            for line in path.read_text().splitlines():
                if line.lstrip().startswith("#include"):
                    assert not any(word in line for word in ("torch/", "ATen", "c10/")), f"{path.name}: {line}"
                    assert "pybind11" not in line or path.name in of_python, f"{path.name}: {line}"
