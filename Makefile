# `make run` and `make test` need Python 3.11 or newer and nothing else: they set up their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 3000
export DAGSTER_HOME := $(CURDIR)/dagster_home
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help run ui test test-slow check wheel bench-loading bench-memory clean reset

help:
	@echo "make run         run the demo datasets, from tar shards to packed files and manifests"
	@echo "make ui          Dagster UI and daemon on http://$(HOST):$(PORT), demo shards registered"
	@echo "make test        the test suite"
	@echo "make test-slow   the tests that take minutes"
	@echo "make check       ruff, mypy --strict, dg check defs"
	@echo "make wheel       build the wheel and check what is in it"
	@echo "make bench-loading DATA=folder  reading and writing, side by side with other projects (an hour, 30 GB)"
	@echo "make bench-memory  resident memory and throughput of each stage on a 500 MB shard"
	@echo "make clean       remove the virtual environment and built files"
	@echo "make reset       remove the local instance's history and EVERY dataset below dagster_home/data"

$(VENV)/pip.done: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --upgrade pip
	@touch $@

$(VENV)/run.done: $(VENV)/pip.done pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[s3,video]'
	@touch $@

$(VENV)/dev.done: $(VENV)/run.done
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev
	@touch $@

run: $(VENV)/run.done
	$(BIN)/mm-assets run

ui: $(VENV)/run.done
	$(BIN)/mm-assets register
	$(BIN)/dagster dev --workspace workspace.yaml --host $(HOST) --port $(PORT)

test: $(VENV)/dev.done
	$(BIN)/python -m pytest -m "not slow" --numprocesses logical --dist worksteal

test-slow: $(VENV)/dev.done
	$(BIN)/python -m pytest -m slow

check: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tests/prose.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dg check defs

wheel: $(VENV)/dev.done
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(BIN)/python -c "import glob, zipfile; n = zipfile.ZipFile(glob.glob('dist/*.whl')[0]).namelist(); \
	need = ['.sql', 'defs.yaml', '.tar', 'shards/README.md']; gone = [e for e in need if not any(x.endswith(e) for x in n)]; \
	assert not gone, gone; print(len(n), 'files in the wheel')"

bench-memory: $(VENV)/dev.done
	$(BIN)/python benchmarks/memory.py

# In an environment of its own: the other projects' packages want versions of theirs.
bench-loading:
	@test -n "$(DATA)" || { echo "say where 30 GB may go: make bench-loading DATA=/path/to/folder"; exit 2; }
	$(PYTHON) -m venv "$(DATA)/venv"
	"$(DATA)/venv/bin/pip" install --quiet --editable . --requirement benchmarks/loading/requirements.txt
	"$(DATA)/venv/bin/python" -m benchmarks.loading --data "$(DATA)"

clean:
	rm -rf $(VENV) dist

reset:
	find dagster_home -mindepth 1 ! -name dagster.yaml -delete
