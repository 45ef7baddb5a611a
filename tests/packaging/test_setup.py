"""What setup.py decides before it compiles: which CUDA architectures, from where, and what it prints and rejects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
NVCC = Path("/cuda/bin/nvcc")
LISTED = "sm_75\nsm_80\nsm_90\nsm_90a\nsm_100\nsm_120\n"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """setup.py as a module on a machine with nvcc 13 and no GPU, with nothing in the environment."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for name in ("ONETRIP_CUDA", "ONETRIP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("onetrip_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers(monkeypatch, module)
    return module


def answers(monkeypatch: pytest.MonkeyPatch, build: ModuleType, gpus: str = "", listed: str = LISTED) -> None:
    """What nvidia-smi prints of the GPUs, and nvcc of the architectures that it knows."""

    def output(*command: str) -> str:
        printed = {("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"): gpus}
        printed[str(NVCC), "--list-gpu-code"] = listed
        return printed[command]

    monkeypatch.setattr(build, "output", output)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8.0", [("8.0", False)]),
        ("8.0, 9.0", [("8.0", False), ("9.0", False)]),
        (" 8.0;  9.0+PTX; ", [("8.0", False), ("9.0", True)]),
        ("sm_90", [("9.0", False)]),
        ("sm_120+PTX", [("12.0", True)]),
        ("9.0 8.0 9.0", [("9.0", False), ("8.0", False)]),
        ("9.0 8.0 9.0+PTX", [("9.0", True), ("8.0", False)]),
        ("10.0f 9.0 9.0a+PTX", [("10.0", False), ("9.0", True)]),
        ("Hopper", [("9.0", True)]),
        ("Turing;Ampere;9.0", [("7.5", True), ("8.0", False), ("9.0", False)]),
        ("8.0 Blackwell", [("8.0", False), ("10.0", False), ("12.0", False)]),
    ],
)
@pytest.mark.parametrize("variable", ["ONETRIP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"])
def test_architectures_that_are_asked_for(build, monkeypatch, variable, value, expected):
    monkeypatch.setenv(variable, value)
    assert build.cuda_archs(NVCC) == expected


def test_our_variable_wins_over_torchs_and_both_over_the_card(build, monkeypatch):
    answers(monkeypatch, build, gpus="12.0\n")
    assert build.cuda_archs(NVCC) == [("12.0", False)]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert build.cuda_archs(NVCC) == [("8.0", False)]
    monkeypatch.setenv("ONETRIP_CUDA_ARCHS", "9.0")
    assert build.cuda_archs(NVCC) == [("9.0", False)]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [("9.0\n", [("9.0", False)]), ("9.0\n8.0\n9.0\n", [("8.0", False), ("9.0", False)])],
    ids=["one", "three_of_two_kinds"],
)
def test_the_visible_gpus_are_built_for(build, monkeypatch, gpus, expected):
    answers(monkeypatch, build, gpus=gpus)
    assert build.cuda_archs(NVCC) == expected


@pytest.mark.parametrize("gpus", ["", "[N/A]\n", "NVIDIA-SMI has failed because it couldn't communicate\n"])
def test_without_a_gpu_the_default_list_is_built(build, monkeypatch, capsys, gpus):
    answers(monkeypatch, build, gpus=gpus)
    assert build.cuda_archs(NVCC) == [
        *((arch, False) for arch in ("7.5", "8.0", "9.0", "10.0")),
        ("12.0", True),
    ]
    assert capsys.readouterr().err == "onetrip: architecture 7.0 dropped: this nvcc does not know it\n"


@pytest.mark.parametrize("variable", ["ONETRIP_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"])
def test_native_is_the_visible_card(build, monkeypatch, variable):
    answers(monkeypatch, build, gpus="9.0\n")
    monkeypatch.setenv(variable, "native")
    assert build.cuda_archs(NVCC) == [("9.0", False)]


def test_names_stand_for_what_they_are_to_torch(build, monkeypatch):
    torchs = pytest.importorskip("torch.utils.cpp_extension")._get_cuda_arch_flags
    for name, archs in build.NAMED_CUDA_ARCHS.items():
        found = []
        for value in (name, archs):
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
            found.append(torchs())
        assert found[0] == found[1], name


@pytest.mark.parametrize(
    ("value", "dropped", "why"),
    [
        ("Kepler+Tesla Ampere Volta", ("3.7", "8.6", "7.0"), "this nvcc does not know it"),
        (
            "hopper;8.0;Ampere+PTX;Tesla",
            ("'hopper'", "'Ampere+PTX'", "'Tesla'"),
            "only numbers such as 8.0 and torch's",
        ),
    ],
    ids=["unknown-to-nvcc", "no-name-of-torchs"],
)
def test_what_cannot_be_built_of_torchs_list_is_dropped_by_name(build, monkeypatch, capsys, value, dropped, why):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", value)
    assert build.cuda_archs(NVCC) == [("8.0", False)]
    said = capsys.readouterr().err
    assert all(f"architecture {arch} dropped: {why}" in said for arch in dropped)


