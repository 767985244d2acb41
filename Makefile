PYTHON ?= python3
MODEL_DIR ?= runs/mnist
STEPS ?= 500

# what was compiled is kept, also where somebody set this
export PYTHONDONTWRITEBYTECODE :=

.PHONY: mnist test test-quick test-cluster lint types slow bench docs clean

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

# as root; needs the packages openssh-server and iproute2
test-cluster: .venv/compiled
	.venv/bin/python -m pytest tests/cluster -m cluster

lint: .venv/tested
	.venv/bin/ruff check .

types: .venv/tested
	.venv/bin/mypy

slow: .venv/slow
	.venv/bin/python -m pytest -m "slow or hypothesis" --hypothesis-profile=many

bench: .venv/tested
	.venv/bin/python tests/benchmarks/overhead.py

docs: .venv/docs
	.venv/bin/python docs/build_site.py

clean:
	rm -rf .venv .pytest_cache .ruff_cache build

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

.venv/slow: .venv/tested
	.venv/bin/python -m pip install --quiet --editable '.[test,slow]'
	touch $@

.venv/docs: pyproject.toml | .venv/bin/python
	.venv/bin/python -m pip install --quiet --editable '.[docs]'
	touch $@ .venv/installed
