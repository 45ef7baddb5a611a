"""Who imports whom, what importing costs, and the names and signatures that users rely on."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import onetrip
import pytest
from onetrip import nn, ops, optim

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python_pkg" / "onetrip"

# The rooms of onetrip that each room may import; "" stands for the package's own top level.
ALLOWED = {
    "reference": set(),
    "kernels": {"reference"},
    "ops": {"kernels", "_native", "reference"},
    "nn": {"ops", "reference"},
    "optim": {"ops", "reference"},
    "patching": {"nn", "ops"},
    "measure": set(),
    "anatomy": {"", "environment", "html", "measure", "nn", "ops", "optim", "patching"},
    "methods": {"", "anatomy", "environment", "html", "measure", "nn", "ops", "optim", "patching"},
}
# Other packages that may be imported at the top of a file; anything else only inside functions.
EAGER = {"torch", "__future__", *sys.stdlib_module_names}
EXTRA = {
    "kernels": {"triton"},
    "cli.py": {"rich", "typer"},
    "doctor.py": {"rich"},
    "anatomy": {"rich"},
    "methods": {"rich"},
}


def source_files() -> list[tuple[str, Path]]:
    """(room, file) of everything that is installed."""
    files = [(path.relative_to(PACKAGE).parts[0], path) for path in PACKAGE.rglob("*.py")]
    return files + [("kernels", path) for path in (ROOT / "kernels" / "triton").rglob("*.py")]


def imports(path: Path, room: str) -> list[tuple[str, bool]]:
    """(absolute module, whether at the top level) of every import, importlib.import_module's literals included."""
    package = ["onetrip", room] if room == "kernels" else ["onetrip", *path.relative_to(PACKAGE).parts[:-1]]
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
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "onetrip" else [module]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        found += [(name, id(node) not in lazy) for name in names]
    return found


@pytest.mark.parametrize(
    ("room", "path"), source_files(), ids=lambda value: value if isinstance(value, str) else value.stem
)
def test_rooms_import_only_what_they_may(room, path):
    for name, eager in imports(path, room):
        top, *rest = name.split(".")
        if top == "onetrip":
            target = rest[0] if rest else ""
            if not (PACKAGE / target).exists() and target not in ("kernels", "_native", "benchmarks"):
                target = "" if not (PACKAGE / f"{target}.py").exists() else target
            assert target != "tests", f"{path.name} imports {name}"
            assert target != "benchmarks" or room == "cli.py", f"{path.name} imports {name}"
            if room in ALLOWED and target != room:
                assert target in ALLOWED[room], f"{path.name} ({room}) must not import {name}"
        elif eager:
            allowed = EAGER | EXTRA.get(room, set())
            assert top in allowed, f"{path.name} must import {name} inside the functions that need it"
        if top == "transformers":
            assert room in ("patching", "anatomy", "methods", "cli.py"), f"{path.name} knows transformers"


def test_the_import_rules_see_violations(tmp_path):
    """The parser above, on imports it must find."""
    (file := tmp_path / "x.py").write_text(
        "import onetrip.patching\ndef f():\n    import triton\n    importlib.import_module('transformers')\n"
    )
    tree_of = imports(Path(file), "kernels")
    assert ("onetrip.patching", True) in tree_of and ("triton", False) in tree_of and ("transformers", False) in tree_of


def test_kernels_folder_is_no_package():
    """With an __init__.py it would shadow Hugging Face's `kernels` for everybody who works in the repository."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_native_sources_know_no_torch():
    of_python = {"bindings.cpp", "adam_watch.h"}  # one module: the header is its part that looks at tensors
    for path in (ROOT / "csrc").rglob("*"):
        if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
            for line in path.read_text().splitlines():
                if line.lstrip().startswith("#include"):
                    assert not any(word in line for word in ("torch/", "ATen", "c10/")), f"{path.name}: {line}"
                    assert "pybind11" not in line or path.name in of_python, f"{path.name}: {line}"


IMPORT = """
import sys, torch
before = {name: (id(value), {k: id(v) for k, v in vars(value).items()})
          for module in (torch.nn, torch.nn.functional, torch.optim)
          for name, value in vars(module).items() if isinstance(value, type)}
