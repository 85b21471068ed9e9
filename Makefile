# The door. `make help` lists what can be done; everything else lives in Python.
# VENV names the environment, PYTHON the interpreter that makes it, EXTRAS what is installed.
# WORKERS is how many processes run the tests: one more than cores, since some tests wait. A file's tests stay
# in one process, with its fixtures, and the folders come in order: the long files of tests/system first, so that
# no process is left alone with one. Of the long tests each goes where there is time, or the simulation's would
# be half of all in one process.

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev
WORKERS ?= 3
# Kinds of processor as OpenBLAS names them (each sums in an order of its own), and the tests that compute with it.
PROCESSORS ?= Haswell Zen SkylakeX Sandybridge
COMPUTING := tests/unit/engine tests/system/sim tests/system/e2e tests/system/cache tests/system/golden
SHELL := /bin/sh

BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(EXTRAS)
PACKAGES := pyproject.toml gen/python/pyproject.toml clients/python/pyproject.toml
UV := $(shell command -v uv 2>/dev/null)

ifneq ($(UV),)
# With pip, which the demo model is fetched with.
MAKE_VENV = uv venv --quiet --seed --python $(PYTHON) --allow-existing $(VENV)
INSTALL = uv pip install --quiet --python $(BIN)/python
else
MAKE_VENV = $(PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.DEFAULT_GOAL := help
.PHONY: help env demo fleet serve test test-slow test-processors test-fleet test-docs test-clients check gen fmt lint types proto fresh bench bench-step bench-profile bench-gpu bench-lone bench-cache bench-vision bench-load bench-storage bench-blas bench-structured bench-speculation bench-telemetry bench-tenants bench-attacks bench-startup bench-fleet simulate-fleet soak fuzz smoke audit packages release docs clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

env: $(STAMP) ## Make the environment in .venv (again only when a pyproject.toml or constraints.txt changed).

$(STAMP): $(PACKAGES) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "icehouse needs Python 3.11 or newer; say make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in $(VENV) (a few minutes the first time)"
	@$(MAKE_VENV)
	@$(INSTALL) -c constraints.txt -e gen/python -e clients/python -e '.[$(EXTRAS)]'
	@$(if $(filter dev,$(EXTRAS)),$(INSTALL) -c constraints.txt --no-deps mlx-vlm)
	@touch $@

demo: $(STAMP) ## Watch a real model answer over gRPC: makes the model once, starts a server, asks, streams, stops.
	@$(BIN)/icehouse demo

fleet: $(STAMP) ## Watch two workers behind a gateway (SMG): one is killed, conversations go on (ARGS="--stay").
	@$(BIN)/python -m bench.fleet.tour $(ARGS)

serve: $(STAMP) ## Serve the demo model on localhost:50051 (ARGS="--port 50052" and so on).
	@$(BIN)/icehouse serve $(ARGS)

# What is compiled is kept, whatever the environment says: the tests start hundreds of processes.
test test-slow test-processors test-fleet test-docs test-clients: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## Run the fast test suite (ARGS="tests/unit/storage -k spill" narrows it).
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## Run the long tests, many seeds, many kill -9: an hour on two cores.
	@$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m slow --timeout 3600 $(ARGS)

test-processors: $(STAMP) ## Run the tests that compute as on other processors: half an hour each (PROCESSORS="Haswell Zen" chooses).
	@for kind in $(PROCESSORS); do echo "== OPENBLAS_CORETYPE=$$kind"; \
		OPENBLAS_CORETYPE=$$kind $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COMPUTING) $(ARGS) || exit 1; done

test-fleet: $(STAMP) ## Test workers behind a real gateway (SMG), with OpenAI's and Anthropic's clients: a minute or two.
	@$(BIN)/python -m pytest -q -m fleet tests/system/fleet $(ARGS)

test-docs: $(STAMP) ## Run the Python and the commands that the pages show, beside live servers: a few minutes.
	@$(BIN)/python -m pytest -q -m docs tests/system/docs $(ARGS)

test-clients: $(STAMP) ## Run each client's tests and scenarios, where its tool chain is here (ARGS="go" narrows it).
	@$(BIN)/python -m tests.system.clients.languages $(ARGS)

check: lint types proto fresh $(if $(TESTED),,test) ## Everything CI checks: format, lint, types, protos, generated code, tests.

lint: $(STAMP) ## Format and lint, changing nothing.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(STAMP) ## mypy, strict over service/.
	@$(BIN)/mypy

proto: $(STAMP) ## buf lint over protos/, and buf breaking against the API of the last release.
	@cd protos && $(abspath $(BIN))/buf lint
	@$(BIN)/python -m release.api_image

fresh: $(STAMP) ## Are gen/ and docs/ what protos/ and the code say, and is the version the same everywhere?
	@$(BIN)/python -m release.version
	@$(BIN)/python protos/generate.py --check
	@PYTHONPATH=.:service:gen/python $(BIN)/python docs/generate.py --check

gen: $(STAMP) ## Write gen/ from protos/, and what pages of docs/ take from the code.
	@$(BIN)/python protos/generate.py
	@PYTHONPATH=.:service:gen/python $(BIN)/python docs/generate.py

fmt: $(STAMP) ## Format the code and mend what ruff can mend.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

bench: $(STAMP) ## What callers wait for, server against the engine in process: about 20 minutes (ARGS="--quick", "--cases clients").
	@$(BIN)/python -m bench.throughput $(ARGS)

