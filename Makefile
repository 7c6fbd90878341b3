# One verb per line; every verb makes the environment it needs.
.DEFAULT_GOAL := help
.PHONY: help serve chat check test test-allocator-long check-kernels check-sanitizers lint format bench compare clean ci
VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint ops/constraints.txt
TORCH_INDEX ?=

help: ## list the verbs
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(VENV)/.runtime: pyproject.toml ops/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	BIN=$(BIN) TORCH_INDEX=$(TORCH_INDEX) sh ops/install_torch.sh
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) --editable '.[dev]'
	touch $@

serve: $(VENV)/.runtime ## serve SmolLM2-135M on http://127.0.0.1:8000 (ARGS='--port 9000' for options)
	$(BIN)/looseleaf serve $(ARGS)

chat: $(VENV)/.runtime ## talk to a running server from the terminal
	$(BIN)/looseleaf chat $(ARGS)

check: $(VENV)/.runtime ## print the effective configuration and which backends can run
	$(BIN)/looseleaf check $(ARGS)

test: $(VENV)/.dev ## run every test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal $(ARGS)

test-allocator-long: $(VENV)/.dev ## run the allocator's state machine 10,000 times, 200 steps each (about 20 minutes)
	LOOSELEAF_ALLOCATOR_RUNS=10000 $(BIN)/python -m pytest tests/allocator/test_allocator_model.py -k TestAllocatorModel $(ARGS)

$(VENV)/.kernels: $(VENV)/.dev
	$(PIP) --editable '.[kernels]'
	touch $@

check-kernels: $(VENV)/.kernels ## compile every CUDA kernel for the architectures it serves and hold it to its registers (no GPU)
	$(BIN)/python ops/gpu/check_kernels.py $(ARGS)

check-sanitizers: $(VENV)/.dev ## run the CUDA kernels on the CPU under ThreadSanitizer and AddressSanitizer
	$(BIN)/python -m tests.cuda_emulation.sanitizers

lint: $(VENV)/.dev ## ruff and mypy --strict
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(VENV)/.dev ## rewrite the code in the project's format
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(VENV)/.dev ## measure this machine (see ops/bench/README.md)
	$(BIN)/python ops/bench/serve.py $(ARGS)

compare: $(VENV)/.dev ## measure this machine beside other servers, 45 minutes (see ops/bench/README.md)
	$(BIN)/python ops/bench/compare.py --preset reported --json build/compare.json $(ARGS)

ci: $(VENV)/.kernels lint test check-kernels ## what CI runs

clean: ## remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
