PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONFIG ?= configs/demo.json
SWAP_DIR ?=
KILLS ?= 100
SEED ?= 0
WORKERS ?= 2
NATIVE_TESTS := $(patsubst %/Makefile,%,$(wildcard native/aio/tests/Makefile native/cpu_adam/tests/Makefile))

.DEFAULT_GOAL := help
.PHONY: help venv build demo demo-large test test-all test-faults lint sanitize clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(VENV)/.installed  ## make .venv with every dependency, as constraints.txt says

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first, pinned: left to the other packages' ranges, pip would take a CUDA build of several gigabytes.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt torch setuptools
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[test]'
	@touch $@

build: $(VENV)/.installed  ## compile native libraries that are older than sources
	@$(BIN)/python setup.py -q build_ext --inplace

demo: build  ## train with states on NVMe (CONFIG=..., SWAP_DIR=...)
	$(BIN)/infinity train $(CONFIG) --floor $(if $(SWAP_DIR),--set infinity.nvme_path=$(SWAP_DIR))

demo-large: build  ## train 41 GiB of states (60 GB of disk, ten minutes)
	$(BIN)/python -m bench.large $(if $(SWAP_DIR),--swap $(SWAP_DIR))

lint: $(VENV)/.installed  ## ruff, mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

sanitize:  ## native tests under three sanitizers
	@set -e; for directory in $(NATIVE_TESTS); do $(MAKE) --no-print-directory -C $$directory check; done

# A machine that tests must have the real libraries: a fallback would pass for them.
test test-all test-faults: export INFINITY_REQUIRE_NATIVE = 1

test: build lint sanitize  ## lint, native tests, quick Python tests (WORKERS=2)
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

test-all: build lint sanitize  ## the same with the slow tests
	$(BIN)/python -m pytest -q

test-faults: build  ## kill 1, 2 ranks; fail I/O of a save (KILLS=..., SEED=...)
	$(BIN)/python -m tests.faults.kill_harness --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m pytest -q tests/checkpoint/test_disk_faults.py tests/faults

clean:  ## remove what was built; .venv and runs/ stay
	rm -rf build native/*/tests/build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	rm -f infinity/_native/*.so infinity/_native/*.missing.txt $(VENV)/.installed
	find infinity tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
