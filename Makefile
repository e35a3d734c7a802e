# Two commands: `make demo` runs a real model, `make test` runs the tests. Both set up what they need.
PYTHON ?= python3
BIN := .venv/bin
PLUGINS := -e plugins/rocm -e plugins/ipu_sim
# The cuda plugin's wheels are large, so they are installed only where there is an NVIDIA driver.
ifneq ($(wildcard /dev/nvidiactl),)
DEMO_PLUGINS := $(PLUGINS) -e plugins/cuda
else
DEMO_PLUGINS := $(PLUGINS)
endif

.PHONY: demo test test-all check clean

demo: .venv/demo
	$(BIN)/python benchmarks/demo.py

test: .venv/test check
	$(BIN)/python -m pytest -n 2 -m "not large and not cuda" tests

test-all: .venv/test check
	$(BIN)/python -m pytest -n 2 -m "not cuda" tests

check: .venv/test
	$(BIN)/ruff check core plugins tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing rammer with its plugins into .venv: downloads about 400 MB of wheels, most of it a CPU OpenCL runtime"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e . $(DEMO_PLUGINS) onnxruntime
	@touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	@echo "Installing rammer, its plugins and the test tools into .venv: downloads about 700 MB of wheels"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[test]' $(PLUGINS) -e 'plugins/cuda[compile]'
	@touch $@

clean:
	rm -rf .venv build dist
