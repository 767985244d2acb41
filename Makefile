PYTHON ?= python3
MODEL_DIR ?= runs/mnist
STEPS ?= 500

# what was compiled is kept, also where somebody set this
export PYTHONDONTWRITEBYTECODE :=

.PHONY: mnist test test-quick test-oldest test-all test-cluster lint types slow bench docs clean

mnist: .venv/installed
	.venv/bin/ctl launch --workers=2 -- .venv/bin/python -m models.mnist \
		--model_dir=$(MODEL_DIR) --train_steps=$(STEPS) --eval_every_steps=100

# one run more than cores, as processes wait for each other; what fails beside others has to pass alone
test: .venv/tested
	$(MAKE) --jobs=3 lint types .venv/compiled
	.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
		|| .venv/bin/python -m pytest --last-failed --last-failed-no-failures none

test-quick: .venv/compiled
	.venv/bin/python -m pytest -n 3 --dist worksteal -m "not workers and not slow and not cluster and not trains" --hypothesis-profile=quick

# real hosts and clusters: as root, with openssh-server, iproute2, iptables, slurm-wlm, munge; else skipped
test-cluster: .venv/compiled
	.venv/bin/python -m pytest tests/cluster -m cluster \
		|| .venv/bin/python -m pytest tests/cluster -m cluster --last-failed --last-failed-no-failures none

lint: .venv/tested
	.venv/bin/ruff check .

types: .venv/tested
	.venv/bin/mypy

# the tests with the oldest versions that pyproject.toml allows
test-oldest: .venv-oldest/tested
	.venv-oldest/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
		|| .venv-oldest/bin/python -m pytest --last-failed --last-failed-no-failures none

# one after the other; clusters need root and packages, and say what is missing
test-all: .venv/tested
	$(MAKE) test
	$(MAKE) test-oldest
	$(MAKE) test-cluster

slow: .venv/slow
	.venv/bin/python -m pytest -m "slow or hypothesis" --hypothesis-profile=many

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
	touch $@

.venv/docs: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@ .venv/installed
