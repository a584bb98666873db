"""Tests with torch's CUDA build on stand-ins of CUDA and NCCL: make test-cuda, or .ci/with-cuda pytest tests/cuda."""

import os

# The environment of `make test` has torch's CPU build.
collect_ignore_glob = [] if "STANDIN_LIBRARIES" in os.environ else ["test_*.py"]
if "STANDIN_LIBRARIES" in os.environ:
    from tests.standin.torch_devices import install

    install()
