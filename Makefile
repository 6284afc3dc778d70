# Works from a fresh clone with python3 (3.10 or later) and pip. Nothing is installed again while pyproject.toml stays as it is.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)
# CUDA version that the driver serves; without a GPU kernels are only compiled, for CUDA 13
DRIVER_CUDA := $(if $(HAS_GPU),$(shell nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\)\..*/\1/p' | head -1),13)
ifeq ($(DRIVER_CUDA),12)
EXTRAS := dev
else
EXTRAS := cu13,dev
endif

# Test processes: one a core, each with one thread of torch, and at most 8 (each holds torch in memory)
WORKERS := $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && echo 8 || echo $$n)

.PHONY: demo test lint format venv clean

demo: $(STAMP)
	$(BIN)/flash-hopper demo $(ARGS)

# One process has the GPU to itself: tests marked `alone` measure time (docs/rooms.md)
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) tests/cpu tests/compile $(ARGS)
ifeq ($(HAS_GPU),yes)
	$(BIN)/python -m pytest tests/gpu $(ARGS)
endif

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

venv: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "flash-hopper needs Python 3.10 or later, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifneq ($(HAS_GPU),yes)
	$(BIN)/python -m pip install --quiet torch==2.13.0
endif
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
