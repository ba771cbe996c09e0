# `make demo` and `make test` need only Python 3.11 or newer and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One environment, which grows: a target installs what it needs and the environment lacks.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.test
CHECKS := $(VENV)/.check
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
LOWEST := tests/spec tests/plan tests/outputs tests/values tests/transport tests/cli/test_run.py \
  tests/cli/test_commands.py tests/cli/test_help.py tests/datasets/sources/test_csv_files.py \
  tests/datasets/sources/test_parquet_files.py tests/datasets/sources/test_urls.py
FLIGHTS := examples/flights/data/flights.csv.zip

.DEFAULT_GOAL := help

# Tests start thousands of processes: without bytecode each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## List the targets.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

# pip runs again only when the dependencies change.
$(DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pipedist needs Python 3.11 or newer. Choose one with: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(INSTALLED): $(DEMO)
	$(PIP) --editable '.[parquet,fsspec,test]'
	@touch $@

$(CHECKS): $(INSTALLED)
	$(PIP) --editable '.[check,docs]'
	@touch $@

$(FLIGHTS): | $(DEMO)
	$(BIN)/python examples/flights/fetch.py

.PHONY: install
install: $(CHECKS)  ## Create the virtual environment .venv with all dependencies.

.PHONY: demo
demo: $(DEMO) $(FLIGHTS)  ## Run a pipeline over 336,776 real flights on 2 worker processes.
	$(BIN)/pipedist run examples/flights/flights.yaml --workers 2

.PHONY: test
test: $(INSTALLED) $(FLIGHTS)  ## Run the test suite, on two cores; tests of the sources themselves: make check.
	$(BIN)/python -m pytest -q -n 4 --dist worksteal --ignore tests/architecture

.PHONY: test-slow
test-slow: $(INSTALLED) $(FLIGHTS)  ## Run the slow tests that make test skips.
	PIPEDIST_TEST_SLOW=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow

.PHONY: test-lowest
test-lowest:  ## Run a share of the tests with the lowest versions of the dependencies, in .venv-lowest (5 minutes).
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	$(PYTHON) tests/lowest_versions.py > .venv-lowest/constraints.txt
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-lowest/constraints.txt \
	  --editable '.[parquet,fsspec,live]' pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis jsonschema
	.venv-lowest/bin/python -m pytest -q -n 2 --dist worksteal \
	  -k "not string_views and not read[fixed] and not h5 and not duckdb" $(LOWEST)

.PHONY: test-portable
test-portable: $(INSTALLED)  ## Run the tests that need no system calls of Linux (one minute).
	$(BIN)/python -m pytest -q -n 2 tests/spec tests/scheduler tests/values tests/datasets/logical

.PHONY: test-networks
test-networks: $(INSTALLED)  ## Test runs over several hosts, in network namespaces, as root (4 minutes).
	PIPEDIST_TEST_NETWORKS=full PIPEDIST_TEST_SLOW=1 $(BIN)/python -m pytest -q -s tests/networks

.PHONY: test-many
test-many: $(INSTALLED)  ## Run a pipeline on 64 worker processes, and report their cost.
	PIPEDIST_TEST_MANY=64 $(BIN)/python -m pytest -q -s tests/runs/test_many_workers.py

.PHONY: test-hosts
test-hosts: $(INSTALLED)  ## Run the tests of several hosts; some need mount namespaces (unshare -rm).
	$(BIN)/python -m pytest -q tests/hosts

.PHONY: chaos-driver
chaos-driver: $(INSTALLED)  ## Kill three runs at every record of their journals, and resume each (15 minutes); EVERY=19: at each 19th.
	$(BIN)/python -m tests.journal.chaos --steps $(or $(STEPS),100) --every $(or $(EVERY),1)

.PHONY: test-memory
test-memory: $(INSTALLED)  ## Test workers that the kernel kills when memory runs out; needs root: sudo make test-memory.
	$(BIN)/python -m pytest -q tests/cluster/launchers/test_out_of_memory.py

.PHONY: chaos-workers
chaos-workers: $(INSTALLED)  ## Kill, stop and crash workers for a minute: same bytes, no leftovers.
	$(BIN)/python -m tests.acceptance.worker_chaos $(ARGS)

.PHONY: chaos-signals
chaos-signals: $(INSTALLED)  ## Interrupt 200 runs at seeded times, and resume each (ten minutes or more).
	$(BIN)/python -m tests.acceptance.signal_chaos $(ARGS)

.PHONY: fuzz
fuzz: $(INSTALLED)  ## Fuzz messages and specs; a share of it: make fuzz SHARE=0.01.
	$(BIN)/python -m tests.acceptance.fuzz --share $(or $(SHARE),1) $(ARGS)

.PHONY: rogues
rogues: $(INSTALLED)  ## Test rogue clients beside honest workers.
	PIPEDIST_TEST_SLOW=1 $(BIN)/python -m pytest -q tests/acceptance/test_rogues.py tests/transport/test_rogues.py \
	  tests/transport/test_shared_memory_rogues.py tests/architecture/test_execution.py

.PHONY: soak
soak: $(INSTALLED)  ## Run a million calls, and check that memory and descriptors do not grow (minutes).
	$(BIN)/python -m tests.acceptance.soak $(ARGS)

.PHONY: detection
detection: $(INSTALLED)  ## Measure how soon a dead, stopped, silent or hanging worker is detected.
	$(BIN)/python -m tests.acceptance.detection $(ARGS)

.PHONY: determinism
determinism: $(INSTALLED)  ## Compare the bytes of runs on 1, 2, 4 and 8 workers, with 20 shuffled schedules each.
	PIPEDIST_TEST_SLOW=1 $(BIN)/python -m pytest -q tests/acceptance/test_schedules.py tests/runs/test_determinism.py

.PHONY: simulate
simulate: $(INSTALLED)  ## Simulate the scheduler and workers with faults; a share of it: make simulate SHARE=0.1.
	$(BIN)/python -m tests.simulation --share $(or $(SHARE),1)

.PHONY: conformance
conformance: $(INSTALLED)  ## Replay recorded tf.distribute cases: make conformance CASES=FOLDER.
	$(BIN)/python -m tests.conformance $(CASES) $(ARGS)

.PHONY: lint
lint: $(CHECKS)  ## Check the style (ruff).
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: types
types: $(CHECKS)  ## Check the types (mypy, strict).
	$(BIN)/mypy

.PHONY: architecture
architecture: $(CHECKS)  ## Check layers, import cycles, prose and public docstrings.
	$(BIN)/python -m pytest -q tests/architecture

.PHONY: check
check: lint types architecture  ## Check style, types and architecture.

.PHONY: dist
dist: $(CHECKS)  ## Build the source archive and the wheel in dist, and check them; the wheel must run.
	rm -rf dist build/wheel
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(PIP) --no-deps --target build/wheel dist/*.whl
	cd build && PYTHONPATH=wheel ../$(BIN)/python -P -m pipedist schema | cmp - wheel/pipedist/spec/schema.json

.PHONY: site
site: $(CHECKS)  ## Build the documentation site to build/site; broken links and anchors are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html. The search needs a server: $(BIN)/python -m http.server -d build/site"

.PHONY: gallery
gallery: $(INSTALLED) $(FLIGHTS)  ## Run the jobs of the gallery, and write their outputs and pictures.
	$(PIP) matplotlib
	$(BIN)/python examples/gallery.py $(ARGS)

.PHONY: pictures
pictures: $(INSTALLED)  ## Make the pictures in docs/pictures from a real run (after make browser).
	$(BIN)/python -m tests.report.pictures docs/pictures

.PHONY: clean
clean:  ## Remove everything that make created.
	rm -rf $(VENV) out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis examples/*/data

.PHONY: bench-peers
bench-peers: $(INSTALLED)  ## Install the peers of the benchmarks in benchmarks/.venv.
	@test -x benchmarks/.venv/bin/python || $(PYTHON) -m venv benchmarks/.venv
	@$(BIN)/python -m pip freeze --quiet | grep -E '^(numpy|pyzmq|msgpack|pyarrow|pandas|cloudpickle)==' \
	  > benchmarks/.venv/same-versions.txt
	benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint benchmarks/.venv/same-versions.txt --requirement benchmarks/peers/requirements.txt

.PHONY: bench
bench: $(INSTALLED)  ## Measure pipedist beside its peers: make bench ARGS="--only W1,W2 --boost".
	$(BIN)/python -m benchmarks.run --write-docs $(ARGS)

.PHONY: bench-scheduler
bench-scheduler: $(INSTALLED)  ## Measure the scheduler's cost per call, with 10 to 10,000 workers.
	$(BIN)/python -m benchmarks.scheduler_cost $(ARGS)

.PHONY: bench-overlap
bench-overlap: $(INSTALLED)  ## Measure how calls on processors and on a simulated GPU overlap, beside Ray Data.
	$(BIN)/python -m benchmarks.overlap $(ARGS)

.PHONY: bench-images
bench-images: $(INSTALLED)  ## Measure decoding of images on 1 and 2 workers, beside Pillow in one process.
	$(BIN)/python -m benchmarks.image_source $(ARGS)

.PHONY: bench-training
bench-training: $(INSTALLED)  ## Measure a training with 1,000,000 parameters, beside torch gloo.
	$(BIN)/python -m benchmarks.training $(ARGS)

.PHONY: bench-test
bench-test: $(INSTALLED)  ## Run every workload in tiny sizes, to check results only.
	$(BIN)/python -m pytest -q benchmarks/tests

.PHONY: bench-keyed
bench-keyed: $(INSTALLED)  ## Count words and group by keys beside joblib, Dask, Polars, DuckDB (after make bench-peers).
	$(BIN)/python -m benchmarks.keyed $(ARGS)

.PHONY: bench-prediction
bench-prediction: $(INSTALLED)  ## Compare predicted and real times of five specs, three times (4 minutes).
	$(BIN)/python -m benchmarks.prediction $(ARGS)

.PHONY: bench-jax
bench-jax: $(INSTALLED)  ## Measure what steps_per_run saves on JAX devices (after make test-jax).
	$(BIN)/python -m benchmarks.jax_steps $(ARGS)

.PHONY: bench-profile
bench-profile: $(INSTALLED)  ## Profile the time of a call: make bench-profile ARGS="--only W1".
	$(BIN)/python -m benchmarks.call_profile $(ARGS)

.PHONY: bench-torch
bench-torch: bench-peers  ## Add torch to benchmarks/.venv: for bench-collectives and test-torch (2 GiB).
	benchmarks/.venv/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint benchmarks/.venv/same-versions.txt --requirement benchmarks/peers/requirements-torch.txt

.PHONY: bench-collectives
bench-collectives: $(INSTALLED)  ## Measure all_reduce beside mpi4py and torch gloo.
	$(BIN)/python -m benchmarks.collectives $(ARGS)

.PHONY: test-gpu
test-gpu: $(INSTALLED)  ## Run the tests that need a CUDA device and torch.
	$(PIP) torch ml_dtypes
	$(BIN)/python -m pytest -q -m gpu tests

.PHONY: test-torch
test-torch:  ## Run the tests that need torch (after make bench-torch).
	benchmarks/.venv/bin/python -m pytest -q -m torch tests/collectives tests/values tests/datasets/test_frames.py

.PHONY: test-jax
test-jax: $(INSTALLED)  ## Install jax for the CPU, and run the tests that need it (120 MiB).
	$(PIP) --editable '.[jax]'
	$(BIN)/python -m pytest -q -n 2 -m jax tests/values tests/jax tests/docs

.PHONY: browser
browser:  ## Install the browser that the tests of pages use (Debian, as root).
	apt-get install --yes --no-install-recommends chromium chromium-driver

.PHONY: test-engines
test-engines:  ## Test the launchers ray and dask with real clusters, in .venv-engines (1 GiB).
	@test -x .venv-engines/bin/python || $(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test,ray,dask]'
	.venv-engines/bin/python -m pytest -q tests/engines
