# Everything that makes an environment or runs something. `make help` lists the commands.
# Needs GNU make, git and Python 3.11 or newer; what else is needed is installed into .venv*.

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# The interpreter that environments are made with. A name on PATH may be a shim that answers
# with an error, so each candidate is asked for its version.
PYTHON ?= $(shell for name in python3 python3.12 python3.11 python3.13 python3.14 python; do \
    $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
    && echo $$name && break; done)

# An environment that another Python made is used as it is, unless PYTHON was given by name.
GIVEN := $(filter command environment,$(origin PYTHON))
ENVIRONMENT := $(PYTHON) tools/environment.py
THIS_PYTHON := $(if $(GIVEN),--this-python)
GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q '^GPU ' && echo yes)

.PHONY: help python env env-cpu env-gpu env-docs test test-cpu demo bench docs lint format type lock clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

python:
	@test -n '$(PYTHON)' || { \
	    echo 'make: no Python 3.11 or newer found; install one, or name it: make PYTHON=/path/to/python3' >&2; \
	    exit 1; }

env: python ## .venv: simulated engines, tests, benchmarks, checks
	@$(ENVIRONMENT) simulated $(THIS_PYTHON)
	@.venv/bin/python -m tools.small_model tokenizer

env-cpu: python ## .venv-cpu: real vLLM engines on CPU cores, and a small real model
	@$(ENVIRONMENT) cpu $(THIS_PYTHON)
	@.venv-cpu/bin/python -m tools.small_model full

env-gpu: python ## .venv-gpu: real vLLM engines on NVIDIA GPUs
	@$(ENVIRONMENT) gpu $(THIS_PYTHON)

env-docs: python
	@$(ENVIRONMENT) docs $(THIS_PYTHON)

test: env ## every test that needs no real engine
	.venv/bin/python -m pytest $(ARGS)

test-cpu: env-cpu ## the tests on real vLLM engines on CPU cores
	.venv-cpu/bin/python -m pytest -m cpu tests $(ARGS)

ifeq ($(GPU),yes)
demo: env-gpu ## a pipeline on real engines: on the GPUs, or where there are none on two CPU cores
	.venv-gpu/bin/python -m examples.demo --model Qwen/Qwen3-0.6B --engine_kind gpu $(ARGS)
else
demo: env-cpu
	.venv-cpu/bin/python -m examples.demo --model .cache/models/SmolLM2-135M-Instruct --engine_kind cpu $(ARGS)
endif

bench: env ## compare native, round-robin and KV routing on simulated engines, in a few minutes
	.venv/bin/python -m benchmarks.compare --engine simulated --num_engines 4 --cohorts 0,95 \
	    --repeats 3 --out .cache/bench $(ARGS)

# Material for MkDocs prints an advertisement of its own future unless it is told not to.
docs: env-docs ## the documentation, in .cache/docs; any warning fails it
	NO_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs build --strict $(ARGS)

lint: env ## style of every file
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

format: env ## mend the style where a tool can
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

type: env ## types, strictly
	.venv/bin/mypy

lock: python ## install the newest versions that fit, and write them down in tools/constraints*.txt
	@$(ENVIRONMENT) simulated --newest
	@$(ENVIRONMENT) cpu --newest
	@$(ENVIRONMENT) docs --newest

clean: ## remove all that these commands made
	rm -rf .venv .venv-cpu .venv-gpu .venv-docs .cache .tox build dist
	rm -rf .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
