"""Tests with torch's CUDA build on stand-ins of CUDA and NCCL: make test-cuda, or .ci/with-cuda pytest tests/cuda.

MULTIRING_TEST_DEVICE=cuda without `.ci/with-cuda` runs them on real devices; those that ask the stand-ins fail there.
"""

import os

_has_standins = "STANDIN_LIBRARIES" in os.environ
# The environment of `make test` has torch's CPU build.
collect_ignore_glob = [] if _has_standins or os.environ.get("MULTIRING_TEST_DEVICE") == "cuda" else ["test_*.py"]
if _has_standins:
    from tests.standin.torch_devices import install

    install()


def pytest_collection_modifyitems() -> None:
    """Forget the settings of benchmarks/evidence/torch/on_devices.py: the tests' programs know none of them."""
    for name in ("MULTIRING_TEST_ALL_SHAPES", "MULTIRING_TEST_ALL_SEEDS"):
        os.environ.pop(name, None)
