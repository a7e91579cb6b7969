# The commands for development and CI. `make help` lists them.
# scripts/environment.py keeps the environments up to date; it compares contents, and is fast if nothing changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ENVIRONMENT = $(PYTHON) scripts/environment.py .venv

PYTHON ?= $(shell scripts/pythons --preferred)# the Python of .venv
DATA_DIR ?= ./tidegate-data#                    make serve: the data directory of the embedded server
LISTEN ?= 127.0.0.1:8080#                       make serve: host and port
SERVE_ARGS ?=#                                  make serve: more options of `tidegate serve`
DEMO_ARGS ?=#                                   make demo: options of `tidegate demo`, e.g. "--redis --mysql"
PYTEST_ARGS ?= -n 4 --dist worksteal#           make test: options of the full run; worksteal leaves no process idle at the end
BENCH_ARGS ?=#                                  make bench: which benchmarks; all by default
SEEDS ?= 1..100000#                             make soak: which seeds

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  Settings: PYTHON DATA_DIR LISTEN SERVE_ARGS DEMO_ARGS PYTEST_ARGS BENCH_ARGS SEEDS (see the top of the Makefile)"

.PHONY: serve
serve: python ## Run a rate limit server without other services
	@scripts/system-packages compiler || echo "make serve: continuing without a compiler: the core will run interpreted" >&2
	@$(ENVIRONMENT) --extra all --package
	exec $(BIN)/tidegate serve --data-dir $(DATA_DIR) --listen $(LISTEN) $(SERVE_ARGS)

.PHONY: demo
demo: python ## Run a fleet of three regions on this machine, with traffic and faults to try
	@scripts/system-packages compiler || echo "make demo: continuing without a compiler: the core will run interpreted" >&2
	@$(ENVIRONMENT) --extra all --package
	exec $(BIN)/tidegate demo $(DEMO_ARGS)

.PHONY: test
test: python ## Run all tests: compiled, interpreted, and on every Python of this machine
	@scripts/system-packages compiler servers
	@scripts/system-packages browser || true # the tests of the console in a browser are skipped, and listed at the end
	@scripts/mysql-server || true # the tests that need it are skipped, and listed at the end
	@PYTHON="$(PYTHON)" scripts/gateways envoy caddy traefik >/dev/null || true # likewise
	@PYTHON="$(PYTHON)" PYTEST_ARGS="$(PYTEST_ARGS)" scripts/test

.PHONY: coverage
coverage: python ## Run all tests interpreted and show which branches no test takes (twice the time of the tests)
	@scripts/system-packages compiler servers
	@scripts/mysql-server || true
	@PYTHON="$(PYTHON)" scripts/gateways envoy caddy traefik >/dev/null || true
	@$(ENVIRONMENT) --extra all --group dev --group coverage --package
	@rm -rf build/coverage && mkdir -p build/coverage
	-PYTHONPATH=$(CURDIR)/src TIDEGATE_EXPECT_COMPILED=0 $(BIN)/python -m coverage run -m pytest --ignore=tests/package $(PYTEST_ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage html --quiet -d build/coverage/html
	@$(BIN)/python -m coverage report --sort=cover

.PHONY: check
check: tools ## Check format, lint, types, layering, links, words and spelling
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src tests scripts setup.py
	$(BIN)/python scripts/check_types.py
	PYTHONPATH=src $(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_docs.py
	$(BIN)/python scripts/check_words.py
	$(BIN)/codespell

.PHONY: check-workflows
check-workflows: ## Check the GitHub workflows with actionlint (needs Go)
	go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.9

.PHONY: format
format: tools ## Format the code and apply automatic lint fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

.PHONY: docs
docs: python ## Build the documentation site into build/site; warnings are errors
	@$(ENVIRONMENT) --group docs
	@$(BIN)/python scripts/docs_site.py build

.PHONY: docs-serve
docs-serve: python ## Show the documentation site on 127.0.0.1:8000, following edits
	@$(ENVIRONMENT) --group docs
	@$(BIN)/python scripts/docs_site.py serve

.PHONY: docs-reference
docs-reference: tools ## Generate docs/reference, alert rules and dashboard from the tables in the code
	PYTHONPATH=src $(BIN)/python scripts/reference.py
	PYTHONPATH=src $(BIN)/python scripts/monitoring.py

.PHONY: pictures
pictures: tools ## Draw the pictures of the documentation from the data in docs/pictures
	PYTHONPATH=src $(BIN)/python scripts/pictures.py

.PHONY: pictures-measure
pictures-measure: tools ## Run the simulator for new data, then draw the pictures (minutes)
	PYTHONPATH=src $(BIN)/python scripts/pictures.py --measure

.PHONY: bench
bench: python ## Measure against other limiters, in one run
	@scripts/system-packages compiler
	@$(ENVIRONMENT) --extra all --group dev --group bench --package
	$(BIN)/python -m bench $(BENCH_ARGS)

.PHONY: screenshots
screenshots: python ## Make the pictures of the console in docs/ again, with the browser tests
	@$(ENVIRONMENT) --extra all --group dev --package
	TIDEGATE_SCREENSHOTS=docs/operations/console $(BIN)/python -P -m pytest -q tests/console/test_browser.py -k picture

.PHONY: soak
soak: python ## Run the simulator for the seeds SEEDS=1..N
	@$(ENVIRONMENT) --extra all --package
	$(BIN)/tidegate simulate --seeds $(SEEDS)

.PHONY: package
package: python ## Build an sdist, a compiled wheel and a pure wheel into dist/ (a minute)
	@$(ENVIRONMENT) --group dev
	@$(BIN)/python scripts/package.py dist

.PHONY: constraints
constraints: python ## Resolve the newest versions of all dependencies into constraints.txt
	$$(scripts/pythons | head -n 1 | cut -d ' ' -f 2-) scripts/constraints.py

.PHONY: clean
clean: ## Remove environments, builds and caches (never the data of `make serve`)
	rm -rf .venv .venvs .gateways build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests scripts bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Steps of the commands above.

.PHONY: python
python:
	@scripts/system-packages python

.PHONY: tools
tools: python
	@$(ENVIRONMENT) --extra all --group dev
