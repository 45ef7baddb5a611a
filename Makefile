# make demo: fine-tune a real BERT, unpatched and patched, and compare.
# make test: the tests that take minutes.   make test-slow: those marked slow and not exhaustive.   make test-all: every test.
# make docs: the documentation site, in build/site.
# Each makes .venv itself from the pinned versions in constraints.txt; Python 3.11+, a C++ compiler and make are enough.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
NATIVE_SOURCES := $(wildcard csrc/*.* csrc/*/*.*)

# Where no GPU is visible a first build does not wait for nvcc; ONETRIP_CUDA=1 builds the CUDA kernels all the same.
ifeq ($(shell nvidia-smi -L 2>/dev/null),)
export ONETRIP_CUDA ?= 0
endif

# The tests start hundreds of processes; each would compile all of onetrip again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow test-all bench docs lint format clean

demo: $(VENV)/demo.stamp
	$(BIN)/python examples/finetune_mlm.py --output demo_output

# Two workers share the machine: one OpenMP thread each, or idle threads spin against busy ones.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/test.stamp
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-slow: $(VENV)/test.stamp
	$(PYTEST) -m 'slow and not exhaustive' --durations=40 $(PYTEST_ARGS)

test-all: $(VENV)/test.stamp
	$(PYTEST) $(PYTEST_ARGS)

bench: $(VENV)/test.stamp
	$(BIN)/python -m onetrip.benchmarks

docs: $(VENV)/test.stamp
	$(BIN)/python -m mkdocs build --strict

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files csrc tests tools | grep -E '\.(h|cpp|cu|cuh)$$' | xargs $(BIN)/clang-format --dry-run --Werror
	MYPYPATH=python_pkg $(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files csrc tests tools | grep -E '\.(h|cpp|cu|cuh)$$' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build dist $(VENV) *.egg-info python_pkg/onetrip/_native*.so

$(VENV)/base.stamp: constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch and the build tools into $(VENV) (a few minutes the first time)"
	$(PIP) torch==2.13.0
	$(PIP) setuptools wheel pybind11 ninja
	@touch $@

$(VENV)/demo.stamp: $(VENV)/base.stamp pyproject.toml setup.py $(NATIVE_SOURCES)
	$(PIP) --no-build-isolation --editable '.[demo]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/base.stamp pyproject.toml setup.py $(NATIVE_SOURCES)
	$(PIP) --no-build-isolation --editable '.[demo,test,test-cuda,docs]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/test.stamp
	$(PIP) ruff clang-format mypy pre-commit
	@touch $@
