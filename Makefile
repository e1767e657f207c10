# make run    the paper's tables in small, on data that comes along: at most 6 minutes on two cores
# make test   everything that must hold: ruff, mypy, import-linter, pytest
# make soak   kills, full disks, lost workers, damaged files, hostile input: about 25 minutes on two cores
# make gpu    the GPU's kernels, on a GPU or in Triton's interpreter: installs triton and fla too (1 GB)
# make release  wheel, source and bill of materials into dist/, tried in an empty environment; make lock, make audit: docs/dependencies.md
# make docs   the documentation as a site, in build/site
# They need python3 (3.10 or newer) and make; they create .venv and install what they use, at the versions of constraints.txt.

PYTHON ?= python3
BIN := .venv/bin
TOOLS := .venv/tools/bin
comma := ,

.PHONY: run test soak gpu slow bench docs docs-serve format release lock audit clean

run: .venv/run
	$(BIN)/permuteformer reproduce --preset quick

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 -q

soak: .venv/dev
	$(BIN)/python -m soak

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

release: .venv/release
	$(TOOLS)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(TOOLS)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	$(TOOLS)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	rm -rf dist
	$(TOOLS)/python release/distributions.py
	$(TOOLS)/python release/sbom.py dist/sbom.cdx.json
	$(TOOLS)/python release/fresh.py

lock: .venv/release
	$(TOOLS)/python release/lock.py

audit: .venv/release
	$(TOOLS)/pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock --requirement release/tools.lock $(AUDIT)

clean:
	rm -rf .venv

# A stamp for each set of extras that was installed; a change of pyproject.toml, constraints.txt or the kernel installs again.
.venv/run .venv/dev .venv/cuda: pyproject.toml constraints.txt hatch_build.py $(wildcard src/permuteformer/ops/native/*.cpp src/permuteformer/ops/native/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; this is %d.%d. Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@test -x $(BIN)/python || { rm -rf .venv; $(PYTHON) -m venv .venv; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.$(if $(filter dev cuda,$(@F)),[dev$(comma)docs$(if $(filter cuda,$(@F)),$(comma)cuda)])'
	@touch $@

# What makes a release has an environment of its own, by hashes.
.venv/release: release/tools.lock
	@$(PYTHON) -m venv .venv/tools
	$(TOOLS)/python -m pip install --quiet --require-hashes --requirement release/tools.lock
	@touch $@
