#!/usr/bin/env bash
# Installs what onetrip needs of the CUDA toolkit into a manylinux_2_28 container (AlmaLinux 8): nvcc, headers, the static runtime.
# 12.9 compiles for V100 to Blackwell; 13 has dropped V100. The static runtime works with every driver of CUDA 12.
set -euo pipefail
dnf config-manager --add-repo https://developer.download.nvidia.com/compute/cuda/repos/rhel8/x86_64/cuda-rhel8.repo
dnf install --assumeyes --setopt=install_weak_deps=False cuda-nvcc-12-9 cuda-cudart-devel-12-9 cuda-cccl-12-9
ln --symbolic --force --no-dereference /usr/local/cuda-12.9 /usr/local/cuda
/usr/local/cuda/bin/nvcc --version
