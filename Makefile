# Every target sets itself up: a fresh machine needs Python 3.10 or newer and make, nothing else.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
LOWEST ?= $(shell python3.10 -c 'print("python3.10")' 2>/dev/null || echo $(PYTHON))
ARGS ?=
LOWEST_TESTS := (FluxTransformer2DModel or FluxPipeline or WanTransformer3DModel or WanPipeline or \
  TestPipeline or TestDemo or TestRun or kv)
LOWEST_KV := $(addprefix tests/kv/test_,adapter.py generate.py versions.py static.py face.py settings.py)

BIN := $(VENV)/bin
READY := $(VENV)/.stamp
PEERS := $(VENV)/.peers
TRITON := $(VENV)/.triton
SITE := $(VENV)/.site
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help demo test test-lowest lint types fix bench records figures build models docs site gpu-test gpu-bench clean

help: ## Show this list; ARGS="..." is passed on to the command a target runs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(READY) ## Run the shipped model with and without a cache
	$(BIN)/diffcache demo $(ARGS)

test: $(READY) ## Run the tests on two cores (WORKERS=0: in one process), without a network
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(ARGS)

# The bounds, then what SGLang and vLLM-Omni pin (torch 2.6 without a GPU fails in transformers 5.19).
# Transitive dependencies stay at their newest: what is tested is the bounds of pyproject.toml.
test-lowest: ## Test the main job, FLUX, Wan and KV caches on the lowest versions, and on those of engines
	$(call lowest,bounds,,)
	$(call lowest,sglang,torch==2.7.0 diffusers==0.37.0 transformers==5.19.0,$(LOWEST_KV))
	$(call lowest,vllm-omni,diffusers==0.40.0 transformers==5.14.0,$(LOWEST_KV))

# $(call lowest,name,pins,tests of KV caches)
define lowest
	$(LOWEST) -m venv --clear build/lowest-$(1)
	build/lowest-$(1)/bin/python -m pip -qq --disable-pip-version-check install uv
	build/lowest-$(1)/bin/uv pip install --quiet --python build/lowest-$(1)/bin/python \
	  --resolution lowest-direct --editable . $(2)
	build/lowest-$(1)/bin/uv pip freeze --exclude-editable --python build/lowest-$(1)/bin/python >build/lowest-$(1)/versions.txt
	build/lowest-$(1)/bin/uv pip install --quiet --python build/lowest-$(1)/bin/python \
	  --constraint build/lowest-$(1)/versions.txt 'pytest>=8' 'pytest-timeout>=2.3' 'tomli>=2'
	@grep -E '^(torch|diffusers|transformers|accelerate|typer|numpy)==' build/lowest-$(1)/versions.txt
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 build/lowest-$(1)/bin/python -m pytest \
	  tests/test_cli.py tests/test_exactness.py tests/test_unchanged.py \
	  tests/test_pipelines.py $(3) -k "$(LOWEST_TESTS)" $(ARGS)
endef

lint: $(READY) ## Check style and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY) ## Check types
	$(BIN)/mypy

fix: $(READY) ## Repair style and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## Measure what caching itself costs: skipped steps, KV caches
	$(BIN)/python -m diffcache.eval.workshop.bench $(ARGS)

records: $(PEERS) ## Make a part of each record again whose code has changed, and stamp it (minutes)
	$(BIN)/python -m diffcache.eval.workshop.records $(ARGS)

figures: $(PEERS) ## Draw all records of the pages again (days; ARGS='--budget 2', or ARGS=NAME for one)
	$(BIN)/python -m diffcache.eval.workshop.figures $(ARGS)

build: $(READY) ## Build dist/ (sdist, wheel from it), install the wheel afresh and import it
	rm -rf build dist
	$(BIN)/pyproject-build --quiet --no-isolation
	$(BIN)/python -m venv --without-pip build/fresh
	$(PIP) --python build/fresh install --no-deps dist/*.whl
	@fresh=$$PWD/build/fresh/bin/python; \
	PYTHONPATH=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	export PYTHONPATH; \
	for folder in / .; do \
	  (cd $$folder && $$fresh -c 'import diffcache, diffcache.pipelines.small.reach') || exit 1; \
	  echo "the installed wheel imports from $$folder"; \
	done

models: $(READY) ## Train the shipped models again (most of a day on one core)
	for name in $$($(BIN)/python -c 'from diffcache.eval.workshop.small.trainer import JOBS; print(*JOBS)'); do \
	  $(BIN)/python -m diffcache.eval.workshop.small.trainer $$name --out runs/models && \
	  $(BIN)/python -m diffcache.eval.workshop.small.trainer $$name --out runs/models --export || exit 1; \
	done
	$(BIN)/python -m diffcache.eval.workshop.lite_card
	$(BIN)/python -m diffcache.eval.workshop.shipped.quality
	$(BIN)/python -m diffcache.eval.workshop.shipped.cards --write

docs: $(READY) ## Write the table of what a cache finds in every supported model
	$(BIN)/python -m diffcache.eval.workshop.denoiser_coverage --write $(ARGS)

site: $(SITE) ## Build the pages as a site in build/site, without a network; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)
	@echo "build/site/index.html"

gpu-test: $(READY) $(TRITON) ## Run the tests that need a CUDA device
	HF_HUB_OFFLINE=1 $(BIN)/pytest -m gpu $(ARGS)

gpu-bench: $(PEERS) $(TRITON) ## Measure kernels on a CUDA device, beside other libraries
	$(BIN)/python -m diffcache.eval.workshop.bench kernels --device cuda --dtype bfloat16 $(ARGS)
	$(BIN)/python -m diffcache.eval.workshop.kernels.page --write

clean: ## Remove build products and caches; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -prune -exec rm -rf {} +

# torch goes first and alone, so that a machine without a GPU gets the CPU build (180 MB, not 3 GB);
# what torch itself depends on comes with the second install.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python %d.%d is too old; name a newer one: make PYTHON=python3.12" % sys.version_info[:2])'
	@echo "setting up $(VENV), a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade pip
	@if nvidia-smi >/dev/null 2>&1; then \
	  $(PIP) install --no-deps "$(TORCH)"; \
	else \
	  $(PIP) install --no-deps --retries 0 --timeout 15 --index-url $(CPU_INDEX) "$(TORCH)" 2>/dev/null || \
	  $(PIP) install --no-deps "$(TORCH)"; \
	fi
	@$(PIP) install --editable '.[dev]'
	@touch $@

$(TRITON): $(READY)
	@$(PIP) install 'triton>=3.5'
	@touch $@

$(SITE): $(READY)
	@$(PIP) install --group site
	@touch $@

$(PEERS): $(READY)
	@$(PIP) install --editable '.[peers]'
	@touch $@
