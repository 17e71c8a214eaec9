# Two commands: make quickstart, make test. Both work on a fresh clone with Python 3.11 or newer and a package index.
PYTHON ?= python3

.PHONY: quickstart test test-rest test-all test-official test-accelerators docs
quickstart: .venv/installed
	.venv/bin/python launch.py

# Types are checked beside the tests; both must pass.
test: .venv/installed
	.venv/bin/ruff check .
	.venv/bin/python -m mypy & types=$$!; .venv/bin/python -m pytest -m 'not test_all'; tests=$$?; \
	wait $$types && exit $$tests

# What `make test` leaves out: processes, hosts, Flower's federations, notebooks, the site, pages in a browser, programs
# for accelerators, PyTorch's encoders, examples of the pages, and whole runs that are compared with each other; and
# further variants of the methods against official code.
test-rest: .venv/installed
	.venv/bin/python -m pytest -m test_all
	.venv/bin/python -m pytest tests/official -m slow

test-all: test test-rest

# Each method against an independent implementation of its official code; writes docs/official_code.csv.
test-official: .venv/installed
	rm -rf .pytest_cache/official
	FEDJAX_SSL_OFFICIAL_RESULTS=.pytest_cache/official .venv/bin/python -m pytest tests/official
	.venv/bin/python docs/official_code.py .pytest_cache/official

# A tiny round of every method compiled for TPUs and a GPU that are not here; takes the extras accelerators and cuda12,
# and skips what is not installed. An hour or two of a processor; PART selects tests as pytest's -k does.
PART ?=
test-accelerators: .venv/installed
	.venv/bin/python -m pytest -n 0 tests/accelerators -k '$(PART)'

# The documentation as a site, in site/.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --strict

.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --editable '.[test]'
	touch $@
