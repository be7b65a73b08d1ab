# `make` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help up test wheel check quick static environment triton kserve compile compiled cover docs bench soak fuzz lock clean
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV ?= .venv
export VENV
BIN := $(VENV)/bin
# Whoever has this set would compile every test anew each time.
export PYTHONDONTWRITEBYTECODE :=

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

up: ## install what is needed and start the demo cluster (or ./forebay.yaml) in the foreground
	@scripts/venv runtime
	@exec $(BIN)/forebay up

test: ## everything that must hold: static checks and all tests, the slow ones with real models too
	@$(MAKE) --no-print-directory --jobs 2 environment triton  # pip and the compiler have use for one core only
	@$(MAKE) --no-print-directory --jobs 2 quick compile kserve
	@$(MAKE) --no-print-directory compiled
	$(BIN)/pytest -m "slow and not compiled" -n 3 --dist loadfile --no-loadscope-reorder

wheel: ## make dist/forebay-*.whl with the request path compiled: the same code for half the CPU (needs gcc)
	@scripts/venv dev
	@scripts/compiled
	@ls dist/forebay-*.whl

check: ## the quick part of `make test`: static checks and the tests that start no real model
	@scripts/venv dev
	@$(MAKE) --no-print-directory quick EXAMPLES=--hypothesis-profile=quick

quick: static
	$(BIN)/pytest -m "not slow" -n 4 --dist worksteal $(EXAMPLES)

static:
	$(BIN)/ruff format --check --quiet src tests bench
	$(BIN)/ruff check --quiet src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports | tail -n 3

environment:
	@scripts/venv dev

triton kserve:
	@scripts/oracle $@ || echo "no $@: its tests are skipped" >&2

compile:
	@scripts/compiled

compiled: compile
	PYTHONPATH=$(CURDIR)/build/compiled $(BIN)/pytest -m compiled -n 3 --dist worksteal --hypothesis-profile=quick

cover: ## run the quick tests and show what of forebay.core no test comes by, line or branch (2 minutes)
	@scripts/venv dev
	@rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest -m "not slow" -n 4 --dist worksteal --hypothesis-profile=quick --hypothesis-seed=0
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

fuzz: ## feed every reader of bytes from elsewhere with thousands of damaged inputs, and the gateway with events (12 minutes); finds are kept in .hypothesis
	@scripts/venv dev
	$(BIN)/pytest tests/fuzz tests/gateway/machine --hypothesis-profile=fuzz --timeout=3600 -o faulthandler_timeout=0

soak: ## thousands of simulated clusters under faults (about half an hour); a seed that breaks a rule is printed
	@scripts/venv dev
	$(BIN)/forebay simulate --depth full --seed 0 --seeds 5000

docs: ## write the generated pages anew: settings, metrics, errors, command line, measurements
	@scripts/venv dev
	$(BIN)/python -m forebay.cli.docs

bench: ## measure gateway, path and model server beside their peers (100 minutes; needs gcc), then write docs/benchmarks.md
	@scripts/venv dev
	@scripts/compiled
	$(BIN)/python bench/gateway/run.py
	-$(BIN)/python bench/gateway/behave.py
	$(BIN)/python bench/path/run.py
	-$(BIN)/python bench/server/run.py
	$(BIN)/python -m forebay.cli.docs

lock: ## resolve the newest allowed versions into requirements.lock and requirements-dev.lock
	@scripts/venv dev
	@scripts/lock

clean: ## remove what can be made again: environment, caches, build outputs; models under .forebay stay
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
