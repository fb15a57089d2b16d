# Two commands do everything: `make run` and `make test`. Each sets up .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test check soak clean help

help:             ## what can be said here
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# The stamp is remade when the requirements change, and only then: a second call installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] < (3,14))' || \
	  { echo "Python 3.11 to 3.13 is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Say PYTHON=python3.12, for example."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Debian has that in a package of its own: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV): a minute or two, and a few GB with PyTorch"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip does, on all cores
	@touch $@

run: $(STAMP)     ## the main job: find the fastest matrix products of this machine
	$(BIN)/python -m sweeper $(ARGS)

check: $(STAMP)   ## ruff (lint, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP)    ## the tests that need no GPU, in under ten minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not gpu and not soak' $(ARGS)

soak: $(STAMP)    ## the long ones: a sweep of 100 trials killed 25 times, and what else takes minutes
	$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)

clean:            ## take the environment and the caches away; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
