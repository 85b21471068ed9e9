# `make help` lists the usual targets; a comment with one # behind a target keeps it off that list.
# VENV names the environment, PYTHON the interpreter that makes it, EXTRAS what is installed. `make demo` and
# `make serve` are content with what users install, without EXTRAS: less than half of what the tests need.
# WORKERS is how many processes run the tests: two more than there are cores, since many tests wait, and at most
# 8. All tests of a file run in one process and share its fixtures. The long files of tests/system come first, so
# that none of them starts last and keeps the others waiting. The slow tests go to whichever process is free
# instead: kept in one process, the simulation alone would take half of the time.

VENV ?= .venv
PYTHON ?= python3
EXTRAS ?= dev
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 6 ? $(CORES) + 2 : 8)))
# Kinds of processor as OpenBLAS names them (each sums in an order of its own), and the tests that compute with it.
PROCESSORS ?= Haswell Zen SkylakeX Sandybridge
COMPUTING := tests/unit/engine tests/system/sim tests/system/e2e tests/system/cache tests/system/golden
SHELL := /bin/sh

BIN := $(VENV)/bin
# A failure is told at once: a run that is cut off has said what failed.
PYTEST = $(BIN)/python -m pytest -q --instafail
STAMP := $(VENV)/.stamp-$(EXTRAS)
SERVING := $(or $(wildcard $(STAMP)),$(VENV)/.stamp-serving)
PACKAGES := pyproject.toml gen/python/pyproject.toml clients/python/pyproject.toml clients/http/pyproject.toml
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
.PHONY: help env demo fleet group serve test test-slow test-processors test-fleet test-group test-docs test-clients test-agents check gen fmt lint types proto fresh bench soak fuzz smoke audit packages release docs clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

env: $(STAMP) ## Make the environment in .venv (again only when a pyproject.toml or constraints.txt changed).

$(STAMP) $(VENV)/.stamp-serving: $(PACKAGES) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "icehouse needs Python 3.11 or newer; say make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making the environment in $(VENV) (a few minutes the first time)"
	@$(MAKE_VENV)
	@$(INSTALL) -c constraints.txt -e gen/python -e clients/python -e clients/http -e '.$(if $(filter $(STAMP),$@),[$(EXTRAS)])'
	@$(if $(filter $(VENV)/.stamp-dev,$@),$(INSTALL) -c constraints.txt --no-deps mlx-vlm)
	@touch $@

demo: $(SERVING) ## Watch a real model answer over gRPC: make the model once, start a server, ask, stream, stop.
	@$(BIN)/icehouse demo

group: $(STAMP) # Watch three ranks of one model: one is killed, the group comes back (ARGS="--ranks 2 --model FOLDER").
	@$(BIN)/python -m bench.group.tour $(ARGS)

fleet: $(STAMP) ## Watch two workers behind a gateway (SMG): one is killed, conversations go on (ARGS="--stay").
	@$(BIN)/python -m bench.fleet.tour $(ARGS)

serve: $(SERVING) ## Serve the demo model on localhost:50051 (ARGS="--port 50052" and so on).
	@$(BIN)/icehouse serve $(ARGS)

# What is compiled is kept, whatever the environment says: the tests start hundreds of processes.
test test-slow test-processors test-fleet test-group test-docs test-clients test-agents: export PYTHONDONTWRITEBYTECODE :=

test: $(STAMP) ## Run the fast test suite (ARGS="tests/unit/storage -k spill" narrows it).
	@$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(STAMP) ## Run the long tests, with many seeds and many kill -9: an hour on two cores.
	@$(PYTEST) -n $(WORKERS) --dist worksteal -m slow --timeout 3600 $(ARGS)

