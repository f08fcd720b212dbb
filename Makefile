# make run: every study at its quick preset, then one HTML report. make test: all tests. make check: what CI runs.
PYTHON ?= python3
OUT ?= runs
BIN := .venv/bin
# pip needs the constraints on every install: an unpinned torch brings gigabytes of CUDA.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
export MPLBACKEND := agg

.PHONY: run test check lint types contracts format benchmark clean

run: .venv/installed
	@$(BIN)/joma run --out $(OUT) || test $$? -eq 1
	@echo "The report:"
	@$(BIN)/joma report $(OUT)

test: .venv/developed
	$(BIN)/python -m pytest -n auto --dist worksteal -q

check: lint types contracts test

lint: .venv/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/developed
	$(BIN)/pyright

contracts: .venv/developed
	$(BIN)/lint-imports --no-cache

format: .venv/developed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: .venv/developed
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "joma needs Python 3.11 or newer, got $$($(PYTHON) --version); try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (the first time takes a minute or two) …"
	@$(PIP) install --constraint constraints.txt --editable '.[hf]'
	@touch $@

.venv/developed: pyproject.toml constraints.txt | .venv/bin/python
	@echo "Installing into .venv (the first time takes a minute or two) …"
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/installed
