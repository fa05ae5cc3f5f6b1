# The list of verbs: `make help`.
export PYTHONSAFEPATH = 1
export PYTHONUNBUFFERED = 1
VENV ?= .venv
BIN = $(VENV)/bin
# A machine with a GPU need not have the environment of the tests.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-unit test-long lint fmt type generate verify lock images cluster-up cluster-down cluster-status bench bench-hour bench-clients bench-engine bench-tables bench-published bench-agreement bench-policy gpu clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

venv: $(VENV)/.ready ## Make the virtual environment from the lock file

$(VENV)/.ready: locks/dev.txt locks/cuda.txt pyproject.toml scripts/venv.sh
	@VENV=$(VENV) scripts/venv.sh

demo: venv ## Serve a real small model on this machine and watch machines move (ARGS="--compare", "--keep")
	@$(BIN)/poolwright demo $(ARGS)

test: venv ## Every test that needs no GPU and is not marked long, in three sessions at once (ARGS="-k name")
	@$(BIN)/python scripts/suite.py $(ARGS)

test-unit: venv ## Only tests that need neither model nor cluster
	@$(BIN)/pytest -m "not long and not gpu and not cluster and not node and not model" tests/unit tests/property tests/contract $(ARGS)

test-long: venv ## The tests marked long
	@$(BIN)/pytest -m "long" $(ARGS)

fmt: venv ## Format the code
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix --quiet .

lint: venv ## Style and import rules
	@$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/lint-imports

type: venv ## Types
	@$(BIN)/mypy

generate: venv ## Write the CRD from the models, into crds/ and the chart, and its reference into docs/
	@$(BIN)/python -m poolwright.api.crd && $(BIN)/python scripts/reference.py

verify: generate lint type ## Generate, lint, type-check, and fail when a generated file changed
	@git diff --exit-code -- crds helm docs/reference

lock: venv ## Resolve pyproject.toml into locks/ (needs uv)
	@$(BIN)/python scripts/lock.py $(ARGS)

images: venv ## Build both images without Docker, as archives (root on Debian); prints their names
	@PYTHONPATH=tests $(BIN)/python -m testbed images $(ARGS)

cluster-up: venv ## Start a Kubernetes with one node on this machine (ARGS=--api: without the node, needs no root)
	@PYTHONPATH=tests $(BIN)/python -m testbed up $(ARGS)

cluster-down: venv ## End it, and remove what killed test runs left
	@PYTHONPATH=tests $(BIN)/python -m testbed down

cluster-status: venv ## What runs, where its kubeconfig is, how much memory it takes
	@PYTHONPATH=tests $(BIN)/python -m testbed status

bench: venv ## What the router, scheduling, planning and the policy cost the host
	@for script in router_streams.py scheduler_cost.py attention_plan.py "policy_cost.py --hour"; do \
	  echo "== bench/$$script"; $(BIN)/python bench/$$script $(ARGS) || exit 1; done

bench-hour: venv ## An hour of recorded conversations on 40 machines, simulated: CPU seconds, at most 60
	@$(BIN)/python bench/policy_cost.py --only-hour $(ARGS)

bench-clients: venv ## `vllm bench serve` and guidellm, as their makers ship them, against this engine (installs them first)
	@PYTHONPATH=bench $(BIN)/python bench/clients.py --install $(ARGS)

bench-engine: venv ## The engine against vLLM, llama.cpp and OpenVINO on this CPU, in turns: 20 minutes, into docs/reference
	@PYTHONPATH=bench $(BIN)/python bench/engine_vs.py --page $(ARGS)

bench-tables: venv ## What each batching strategy does to latency: four tables, 12 minutes, into docs/explanation
	@PYTHONPATH=bench $(BIN)/python bench/engine_tables.py --page $(ARGS)

bench-published: venv ## Figures of papers beside ours, simulated on published step times: 5 minutes, into docs/reference
	@PYTHONPATH=. $(BIN)/python -m bench.published --page $(ARGS)

bench-agreement: venv ## The simulator beside real processes: 12 minutes (ARGS="--resume --page"); into build/bench
	@PYTHONPATH=. $(BIN)/python -m bench.policy_agreement $(ARGS)

bench-policy: venv ## The policy beside the published ones, in 24 simulated cells: 30 minutes a call (ARGS="--quick", "--estimate")
	@PYTHONPATH=. $(BIN)/python -m bench.policy --page $(ARGS)

gpu: ## Prove and measure what needs an NVIDIA GPU, without network (ARGS="--only attention"); into build/gpu
	@$(GPU_PYTHON) bench/gpu/__main__.py $(ARGS)

clean: ## Remove the virtual environment and caches of this checkout
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
