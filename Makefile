# Two commands are enough: `make run` starts a sweep, `make test` runs the tests. Both install .venv where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check soak clean help

help:             ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# The stamp is remade only when the requirements change, so a second call installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] < (3,14))' || \
	  { echo "Python 3.11 to 3.13 is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=python3.12, for example."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian, venv is a separate package: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): takes a minute or two, and a few GB with PyTorch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip does, on all cores
	@touch $@

run: $(STAMP)     ## the default sweep: find the fastest matrix products of this machine
	$(BIN)/python -m sweeper $(ARGS)

check: $(STAMP)   ## ruff (lint, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Tests that share a fixture form a group, which one worker runs; otherwise the order is that of tests/conftest.py.
test: $(STAMP)    ## tests that need no GPU, about six minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m 'not gpu and not soak' $(ARGS)

soak: $(STAMP)    ## long tests, such as a sweep of 100 trials whose driver is killed 25 times
	$(BIN)/python -m pytest -m 'soak and not gpu' --timeout=3600 $(ARGS)

clean:            ## remove the environment and the caches; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