@pytest.mark.parametrize("value", ["Tesla", "8", "8.0 hopper", "8.0x", "8.0+ptx"])
def test_other_names_of_our_list_are_refused(build, monkeypatch, value):
    monkeypatch.setenv("ONETRIP_CUDA_ARCHS", value)
    with pytest.raises(SystemExit, match=r'must read like "7\.0 8\.0 9\.0'):
        build.cuda_archs(NVCC)


# Environment and GPUs of which this nvcc knows none.
UNKNOWN = {
    "an old GPU": ({}, "7.0\n"),
    "a future GPU": ({}, "13.0\n"),
    "torch's list": ({"TORCH_CUDA_ARCH_LIST": "7.0"}, ""),
    "torch's list of names": ({"TORCH_CUDA_ARCH_LIST": "Volta"}, "9.0\n"),
}


@pytest.mark.parametrize(("environment", "gpus"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_cards_that_nvcc_does_not_know_leave_a_build_without_cuda(
    build, monkeypatch, capsys, tmp_path, environment, gpus
):
    answers(monkeypatch, build, gpus=gpus)
    monkeypatch.setattr(build, "cuda_home", lambda: NVCC.parent.parent)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ninja = ninja_file(build, tmp_path)
    assert "rule nvcc" not in ninja and "ONETRIP_WITH_CUDA" not in ninja and "cudart" not in ninja
    assert 'ONETRIP_WITHOUT_CUDA="nvcc knew none of the GPUs at installation"' in ninja
    assert "cpu_row_norm_baseline.o" in ninja and "cuda_row_norm.o" not in ninja
    assert "onetrip: building without CUDA kernels" in capsys.readouterr().err


@pytest.mark.parametrize(("environment", "gpus"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_asking_for_cuda_by_name_rejects_a_build_without_it(build, monkeypatch, environment, gpus):
    answers(monkeypatch, build, gpus=gpus)
    for name, value in {**environment, "ONETRIP_CUDA": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="none of the CUDA architectures asked for"):
        build.cuda_archs(NVCC)


def test_our_list_of_cards_that_nvcc_does_not_know_is_refused(build, monkeypatch):
    monkeypatch.setenv("ONETRIP_CUDA_ARCHS", "7.0 6.1")
    with pytest.raises(SystemExit, match=r"none of the CUDA architectures asked for \(7.0 6.1\) is known to"):
        build.cuda_archs(NVCC)


def ninja_file(build: ModuleType, folder: Path, compiler: str = "c++") -> str:
    build.BuildNative.write_ninja(None, folder, folder / "_native.so", compiler)
    return (folder / "build.ninja").read_text()


def test_code_is_generated_for_each_architecture_and_ptx_for_the_marked(build, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "cuda_home", lambda: NVCC.parent.parent)
    monkeypatch.setenv("ONETRIP_CUDA_ARCHS", "8.0 9.0+PTX")
    ninja = ninja_file(build, tmp_path)
    assert "rule nvcc" in ninja and "cuda_row_norm.o" in ninja
    assert "-gencode=arch=compute_80,code=sm_80" in ninja
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in ninja
    assert "ONETRIP_CUDA_ARCHS_BUILT" in ninja and "-DONETRIP_WITH_CUDA" in ninja and "-lcudart_static" in ninja


@pytest.mark.parametrize(
    ("compiler", "host"),
    [("c++", "c++"), ("g++ -m64", "g++"), ("ccache g++", "g++"), ("'/opt/my tools/sccache' clang++ -O2", "clang++")],
)
def test_nvcc_is_given_the_compiler_behind_a_cache(build, monkeypatch, tmp_path, compiler, host):
    monkeypatch.setattr(build, "cuda_home", lambda: NVCC.parent.parent)
    ninja = ninja_file(build, tmp_path, compiler)
    assert f"-ccbin {host} " in ninja and f"command = {compiler} " in ninja


def test_a_compiler_that_is_not_there_is_named(build, monkeypatch, capsys):
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "/nope/g++" else f"/bin/{name}")
    monkeypatch.setenv("CXX", "/nope/g++ -m64")
    assert build.cxx_compiler() == "c++" and build.cxx_compiler() == "c++"
    said = "onetrip: CXX=/nope/g++ -m64 cannot be found: looking for c++, g++ and clang++\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("compiler", ["ccache", " "])
def test_a_cache_alone_is_no_compiler(build, monkeypatch, compiler):
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("CXX", compiler)
    assert build.cxx_compiler() == "c++"


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_the_toolkit_is_where_the_variable_says_it_is(build, monkeypatch, tmp_path, variable):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    monkeypatch.setenv(variable, str(tmp_path))
    assert build.cuda_home() == tmp_path
    monkeypatch.setenv("ONETRIP_CUDA", "0")
    assert build.cuda_home() is None


@pytest.mark.parametrize(
    ("value", "reason"), [("0", "ONETRIP_CUDA=0"), (None, "no nvcc was found")], ids=["switched-off", "no-nvcc"]
)
def test_a_build_without_cuda_records_why(build, monkeypatch, tmp_path, value, reason):
    """doctor called ONETRIP_CUDA=0 "no nvcc"."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None if name == "nvcc" else f"/bin/{name}")
    real = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "nvcc" and real(path))
    if value is not None:
        monkeypatch.setenv("ONETRIP_CUDA", value)
    assert f'ONETRIP_WITHOUT_CUDA="{reason} at installation"' in ninja_file(build, tmp_path)
