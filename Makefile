# Five verbs. CI calls the same ones; the virtual environment is made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check chaos bench page clean

# Without a page the demo is the same: only `shoal dash` has nothing to show what it did on.
demo: $(VENV)/.ready
	@$(MAKE) --no-print-directory page || echo "the page of shoal dash could not be built; \`make page\` tries again" >&2
	$(BIN)/shoal demo

# Two files at a time: most tests start processes, and half of the time wait for them.
test: $(VENV)/.dev page
	$(BIN)/python -m pytest -m "not slow" --numprocesses=2 --dist=loadfile --durations=40

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# JAX and TensorFlow in an environment of their own: two gigabytes that nothing else needs.
chaos: $(VENV)/.dev $(VENV)/.frameworks page
	SHOAL_TEST_FRAMEWORKS_PYTHON=$(CURDIR)/$(VENV)/frameworks/bin/python \
	  $(BIN)/python -m pytest -m slow --timeout 1800

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks all --save

# The page of `shoal dash`. Where there is no npm everything else works, and its tests are skipped.
PAGE := src/shoal/dash/page/index.html

page:
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(PAGE); \
	else echo "there is no npm: the page of shoal dash is not built" >&2; fi

$(PAGE): web/package-lock.json web/build.mjs $(wildcard web/src/*)
	cd web && npm ci --ignore-scripts --no-progress --loglevel=error && npm run --silent check && npm run --silent build

clean:
	rm -rf $(VENV) web/node_modules src/shoal/dash/page .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[service]'
	touch $@

$(VENV)/.frameworks: | $(VENV)/bin/python
	$(PYTHON) -m venv $(VENV)/frameworks
	$(VENV)/frameworks/bin/python -m pip install --quiet --disable-pip-version-check \
	  jax==0.10.2 tensorflow-cpu==2.21.0
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all]' --group dev
	touch $@
