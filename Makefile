# make run    the paper's tables at small scale, on bundled data: at most 6 minutes on two cores
# make test   everything that must hold: ruff, mypy, import-linter, pytest
# make soak   kills, full disks, lost workers, damaged files, hostile input: about 10 minutes on two cores
# make gpu    the GPU's kernels, on a GPU or in Triton's interpreter: installs triton and fla too (1 GB)
# make release  wheel and source distribution in dist/, tried in an empty environment
# make docs   the documentation as a site, in build/site
# They need python3 (3.10 or newer) and make; they create .venv and install what they use, at the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
FRESH := build/release

.PHONY: run test soak gpu slow bench docs docs-serve format release clean

run: .venv/run
	$(BIN)/permuteformer reproduce --preset quick

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -q

soak: .venv/dev
	rm -f results/reliability/soak.jsonl
	$(BIN)/pytest -n 2 --dist worksteal -q tests/soak -m soak --record

gpu: .venv/cuda
	$(BIN)/pytest -n 2 -q tests/ops/test_cuda_backend.py

slow: .venv/dev
	$(BIN)/pytest -q -m slow

bench: .venv/dev
	$(BIN)/pytest -q benchmarks/test_ops.py --benchmark-autosave $(if $(wildcard .benchmarks/*/*.json),--benchmark-compare --benchmark-compare-fail=min:20%)

docs: .venv/dev
	$(BIN)/mkdocs build --strict

docs-serve: .venv/dev
	$(BIN)/mkdocs serve

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel is made from the source distribution. The last two lines try the source distribution without a compiler.
release: .venv/release
	rm -rf dist $(FRESH)
	PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	$(FRESH)/bin/python release/smoke.py native
	CXX=/nonexistent PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(FRESH)/bin/pip install --quiet --no-deps --force-reinstall --no-cache-dir dist/*.tar.gz
	$(FRESH)/bin/python release/smoke.py torch

clean:
	rm -rf .venv

# A stamp for each set of extras that was installed; a change of pyproject.toml, constraints.txt or the kernel installs again.
.venv/dev: EXTRAS := [dev,docs]
.venv/cuda: EXTRAS := [dev,docs,cuda]
.venv/release: EXTRAS := [release]
.venv/run .venv/dev .venv/cuda .venv/release: pyproject.toml constraints.txt hatch_build.py $(wildcard src/permuteformer/ops/native/*.cpp src/permuteformer/ops/native/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; this is %d.%d. Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@test -x $(BIN)/python || { rm -rf .venv; $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.$(EXTRAS)'
	@touch $@
