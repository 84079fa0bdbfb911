# `make demo` and `make test` set up all they need in .venv first, once.
#
# TORCH names the torch to install where .venv has none; for a small CPU-only build from pytorch.org:
#   make demo TORCH="torch --index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= torch==2.13.0
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check
SOURCES := setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: help demo test bench wheel lint clean
help: ## say what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 16

demo: $(VENV)/.ready-demo ## train on handwritten digits through four accidents
	@$(VENV)/bin/python -m lossguard demo

test: $(VENV)/.ready-test ## run the tests
	@echo "== running the tests (about 4 minutes on 2 cores)"
	@$(VENV)/bin/python -m pytest

bench: $(VENV)/.ready-demo ## time the losses against native torch
	@$(VENV)/bin/python -m benchmarks

wheel: $(VENV)/.ready-demo ## build a wheel into dist/
	@$(PIP) wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

lint: $(VENV)/.ready-test ## ruff and mypy
	@$(VENV)/bin/python -m ruff check python tests benchmarks setup.py
	@$(VENV)/bin/python -m mypy

clean: ## remove what was built, and .venv
	rm -rf $(VENV) build dist python/*.egg-info python/lossguard/*.so

$(VENV)/bin/python:
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(VENV)/bin/python
	@echo "== installing torch into $(VENV) (the longest part where it has to be downloaded)"
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || $(PIP) install --quiet $(TORCH)
	@touch $@

$(VENV)/.ready-%: $(SOURCES) | $(VENV)/.torch
	@echo "== compiling lossguard and installing what '$*' needs (about a minute)"
	@$(PIP) install --quiet -e '.[$*]'
	@touch $@
