# make run: every study at its quick preset, side by side, and one HTML report that grows with them. make test: all tests. make check: what CI runs.
# make docs: the documentation site, in build/docs; ends with the path of its first page.
# make torture: the long part of tests/robustness, in minutes; SCALE=0.1 tries a tenth, HARNESS=name one of them.
# make dist: the wheel and the sdist of a release, checked, in dist/.
PYTHON ?= python3
OUT ?= runs
# Another build of torch, in an environment of its own: make check VENV=.venv-torch TORCH=2.11.0
VENV ?= .venv
TORCH ?=
BIN := $(VENV)/bin
# pip needs the constraints on every install: an unpinned torch would be the newest, whatever was tested.
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
SCALE ?= 1
HARNESS ?=
export MPLBACKEND := agg
# Packages are installed uncompiled, which halves the time: the first import compiles what it needs, and must keep it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test torture check lint types contracts format reference axes runs-page scale docs benchmark dist clean

run: $(VENV)/installed
	@$(BIN)/joma run --out $(OUT) || test $$? -eq 1

test: $(VENV)/developed
	$(BIN)/python -m pytest -n auto --dist worksteal -q

torture: $(VENV)/developed
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests $(BIN)/python -m robustness --scale $(SCALE) $(HARNESS)

check: lint types contracts test

lint: $(VENV)/developed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/developed
	$(BIN)/pyright --pythonpath $(BIN)/python

contracts: $(VENV)/developed
	$(BIN)/lint-imports --no-cache

format: $(VENV)/developed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(VENV)/developed
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_families.py

# The curves that panorama reads come from the other stored runs: after a new one, run it again and store it.
axes: $(VENV)/developed
	$(BIN)/python docs/make_axes.py

runs-page: $(VENV)/developed
	$(BIN)/joma judge docs/runs > /dev/null || test $$? -eq 1
	$(BIN)/python docs/make_runs.py
	$(BIN)/python docs/make_tables.py

scale: $(VENV)/developed
	$(BIN)/python -m benchmarks.scale
	$(BIN)/python docs/make_scale.py

# -W: a warning ends the build with an error, after all of them are shown. -a: every page is written, as all show the contents.
docs: $(VENV)/developed
	$(BIN)/python -m sphinx -a -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo $(CURDIR)/build/docs/index.html

benchmark: $(VENV)/developed
	$(BIN)/python -m benchmarks

dist: $(VENV)/developed
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache .hypothesis build dist docs/api docs/findings

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "joma needs Python 3.11 or newer, got $$($(PYTHON) --version); try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/constraints.txt: constraints.txt | $(BIN)/python
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $@

$(VENV)/installed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes a minute or two) …"
	@$(PIP) install --no-compile --constraint $(CONSTRAINTS) --editable '.[hf]'
	@touch $@

$(VENV)/developed: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "Installing into $(VENV) (the first time takes a minute or two) …"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[dev]'
	@$(PIP) install --constraint $(CONSTRAINTS) --no-deps timm  # its torchvision from PyPI does not load beside a CPU torch
	@touch $@ $(VENV)/installed
