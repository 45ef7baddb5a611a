"""Builds onetrip._native with ninja: CPU kernels at each instruction-set level, CUDA kernels where nvcc is found.

Environment: CXX (compiler), CUDA_HOME, ONETRIP_CUDA=0 (no CUDA kernels) or 1 (fail without nvcc), ONETRIP_CUDA_ARCHS
(for example "7.0" or "8.0 9.0+PTX"), MAX_JOBS. Without a C++ compiler the package installs without the native library.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

CXX_FLAGS = "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -fno-math-errno -ffp-contract=off -Wall -Wextra"
CPU_LEVELS = {"baseline": ""}
if IS_X86:
    CPU_LEVELS["baseline"] = "-O2"  # where AVX2 or FMA is missing; compiles in little more than half the time
    CPU_LEVELS["avx2"] = "-mavx2 -mfma -mf16c"
    CPU_LEVELS["avx512"] = f"{CPU_LEVELS['avx2']} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
    CPU_LEVELS["avx512vbmi"] = f"{CPU_LEVELS['avx512']} -mavx512vbmi"
FAMILIES_WITH_VBMI = {"adam"}  # the others run there as under avx512

# One cubin runs on every later minor version of its major one; the PTX of the newest serves the GPUs after it.
DEFAULT_CUDA_ARCHS = "7.0 7.5 8.0 9.0 10.0 12.0+PTX"
# Names that TORCH_CUDA_ARCH_LIST takes beside numbers. Source: torch/utils/cpp_extension.py, _get_cuda_arch_flags.
NAMED_CUDA_ARCHS = {
    "Kepler": "3.5+PTX",
    "Kepler+Tesla": "3.7",
    "Maxwell": "5.0 5.2+PTX",
    "Maxwell+Tegra": "5.3",
    "Pascal": "6.0 6.1+PTX",
    "Volta": "7.0+PTX",
    "Volta+Tegra": "7.2",
    "Turing": "7.5+PTX",
    "Ampere": "8.0 8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0 10.3 12.0 12.1+PTX",
    "Blackwell+Tegra": "11.0",
}
COMPILER_CACHES = ("ccache", "sccache", "distcc")
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--threads",
    "2",
    "--expt-relaxed-constexpr",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
]


def say(text: str) -> None:
    print(f"onetrip: {text}", file=sys.stderr, flush=True)


def output(*command: str) -> str:
    """What the command prints, "" where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


@cache
def cxx_compiler() -> str | None:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        words = shlex.split(name or "")
        if any(Path(word).name not in COMPILER_CACHES for word in words) and shutil.which(words[0]):
            return name
        if name and name == os.environ.get("CXX"):
            say(f"CXX={name} cannot be found: looking for c++, g++ and clang++")
    return None


def cuda_home() -> Path | None:
    """The toolkit that holds the real nvcc, whatever wrapper stands on PATH; None without one."""
    if os.environ.get("ONETRIP_CUDA") == "0":
        return None
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (Path(home) / "bin/nvcc").exists():
            return Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc:
        top = re.search(r"^#\$ TOP=(.+)$", output(nvcc, "--dryrun", "-x", "cu", "-c", os.devnull), re.MULTILINE)
        home = Path(top[1].strip()).resolve() if top else Path(nvcc).resolve().parent.parent
        if (home / "bin/nvcc").exists():
            return home
    if Path("/usr/local/cuda/bin/nvcc").exists():
        return Path("/usr/local/cuda")
    if os.environ.get("ONETRIP_CUDA") == "1":
        sys.exit("onetrip: ONETRIP_CUDA=1 asks for the CUDA kernels, and no nvcc was found (set CUDA_HOME)")
    return None


def visible_gpus() -> str:
    return " ".join(sorted(set(output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split())))


def cuda_archs(nvcc: Path) -> list[tuple[str, bool]]:
    """[("8.0", with PTX), ...] to build for, less what this nvcc lacks; each one dropped is named."""
    visible = visible_gpus()
    if not re.fullmatch(r"[\d. ]+", visible):
        visible = ""
    ours = os.environ.get("ONETRIP_CUDA_ARCHS")
    asked = ours or os.environ.get("TORCH_CUDA_ARCH_LIST") or "native"
    asked = visible or DEFAULT_CUDA_ARCHS if asked == "native" else asked
    known = set(re.findall(r"sm_(\d+)\b", output(str(nvcc), "--list-gpu-code")))
    archs: dict[str, bool] = {}
    words = re.findall(r"[^\s;,]+", asked)
    for word in " ".join(NAMED_CUDA_ARCHS.get(word, word) for word in words).split():
        match = re.fullmatch(r"(?:sm_)?(\d+)\.?(\d)[af]?(\+PTX)?", word)
        if match is None and not ours:
            say(f"architecture {word!r} dropped: only numbers such as 8.0 and torch's names are read")
            continue
        if match is None:
            sys.exit(f'onetrip: CUDA architectures must read like "7.0 8.0 9.0+PTX", got {word!r}')
        arch = f"{match[1]}.{match[2]}"
        if match[1] + match[2] in known:
            archs[arch] = archs.get(arch, False) or match[3] is not None
        else:
            say(f"architecture {arch} dropped: this nvcc does not know it")
    if not archs and (ours or os.environ.get("ONETRIP_CUDA") == "1"):
        sys.exit(f"onetrip: none of the CUDA architectures asked for ({asked}) is known to {nvcc}")
    return list(archs.items())


def ninja_program() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        return shutil.which("ninja") or sys.exit("onetrip: the build needs ninja (pip install ninja)")


