# isobatch: 'make serve' runs it, 'make test' tests it; each sets up what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# The files from which the images of cluster/, and the wheel in them, are built.
CONTEXT := pyproject.toml README.md LICENSE constraints.txt isobatch profiles optimizer deployments cluster

.DEFAULT_GOAL := help
.PHONY: help setup serve demo llm-demo test test-long test-cluster fuzz lint format experiments results house arguments chaos soak browser pictures docs release newest-ray clean

help:  ## list the targets
	@grep -hE '^[a-z%-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup: $(READY)  ## create .venv with the pinned packages (does nothing when nothing changed)

# torch comes first, by its exact version, so that pip takes a CPU wheel that it is given (--find-links). pip would
# compile bytecode on one core; some packages contain files for other versions of Python, which cannot be compiled.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "isobatch needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev,gpu]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	touch $@

serve: setup  ## serve the built-in demo model at http://127.0.0.1:8000
	$(BIN)/isobatch serve

demo: setup  ## train the built-in demo model anew (it is shipped: nothing needs this)
	$(BIN)/python -m experiments.demos.digits && cp deployments/demo/demo-float32/exits.png docs/

llm-demo: setup  ## train the built-in decoder anew (it is shipped: nothing needs this)
	$(BIN)/python -m experiments.demos.sums

# Hundreds of processes start: the bytecode that the first one compiles serves all, even where Python is set to write none.
test test-long test-cluster fuzz: export PYTHONDONTWRITEBYTECODE =

test: setup  ## run the tests on two cores: those without Ray, then the others, each half on a Ray of its own
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not long" tests/unit
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not (cluster or long)" tests/integration tests/perf
	@echo "all tests passed: unit, integration, perf"

test-long: setup  ## run the tests from end to end, which make test leaves out: they take minutes
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m long tests/unit tests/integration

test-cluster: setup  ## run the tests of several nodes on this machine, which make test leaves out: they take minutes
	$(BIN)/python -m pytest -m cluster tests/integration

fuzz: setup  ## 100,000 wrong requests and files, beside a well-behaved client; the figures go to experiments/results
	ISOBATCH_FUZZ=100000 ISOBATCH_FUZZ_KEPT=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup tests/fuzz

lint: setup  ## check format, style, types and the direction of imports
	$(BIN)/ruff format --check . && $(BIN)/ruff check .
	$(BIN)/mypy && $(BIN)/lint-imports --no-cache

format: setup  ## rewrite the code in the project's format
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

bench-%: setup  ## run one benchmark and write experiments/results/NAME.json: make bench-forecast (or print a part: make bench-replan changes=6)
	$(BIN)/python -m experiments.bench $* $(filter-out PYTHON=%,$(MAKEOVERRIDES))

experiments: setup  ## simulate those figures of the paper that are missing (docs/e3.md)
	$(BIN)/python -m experiments.bench e3

results: setup  ## write experiments/results/README.md and the tables of docs/results.md (make results BUDGET=60: first repeat outdated measurements, for 60 minutes)
	$(BIN)/python -m experiments.shared.results_page $(BUDGET)

arguments: setup  ## write docs/arguments.md and cluster/schemas: every field of a Serve file's args: and of other files
	$(BIN)/python -m tests.helpers.arguments_page

house: setup  ## print lines by folder, words of docs, and how many files answer each question of docs/design.md
	$(BIN)/python -m tests.helpers.house

chaos: setup  ## break a live application 40 times, then one beside another, and see how it recovers (make bench-chaos faults=30 beside=0: in 6 minutes)
	$(BIN)/python -m experiments.bench chaos

soak: setup  ## mixed traffic, drift and faults for an hour (make soak MINUTES=8 PER_S=200: shorter, no faster), and see what grows
	ISOBATCH_SOAK_MINUTES=$(or $(MINUTES),60) ISOBATCH_SOAK_PER_S=$(or $(PER_S),inf) $(BIN)/python -m experiments.bench soak

browser: setup  ## install what the test of the page needs: Chromium (as root, on Debian) and playwright
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[browser]'
	command -v chromium || command -v chromium-browser || command -v google-chrome || { apt-get update && apt-get install --yes --no-install-recommends chromium; }

pictures: browser  ## make the pictures of docs/watching.md anew, by the test that opens the page
	ISOBATCH_PICTURES=1 $(BIN)/python -m pytest -q tests/integration/test_page.py

docs: setup  ## build the docs as a site in build/site; a link that leads nowhere is an error
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/zensical build --strict --clean

release: setup  ## build wheel, source distribution, context of the images and docs, check them, and list what would be published
	rm -rf dist build && mkdir build
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[release]'
	$(BIN)/python -m build --quiet --outdir dist .
	$(BIN)/twine check --strict dist/* && $(BIN)/check-wheel-contents dist/*.whl
	for python in 3.11 3.12 3.13; do $(BIN)/pip install --quiet --disable-pip-version-check --dry-run --ignore-installed \
		--python-version $$python --only-binary :all: --target build/none "$$(echo dist/*.whl)[cpu]" || exit 1; done
	$(BIN)/hadolint cluster/Dockerfile cluster/Dockerfile.serve
	git archive --output build/image.tar.gz HEAD $(CONTEXT)
	$(MAKE) docs
	@$(BIN)/python -m zipfile --list dist/*.whl && ls -l dist build/image.tar.gz && du -sh build/site
	@echo "nothing was published. 'twine upload dist/*' would publish the packages, and build/site is the site."
	@echo "Images: 'docker build -f cluster/Dockerfile.serve -t isobatch - < build/image.tar.gz', and with cluster/Dockerfile."

# Only Ray is newer: its dependencies are those of .venv.
newest-ray: setup  ## test a live application, and the internals of Ray that isobatch uses, on the newest Ray (or make newest-ray RAY=2.59.0)
	rm -rf build/ray && $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/ray ray$(RAY:%===%)
	PYTHONPATH=$(CURDIR)/build/ray $(BIN)/python -m pytest tests/unit/deployments/test_ray_facts.py \
		tests/unit/deployments/test_ray_settings.py tests/integration/test_ray_facts.py tests/integration/test_graph.py

clean:  ## remove the environment and every cache
	rm -rf .venv .cache *.egg-info build && find . -name __pycache__ -prune -exec rm -rf {} +
