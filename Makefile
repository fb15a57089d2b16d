# Two commands are enough: `make run` starts a sweep, `make test` runs the tests. Both install .venv where it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# The package index has torch for CUDA. PyTorch's own indexes have it for ROCm, and for CPUs at a fraction of the size:
# TORCH_INDEX=https://download.pytorch.org/whl/cpu. A machine with AMD GPUs uses the torch for ROCm that $(PYTHON) has,
# as in ROCm's images, else ROCm's index; and AMD's own amdsmi, through which Ray finds the GPUs.
DEV := /dev
AMDSMI := /opt/rocm/share/amd_smi
AMD := $(if $(wildcard $(DEV)/nvidia[0-9]*),,$(wildcard $(DEV)/kfd))
ifneq ($(AMD),)
GIVEN_TORCH := $(shell $(PYTHON) -c 'from workloads.api.gpu_setup import read_torch_build; \
  torch = read_torch_build(); torch and torch.hip and print(f"torch=={torch.version}", torch.folder)')
GIVEN_FOLDER := $(lastword $(GIVEN_TORCH))
TORCH_INDEX ?= $(if $(GIVEN_TORCH),,https://download.pytorch.org/whl/rocm7.2)
endif
TORCH := $(or $(firstword $(GIVEN_TORCH)),$(shell grep '^torch==' constraints.txt))

.PHONY: install run test check docs pictures soak verify clean help

help:             ## list the targets
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

# The stamp is remade only when the requirements change, so a second call installs nothing.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3,11) <= sys.version_info[:2] < (3,14))' || \
	  { echo "Python 3.11 to 3.13 is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=python3.12, for example."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "On Debian, venv is a separate package: apt-get install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): takes a minute or two, and a few GB with PyTorch for GPUs"
	@{ grep -v '^torch==' constraints.txt; echo '$(TORCH)'; } > $(VENV)/constraints.txt
ifneq ($(GIVEN_TORCH),)
	printf 'import site; site.addsitedir("%s")\n%s\n' $(GIVEN_FOLDER) $(GIVEN_FOLDER)/_rocm_sdk_core/share/amd_smi \
	  > $$(echo $(VENV)/lib/python3.*/site-packages)/given_torch.pth
endif
ifneq ($(TORCH_INDEX),)
	$(PIP) --index-url $(TORCH_INDEX) '$(TORCH)'
endif
	$(PIP) -c $(VENV)/constraints.txt -e '.[dev]'
ifneq ($(and $(AMD),$(wildcard $(AMDSMI))),)
	cp -r $(AMDSMI) $(VENV)/amd_smi && $(PIP) $(VENV)/amd_smi
endif
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # as pip does, on all cores
	@touch $@

install: $(STAMP) ## set up .venv

run: $(STAMP)     ## the default sweep: find the fastest matrix products of this machine
	$(BIN)/python -m sweeper $(ARGS)

# mypy takes 40 s of CPU time to read torch and the other libraries. A new checkout begins with what another one of the
# last day has read, in one file that is there whole or not at all: several checkouts may be checked at once.
MYPY_SEED := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-sweeper/mypy.tar

check: $(STAMP)   ## ruff (lint, format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@[ -d .mypy_cache ] || { mkdir .mypy_cache && tar -xf $(MYPY_SEED) -C .mypy_cache 2>/dev/null; } || true
	$(BIN)/mypy
	@[ -n "$$(find $(MYPY_SEED) -mtime -1 2>/dev/null)" ] || { mkdir -p $(dir $(MYPY_SEED)) 2>/dev/null && \
	  tar -cf $(MYPY_SEED).$$$$ -C .mypy_cache . && mv $(MYPY_SEED).$$$$ $(MYPY_SEED); } || true

docs: $(STAMP)    ## the reference from the code, and the documentation as a site in build/site, which opens offline
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Three workers keep two cores busy, since the longest tests mostly wait: for Ray, for programs, for timeouts. Tests that
# share a fixture form a group, which one worker runs; otherwise the order is that of tests/conftest.py. Without compiled
# files each of some hundred processes would compile all of sweeper/, which takes 0.6 s.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)    ## tests that need no GPU, about seven minutes on two cores
	$(BIN)/python -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m 'not gpu and not soak' $(ARGS)

pictures: $(STAMP) ## draw the pictures of README and docs again: a sweep on this CPU, and stored results of GPUs
	$(BIN)/python -m docs.pictures

soak: $(STAMP)    ## long tests, such as a sweep whose driver is killed 25 times, and many random examples of laws
	$(BIN)/python -m pytest -m 'soak and not gpu' --timeout=3600 $(ARGS)
	HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -m 'hypothesis and not gpu' --timeout=3600 $(ARGS)

verify: $(STAMP)  ## measure a published result again: CARD=planner, or another card of benchmarks/cards/
	$(BIN)/python benchmarks/verify.py $(CARD)

clean:            ## remove the environment and the caches; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build *.egg-info