class NinjaFile:
    """The few lines of a build.ninja."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @staticmethod
    def path(path: Path | str) -> str:
        return re.sub(r"([$ :])", r"$\1", str(path))

    def rule(self, name: str, command: str, depfile: bool = True) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        if depfile:
            self.lines += ["  depfile = $out.d", "  deps = gcc"]

    def build(self, out: Path, rule: str, inputs: list[Path], **variables: str) -> None:
        self.lines.append(f"build {self.path(out)}: {rule} " + " ".join(map(self.path, inputs)))
        self.lines += [f"  {name} = {value}" for name, value in variables.items()]


def shell(words: list[str]) -> str:
    """Words for a ninja command, quoted where the shell would split or read them."""
    return " ".join(w if re.fullmatch(r"[\w@%+=:,./-]+", w) else "'" + w + "'" for w in words).replace("$", "$$")


class BuildNative(build_ext):
    def build_extension(self, ext: Extension) -> None:
        compiler = cxx_compiler()
        if compiler is None:
            say("no C++ compiler found: installing without native kernels (the slow reference backend serves the CPU)")
            return
        # Always the same folder, also for editable installs: ninja then compiles only what changed.
        build_dir = ROOT / "build" / f"native-{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        build_dir.mkdir(parents=True, exist_ok=True)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.write_ninja(build_dir, target, compiler)
        command = [ninja_program(), "-C", str(build_dir), *(["-v"] if os.environ.get("ONETRIP_VERBOSE") else [])]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        subprocess.run(command, check=True)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self) -> None:
        if cxx_compiler() is not None:
            super().copy_extensions_to_source()

    def write_ninja(self, build_dir: Path, target: Path, compiler: str) -> None:
        import pybind11

        csrc = ROOT / "csrc"
        python = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
        common = [*CXX_FLAGS.split(), f"-I{csrc}", f"-ffile-prefix-map={ROOT}=."]
        home = cuda_home()
        without_cuda = "ONETRIP_CUDA=0" if os.environ.get("ONETRIP_CUDA") == "0" else "no nvcc was found"
        ninja = NinjaFile()
        ninja.rule("cxx", f"{compiler} -MMD -MF $out.d {shell(common)} $flags -c $in -o $out")
        objects: list[Path] = []

        def compile(rule: str, source: Path, name: str, flags: list[str]) -> None:
            objects.append(build_dir / f"{name}.o")
            ninja.build(objects[-1], rule, [source], flags=shell(flags))

        archs = cuda_archs(home / "bin/nvcc") if home is not None else []
        if home is not None and not archs:
            say("building without CUDA kernels: this nvcc knows none of the GPUs")
            home, without_cuda = None, "nvcc knew none of the GPUs"
        if home is not None:
            say(f"CUDA kernels by {home}/bin/nvcc for {', '.join(arch for arch, _ in archs)}")
            code = []
            for arch, with_ptx in archs:
                sm = arch.replace(".", "")
                code.append(f"-gencode=arch=compute_{sm},code={f'[sm_{sm},compute_{sm}]' if with_ptx else f'sm_{sm}'}")
            built = " ".join(arch for arch, _ in archs)
            # nvcc runs the host compiler itself, and takes its name alone: CXX may be "ccache g++ -m64".
            host = next(word for word in shlex.split(compiler) if Path(word).name not in COMPILER_CACHES)
            nvcc = [str(home / "bin/nvcc"), *NVCC_FLAGS, f"-I{csrc}", "-ccbin", host, *code]
            ninja.rule("nvcc", f"{shell(nvcc)} -MD -MF $out.d $flags -c $in -o $out")
            for source in sorted((csrc / "cuda").glob("*.cu")):
                compile("nvcc", source, f"cuda_{source.stem}", [f'-DONETRIP_CUDA_ARCHS_BUILT="{built}"'])
        # First, because it takes among the longest and would else be compiled alone at the end.
        cuda = "-DONETRIP_WITH_CUDA" if home else f'-DONETRIP_WITHOUT_CUDA="{without_cuda} at installation"'
        compile("cxx", csrc / "bindings.cpp", "bindings", [*python, cuda])
        for source in sorted((csrc / "cpu").glob("*.cpp")):
            if source.stem == "dispatch":
                compile("cxx", source, "cpu_dispatch", ["-DONETRIP_HAVE_X86_LEVELS"] if IS_X86 else [])
                continue
            for level, flags in CPU_LEVELS.items():
                if level == "avx512vbmi" and source.stem not in FAMILIES_WITH_VBMI:
                    continue
                compile("cxx", source, f"cpu_{source.stem}_{level}", [f"-DONETRIP_LEVEL={level}", *flags.split()])
        link = ["-shared", "-fopenmp", "-Wl,--exclude-libs,ALL", "-Wl,--as-needed", "-s"]
        cuda_libraries = ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
        libraries = [f"-L{home / 'lib64'}", f"-L{home / 'lib'}", *cuda_libraries] if home else []
        ninja.rule("link", f"{compiler} $in {shell(link + libraries)} -o $out", depfile=False)
        ninja.build(target, "link", objects)
        (build_dir / "build.ninja").write_text("\n".join(ninja.lines) + "\n")


# Where each tree of packages lies, as in pyproject.toml's package-dir.
PACKAGE_ROOTS = {
    "onetrip": "python_pkg/onetrip",
    "onetrip.benchmarks": "benchmarks",
    "onetrip.kernels": "kernels/triton",
}
packages = [
    ".".join([name, *path.parent.relative_to(ROOT / folder).parts])
    for name, folder in PACKAGE_ROOTS.items()
    for path in sorted((ROOT / folder).rglob("__init__.py"))
]

setup(packages=packages, ext_modules=[Extension("onetrip._native", sources=[])], cmdclass={"build_ext": BuildNative})