test-processors: $(STAMP) # Run the tests that compute as on other processors: half an hour each (PROCESSORS="Haswell Zen" chooses).
	@for kind in $(PROCESSORS); do echo "== OPENBLAS_CORETYPE=$$kind"; \
		OPENBLAS_CORETYPE=$$kind $(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(COMPUTING) $(ARGS) || exit 1; done

test-fleet: $(STAMP) ## Test workers behind a real gateway (SMG), with OpenAI's and Anthropic's clients: a minute or two.
	@$(PYTEST) -m fleet tests/system/fleet $(ARGS)

test-group: $(STAMP) # Test one model over several processes: equal tokens, lost ranks and disks, planted faults: a few minutes.
	@$(PYTEST) -m "group and not slow" -n $(WORKERS) --dist worksteal tests/system/group $(ARGS)

test-docs: $(STAMP) ## Run the Python and the commands that the pages show, beside live servers: a few minutes.
	@$(PYTEST) -m docs tests/system/docs $(ARGS)

test-clients: $(STAMP) ## Run the tests and scenarios of each client whose tool chain is installed (ARGS="go" narrows it).
	@$(BIN)/python -m tests.system.clients.languages $(ARGS)

test-agents: $(STAMP) # Lead Codex, OpenCode, Claude Code and others through a task; npm and pip fetch 3 GB of them once.
	@$(PYTEST) -m agents tests/system/agents $(ARGS)

check: lint types proto fresh $(if $(TESTED),,test) ## Check what CI checks: format, lint, types, protos, generated code, tests.

lint: $(STAMP) # Format and lint, changing nothing.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .

types: $(STAMP) # mypy, strict over service/.
	@$(BIN)/mypy

proto: $(STAMP) # buf lint over protos/, and buf breaking against the API of the last release.
	@cd protos && $(abspath $(BIN))/buf lint
	@$(BIN)/python -m release.api_image

fresh: $(STAMP) # Are gen/ and docs/ what protos/ and the code say, and is the version the same everywhere?
	@$(BIN)/python -m release.version
	@$(BIN)/python protos/generate.py --check
	@PYTHONPATH=.:service:gen/python $(BIN)/python docs/generate.py --check

gen: $(STAMP) ## Generate gen/ from protos/, and the pages of docs/ that come from the code.
	@$(BIN)/python protos/generate.py
	@PYTHONPATH=.:service:gen/python $(BIN)/python docs/generate.py
	@PYTHONPATH=.:service:gen/python $(BIN)/python -m tests.fixtures.telemetry.metric_page

fmt: $(STAMP) ## Format the code and fix what ruff can fix.
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

# What `make bench CASE=…` takes, and the modules that are not called like their case. The first is what
# `make bench` runs.
#   throughput   what callers wait for, server against the engine in process: 20 minutes (ARGS="--quick", "--cases clients")
#   gpu          on a GPU, a model of a real shape made on the spot, against mlx-lm's engine: the table of targets
#                (ARGS="--shape tiny --scale 0.05" tries it on a CPU)
#   step         the host's milliseconds of a pass at 1 to 64 rows against mlx-lm's engine, and its primitives
#   profile      where one step's time goes at 16 rows: planning, graph building, device, publishing
#   lone         time to first token of a lone cold prompt, after a tiny first request, against the engine
#   load         Poisson arrivals at rising rates, beside mlx-lm's server: latency, goodput, a plot
#   cache        prefix cache: cold, RAM, SSD after a restart
#   storage      SSD tier against raw files: spill, restore, reconcile, as ratios (ARGS="--cases auto": what `auto`
#                chooses, on this disk and on one made slow)
#   startup      process start to SERVING with a tiny model (ARGS='--baseline "/old/.venv/bin/icehouse"' compares)
#   vision       a conversation about one picture: cold, RAM, SSD after a restart, beside mlx-vlm's server
#   structured   decode with a response format against without, 16 clients, as ratios
#   speculation  decode with speculation against without, as ratios; outputs compared
#   blas         what OpenBLAS is worth on a CPU: prefill of Gemma 3 270M with it and without
#   telemetry    access log, metrics, traces and load reports: all on against all off (ARGS=--events: KV events)
#   tenants      can one tenant tell from the time that another one has a prompt cached?
#   attacks      what a hostile tenant does to another one's short request, attack by attack
#   http         the HTTP front against gRPC: first text, 64 streams at once, its memory
#   httpattacks  what a hostile caller of the HTTP front does to another one's short request, attack by attack
#   fleet        agents' sessions on one worker, two by their blocks, two in turn; what the gateway adds
#   agents       agents' sessions, from a public trace (ARGS="--trace FOLDER") or generated: rules of eviction and
#                budgets of checkpoints against LRU and Belady; with ARGS=--server against a real server
#   nextturn     a session's second question where the template rewrites the history (ARGS="--templates FILE.json"):
#                what is computed and the first token, with the next turn computed ahead and without
#   group        one model over two processes beside one process: what a group costs, and the bytes of its orders
#   models       several models in one server: how long one takes to come back, the tokens of another one beside it,
#                a pool of one, fifty callers at random on three (ARGS="--parts drive --seconds 60")
#   growth       when one worker is enough, what 64 keep of its hits: simulated from what one costs
CASE = throughput
CASES := throughput gpu step profile lone load cache storage startup vision structured speculation blas telemetry \
	tenants attacks http httpattacks fleet agents nextturn group growth shared models
MODULE_profile := step.profile
MODULE_storage := storage_bench
MODULE_http := http.measure
MODULE_httpattacks := http.attacks
MODULE_fleet := fleet.measure
MODULE_group := group.measure
MODULE_growth := fleet.growth
MODULE_nextturn := next_turn

bench: $(STAMP) ## Measure what callers wait for, against mlx-lm's engine; CASE=step and others: see the Makefile.
	@$(if $(filter $(CASES),$(CASE)),,echo "there is no bench $(CASE); CASE is one of: $(CASES)"; exit 1)
	$(if $(filter vision,$(CASE)),-@$(MAKE) --silent build/mlx-vlm-server/.stamp)
	@$(BIN)/python -m bench.$(or $(MODULE_$(CASE)),$(CASE)) $(ARGS)

# Where it cannot be had the bench says so and measures mlx-vlm's generation.
build/mlx-vlm-server/.stamp: .ci/mlx-vlm-server-requirements.txt $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(@D) -r $<
	@touch $@

soak: $(STAMP) ## Keep 256 streams open for an hour: memory and open files must stay flat (ARGS="--seconds 600", "--hangs").
	@$(BIN)/python -m bench.soak $(ARGS)

fuzz: $(STAMP) ## Send mutated requests over every RPC to a real server (ARGS="--requests 1000000 --seed 2", "--images").
	@$(BIN)/python -m tests.system.fuzz $(ARGS)

smoke: $(STAMP) # The pages' grpcurl lines and bad inputs against a live server (needs grpcurl).
	@$(BIN)/python .ci/smoke.py $(ARGS)

build/audit/.stamp: .ci/audit-requirements.txt
	@$(PYTHON) -m venv build/audit/venv
	@build/audit/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# The variable silences what mkdocs 1 says of mkdocs 2, of which nothing is used here.
docs: build/docs/.stamp ## Build the pages as a site in build/site; a dead link fails it (ARGS=serve shows it as you write).
	@NO_MKDOCS_2_WARNING=1 build/docs/venv/bin/mkdocs $(if $(ARGS),$(ARGS),build --strict)

build/docs/.stamp: .ci/docs-requirements.txt
	@$(PYTHON) -m venv build/docs/venv
	@build/docs/venv/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

packages: $(STAMP) # Build the four distributions into dist/wheels; install and remove them in many orders.
	@$(BIN)/python .ci/packages.py

release: $(STAMP) build/audit/.stamp ## Build a release with bills of materials and checksums in dist/ (docs/releases.md).
	@$(BIN)/python -m release.build --tools build/audit/venv/bin/python $(ARGS)

audit: $(STAMP) build/audit/.stamp ## Look up known vulnerabilities of installed packages, and write build/audit/sbom.json (CycloneDX).
	@build/audit/venv/bin/python .ci/audit.py --python $(BIN)/python --sbom build/audit/sbom.json

clean: ## Remove what make built here; the model and the cache in your cache directory stay.
	@rm -rf $(VENV) build dist service/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/out
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
