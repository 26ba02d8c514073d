# Every command sets up what it needs, from nothing but Python 3.12.
PYTHON ?= python3.12
VENV ?= .venv
BIN := $(VENV)/bin
POLICIES := none,full,selective_attention,dots_saveable,dots_with_no_batch_dims_saveable,minimal_with_context,save_out_proj,minimal_offloaded

.PHONY: sweep browser foreign test test-fast test-oldest check format bench bench-torch clean

# What each policy costs on an H100 that need not be here: need, step time, plot and records in out/.
sweep: $(VENV)/.compile
	@mkdir -p out
	$(BIN)/remat-kit sweep models.transformer:gpt size=gpt2-small batch=8 seq=1024 --target h100-sxm-80gb \
	  --policies $(POLICIES) --json out/gpt2-small-h100.json --plot out/gpt2-small-h100.png --force

# Chromium and its driver, for the tests that open the HTML report; without them those tests are skipped.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
	  echo "make browser: there is no apt-get here. Install chromium and chromedriver by hand, both on the PATH." >&2; exit 1; \
	fi; \
	if [ "$$(id -u)" -ne 0 ]; then \
	  echo "make browser: apt-get needs root. Run: sudo make browser" >&2; exit 1; \
	fi; \
	apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null

# Models that no one here wrote, for the tests of enable_remat; without them those tests are skipped. Two are packages,
# the others are Flax's examples, which its source distribution has and its wheel has not.
foreign: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -e '.[foreign]' $(CONSTRAINTS)
	rm -rf .foreign && mkdir .foreign
	$(BIN)/python -m pip download --quiet --no-deps --no-binary flax --dest .foreign \
	  "flax==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("flax"))')"
	tar xzf .foreign/flax-*.tar.gz -C .foreign --strip-components=1 --wildcards --no-wildcards-match-slash '*/examples'
	rm .foreign/flax-*.tar.gz

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-fast: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# The oldest JAX that is supported.
test-oldest:
	@$(MAKE) --no-print-directory VENV=.venv-oldest CONSTRAINTS="-c constraints-oldest.txt" test-fast

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What the toolkit costs beside the bare compiles of the same steps, in one run.
bench: $(VENV)/.dev
	$(BIN)/python experiments/overhead.py

# What PyTorch's activation memory budget keeps and recomputes of a GPT block, and our plans at the same bytes. PyTorch
# has an environment of its own, which nothing else needs: any Python that PyTorch has wheels for will do. Pip takes a CPU
# build (0.9 GB installed) where it is set up to find one (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL), else PyPI's CUDA build.
TORCH_PYTHON ?= $(shell command -v python3.11 || echo $(PYTHON))
bench-torch: .venv-torch/.torch $(VENV)/.compile
	.venv-torch/bin/python experiments/torch_budget.py
	JAX_PLATFORMS=cpu $(BIN)/python -m experiments.against_torch

.venv-torch/.torch:
	$(TORCH_PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet 'torch>=2.13,<2.14' numpy
	@touch $@

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.compile: $(VENV)/.python pyproject.toml constraints-oldest.txt
	$(BIN)/python -m pip install --quiet -e '.[compile,models]' $(CONSTRAINTS)
	@touch $@

$(VENV)/.dev: $(VENV)/.compile
	$(BIN)/python -m pip install --quiet -e '.[compile,models,dev]' $(CONSTRAINTS)
	@touch $@

clean:
	rm -rf .venv .venv-oldest .venv-torch out .remat-kit .foreign