functions = {name: id(value) for name, value in vars(torch.nn.functional).items()}
state, threads, dtype = torch.random.get_rng_state(), torch.get_num_threads(), torch.get_default_dtype()
import onetrip
for module in (torch.nn, torch.nn.functional, torch.optim):
    for name, value in vars(module).items():
        if isinstance(value, type):
            assert before[name] == (id(value), {k: id(v) for k, v in vars(value).items()}), name
assert functions == {name: id(value) for name, value in vars(torch.nn.functional).items()}
assert torch.equal(state, torch.random.get_rng_state()) and threads == torch.get_num_threads()
assert dtype == torch.get_default_dtype() and not torch.cuda.is_initialized()
print(sorted({"transformers", "triton", "matplotlib", "jinja2", "rich", "typer"} & set(sys.modules)))
print("onetrip.kernels" in sys.modules)
"""


def test_importing_has_no_side_effects_and_loads_nothing_large():
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = "{'triton', 'jinja2', 'rich', 'typer'}"
    bare = subprocess.run(
        [sys.executable, "-c", f"import torch, sys; print(sorted({names} & set(sys.modules)))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [bare.stdout.strip(), "False"]


SIGNATURES = {
    ops.layer_norm: "(x, weight=None, bias=None, eps=1e-05, **unknown)",
    ops.rms_norm: "(x, weight=None, eps=1e-06, *, weight_offset=0.0, cast_before_weight=False, **unknown)",
    ops.bias_dropout_residual: "(x, residual, bias=None, *, dropout_p=0.0, rng=None, **unknown)",
    ops.bias_dropout_residual_norm: (
        "(x, residual, weight=None, norm_bias=None, *, bias=None, dropout_p=0.0, norm='layer', eps=1e-05, "
        "weight_offset=0.0, cast_before_weight=False, return_residual=False, rng=None, **unknown)"
    ),
    ops.dropout_keep_mask: "(shape, dropout_p, rng, device='cpu')",
    optim.AdamW8bit: (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01, *, optim_bits=8, min_8bit_numel=4096, "
        "maximize=False, capturable=False, **unknown)"
    ),
    optim.Adam8bit: (
        "(params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, *, optim_bits=8, min_8bit_numel=4096, "
        "maximize=False, capturable=False, **unknown)"
    ),
    optim.AdamW8bit.dequantized_state: "(self, p)",
    optim.AdamW8bit.load_bitsandbytes_state_dict: "(self, state)",
    optim.AdamW8bit.state_dict_for_torch: "(self)",
    optim.trainer_optimizer: "(training_args, *, model=None, embeddings_32bit=False, **overrides)",
    onetrip.available_backends: "(device='cpu')",
    onetrip.use_backend: "(name)",
    onetrip.set_backend: "(name)",
}


@pytest.mark.parametrize(
    ("function", "signature"), SIGNATURES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_public_signatures(function, signature):
    parameters = [
        p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()
    ]
    assert str(inspect.Signature(parameters)) == signature
    assert function.__doc__ and inspect.signature(function).return_annotation is not inspect.Parameter.empty


def test_public_names():
    assert {
        "layer_norm",
        "rms_norm",
        "bias_dropout_residual",
        "bias_dropout_residual_norm",
        "dropout_keep_mask",
    } <= set(ops.__all__)
    assert {"LayerNorm", "RMSNorm", "BiasDropoutResidual", "BiasDropoutResidualNorm"} <= set(nn.__all__)
    assert {"AdamW8bit", "Adam8bit", "trainer_optimizer"} <= set(optim.__all__)
    assert {"ops", "nn", "optim", "available_backends", "use_backend", "set_backend", "__version__"} <= set(
        onetrip.__all__
    )
    for module in (onetrip, ops, nn, optim):
        for name in module.__all__:
            assert hasattr(module, name)
            assert name == "__version__" or not name.startswith("_")
