# What a newcomer needs: `make demo`, `make test`. Everything runs in .venv, made here with nothing
# but Python >= 3.11; nothing outside this folder changes. Works with GNU make 3.81 (macOS) too.

PYTHON ?= python3
# Further pip options for the torch download, e.g. an index of smaller CPU-only builds.
TORCH_PIP_ARGS ?=
# Arguments for pytest and for the benchmark: make test ARGS="-k executor"
ARGS ?=
# Of `make chaos`: which schedule of faults, and for how long. An empty seed means the seeds of the tests.
# ENGINE=ray: only pools on hosts that Ray carries; direct: only the other ones there.
SEED ?=
SECONDS ?= 60
ENGINE ?=

# Of `make release`.
VERSION ?=

# Of the machine with a GPU that `make gpu-wheels` prepares for.
GPU_PYTHON ?= 3.12
GPU_ARCH   ?= x86_64
GPU_WHEELS := .make/gpu-wheels
# Keras and the server of DiLoCo, each with what it needs.
GPU_EXTRAS := keras absl-py h5py markdown-it-py mdurl ml-dtypes namex optree pygments rich \
  uvicorn starlette anyio click h11 idna typing-extensions

TORCH := torch==2.13.0
VENV  := .venv
BIN   := $(VENV)/bin
PIP   := -m pip --disable-pip-version-check --no-input
# Keyed by content, not by time: a fresh checkout or a touched file installs nothing anew.
KEY       := $(shell cat pyproject.toml constraints.txt 2>/dev/null | cksum | cut -d' ' -f1)
READY     := $(VENV)/.ready-$(KEY)
BENCH     := .make/bench
BENCH_KEY := $(shell cat pyproject.toml constraints-bench.txt 2>/dev/null | cksum | cut -d' ' -f1)
BENCH_OK  := $(BENCH)/.ready-$(BENCH_KEY)
DOCS      := .make/docs
DOCS_KEY  := $(shell cat pyproject.toml constraints-docs.txt 2>/dev/null | cksum | cut -d' ' -f1)
DOCS_OK   := $(DOCS)/.ready-$(DOCS_KEY)
# The MLflow that the hub is compared with, and an older client of it. tests/hub/mlflow/ and benchmarks/hub.py run their
# programs. Each constraints file names every package, and .ci/lock names the versions of MLflow.
MLFLOW_OLD    := .make/mlflow-2.22.0
MLFLOW_NEW    := .make/mlflow-3.17.2
MLFLOW_OLD_OK := $(MLFLOW_OLD)/.ready-$(shell cat constraints-mlflow-2.22.0.txt 2>/dev/null | cksum | cut -d' ' -f1)
MLFLOW_NEW_OK := $(MLFLOW_NEW)/.ready-$(shell cat constraints-mlflow-3.17.2.txt 2>/dev/null | cksum | cut -d' ' -f1)

# Where this is set, each of the many processes of the tests would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

SAY := printf '\n== %s\n'

.DEFAULT_GOAL := help
.PHONY: help env demo test test-all test-gpu gpu-wheels coverage chaos lint bench docs docs-serve pictures bench-hub mlflow release lock clean check-python
.DELETE_ON_ERROR:

help:
	@echo "skyward: decorate a function, choose where it runs, get its value back."
	@echo
	@echo "  make demo       make the environment, then show the main job on this machine (3 minutes)"
	@echo "  make test       make the environment, then lint, types, import rules and the tests of the main promises (8 minutes)"
	@echo "  make test-all   all other tests (half an hour)"
	@echo
	@echo "  make env        only make .venv (a few minutes the first time, instant afterwards)"
	@echo "  make chaos      kill and pause what pools are made of, at random: make chaos SEED=7 SECONDS=600 ENGINE=ray"
	@echo "  make coverage   lines that the tests of make test run, in all processes, by room (10 minutes; ARGS as above)"
	@echo "  make test-gpu   the tests of a machine with a GPU: by PYTHON as it is, nothing is installed (8 minutes, a report)"
	@echo "  make gpu-wheels what test-gpu needs beside PYTHON's own packages, for a GPU machine without a network"
	@echo "  make lint       ruff, words, mypy --strict and the import rules"
	@echo "  make bench      compare with ProcessPoolExecutor, loky, Ray, Dask (an environment of its own)"
	@echo "  make bench-hub  compare the hub with MLflow's server (an environment of its own)"
	@echo "  make docs       build the documentation site into .make/site (an environment of its own)"
	@echo "  make docs-serve show the site on http://127.0.0.1:8000, and build it again at each change"
	@echo "  make pictures   draw the pictures again: a run in a terminal, the benchmark, pages of the hub"
	@echo "  make release    version, changelog, packages that are tried out, commit and tag: make release VERSION=0.2.0"
	@echo "  make lock       resolve the newest versions into constraints*.txt"
	@echo "  make clean      remove the environments and caches made here"
	@echo
	@echo "Another Python:   make env PYTHON=python3.12"
	@echo "Some tests only:  make test ARGS='tests/pool -k executor -x'"

