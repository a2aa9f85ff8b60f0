# kvplane: see README.md.
PYTHON ?= python3
VENV ?= .venv
VENV_LITE ?= .venv-lite
# vllm: real vLLM on CPU. reference: the reference engine, in seconds.
ENGINE ?= vllm
# The package index with torch's CPU build, where pip does not find it by itself.
TORCH_INDEX ?=
export TORCH_INDEX
BIN := $(VENV)/bin
DEMO_VENV := $(if $(filter reference,$(ENGINE)),$(VENV_LITE),$(VENV))
# How many seeds `make simulate` runs.
SEEDS ?= 300
# Options for the tests and for the demo, such as ARGS="-k lease" or ARGS=--keep.
ARGS ?=

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show what there is
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: ## Build .venv from nothing: vLLM on CPU, kvplane, test and lint tools
	@$(PYTHON) tools/install.py full $(VENV)

.PHONY: setup-lite
setup-lite: ## Build .venv-lite: the control plane and the reference engine, without vLLM
	@$(PYTHON) tools/install.py lite $(VENV_LITE)

.PHONY: demo
demo: $(if $(filter reference,$(ENGINE)),setup-lite,setup) ## Five turns with and without reuse (ENGINE=reference: in seconds)
	@PYTHONPATH=examples $(DEMO_VENV)/bin/python -m demo.run --engine $(ENGINE) $(ARGS)

.PHONY: test
test: setup spin ## Run all tests, those on real vLLM too
	@$(BIN)/python tools/run_tests.py $(ARGS)

.PHONY: test-fast
test-fast: setup spin ## Run the tests that need no vLLM
	@$(BIN)/python tools/run_tests.py --fast $(ARGS)

.PHONY: model
model: ## Check the lease protocol's model with spin, and each planted fault (ARGS=--pairs: more)
	@$(PYTHON) tools/spin.py
	@$(PYTHON) tests/model/check.py $(ARGS)

# Without spin the tests of the model fail, and the others run.
.PHONY: spin
spin:
	-@$(PYTHON) tools/spin.py

.PHONY: simulate
simulate: setup ## Search SEEDS interleavings with faults for a broken invariant
	@cd tests && $(abspath $(BIN))/python -m simulation --seeds $(SEEDS) --jobs 2 $(ARGS)

# How long `make fuzz` searches, in seconds.
FUZZ_SECONDS ?= 600

.PHONY: fuzz
fuzz: setup ## Odd input at all RPCs and endpoints for FUZZ_SECONDS; counts go to build/fuzz
	@cd tests && GRPC_VERBOSITY=ERROR $(abspath $(BIN))/python -m fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

.PHONY: lint
lint: setup ## Style, types, layers, protos, generated files
	$(BIN)/ruff check --no-cache
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_protos.py
	$(BIN)/python -m kvplane.cli config --docs | diff docs/settings.md - || { echo "run: make docs"; exit 1; }

.PHONY: bench
bench: setup ## Run every benchmark; plots go to build/bench
	@set -e; for script in bench/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script; done

.PHONY: protos
protos: ## Regenerate the gRPC stubs (checked in; tests compare them)
	$(BIN)/python tools/check_protos.py --write

.PHONY: docs
docs: setup ## Write docs/settings.md
	$(BIN)/python -m kvplane.cli config --docs > docs/settings.md

.PHONY: freeze
freeze: setup ## Write the versions of .venv to requirements/constraints.txt
	$(BIN)/python tools/freeze.py

.PHONY: clean
clean: ## Remove the virtual environments, build/ and caches
	rm -rf $(VENV) $(VENV_LITE) build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
