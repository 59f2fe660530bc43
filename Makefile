# make bench   sets up what is missing, then verifies and times the forward pass on what this machine has
# make results renders the tables, page and plots of results/ from the runs there
# make test    sets up what is missing, then lints, checks types and imports, and runs the tests

# Settings, given as `make test NAME=VALUE`. PYTHON: an interpreter >= 3.11 that creates the environment VENV.
PYTHON ?= python3
VENV ?= .venv
# More pip arguments for torch alone, such as the --index-url of PyTorch's CPU wheels.
TORCH_ARGS ?=
# Where `make bench` writes its results.
OUT ?= out
# Processes that run the tests, and more arguments for pytest.
WORKERS ?= auto
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
comma := ,
GPU := $(or $(wildcard /proc/driver/nvidia/gpus/*),$(shell nvidia-smi -L 2>/dev/null | grep '^GPU'))
NVCC := $(or $(shell command -v nvcc),$(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc))
# The peers need a GPU, and take a few hundred MB. Without a CUDA compiler on the machine, one comes from wheels.
EXTRAS := dev$(if $(GPU),$(comma)peers)$(if $(NVCC),,$(comma)nvcc)

# One stamp for one content of the files that decide what is installed: unchanged, a second run starts at once.
STAMP := $(VENV)/.installed-$(shell (cat pyproject.toml constraints.txt; echo '$(EXTRAS)') | cksum | cut -d' ' -f1)

.PHONY: help setup bench results test check lock

help:
	@sed -n '/^# make /s/^# //p' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed: make PYTHON=python3.12 ..." if sys.version_info < (3, 11) else 0)'
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing torch and flashqla[$(EXTRAS)] into $(VENV); the first time takes minutes" >&2
	@$(INSTALL) torch $(TORCH_ARGS)
	@$(INSTALL) editables hatchling
	@$(INSTALL) --no-build-isolation --editable '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# The commands choose suites and backends for the machine, and say so: kernels and peers on a Hopper GPU, PyTorch elsewhere.
bench: $(STAMP)
	mkdir -p $(OUT)
	$(BIN)/flashqla verify --json $(OUT)/verify.json
	$(BIN)/flashqla bench fwd --json $(OUT)/bench-fwd.json --out $(OUT)/bench-fwd.txt
	@echo
	@echo "Both runs are in $(OUT)/. Next: source $(BIN)/activate; flashqla report $(OUT)/*.json --out $(OUT)/report.html"

# The run of the README's table comes first on the page, and has its plots in the README.
TABLE := results/benchmark_results_H200
results: $(STAMP)
	mkdir -p $(OUT)
	for run in results/*.json; do $(BIN)/flashqla show $$run > $${run%.json}.txt; done
	$(BIN)/flashqla report $(TABLE).json $(filter-out $(TABLE).json,$(sort $(wildcard results/*.json))) \
	  --out results/report_H200.html
	$(BIN)/flashqla report $(TABLE).json --format markdown --out $(OUT)/summary.md --plots $(OUT)/plots
	for plot in speedup latency; do cp $(OUT)/plots/$$plot.svg $(TABLE).$$plot.svg; done

test: check
	$(BIN)/pytest --numprocesses $(WORKERS) --maxprocesses 8 --dist loadgroup $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Resolves every extra anew around the pinned torch, and rewrites the pins below the head of constraints.txt.
lock: $(STAMP)
	mkdir -p $(OUT)
	$(BIN)/pip install --dry-run --ignore-installed --no-build-isolation --report $(OUT)/lock.json \
	  "$$(grep '^torch==' constraints.txt)" --editable '.[dev,nvcc,peers,report]'
	$(BIN)/python -c 'import json, sys; \
	  found = {p["metadata"]["name"].lower().replace("_", "-"): p["metadata"]["version"] for p in json.load(open(sys.argv[1]))["install"]}; \
	  head = [line.strip() for line in open(sys.argv[2]) if line.startswith("#")]; \
	  pins = sorted(f"{name}=={version.split(chr(43))[0]}" for name, version in found.items() if name != "flashqla"); \
	  print(*head, *pins, sep="\n", file=open(sys.argv[2], "w"))' $(OUT)/lock.json constraints.txt