check-python:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "There is no '$(PYTHON)' here. Install Python 3.11 or newer, or name yours: make env PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "skyward needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name a newer one: make env PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "'$(PYTHON)' comes without its venv module. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Interrupted at any point, the next `make env` goes on: an environment is made afresh until it is whole
# (.made); pip skips what it has installed; and as it writes a package's RECORD last, one without is half unpacked and
# forgotten here, or pip would take it for installed.
env: $(READY)
	@echo "$(VENV) is ready. Activate it with: . $(BIN)/activate"

$(READY):
	@$(MAKE) --no-print-directory check-python
	@test -f $(VENV)/.made && $(BIN)/python $(PIP) --version >/dev/null 2>&1 || \
	  { $(SAY) "making $(VENV) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(VENV) && touch $(VENV)/.made; }
	@find $(VENV)/lib -name '*.dist-info' ! -exec test -e {}/RECORD \; -prune -exec rm -rf {} +
	@$(SAY) "installing $(TORCH) first (the largest download, a few hundred MB)"
	@quiet=-q; if [ -t 1 ] && ! $(BIN)/python $(PIP) show -q torch 2>/dev/null; then quiet=; fi; \
	  $(BIN)/python $(PIP) install $$quiet -c constraints.txt $(TORCH_PIP_ARGS) '$(TORCH)'
	@$(SAY) "installing skyward (editable), its tests' libraries and its tools: 1 to 3 minutes"
	@$(BIN)/python $(PIP) install -q -c constraints.txt -e '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

demo: $(READY)
	@$(SAY) "the demo"
	@$(BIN)/python examples/demo.py

# `python -m tests promises` runs `make lint` beside the tests: one after the other they take a minute longer.
test: $(READY)
	@$(SAY) "$(if $(ARGS),tests: $(ARGS),lint and the tests of the main promises)"
	@$(BIN)/python -m tests $(if $(ARGS),$(ARGS),promises)

test-all: $(READY) mlflow
	@$(SAY) "all tests that make test leaves out"
	@$(BIN)/python -m tests $(if $(ARGS),$(ARGS),rest)

# The floor is in pyproject.toml, and holds for the default tests only. A failed test does not hide the figures, and
# neither do the damaged files of killed processes (-W ignore).
coverage: $(READY)
	@$(SAY) "coverage of $(if $(ARGS),tests: $(ARGS),the tests of the main promises)"
	@rm -rf .make/coverage && mkdir -p .make/coverage
	@status=0; \
	  PYTEST_TIMEOUT=600 $(BIN)/python -m coverage run -m tests $(if $(ARGS),$(ARGS),promises) || status=1; \
	  $(BIN)/python -W ignore -m coverage combine -q && rm -f .make/coverage/data.* && $(BIN)/python -m coverage html -q --fail-under=0 && \
	  $(BIN)/python -m tests.coverage_table && \
	  $(BIN)/python -m coverage report --format=total $(if $(ARGS),--fail-under=0) >/dev/null || \
	  { status=1; echo "coverage: below the floor of pyproject.toml, or not measured" >&2; }; \
	  echo "each line: .make/coverage/html/index.html"; exit $$status

chaos: $(READY)
	@$(SAY) "chaos: seed $(or $(SEED),of the tests), $(SECONDS) s on each kind of pool"
	@SKYWARD_CHAOS_SEED=$(SEED) SKYWARD_CHAOS_SECONDS=$(SECONDS) \
	  $(BIN)/python -m pytest -s $(if $(ENGINE),-k $(ENGINE),tests/chaos) tests/hosts/test_chaos.py tests/hosts/test_ray_long.py $(ARGS)

# Not in .venv: a machine with a GPU has its own torch, and perhaps no network.
test-gpu:
	@$(PYTHON) tests/gpu/run.py $(ARGS)

gpu-wheels:
	@$(MAKE) --no-print-directory check-python
	@$(SAY) "wheels for Python $(GPU_PYTHON) on $(GPU_ARCH), into $(GPU_WHEELS)"
	@rm -rf $(GPU_WHEELS)
	@$(PYTHON) $(PIP) download -q --no-deps --only-binary=:all: -d $(GPU_WHEELS) -c constraints.txt \
	  --implementation cp --python-version $(GPU_PYTHON) \
	  --platform manylinux_2_17_$(GPU_ARCH) --platform manylinux2014_$(GPU_ARCH) --platform manylinux_2_28_$(GPU_ARCH) \
	  cloudpickle xxhash $(GPU_EXTRAS)
	@ls $(GPU_WHEELS)

lint: $(READY)
	@$(SAY) "ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(SAY) "words: spelling, and tests/words.py"
	@$(BIN)/codespell
	@$(BIN)/python -m tests.words
	@$(SAY) "mypy --strict"
	@$(BIN)/mypy
	@$(SAY) "import rules"
	@$(BIN)/lint-imports

# Apart from .venv: Ray and Dask pull many packages that no user of ours has, and the tests must not see them.
bench: $(BENCH_OK)
	@$(SAY) "benchmarks/dispatch.py"
	@$(BENCH)/bin/python benchmarks/dispatch.py $(ARGS)

$(BENCH_OK):
	@$(MAKE) --no-print-directory check-python
	@test -f $(BENCH)/.made && $(BENCH)/bin/python $(PIP) --version >/dev/null 2>&1 || \
	  { $(SAY) "making $(BENCH) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(BENCH) && touch $(BENCH)/.made; }
	@$(SAY) "installing skyward and the peers to compare with (Ray, Dask, loky, joblib)"
	@$(BENCH)/bin/python $(PIP) install -q -c constraints-bench.txt -e '.[bench]'
	@rm -f $(BENCH)/.ready-*
	@touch $@

bench-hub: $(READY) $(MLFLOW_NEW_OK)
	@$(SAY) "benchmarks/hub.py"
	@$(BIN)/python benchmarks/hub.py $(ARGS)

# Apart from .venv: MLflow pins older packages, and the tests without it must not see it. uv takes a tenth of the processor
# time of pip, which compares each version of each package. uv does not read the settings of pip, the fallback.
mlflow: $(READY)
	@$(MAKE) -s --no-print-directory -j 2 $(MLFLOW_OLD_OK) $(MLFLOW_NEW_OK)

$(MLFLOW_OLD_OK) $(MLFLOW_NEW_OK): | $(READY)
	@$(SAY) "installing MLflow into $(@D)"
	@$(BIN)/python -m venv --clear --without-pip $(@D)
	@$(BIN)/uv pip install -q --cache-dir .make/uv --python $(@D)/bin/python --no-deps -r constraints-$(notdir $(@D)).txt || \
	  { $(SAY) "uv found not all of them; installing with pip"; \
	    $(BIN)/python $(PIP) --python $(@D)/bin/python install -q --no-deps --no-compile -r constraints-$(notdir $(@D)).txt; }
	@touch $@

# Apart from .venv too: neither users nor tests need a site generator. Strict: a warning fails the build.
docs: $(DOCS_OK)
	@$(SAY) "building the documentation into .make/site"
	@mkdir -p .make/pages
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build -q --strict $(ARGS)
	@echo "read it: .make/site/index.html, or make docs-serve"

docs-serve: $(DOCS_OK)
	@mkdir -p .make/pages
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs serve $(ARGS)

$(DOCS_OK):
	@$(MAKE) --no-print-directory check-python
	@test -f $(DOCS)/.made && $(DOCS)/bin/python $(PIP) --version >/dev/null 2>&1 || \
	  { $(SAY) "making $(DOCS) with $$($(PYTHON) -V)"; $(PYTHON) -m venv --clear $(DOCS) && touch $(DOCS)/.made; }
	@$(SAY) "installing skyward and the site generator"
	@$(DOCS)/bin/python $(PIP) install -q -c constraints-docs.txt -e '.[docs]'
	@rm -f $(DOCS)/.ready-*
	@touch $@

pictures: $(DOCS_OK) $(READY)
	@$(SAY) "drawing docs/pictures"
	@$(DOCS)/bin/python docs/site/pictures.py $(ARGS)
	@$(BIN)/python docs/site/rules.py
	@$(BIN)/python -m tests.hub.ui.pictures

# Ends with a commit and a tag here; nothing is uploaded.
release: $(READY)
	@test -n "$(VERSION)" || { echo "Name the version: make release VERSION=0.2.0" >&2; exit 1; }
	@$(SAY) "release $(VERSION)"
	@sh .ci/release "$(VERSION)"

lock:
	@$(MAKE) --no-print-directory check-python
	@$(SAY) "resolving the newest versions in fresh environments"
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' TORCH_PIP_ARGS='$(TORCH_PIP_ARGS)' sh .ci/lock

clean:
	rm -rf $(VENV) .make build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
