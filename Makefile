# make run: from nothing to a trained model.  make test: from nothing to a green suite.
# make test-all: without skipping the tests whose dependencies have not changed (tests/watched.py).
PYTHON ?= python3
# Installed only if the environment has no torch yet. One that is given (make test TORCH=torch==2.15.0) replaces another,
# so that no version is tested under another one's name; VENV=.venv-2.15 leaves the usual environment as it is.
TORCH ?= torch==2.13.0
GIVEN := $(filter command environment,$(firstword $(origin TORCH)))
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed$(if $(GIVEN),-$(subst =,-,$(TORCH)))

# A process per core, and three more, since a third of the time tests wait for processes that they start; at most 8.
# A file's tests are in one process, since they share what they set up. A process that ends in a test is not replaced:
# the next one would start with the same test.
PROCESSES := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$((n < 5 ? n + 3 : 8)))
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --max-worker-restart=0

# Threads that wait must not spin: a busy neighbour would slow them down several times over.
export OMP_WAIT_POLICY ?= passive

.PHONY: run test test-all lint types contracts tests coverage measure gpu kernels docs venv wheels alone clean

run: $(STAMP)
	$(BIN)/forge-run configs/quickstart.toml --nproc 2

test: lint types contracts tests docs

test-all: export FORGE_TESTS = all
test-all: test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/python tools/workspace.py types

# Who may import whom; and parts of files that are made from the folders of `plugins/`.
contracts: $(STAMP)
	$(BIN)/python tools/workspace.py contracts
	$(BIN)/python tools/workspace.py packages --check
	$(BIN)/python tools/workspace.py extra --check

# The tests with the share of lines that they reach, as a report in htmlcov/. A parallel run's shares are added up.
coverage: $(STAMP)
	$(PYTEST) --cov --cov-report=term --cov-report=html

# The figures that the house holds itself to: sizes, private imports, comments.
measure: $(STAMP)
	$(BIN)/python tests/measure.py

tests: $(STAMP)
	$(PYTEST)

# On a machine with a GPU: the tests of tests/gpu, then the benchmarks, each piece into a JSON and a table in the folder OUT.
# PIECE=numerics runs one. Nothing is installed: the python that there is needs torch and what Forge imports.
KERNELS := .kernels
OUT ?= gpu-results
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	$(GPU_PYTHON) tests/gpu --out $(OUT) --tests $(addprefix --piece ,$(PIECE))

# Compiled blocks as kernels of sm_80, sm_90 and sm_100, beside the recorded table: no kernel, graph break or spill more.
# Free while nothing that it depends on has changed (tests/gpu/kernels/table.sha256); otherwise it installs Triton into a
# folder of its own, 1 GB, and takes five minutes on two cores. It needs g++ and a torch without CUDA. Not as `tests.gpu`:
# distributions of others have installed a package `tests`, which would be found first.
kernels: $(STAMP)
	@PYTHONPATH=tests $(BIN)/python -m gpu.kernels --unchanged || { \
		triton=triton==$$(PYTHONPATH=tests $(BIN)/python -c "from gpu.kernels.watched_kernels import TRITON; print(TRITON)"); \
		test -d $(KERNELS)/triton || $(BIN)/pip install --quiet --no-deps --target $(KERNELS) $$triton && \
		PYTHONPATH=$(KERNELS):tests OMP_NUM_THREADS=1 $(BIN)/python -m gpu.kernels $(RECORD); }

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheels: $(STAMP)
	rm -rf dist
	for project in . plugins/*/; do \
		$(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $$project || exit 1; \
	done

# Each distribution's wheel by itself; takes minutes.
alone: wheels
	OMP_NUM_THREADS=1 $(BIN)/python tests/alone.py

venv: $(STAMP)

# All projects in one pip call, so that each finds the others here and none is looked for on an index.
$(STAMP): requirements-dev.txt pyproject.toml $(wildcard plugins/*/pyproject.toml)
	@echo "environment: $(VENV), of $(PYTHON)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH)"
	@$(if $(GIVEN),,$(BIN)/python -c "import torch" 2>/dev/null ||) $(BIN)/pip install --quiet "$(TORCH)"
	@echo "installing forge-run, the $(words $(wildcard plugins/*/)) packages of plugins/ and the tools of requirements-dev.txt"
	@$(BIN)/pip install --quiet hatchling editables
	@$(BIN)/pip install --quiet --no-build-isolation -r requirements-dev.txt -e . $(addprefix -e ./,$(wildcard plugins/*/))
	@rm -f $(VENV)/.installed*
	@touch $@

clean:
	rm -rf $(VENV) $(KERNELS) dist site htmlcov .coverage .mypy_cache .ruff_cache .pytest_cache
