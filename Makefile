# openk3. `make` lists the targets; everything is installed into .venv by the first one that needs it.
PYTHON ?= python3
JOBS ?= auto
BIN := .venv/bin
READY := .venv/openk3-ready
DOCS_READY := .venv/openk3-docs-ready

.DEFAULT_GOAL := help
.PHONY: help setup tour test slow lint style floors covered portable types format coverage-table docs docs-serve figures \
  lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1#/p' Makefile | awk -F'#' '{ printf "  make %-15s %s\n", $$1, $$2 }'

setup: $(READY) ## install openk3 and the locked packages into .venv

# The lock pins torch, so that no other package can bring another build of it along.
$(READY): requirements.lock pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "openk3 needs Python 3.11 or newer, and $(PYTHON) is not: name one with make setup PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

tour: setup ## what K3 is made of, a small one trained before your eyes, and its report
	$(BIN)/openk3 tour

# One thread a worker: more would fight over the cores.
test: setup ## the quick, exact tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --maxprocesses 8

slow: setup ## the tests that learn something, which takes a while
	$(BIN)/pytest -m slow -n 0 --durations 10

lint: style floors covered portable types ## style, import floors, coverage table, no path of this machine, types

style: setup
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check . || { echo "run make format" >&2; exit 1; }

floors: setup
	$(BIN)/lint-imports --no-logo

covered: setup
	$(BIN)/python tests/coverage_table.py --check

portable:
	@! grep -rnE '(^|[^[:alnum:]_.])/(home|root|tmp|usr|opt|mnt|var|work|Users)/' openk3 --include='*.py' || { \
	    echo "a path of one machine stands in the package" >&2; exit 1; }
	@! LC_ALL=C grep -rn '[^[:print:][:space:]]' openk3 recipes --include='*.py' --include='*.toml' || { \
	    echo "only ASCII stands in code" >&2; exit 1; }

types: setup
	$(BIN)/basedpyright --level error

format: setup ## let ruff lay out the code
	$(BIN)/ruff check --quiet --fix-only .
	$(BIN)/ruff format --quiet .

coverage-table: setup ## write docs/coverage.md: which test proves which component
	$(BIN)/python tests/coverage_table.py

# The lock holds the packages that both need; what the documentation alone needs follows pyproject.toml.
$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
	    --constraint requirements.lock --editable '.[docs]'
	@touch $@

docs: $(DOCS_READY) ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "open site/index.html"

docs-serve: $(DOCS_READY) ## show the documentation at http://127.0.0.1:8000, built anew on every change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8000

figures: setup ## draw the figures of the documentation anew
	$(BIN)/python docs/plots.py

lock: ## resolve all packages anew and write requirements.lock
	rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' torch==2.13.0
	{ sed '/^[^#]/,$$d' requirements.lock; \
	  .venv-lock/bin/python -m pip freeze --all --exclude-editable --exclude pip | grep -vE "^(nvidia|cuda)-" \
	  | sed -E 's/\+cpu$$//; s/^triton==.*/&; sys_platform == "linux"/'; } > requirements.lock.new
	mv requirements.lock.new requirements.lock && rm -rf .venv-lock

clean: ## remove .venv and caches; runs stay
	rm -rf .venv .venv-lock build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find openk3 tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
