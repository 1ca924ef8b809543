# `make demo` and `make test` work on a fresh machine with Python >= 3.11: each sets up .venv first and may be repeated.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test package docs cuda soak attack lint peers browser clean

demo: .venv/.installed  ## what the built-in model can do, measured here in two minutes: runs/demo/report.html
	$(BIN)/vitrail demo

test: .venv/.dev lint  ## style, types, layers, and the suite in parallel; what the machine lacks is skipped and named
	$(BIN)/pytest --numprocesses auto

package: .venv/.dev  ## the wheel, the source archive and the containers' commands, in clean environments
	VITRAIL_TEST_INSTALL=1 $(BIN)/pytest tests/test_package.py tests/test_docker.py

docs: .venv/.docs  ## the site in build/site, which opens without a server and without a network
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/doctrees . build/site
	@echo "open build/site/index.html"

cuda: .venv/.dev  ## the tests for an NVIDIA GPU, which the suite leaves out
	VITRAIL_TEST_CUDA=1 $(BIN)/pytest -k cuda

soak: .venv/.dev  ## the full counts of what the suite samples, and a table of what they reached; takes long
	$(BIN)/pytest -m soak

attack: .venv/.dev  ## every attack of docs/reliability.md, on this machine alone, and a table of their outcomes
	$(BIN)/pytest -m attack

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache > .venv/imports.log || { cat .venv/imports.log; exit 1; }

# Compared with, never depended on: timm, torchvision, open_clip and PEFT without their dependencies, or they would
# replace torch (ftfy is what open_clip's tokenizer imports); accelerate for transformers' Trainer, which bench/
# measures, and for PEFT. Ray and Spark run vitrail in their workers; faiss, usearch and Lance read its Parquet files;
# kubeflow-trainer-api has the schema of a TrainJob.
peers: .venv/.dev
	$(PIP) --no-deps timm torchvision open_clip_torch ftfy peft kubeflow-trainer-api
	$(PIP) accelerate ray pyspark cleanlab faiss-cpu usearch pylance

# For the tests of pages, which skip without it: Debian's, as root.
browser:
	command -v chromium > /dev/null || { apt-get update -qq && apt-get install --yes --no-install-recommends -qq chromium fonts-dejavu-core; }

clean:
	rm -rf .venv build .mypy_cache .pytest_cache .ruff_cache .hypothesis

.venv/bin/pip:
	@echo "making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "vitrail needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing vitrail (a minute or two)"
	$(PIP) --editable '.[demo]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing vitrail and its developer tools (a minute or two)"
	$(PIP) --editable '.[dev]'
	@touch $@ .venv/.installed

.venv/.docs: pyproject.toml constraints.txt | .venv/bin/pip
	@echo "installing vitrail and what builds its site (a minute or two)"
	$(PIP) --editable '.[docs]'
	@touch $@
