# Two commands on a fresh Linux machine with Python 3.11 and g++: `make demo` and `make test`.
# Versions are pinned in constraints.txt. PyPI's torch brings several GB of CUDA: PIP_INDEX_URL can name CPU builds.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
PYTEST := $(VENV)/bin/pytest --numprocesses=2

export OMP_NUM_THREADS ?= 1

.PHONY: demo test long lint clean

demo: $(INSTALLED)
	$(VENV)/bin/python examples/demo.py

# A file's tests share processes that they start, so they stay together.
test: $(INSTALLED)
	$(PYTEST) --dist=loadfile --no-loadscope-reorder --timeout=600

# The models of diffusers start no processes: both workers share them. Random models last: there are thousands, and
# the other sweeps should have had their turn.
APART := tests/test_zoo.py tests/test_graphs.py

long: $(INSTALLED)
	$(PYTEST) -m long --dist=loadfile --no-loadscope-reorder --timeout=1800 $(APART:%=--ignore=%)
	$(PYTEST) -m long --timeout=1800 $(APART)

# mypy reads the package as it is installed, with ops/ as spcompile.ops.
lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	rm -rf build/mypy && mkdir -p build/mypy && cp -r spcompile build/mypy && cp -r ops build/mypy/spcompile/ops
	cd build/mypy && ../../$(VENV)/bin/mypy --config-file ../../pyproject.toml -p spcompile

# A new environment whenever what it is made from changes, so that nothing stale is left in it.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
