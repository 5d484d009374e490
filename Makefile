# Everything here goes through tools/dev_env.py, which builds .dev (ComfyUI and its packages) and .rank_env.
# Python tools are always run as `python -m`: console scripts do not start from a path with a space in it.

PYTHON ?= python3.11
DEVICES ?= cpu:2
PYTEST_ARGS ?=

COMFY_PYTHON := .dev/venv/bin/python
RANK_PYTHON := .rank_env/bin/python
# One thread each: the tests run several ranks on few cores.
PYTEST = OMP_NUM_THREADS=1 "$(RANK_PYTHON)" -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo lint quick test full bench clean

help:
	@echo "make demo [DEVICES=cpu:2|all|0,1]   a picture from a real ComfyUI; does all set-up"
	@echo "make test                           set-up, lint and every test but the long ones"
	@echo "make quick                          lint and the tests that take seconds"
	@echo "make full                           the long tests"
	@echo "make bench                          what the machinery costs on this machine"
	@echo "make clean                          remove what the others made"

setup:
	@command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not installed; make ... PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m tools.dev_env

demo: setup
	@"$(COMFY_PYTHON)" -m tools.demo --devices "$(DEVICES)"

lint: setup
	"$(RANK_PYTHON)" -m ruff check .
	"$(RANK_PYTHON)" -m ruff format --check .
	"$(RANK_PYTHON)" -m mypy -p parallel_core

quick: setup
	"$(RANK_PYTHON)" -m ruff check .
	$(PYTEST) tests/unit tests/ranks -m "not slow and not full" $(PYTEST_ARGS)

test: lint
	$(PYTEST) -m "not full" $(PYTEST_ARGS)

full: setup
	$(PYTEST) -m full $(PYTEST_ARGS)

bench: setup
	"$(RANK_PYTHON)" -m benchmarks.overhead

clean:
	rm -rf .dev .rank_env output .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -not -path "./.git/*" -prune -exec rm -rf {} +
