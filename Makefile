# Two commands: `make demo` runs a trained model, `make test` runs the tests; `make docs` builds the site. All set up what they need in
# .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
PLUGINS := -e plugins/rocm -e plugins/ipu_sim
# What the cuda plugin needs is large, so the demo installs it only where there is an NVIDIA driver, in the driver's CUDA
# version; a driver that does not tell runs CUDA 12.
ifneq ($(wildcard /dev/nvidiactl),)
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: 13.*/cu13/p')
DEMO_PLUGINS := $(PLUGINS) -e 'plugins/cuda[$(or $(CUDA),cu12)]'
else
DEMO_PLUGINS := $(PLUGINS)
endif
# The test kit and the peers of the bench command.
TOOLS := -e tests/kit -e benchmarks
LOCKS := pyproject.toml core/pyproject.toml constraints.txt tests/kit/pyproject.toml benchmarks/pyproject.toml \
    $(wildcard plugins/*/pyproject.toml core/rammer/plugin-template/pyproject.toml)

.PHONY: demo test tests test-slow test-all test-torch corpus search search-at drawn drawn-at check newest docs linkcheck dist clean

demo: .venv/demo
	$(BIN)/python benchmarks/demo.py

# Three processes for two cores: tests wait for processes that they start. One thread each for NumPy's products. A process keeps
# to its files, as long as it has any, since what the tests of a file share is then made once. Bytecode is kept even where the
# environment says otherwise: tests start many processes.
PYTEST := OPENBLAS_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

# The checks run beside the first tests: mypy alone takes 20 s where it has no cache yet.
test: .venv/test
	@$(MAKE) --no-print-directory -j 2 check tests

tests: .venv/test
	$(PYTEST) -m "not slow and not large and not cuda"

# Tests of over 1 s of processor time, in about 13 minutes on two cores.
test-slow: .venv/test
	$(PYTEST) -m "slow and not large and not cuda"

test-all: check
	$(PYTEST) -m "not cuda"

# Models from torch: installs the extra, torchvision, timm and transformers.
test-torch: .venv/test
	$(PIP) -e core -e '.[torch]' torchvision timm transformers
	$(BIN)/python -m pytest tests/from_torch -m "not cuda"

# Every model of tests/corpus on every device that works here but a GPU, in about half an hour.
corpus: .venv/test
	$(PYTEST) tests/corpus -m "not cuda"

# What `make test` only samples, in about 6 minutes, at a seed that is drawn and printed (SEED=N repeats one): tests that draw their
# inputs, cuts over devices, random graphs, damaged files, every kernel of sampled operators. Ends at the first failure; what a
# search finds is in $(FOUND).
FOUND := build/search
SEARCH := OPENBLAS_NUM_THREADS=1 $(BIN)/python -m rammer_testing
GRAPHS = $(SEARCH).graphs --processes 2 --policy '*' --layout '*' --form '*' --seed $(SEED) --keep $(FOUND)
MUTANTS = $(SEARCH).mutants --processes 2 --seed $(SEED) --keep $(FOUND)/mutants
FAMILIES = $(SEARCH).families --processes 2 --seed $(SEED)

define AT_SEED
	+@seed=$(or $(SEED),$$($(BIN)/python -c 'import secrets; print(secrets.randbits(31))')); \
	again="make $@ SEED=$$seed"; echo "seed $$seed: $$again repeats this"; \
	$(MAKE) --no-print-directory $@-at SEED=$$seed || { echo "failed at seed $$seed: $$again repeats this"; exit 1; }
endef

search: .venv/test
	$(AT_SEED)

drawn: .venv/test
	$(AT_SEED)

# Tests that draw their inputs, of which the seed chooses as many as take about a minute on two cores.
drawn-at:
	$(PYTEST) --seed $(SEED) --drawn 100 -m "not large and not cuda"

search-at: drawn-at
	@mkdir -p $(FOUND)
	$(PYTEST) --seed $(SEED) tests/devices/test_cut_order.py
	$(GRAPHS) --device toy --graphs 170
	$(GRAPHS) --device ipu_sim --graphs 80 --precision '*' --no-voices
	$(GRAPHS) --device rocm --graphs 50 --precision '*' --no-voices
	$(MUTANTS) --option tiles=8 --kind model --kind compiled --kind signed --count 480
	$(MUTANTS) --option tiles=8 --kind store --kind kept --kind head --count 70
	$(MUTANTS) --device rocm --kind model --kind compiled --kind signed --count 15
	$(FAMILIES) --device rocm --seconds 40 --report $(FOUND)/rocm.json
	$(FAMILIES) --device ipu_sim --seconds 20 --report $(FOUND)/ipu_sim.json

check: .venv/test
	$(BIN)/ruff check core plugins tests benchmarks docs
	$(BIN)/ruff format --check --quiet core plugins tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/line_budget.py

# The newest Python that every dependency supports, in about 2 minutes.
newest: .venv/bin/python
	tests/newest_python.sh

# The site; pages are the Markdown files of the repository. Every warning is an error, and so is a link that leads nowhere.
SPHINX := $(BIN)/python -m sphinx -q -n -c docs -d docs/_build/doctrees .

docs: .venv/docs
	$(SPHINX) docs/_build/html -W --keep-going -b html
	@echo "docs/_build/html/index.html"

# Needs the open network, so no part of the tests.
linkcheck: .venv/docs
	$(SPHINX) docs/_build/links -b linkcheck

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "rammer needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python $(LOCKS)
	@echo "Installing into .venv: rammer-runtime, rammer-core, $(TOOLS), $(DEMO_PLUGINS)"
	@echo "Downloads about 340 MB of wheels from PyPI: 275 MB are an OpenCL runtime for CPUs. An NVIDIA GPU adds about 170 MB."
	$(PIP) -e core -e . $(TOOLS) $(DEMO_PLUGINS)
	@touch $@

.venv/test: .venv/bin/python $(LOCKS)
	@echo "Installing into .venv: rammer-runtime, rammer-core, $(TOOLS), $(PLUGINS), plugins/cuda and the test tools"
	@echo "Downloads about 470 MB of wheels from PyPI: an OpenCL runtime for CPUs and NVIDIA's run-time compiler among them"
	$(PIP) -e core -e '.[test]' $(TOOLS) $(PLUGINS) -e 'plugins/cuda[compile]' -e core/rammer/plugin-template
	@touch $@

.venv/docs: .venv/bin/python $(LOCKS)
	$(PIP) -e core -e '.[docs]'
	@touch $@

# An sdist of every distribution, and the wheel that is built from it.
dist: .venv/test
	rm -rf dist
	for folder in core . tests/kit benchmarks plugins/cuda plugins/rocm plugins/ipu_sim; do \
	    $(BIN)/python -m build --no-isolation --outdir dist $$folder || exit 1; \
	done

clean:
	rm -rf .venv build core/build dist docs/_build
