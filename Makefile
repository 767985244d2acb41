PYTHON ?= python3
MODEL_DIR ?= runs/mnist
STEPS ?= 500

# what was compiled is kept, also where somebody set this
export PYTHONDONTWRITEBYTECODE :=

.PHONY: mnist test test-rest test-all test-oldest test-cluster test-gpu coverage lint types bench docs clean

# the tests of `make test`: of one process, and one with several processes for each feature
FIRST = (not workers or smoke) and not slow and not cluster
# one process more than cores, as processes wait for each other
PYTEST = .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
SOURCES := $(shell find ctl models tests docs .ci -type f ! -name '*.pyc') $(wildcard *.md *.toml Makefile)

mnist: .venv/installed
	.venv/bin/ctl launch --workers=2 -- .venv/bin/python -m models.mnist \
		--model_dir=$(MODEL_DIR) --train_steps=$(STEPS) --eval_every_steps=100

test: .venv/tested
	$(MAKE) --jobs=3 lint types .venv/compiled
	$(PYTEST) -m "$(FIRST)" --hypothesis-profile=quick
	touch .venv/passed

.venv/passed: $(SOURCES)
	$(MAKE) test

# `make test`, unless it has passed for these files; then all other tests
test-all: .venv/passed
	$(MAKE) test-rest test-cluster

test-rest: .venv/slow
	$(PYTEST) -m "not cluster and (slow or hypothesis or not ($(FIRST)))" --hypothesis-profile=many

# real hosts and clusters: as root, with openssh-server, iproute2, iptables, slurm-wlm, munge; else skipped
test-cluster: .venv/compiled
	.venv/bin/python -m pytest -n 2 --dist worksteal tests/cluster -m cluster

lint: .venv/tested
	.venv/bin/ruff check .

types: .venv/tested
	.venv/bin/mypy

# the tests with the oldest versions that pyproject.toml allows
test-oldest: .venv-oldest/tested
	.venv-oldest/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# on a machine with a GPU; CTL_TEST_DEVICE=cpu:1 shows that the tests themselves work
test-gpu: .venv/compiled
	.venv/bin/python -m pytest tests/gpu -m "" -rs
	.venv/bin/python tests/benchmarks/overhead.py --strategy=one_device --rounds=3

# lines of ctl/ that all tests run, by folder; processes that are killed leave no record
coverage: .venv/slow
	-$(PYTEST) -m "not cluster" --cov --cov-report= --hypothesis-profile=quick
	@rm -f .coverage.*  # incomplete ones
	@for folder in $(filter-out %/__pycache__/,$(wildcard ctl/*/)) ctl/; do \
		printf '%-20s ' $$folder; \
		.venv/bin/python -m coverage report --format=total --precision=1 --include="$$folder*"; \
	done

bench: .venv/tested
	.venv/bin/python tests/benchmarks/overhead.py

docs: .venv/docs
	.venv/bin/python docs/build_site.py

clean:
	rm -rf .venv .venv-oldest .pytest_cache .ruff_cache build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable .
	touch $@

.venv/tested: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --no-compile --editable '.[test]'
	touch $@ .venv/installed

# once, before several processes do it at the same time: what tests import is compiled
.venv/compiled: .venv/tested
	-.venv/bin/python -m pytest --collect-only -q > /dev/null
	.venv/bin/python -m compileall -q ctl models tests/programs
	touch $@

# the oldest that runs: shims of version managers may stand for no Python
OLDEST_PYTHON ?= $(or $(shell for minor in 10 11 12 13; do \
	python3.$$minor -c 'import ensurepip' 2> /dev/null && echo python3.$$minor && break; done), $(PYTHON))

.venv-oldest/tested: pyproject.toml tests/programs/oldest_versions.py
	$(OLDEST_PYTHON) -m venv .venv-oldest
	$(OLDEST_PYTHON) tests/programs/oldest_versions.py > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --no-compile \
		--constraint .venv-oldest/constraints.txt --editable '.[test]'
	.venv-oldest/bin/python -m compileall -q ctl models tests/programs
	touch $@

.venv/slow: .venv/tested
	.venv/bin/python -m pip install --quiet --editable '.[test,slow]'
	-.venv/bin/pyright --version > /dev/null 2>&1  # downloads its program
	touch $@

.venv/docs: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@ .venv/installed
