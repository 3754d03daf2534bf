# Everything runs in a virtual environment, .venv, that is made once and kept until the requirements change.
#
#   PYTHON=...        the interpreter to use (3.11 or newer)
#   PIP_OPTIONS=...   given to pip, e.g. to take torch's small CPU build from its own index:
#                     make test PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"

SUITABLE := import sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for name in python3.11 python3 python3.12 python3.13; do \
	$$name -c '$(SUITABLE)' 2>/dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := constraints.txt pyproject.toml setup.py
STAMP := $(VENV)/.installed-$(shell (cat $(REQUIREMENTS); $(PYTHON) --version) 2>&1 | cksum | tr ' ' -)
PIP_INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) --constraint constraints.txt

.PHONY: help venv library test demo lint clean distclean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

venv: $(STAMP)  ## make .venv and install lsq into it

# torch comes first, as constrained: fairseq-fixed is built on Python 3.11 (3 to 4 minutes, once; pip keeps the
# wheel) and must see this torch, which an isolated build would download again in its newest and largest form.
$(STAMP):
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer (with its venv module) was found;" \
		"install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@test "$$($(BIN)/python --version 2>&1)" = "$$($(PYTHON) --version)" \
		&& $(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| $(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) torch numpy cython setuptools
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@rm -f $(VENV)/.installed-* && touch $@

library: $(STAMP)  ## compile the C++ that changed
	@$(BIN)/python setup.py --quiet build_ext --inplace

test: library  ## run the tests
	$(BIN)/python -m pytest

demo: library  ## train, translate and score the built-in task, in float and in int8
	$(BIN)/lsq numbers

lint: $(STAMP)  ## check the style
	$(BIN)/ruff check .

clean:  ## remove what was built, but not .venv
	rm -rf build lsq/csrc/*.so .pytest_cache .ruff_cache .hypothesis
	find lsq tests benchmarks recipes -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv as well
	rm -rf $(VENV)
