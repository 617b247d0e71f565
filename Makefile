# The daily interface: setup proto lint type test mesh demo bench. Everything runs in .venv, made on first use.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup proto proto-check lint type test test-clients chaos demo up bench consul postgres model clean

help:  ## Show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/.stamp: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Meshfire needs Python 3.11 or newer; set PYTHON=…" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --group dev --editable '.[all]'
	touch $@

setup: $(VENV)/.stamp  ## Make the virtual environment and install everything into it

proto: setup  ## Generate the stubs in libs/meshfire/api from protos/
	rm -rf libs/meshfire/api
	mkdir -p libs/meshfire/api
	$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
	    --python_out=libs --mypy_out=quiet:libs $$(find protos -name '*.proto' | sort)
	$(BIN)/python -m grpc_tools.protoc -Iprotos --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	    --grpc_python_out=libs --mypy_grpc_out=quiet:libs $$(find protos -name '*_service.proto' | sort)
	find libs/meshfire/api -type d -exec touch {}/__init__.py \;

proto-check: proto  ## Fail if the committed stubs are not what protos/ generates
	@git diff --exit-code --stat -- libs/meshfire/api && test -z "$$(git ls-files --others --exclude-standard libs/meshfire/api)"

lint: setup  ## Style, import rules, contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/buf lint

type: setup  ## Static types
	$(BIN)/mypy

consul: setup  ## Fetch a Consul agent for tests and `meshfire up`, where it can be had
	@deploy/consul/fetch-consul.sh || echo "no Consul agent here: its tests are skipped, the mesh uses files"

postgres:  ## Install a PostgreSQL server for tests, where apt and root are there
	@deploy/postgres/install-server.sh || echo "no PostgreSQL here: its tests are skipped"

kernels: setup  ## Compile the C++ kernels now (else a worker's first start does); says which path will run
	$(BIN)/python -m meshfire.kernels

model: setup  ## Fetch SmolLM2-135M-Instruct into the model cache
	$(BIN)/meshfire models pull smollm2-135m-instruct

test: setup consul postgres model  ## All fast tests
	$(BIN)/python -m pytest

test-clients: setup consul model  ## Client SDKs in other languages against a running mesh
	$(BIN)/python -m pytest tests/e2e -k 'sdk or node'

chaos: setup consul model  ## Kill processes under load; takes minutes
	$(BIN)/python -m pytest tests/chaos -m long

demo: setup model  ## Start a mesh, ask it something, show the trace, stop it
	$(BIN)/python examples/demo.py

up: setup  ## Start a mesh and keep it until Ctrl-C
	$(BIN)/meshfire up

bench: setup model  ## make bench NAME=mesh-tax; without NAME, list the benchmarks
	$(BIN)/meshfire bench $(NAME)

clean:  ## Remove what this file made
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
