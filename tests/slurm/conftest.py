"""Without Slurm or root the tests fail, and are not skipped: `make slurm-test` runs them, and nothing else does."""

import os

import pytest
from tests.support.slurm_cluster import missing


def pytest_sessionstart(session: pytest.Session) -> None:
    del session
    if os.geteuid() != 0:
        pytest.exit("tests/slurm: virtual hosts need root", 1)
    if gone := missing():
        pytest.exit(f"tests/slurm: {', '.join(gone)} not found; `make slurm-test` installs Slurm", 1)
