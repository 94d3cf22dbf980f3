# `make demo` and `make test` are the only two commands a newcomer needs; both install first when needed.
PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.planaria-installed
# 2: clusters in one lane, the rest in another (tests/lanes.py); 1: one test after the other
JOBS ?= 2

.PHONY: help setup demo test check bench format clean

help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "%-8s %s\n", $$1, $$2}'

setup: $(STAMP) ## create .venv and install the pinned packages (does nothing when that is done)

$(STAMP): requirements-cpu.lock requirements-dev.lock pyproject.toml deploy/install.py
	@$(PYTHON) deploy/install.py

demo: $(STAMP) ## the whole story on this machine: a report at the end
	@$(BIN)/planaria demo $(ARGS)

test: $(STAMP) ## all tests, with real processes
	@$(BIN)/python -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder) $(ARGS)

check: $(STAMP) ## lint, format, types, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(STAMP) ## rewrite the sources in the project's format
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: $(STAMP) ## measure the figures of the README; JSON and tables in bench-results/
	@$(BIN)/python -m tests.bench.run $(ARGS)

clean: ## remove the virtual environment
	rm -rf .venv
