# make demo   see FedPeWS win on the synthetic data (sets up first)
# make test   the tests (make test-slow: those that take minutes each, too)
# make torture, make damage: runs killed at random and folders damaged, see docs/keep-a-run-safe.md
# make check  lint, format and types
# make fuzz   every parser that reads from outside, thirty times as long as in the tests (FUZZ=100: longer still)
# make docs   the documentation: build/site/index.html

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: setup demo test test-slow torture damage flat fuzz audit zoo check format vendor bench bench-peers docs pictures clean

setup: $(VENV)/.ready

# the constraints pin torch first: an unpinned one pulls gigabytes of CUDA
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,docs,flower,pandas,privacy,cluster,search]"
	touch $@

demo: setup
	$(BIN)/fedpews run synthetic-four --method fedavg --method fedavg+pews --out runs/demo --resume
	$(BIN)/fedpews compare runs/demo --plot runs/demo/curves.png

# the tests of a file stay together, so that they share what they set up
test: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadscope -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -q -n 2 --dist loadscope

# kill -9 at random moments, KILLS of each method, resumed until done and compared byte for byte with an undisturbed run
KILLS ?= 100
SEED ?= 0
torture: setup
	$(BIN)/python tests/faults/torture.py --kills $(KILLS) --seed $(SEED)

# every file of a run's folder damaged in six ways, then resumed, compared, reported and loaded
damage: setup
	$(BIN)/python tests/faults/damage.py --seed $(SEED)

# memory, handles, threads and temporary files over 2,000 rounds, and what a round adds on disk
flat: setup
	$(BIN)/python benchmarks/flat.py

FUZZ ?= 30
fuzz: setup
	FEDPEWS_FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -n 2 tests/hostile/test_fuzz_*.py

# known weaknesses of the pinned versions, from a database on the network; what cannot be looked up is listed as such
audit:
	test -x build/audit/bin/pip-audit || { $(PYTHON) -m venv build/audit && build/audit/bin/pip install --quiet pip-audit; }
	build/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip

# the libraries of the zoo are 40 MB to fetch and 250 MB on disk; without them its tests are skipped
zoo: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[zoo]"
	$(BIN)/python -m pytest -q -n 2 tests/zoo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the chart library inside the report, from npm by name and version; its checksums are in the repository
UPLOT := 1.6.32
VENDOR := src/fedpews/report/page/vendor
vendor:
	rm -rf build/uplot && mkdir -p build/uplot
	cd build/uplot && npm pack --silent uplot@$(UPLOT) && tar xzf uplot-$(UPLOT).tgz
	cp build/uplot/package/dist/uPlot.iife.min.js build/uplot/package/dist/uPlot.min.css $(VENDOR)
	cp build/uplot/package/LICENSE $(VENDOR)/uPlot.LICENSE
	cd $(VENDOR) && sha256sum --check SHA256SUMS

# our engines against a plain PyTorch loop and the floor of bare kernels, on one core and on two
bench: setup
	$(BIN)/python benchmarks/speed.py

# Flower's simulation and pfl-research, in an environment of their own; `make bench` then measures them too
bench-peers:
	test -x benchmarks/.peers/bin/python || $(PYTHON) -m venv benchmarks/.peers
	# torch alone as we pin it: pfl-research asks for older versions of the rest
	grep '^torch==' constraints.txt > benchmarks/.peers/constraints.txt
	benchmarks/.peers/bin/python -m pip install --quiet -c benchmarks/.peers/constraints.txt -e . "flwr[simulation]==1.41.0" pfl

# the docs' generated parts (every key, the ratios of `make bench`), then the site, strictly: build/site/index.html
docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/zensical build --strict

# the pictures of docs/idea.md, the README and examples/README.md, from runs made on the spot
pictures: setup
	$(BIN)/python docs/pictures/draw.py
	$(BIN)/python docs/pictures/gallery.py

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache
