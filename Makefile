# Each target first makes .venv, or refreshes it when pyproject.toml or a file of versions has changed.
#   make lab PYTHON=python3.12       another Python (3.10 or later)
#   make lab LAB_ARGS=--no-browser   more options for JupyterLab
#   make lessons ONLY=01             one lesson
VENV_PYTHON = .venv/bin/python
ifeq ($(origin PYTHON),undefined)
# .venv's own Python where there is one: it starts faster than a shim, and .venv keeps its version
PYTHON := $(shell test -x $(VENV_PYTHON) && echo $(VENV_PYTHON) || echo python3)
endif

# the lessons' stored outputs show four ranks; with another number only their assertions are checked
test: export FSDP_RANKS ?= 4
NBVAL = $(if $(filter 4,$(FSDP_RANKS)),--nbval,--nbval-lax)

.PHONY: lab test lessons lint bench book progress setup

# Without the limit on the rate of outputs: four ranks that print at length exceed it.
lab: setup
	@$(VENV_PYTHON) -m jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_fsdp_from_scratch.ipynb \
		--ZMQChannelsWebsocketConnection.limit_rate=False $(LAB_ARGS)

test: setup .venv/made-for-test
	@status=0; \
	$(VENV_PYTHON) -m pytest -p no:nbval --numprocesses=3 --dist=loadfile --no-loadscope-reorder --max-worker-restart=0 tests || status=1; \
	$(VENV_PYTHON) -m pytest $(NBVAL) --nbval-current-env --nbval-cell-timeout=120 --timeout=180 notebooks || status=1; \
	exit $$status

lessons: setup
	@$(VENV_PYTHON) tools/build_lessons.py $(ONLY)
	@$(VENV_PYTHON) tools/claims_page.py
	@$(VENV_PYTHON) tools/answers_page.py

# which turns you have solved
progress: setup
	@$(VENV_PYTHON) -m fsdp_utils.lessons.progress

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m pyright --pythonpath $(VENV_PYTHON)

# All but gpu.py and its parts, which record on a GPU when gpu.py is called by name; machine.py is what they share.
BENCHMARKS = $(filter-out %/__init__.py %/machine.py $(wildcard benchmarks/gpu*.py),$(wildcard benchmarks/*.py))
bench: setup
	@status=0; \
	for script in $(BENCHMARKS); do echo "== $$script"; $(VENV_PYTHON) "$$script" || status=1; done; \
	exit $$status

# The lessons as a web site in book/_build/html, from the notebooks as they are; opened in Chromium where there is one.
book: setup .venv/made-for-book
	@$(VENV_PYTHON) tools/build_book.py
	@$(VENV_PYTHON) -m pytest -q tests/test_book.py tests/test_book_keyboard.py

# Sphinx, which nothing else needs
.venv/made-for-book: locks/book.txt | setup
	@$(VENV_PYTHON) -m pip install --quiet --require-hashes --no-deps -r locks/book.txt
	@touch $@

# Lightning, which only the tests of fsdp_utils/integrations need
.venv/made-for-test: locks/tests.txt | setup
	@$(VENV_PYTHON) -m pip install --quiet --require-hashes --no-deps -r locks/tests.txt
	@touch $@

setup:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "There is no command $(PYTHON): install Python 3.10 or later, or name it, for example: make lab PYTHON=python3.12"; \
		exit 1; }
	@"$(PYTHON)" -I tools/setup_env.py
