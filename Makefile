PY := .venv/bin/python
CMAKE := .venv/bin/cmake
JOBS := $(shell nproc)

build:
	@test -f build/dev/build.ninja || $(CMAKE) --preset dev
	@$(CMAKE) --build build/dev --parallel $(JOBS)
.PHONY: build
