# Everything runs in .venv. `make demo` and `make test` are the two commands that README promises.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: install demo test lint readme-table clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	@echo "Installing into .venv (some minutes, 2.3 GB) ..."
	$(PYTHON) -m venv .venv
	$(PIP) --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	touch $@

.venv/.test-installed: .venv/.installed
	$(PIP) --editable '.[test]'
	touch $@

# The demo model and data are fetched once; a run that was stopped goes on where it was.
demo: install
	$(BIN)/toolkit data prepare
	$(BIN)/toolkit run examples/demo.yaml

# Tests on the real model find it in .home; without it they say so and skip.
DEMO_MODEL := .home/models/SmolLM2-135M-Instruct/config.json

$(DEMO_MODEL): | .venv/.installed
	$(BIN)/toolkit data prepare --home .home

test: .venv/.test-installed $(DEMO_MODEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: .venv/.test-installed
	$(BIN)/ruff check .
	$(BIN)/mypy calib engines evals toolkit ui

# Writes the newest run of the demo job into README's marked section.
readme-table: install
	$(BIN)/python examples/readme_table.py README.md demo

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
