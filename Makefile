# Five verbs. CI calls the same ones; the virtual environment is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check chaos bench clean

demo: $(VENV)/.ready
	$(BIN)/shoal demo

# Two files at a time: most tests start processes, and half of the time wait for them.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" --numprocesses=2 --dist=loadfile

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

chaos: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow --timeout 1800

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks all --save

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]' --group dev
	touch $@
