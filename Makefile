# `make demo` and `make test` set up all they need in .venv first, once.
#
# TORCH names the torch to install where .venv has none; for a small CPU-only build from pytorch.org:
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"
# TORCH_CUDA_ARCH_LIST names the GPUs to compile for where nvcc is; LOSSGUARD_CUDA=0 leaves the CUDA half out.

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)
RELEASE_ARCHS := 7.5 8.0 8.6 8.9 9.0 10.0 12.0+PTX

.PHONY: help demo test test-emulated check-build ptxas-table bench wheel lint clean
help: ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.ready-demo ## train on handwritten digits through four accidents
	@$(PY) -m lossguard demo

test: test-emulated ## run the tests, on the CUDA kernels in the emulator and then as installed
	@echo "== running the tests (about 12 minutes on 2 cores)"
	@$(PY) -m pytest

test-emulated: $(VENV)/.ready-test ## run the tests on the CUDA kernels in the emulator
	@echo "== building the CUDA kernels for the emulator (about 2 minutes on 2 cores)"
	@$(PY) tests/cuda_emulator/build.py >/dev/null
	@echo "== running the tests on them (about 7 minutes on 2 cores)"
	@PYTHONPATH=$(CURDIR)/build/emulated $(PY) -m pytest

# Its PTX is not compressed, so that the tests can read it.
release = TORCH_CUDA_ARCH_LIST="$(RELEASE_ARCHS)" LOSSGUARD_CUDA=1 NVCC_APPEND_FLAGS=--no-compress \
	$(PY) setup.py -q build --build-base build/release
on_release = LOSSGUARD_CHECK_BUILD="$(RELEASE_ARCHS)" PYTHONPATH=$$(echo $(CURDIR)/build/release/lib.*)

check-build: $(VENV)/.ready-test ## compile for every GPU architecture of a release, and check what came out
	@echo "== compiling for $(RELEASE_ARCHS) (about 5 minutes on 2 cores)"
	@$(release)
	@$(on_release) $(PY) -m pytest -n 0 tests/test_cuda_build.py

ptxas-table: $(VENV)/.ready-test ## after a change of a kernel: write tests/ptxas.txt anew
	@echo "== compiling for $(RELEASE_ARCHS) (about 5 minutes on 2 cores)"
	@$(release)
	@$(on_release) $(PY) tests/cuda_build.py > build/release/ptxas.txt
	@mv build/release/ptxas.txt tests/ptxas.txt
	@git --no-pager diff --stat tests/ptxas.txt

bench: $(VENV)/.ready-demo ## time the losses against native torch
	@$(PY) -m benchmarks

wheel: $(VENV)/.ready-demo ## build a wheel into dist/, for the GPUs of a release or TORCH_CUDA_ARCH_LIST
	@TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$(RELEASE_ARCHS)}" $(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

lint: $(VENV)/.ready-test ## ruff and mypy
	@$(PY) -m ruff check python tests benchmarks setup.py
	@$(PY) -m mypy

clean: ## remove what was built, and .venv
	rm -rf $(VENV) build dist python/*.egg-info python/lossguard/*.so

$(PY):
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# Also what pyproject.toml requires to build: without pip's isolation, ninja compiles only what has changed.
$(VENV)/.torch: | $(PY)
	@echo "== installing torch into $(VENV) (the longest part where it has to be downloaded)"
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	@$(PIP) install --quiet 'setuptools>=77' ninja 'pybind11>=3'
	@touch $@

$(VENV)/.ready-%: $(SOURCES) | $(VENV)/.torch
	@echo "== compiling lossguard and installing what '$*' needs (about a minute, and with nvcc 3)"
	@$(PIP) install --quiet --no-build-isolation -e '.[$*]'
	@touch $@
