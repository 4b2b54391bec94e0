# Every target sets itself up: the first one to run installs the package and its tools into .venv.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test grid check bench docs fmt

# Trains a small Llama over four processes and proves that it equals one process.
demo: .venv/.installed
	$(BIN)/longspan demo

# A pairwise cover of every grid.
test: .venv/.installed
	$(BIN)/pytest

# The full grids; the logs hold the outcome and worst error of every cell.
grid: .venv/.installed
	$(BIN)/pytest -m grid tests/attention --grid-log benchmarks/results/grid_attention.md
	$(BIN)/pytest -m grid tests/train/test_parity.py --grid-log benchmarks/results/grid_parity.md
	$(BIN)/pytest -m grid --ignore tests/attention --ignore tests/train/test_parity.py \
	    --grid-log benchmarks/results/grid_runs.md

check: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

# Timings, with the peers beside ours where they run on this machine.
bench: .venv/.installed-bench
	$(BIN)/python -m benchmarks.attention
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.context
	$(BIN)/python -m benchmarks.context --fsdp
	$(BIN)/python -m benchmarks.saving

# Runs every example in the docs, the README and the docstrings.
docs: .venv/.installed
	$(BIN)/pytest --doctest-modules --doctest-glob='*.md' README.md docs src

fmt: .venv/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,check]'
	touch $@

.venv/.installed-bench: .venv/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	touch $@
