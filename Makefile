# make quickstart: from a fresh machine to a trained ranker on MovieLens-100K.
# make test:       everything that CI runs.
# Both make their own environment (.venv) and need Python 3.11 and a package index.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell for candidate in python3.11 python3 python; do \
	if $$candidate -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then command -v $$candidate; break; fi; done)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
PRESET := movielens_100k_ranking.gin
DATA := prepared/ml-100k
JOBS ?= 2

.PHONY: help quickstart test lint types contracts unit nightly format env dev-env clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

quickstart: env
	@echo "== data: MovieLens-100K, into $(DATA)"
	@$(VENV)/bin/python examples/prepare_data.py --dataset ml-100k --output $(DATA)
	@echo "== training: configs/$(PRESET)"
	@$(VENV)/bin/python examples/pretrain_gr_ranking.py --gin-config-file $(PRESET)

test: lint types contracts unit

lint: dev-env
	@echo "== lint"
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

types: dev-env
	@echo "== types"
	@$(VENV)/bin/mypy

contracts: dev-env
	@echo "== import contracts"
	@PYTHONPATH=.pkgroot $(VENV)/bin/lint-imports --no-logo pyproject.toml

# One thread a process: the tests are tiny, and two processes share the cores. PYTEST_ARGS narrows the run.
unit: dev-env
	@echo "== tests"
	@OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(JOBS) -m "not nightly" $(PYTEST_ARGS)

nightly: dev-env
	@$(VENV)/bin/python -m pytest -m nightly $(PYTEST_ARGS)

format: dev-env
	@$(VENV)/bin/ruff check --fix .
	@$(VENV)/bin/ruff format .

env: $(VENV)/.stamp-cpu

dev-env: $(VENV)/.stamp-dev

# PyPI's plain torch on Linux is the CUDA build, which does not import without NVIDIA's libraries: see requirements/cpu.txt.
$(VENV)/.stamp-cpu: requirements/cpu.txt setup.py pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "genrec needs Python 3.11: put python3.11 on PATH or name one with make PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@echo "== environment: $(VENV), from requirements/cpu.txt (about 1.5 GB, a minute or more)"
	@[ -x $(VENV)/bin/python ] || "$(PYTHON)" -m venv $(VENV)
	@$(PIP) install --no-deps -r requirements/cpu.txt
	@$(VENV)/bin/python -c 'import torch' 2>/dev/null || { \
		echo "== this torch does not import alone (a CUDA build): installing what it needs, several gigabytes"; \
		$(PIP) install "$$(grep '^torch==' requirements/cpu.txt)"; $(VENV)/bin/python -c 'import torch'; }
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-cpu requirements/dev.txt
	@echo "== environment: $(VENV), from requirements/dev.txt"
	@$(PIP) install --no-deps -r requirements/dev.txt
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
