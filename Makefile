# `make run` and `make test` need Python 3.11 or newer and nothing else: they set up their own virtual environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 3000
VIEWER_PORT ?= 3001
FUZZ_SECONDS ?= 60
# What packaging can break: commands, entry points, files of the package, imports of other people's code, every field.
WHEEL_TESTS := wheels cli dg extensions pack_job daemon modalities
export DAGSTER_HOME := $(CURDIR)/dagster_home
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Images of containers set it: then each process of the tests compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run ui quick test nightly fuzz coverage check docs screenshots wheels test-slow test-cluster test-wheels interop bench-interop bench-loading bench-ingest bench-memory bench-decodable clean reset

help:
	@echo "make run         run the demo datasets, from tar shards to packed files and manifests"
	@echo "make ui          Dagster UI, daemon and viewer on http://$(HOST):$(PORT), demo shards registered"
	@echo "make quick       the tests without tests/e2e, which starts processes, servers and a browser, and without fuzzing"
	@echo "make test        all tests but those of test-slow and test-cluster"
	@echo "make test-slow   processes killed, disks and storages that fail, other services, benchmarks on small data"
	@echo "make test-cluster loads on a Ray cluster of this machine, whose nodes, workers and driver are killed (10 minutes)"
	@echo "make nightly     the property tests and the fuzzing, with twenty times their examples (hours)"
	@echo "make fuzz        fuzzing guided by coverage for FUZZ_SECONDS=$(FUZZ_SECONDS)"
	@echo "make coverage    the lines and branches that the quick tests run, of the parts that must not be wrong"
	@echo "make check       ruff, mypy --strict, import-linter, the prose check, dg check defs"
	@echo "make docs        build the documentation into site/: open site/index.html, no server is needed"
	@echo "make screenshots  take the pictures of the documentation again, with chromium (two minutes)"
	@echo "make wheels      build mm-assets and mm-assets-reader into dist/, and check what is in them"
	@echo "make test-wheels install the built mm-assets in an environment of its own and run $(WHEEL_TESTS) of tests/e2e"
	@echo "make interop     what other projects' libraries write and open, in environments of their own (minutes, 15 GB)"
	@echo "make bench-interop DATA=folder  exports and imports, beside cp and the other projects' converters (20 minutes, 8 GB)"
	@echo "make bench-loading DATA=folder  reading and writing, side by side with other projects (an hour, 30 GB)"
	@echo "make bench-ingest DATA=folder   from tar shards to Parquet and packed files, beside NeMo Curator (an hour, 12 GB)"
	@echo "make bench-memory  resident memory and throughput of each stage on a 500 MB shard"
	@echo "make bench-decodable  cost of decoding every media item before it is packed"
	@echo "make clean       remove the virtual environment and built files"
	@echo "make reset       remove the local instance's history and EVERY dataset below dagster_home/data"

$(VENV)/pip.done: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	@echo "installing into $(VENV): a minute or two"
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
	$(BIN)/mm-assets ui --host $(HOST) --port $(PORT) --viewer-port $(VIEWER_PORT)

quick: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --ignore tests/e2e -m "not fuzz and not cluster"

test: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "not cluster and not slow"

test-slow: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal -m "slow and not cluster"

# In one process: a cluster takes the processors of this machine.
test-cluster: $(VENV)/dev.done
	$(BIN)/python -m pytest -m cluster

nightly: $(VENV)/dev.done
	$(BIN)/python -m pytest --numprocesses logical --dist worksteal --hypothesis-profile nightly --timeout 7200 \
	    -m "hypothesis or fuzz"
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

fuzz: $(VENV)/dev.done
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

coverage: $(VENV)/dev.done
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --numprocesses logical --dist worksteal --ignore tests/e2e
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

check: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/prose.py
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dg check defs

docs: $(VENV)/dev.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

screenshots: $(VENV)/dev.done
	$(BIN)/python docs/screenshots.py

wheels: $(VENV)/dev.done
	rm -rf dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist . ./reader
	$(BIN)/python -m pytest tests/e2e/test_wheels.py::TestContents --wheels dist
	ls -l dist

# From dist/, so that no process of a test finds the source tree in its current folder.
test-wheels: wheels
	$(PYTHON) -m venv dist/venv
	dist/venv/bin/pip install --quiet --constraint constraints.txt --upgrade pip
	dist/venv/bin/pip install --quiet --constraint constraints.txt --group dev \
	    "mm-assets[all] @ file://$$(echo $(CURDIR)/dist/mm_assets-*.whl)"
	cd dist && venv/bin/python -c 'import mm_assets; assert "site-packages" in mm_assets.__file__, mm_assets.__file__'
	cd dist && venv/bin/python -m pytest --config-file ../pyproject.toml --rootdir .. --numprocesses logical \
	    --dist worksteal --wheels . $(WHEEL_TESTS:%=../tests/e2e/test_%.py)

# In environments of their own: the other projects' packages want versions of theirs, and LeRobot's conflict with the rest.
$(VENV)-interop/pip.done: tests/interop/requirements.txt
$(VENV)-lerobot/pip.done: tests/interop/requirements-lerobot.txt
$(VENV)-interop/pip.done $(VENV)-lerobot/pip.done:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --requirement $<
	@touch $@

interop: $(VENV)/dev.done $(VENV)-interop/pip.done $(VENV)-lerobot/pip.done
	$(BIN)/python -m pytest tests/interop --owners $(VENV)-interop/bin/python --lerobot $(VENV)-lerobot/bin/python \
	    --results $(VENV)-interop/results.json
	$(BIN)/python tests/interop/page.py $(VENV)-interop/results.json

bench-interop: $(VENV)/dev.done $(VENV)-interop/pip.done
	@test -n "$(DATA)" || { echo "say where 8 GB may go: make bench-interop DATA=/path/to/folder"; exit 2; }
	$(BIN)/python -m benchmarks.interop --data "$(DATA)" --owners $(VENV)-interop/bin/python

bench-memory: $(VENV)/dev.done
	$(BIN)/python benchmarks/memory.py

bench-decodable: $(VENV)/dev.done
	$(BIN)/python benchmarks/decodable.py

# In an environment of its own: the other projects' packages want versions of theirs.
bench-loading:
	@test -n "$(DATA)" || { echo "say where 30 GB may go: make bench-loading DATA=/path/to/folder"; exit 2; }
	$(PYTHON) -m venv "$(DATA)/venv"
	"$(DATA)/venv/bin/pip" install --quiet --editable . --requirement benchmarks/loading/requirements.txt
	"$(DATA)/venv/bin/python" -m benchmarks.loading --data "$(DATA)"

# The other project has an environment of its own: it wants versions of packages that this one cannot use.
bench-ingest: $(VENV)/dev.done
	@test -n "$(DATA)" || { echo "say where 12 GB may go: make bench-ingest DATA=/path/to/folder"; exit 2; }
	$(PYTHON) -m venv "$(DATA)/curator"
	"$(DATA)/curator/bin/pip" install --quiet --requirement benchmarks/ingest/requirements.txt
	$(BIN)/python -m benchmarks.ingest --data "$(DATA)" --curator "$(DATA)/curator/bin/python"

clean:
	rm -rf $(VENV) $(VENV)-interop $(VENV)-lerobot dist site

reset:
	find dagster_home -mindepth 1 ! -name dagster.yaml -delete
