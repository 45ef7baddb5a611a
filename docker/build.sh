#!/usr/bin/env bash
# Builds onetrip into the Python that stands on PATH, beside the torch that is there, and checks it. Dockerfile.ngc runs it in
# NVIDIA's PyTorch image; a test runs it in a fresh virtual environment.
#
#   build.sh packages   what the build needs
#   build.sh native     compiles the kernels; csrc, setup.py and pyproject.toml are enough
#   build.sh install    a wheel in dist/, installed and checked
#   build.sh            all of them
#
# Environment: ONETRIP_CUDA_ARCHS (for example 7.0), ONETRIP_CUDA, MAX_JOBS: see setup.py. ONETRIP_BENCH=1 also installs what
# onetrip bench and the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."

# The image presets TORCH_CUDA_ARCH_LIST for its own builds: ours is asked for by name, or the default list of setup.py.
if [ -z "${ONETRIP_CUDA_ARCHS:-}" ]; then
  unset ONETRIP_CUDA_ARCHS
fi
unset TORCH_CUDA_ARCH_LIST

packages() {
  python -c 'import torch; print("torch", torch.__version__)'
  # The image presets a pip constraint file, which pins its own setuptools; the build tools and the two small libraries of the
  # command line do not touch torch, so they may come from outside it. torch and triton stay the image's.
  PIP_CONSTRAINT='' python -m pip install --quiet --no-cache-dir --disable-pip-version-check \
    'setuptools>=64' wheel 'pybind11>=2.13' ninja rich typer
  if [ -n "${ONETRIP_BENCH:-}" ]; then
    PIP_CONSTRAINT='' python -m pip install --quiet --no-cache-dir --disable-pip-version-check \
      pytest pytest-benchmark pytest-xdist hypothesis 'transformers>=4.48' jinja2 matplotlib psutil nvidia-ml-py
  fi
}

native() {
  python setup.py --quiet build_ext
}

install() {
  rm -rf dist
  python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps --wheel-dir dist .
  python -m pip install --quiet --disable-pip-version-check --no-deps dist/onetrip-*.whl
  # From elsewhere, so that the installed package is checked, not the source tree.
  (cd / && onetrip doctor)
}

if [ $# -eq 0 ]; then
  set -- packages native install
fi
for step in "$@"; do
  "$step"
done
