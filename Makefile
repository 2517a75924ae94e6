# Every target sets up what it needs first; done once, set-up costs nothing.
#   make train ARGS='strategy=tensor world_size=2 trainer.max_steps=50'
#   make test ARGS='-x tests/test_models.py'

PYTHON ?= python3
PIP_ARGS ?=
EXTRAS := data,report,dashboard,slurm,dev
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: install train sweep test coverage test-slow bench compare report lint format reference help

install: $(STAMP) ## set up .venv with everything that the other targets need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

train: $(STAMP) ## train the pipeline over two local ranks on handwritten digits (ARGS=... adds overrides)
	$(BIN)/python scripts/train.py strategy=pipeline world_size=2 data=digits $(ARGS)

sweep: $(STAMP) ## train under three splits on one rank and two, and write the sweep's report (ARGS=... adds overrides)
	$(BIN)/python scripts/train.py -m experiment=three_splits $(ARGS)

test: lint ## check style, types, layers and the reference config, then run the tests but the slow ones (ARGS=... goes to pytest)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

coverage: $(STAMP) ## run the same tests and show which lines they reach, those in the ranks' processes too
	$(BIN)/python -m pytest -m "not slow" --cov --cov-report=term $(ARGS)

test-slow: $(STAMP) ## run the tests that `make test` leaves out
	$(BIN)/python -m pytest -m slow $(ARGS)

bench: $(STAMP) ## time the collectives over local ranks and check their results (ARGS=... adds overrides)
	$(BIN)/python scripts/bench.py $(ARGS)

compare: $(STAMP) ## time our splits beside torch's own (ARGS=... goes to scripts/compare.py)
	$(BIN)/python scripts/compare.py $(ARGS)

report: $(STAMP) ## write report.html of a run or sweep again (ARGS=RUN), or beside another's (ARGS='RUN OTHER')
	$(BIN)/python scripts/report.py $(ARGS)

lint: $(STAMP) ## check style, types, import layers and the reference config
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/reference_config.py

format: $(STAMP) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(STAMP) ## write docs/reference_config.yaml anew after a change to conf/
	$(BIN)/python scripts/reference_config.py --write

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