bench-step: $(STAMP) ## The host's milliseconds of a pass at 1 to 64 rows against mlx-lm's engine, and its primitives.
	@$(BIN)/python -m bench.step $(ARGS)

bench-profile: $(STAMP) ## Where one step's time goes at 16 rows: planning, graph building, device, publishing.
	@$(BIN)/python -m bench.step.profile $(ARGS)

bench-gpu: $(STAMP) ## On a GPU, a model of a real shape made on the spot, against mlx-lm's engine: the table of targets (ARGS="--shape tiny --scale 0.05" tries it on a CPU).
	@$(BIN)/python -m bench.gpu $(ARGS)

bench-lone: $(STAMP) ## Cold time to first token of a lone prompt, after a tiny first request, against the engine.
	@$(BIN)/python -m bench.lone $(ARGS)

bench-cache: $(STAMP) ## Prefix cache: cold, RAM, SSD after a restart.
	@$(BIN)/python -m bench.cache $(ARGS)

bench-vision: $(STAMP) ## A conversation about one picture: cold, RAM, SSD after a restart, beside mlx-vlm's server; decode beside pictures.
	-@$(MAKE) --silent build/mlx-vlm-server/.stamp
	@$(BIN)/python -m bench.vision $(ARGS)

# Where it cannot be had the bench says so and measures mlx-vlm's generation.
build/mlx-vlm-server/.stamp: .ci/mlx-vlm-server-requirements.txt $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $<
	@touch $@

bench-load: $(STAMP) ## Poisson arrivals at rising rates, beside mlx-lm's server: latency, goodput, a plot.
	@$(BIN)/python -m bench.load $(ARGS)

bench-structured: $(STAMP) ## Decode with a response format against without, 16 clients, as ratios.
	@$(BIN)/python -m bench.structured $(ARGS)

bench-telemetry: $(STAMP) ## Access log, metrics, traces and load reports: all on against all off (ARGS=--events: subscribers of KV events).
	@$(BIN)/python -m bench.telemetry $(ARGS)

bench-tenants: $(STAMP) ## Can one tenant tell from the time that another one has a prompt cached?
	@$(BIN)/python -m bench.tenants $(ARGS)

bench-attacks: $(STAMP) ## What one hostile tenant does to another one's short request, attack by attack.
	@$(BIN)/python -m bench.attacks $(ARGS)

bench-startup: $(STAMP) ## Process start to SERVING with a tiny model (ARGS='--baseline "/old/.venv/bin/icehouse"' compares).
	@$(BIN)/python -m bench.startup $(ARGS)

bench-speculation: $(STAMP) ## Decode with speculation against without, as ratios; outputs compared.
	@$(BIN)/python -m bench.speculation $(ARGS)

bench-fleet: $(STAMP) ## Agents' sessions on one worker, two by their blocks, two in turn; what the gateway adds.
	@$(BIN)/python -m bench.fleet.measure $(ARGS)

simulate-fleet: $(STAMP) ## When one worker is enough, what 64 keep of its hits: simulated from what one costs.
	@$(BIN)/python -m bench.fleet.growth $(ARGS)

soak: $(STAMP) ## 256 streams for an hour: memory and open files must stay flat (ARGS="--seconds 600", "--hangs": with a disk that hangs now and then).
	@$(BIN)/python -m bench.soak $(ARGS)

bench-storage: $(STAMP) ## SSD tier against raw files: spill, restore, reconcile, as ratios.
	@$(BIN)/python -m bench.storage_bench $(ARGS)

bench-blas: $(STAMP) ## What OpenBLAS is worth on a CPU: prefill of Gemma 3 270M with it and without.
	@$(BIN)/python -m bench.blas $(ARGS)

fuzz: $(STAMP) ## Mutated requests over every RPC against a real server (ARGS="--requests 1000000 --seed 2", "--images").
	@$(BIN)/python -m tests.system.fuzz $(ARGS)

smoke: $(STAMP) ## The pages' grpcurl lines and bad inputs against a live server (needs grpcurl).
	@$(BIN)/python .ci/smoke.py $(ARGS)

build/audit/.stamp: .ci/audit-requirements.txt
	@$(PYTHON) -m venv build/audit/venv
	@build/audit/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Of mkdocs 1: nothing of what it warns of is used here.
docs: build/docs/.stamp ## Build the pages as a site in build/site; a dead link fails it (ARGS=serve shows it as you write).
	@NO_MKDOCS_2_WARNING=1 build/docs/venv/bin/mkdocs $(if $(ARGS),$(ARGS),build --quiet --strict)

build/docs/.stamp: .ci/docs-requirements.txt
	@$(PYTHON) -m venv build/docs/venv
	@build/docs/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

packages: $(STAMP) ## Build the three distributions; install and remove them in every order.
	@$(BIN)/python .ci/packages.py

release: $(STAMP) build/audit/.stamp ## Build all that a release gives out, with bills of materials and sums, in dist/ (docs/releases.md).
	@$(BIN)/python -m release.build --tools build/audit/venv/bin/python $(ARGS)

audit: $(STAMP) build/audit/.stamp ## Known vulnerabilities of what is installed, and build/audit/sbom.json, a CycloneDX bill of materials.
	@build/audit/venv/bin/python .ci/audit.py --python $(BIN)/python --sbom build/audit/sbom.json

clean: ## Remove what make made here; the model and the cache in the user's cache directory stay.
	@rm -rf $(VENV) build dist service/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
