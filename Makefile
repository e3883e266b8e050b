# `make help` lists the targets. Needs only Python 3.11, 3.12 or 3.13 and make; everything else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
ARGS ?=
UPGRADE ?=

.PHONY: help setup train test bench docs lock format clean

help:  ## show this list
	@grep -E '^[a-z]+: .*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+): .*## /\1	/' | expand -t 10

setup: $(STAMP)  ## create .venv with the pinned dependencies and this package

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "Cleanba needs Python 3.11, 3.12 or 3.13, but '$(PYTHON)' is: $$($(PYTHON) --version 2>&1 || true). Name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --require-hashes -r requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $@

train: $(STAMP)  ## train PPO on CartPole-v1; ARGS="--seed 2" passes arguments on
	$(BIN)/python cleanba/ppo.py --save-model $(ARGS)

test: $(STAMP)  ## lint, format check, type check, tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

bench: $(STAMP)  ## measure how fast it trains, beside other people's PPO (about half an hour); makes the tables of docs/performance.md
	$(BIN)/python benchmarks/performance.py $(ARGS)

docs: $(STAMP)  ## build the site of docs/ into site/; open site/index.html
	$(BIN)/python docs/diffs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(STAMP)  ## apply the formatter and the linter's safe fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock:  ## pin the dependencies of pyproject.toml anew; UPGRADE=--upgrade also moves those that need not move
	$(PYTHON) -m venv .venv/lock
	.venv/lock/bin/python -m pip install --disable-pip-version-check --quiet uv
	.venv/lock/bin/uv pip compile pyproject.toml --extra dev --extra track --extra report --extra tune --extra share --extra video --extra docs --universal --python-version 3.11 --no-strip-extras \
	  --fork-strategy fewest --generate-hashes --no-header $(UPGRADE) --quiet \
	  --output-file requirements.txt > /dev/null
	@{ printf '%s\n' '# Every package of `make setup`, pinned with hashes, for Python 3.11 to 3.13 (all extras but cuda).' \
	  '# Made from pyproject.toml by `make lock`; do not edit by hand.'; cat requirements.txt; } > requirements.tmp
	@mv requirements.tmp requirements.txt

clean:  ## remove .venv and the tools' caches; runs/ stays
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
