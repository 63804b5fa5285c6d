# Everything a person or CI calls. `make help` lists it.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
PIP    := $(PY) -m pip --disable-pip-version-check --no-input -q

.DEFAULT_GOAL := help
.PHONY: help setup demo test check unit integration integration-engine integration-services models faults e2e browser s3 containers chart trainers bench engine-soak figures docs clean engine-old

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Make .venv with everything (torch, the real SGLang for the CPU, redis, tools)

# torch comes with its own dependencies (they differ by build); all else is pinned completely and needs no resolver.
$(STAMP): requirements/torch.txt requirements/lock.txt pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (one or two minutes the first time)"
	@$(PIP) install -r requirements/torch.txt -c requirements/lock.txt 2>&1 | { grep -v 'is ignored: it is neither' || true; }
	@$(PIP) install --no-deps -r requirements/lock.txt 2>&1 | { grep -v 'is ignored: it is neither' || true; }
	@$(PIP) install --no-deps --no-build-isolation -e . 2>&1 | { grep -v 'is ignored: it is neither' || true; }
	@$(PY) -c 'from statetap.engine.cpu.boot import install; install(); import sglang, rq, redis, pyarrow'
	@touch $(STAMP)

demo: setup ## The main job: extract the example conversations through real SGLang, verify, compare with transformers
	@$(PY) examples/demo.py

test: setup check ## Everything that CI runs
	@$(PY) -m pytest -q -n 2 --dist loadfile tests/unit
	@$(MAKE) --no-print-directory integration
	@STATETAP_MODELS=short $(PY) -m pytest -q tests/models
	@$(PY) -m pytest -q -n 2 --dist loadfile tests/faults
	@$(PY) -m pytest -q tests/e2e
	@$(PY) -m pytest -q tests/browser
	@$(PY) -m pytest -q tests/chart
	@$(PY) -m pytest -q tests/containers

check: setup ## ruff, mypy, import-linter, deptry
	@$(VENV)/bin/ruff format --check -q services tests examples || { echo "not formatted: run ruff format"; exit 1; }
	@$(VENV)/bin/ruff check -q services tests examples
	@$(VENV)/bin/mypy --no-error-summary
	@$(VENV)/bin/lint-imports --no-logo --no-cache > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log; exit 1; }
	@$(VENV)/bin/deptry services > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log; exit 1; }
	@echo "check: ruff, mypy, import-linter and deptry found nothing"

unit: setup ## Unit tests
	@$(PY) -m pytest -q -n 2 --dist loadfile tests/unit

integration: setup ## Real redis-server, real SGLang, one service at a time; the engine's tests beside the others
	@$(MAKE) --no-print-directory -j2 --output-sync=target integration-engine integration-services

# In one process: they look at what other engines leave in /dev/shm.
integration-engine: setup
	@$(PY) -m pytest -q $(wildcard tests/integration/test_engine*.py)

integration-services: setup
	@$(PY) -m pytest -q $(filter-out $(wildcard tests/integration/test_engine*.py),$(wildcard tests/integration/test_*.py))

models: setup ## Capture on every model of docs/models.md, against transformers; STATETAP_MODELS=short or names
	@$(PY) -m pytest -q tests/models

faults: setup ## Killed workers, full disks, torn writes: the full form (tens of minutes); `make test` runs the short one
	@STATETAP_FAULTS=full $(PY) -m pytest -q -s tests/faults

e2e: setup ## The whole stack by its command line
	@$(PY) -m pytest -q tests/e2e

browser: setup ## The page in a real Chromium (Debian's, which root installs where there is none)
	@$(PY) -m pytest -q tests/browser

s3: setup ## Samples in a bucket of a real service, Ceph's gateway, that is started for it (needs its packages: says which)
	@$(PY) -m tests.support.ceph
	@$(PY) -m pytest -q -s tests/s3

chart: setup ## The Helm chart: lint, value sets that must be refused or render, rendered objects (real helm, no cluster)
	@$(PY) -m pytest -q tests/chart

engine-old: setup ## The engine's tests on SGLang 0.5.17, the oldest release that is known to work
	@test -d $(VENV)/sglang-0.5.17 || $(PY) -m tests.support.other_sglang 0.5.17 $(VENV)/sglang-0.5.17
	@PYTHONPATH=$(CURDIR)/$(VENV)/sglang-0.5.17 $(PY) -m pytest -q tests/integration/test_engine.py

containers: setup ## docker compose --profile cpu from the project's own Dockerfiles, killed, stopped and gone on with (root: starts an engine of its own where there is none)
	@$(PY) -m pytest -q tests/containers

trainers: setup ## Exports, read by each trainer's own package in an environment of its own
	@$(PY) -m tests.trainers.venvs $(VENV)/trainers
	@TRAINERS=$(VENV)/trainers $(PY) -m pytest -q tests/trainers

bench: setup ## What our own layers cost; SHORT=1 for a short form (one JSON object a figure)
	@$(PY) -m tests.bench.bench $(if $(SHORT),--short,)

engine-soak: setup ## 10,000 requests through the real SGLang; memory must stay flat (three minutes)
	@$(PY) -m tests.bench.engine_soak

figures: setup ## Measure the demo and the bench again and write docs/figures.json
	@$(PY) examples/demo.py --figures > $(VENV)/figures.log || { cat $(VENV)/figures.log; exit 1; }
	@$(PY) -m tests.bench.bench >> $(VENV)/figures.log
	@STATETAP_FIGURES=1 $(PY) -m pytest -q -s tests/integration/test_api_schema.py | grep -o '{"name.*' >> $(VENV)/figures.log
	@STATETAP_FIGURES=1 $(PY) -m pytest -q -s tests/models | grep -o '{"name.*' >> $(VENV)/figures.log
	@$(PY) -m tests.bench.engine_soak >> $(VENV)/figures.log
	@$(PY) -m tests.support.figures < $(VENV)/figures.log

docs: setup ## Write docs/reference from the code (a test fails when it is not what the code says)
	@$(PY) -m tests.support.reference

clean: ## Remove .venv and everything that demo and bench made
	rm -rf $(VENV) .statetap
