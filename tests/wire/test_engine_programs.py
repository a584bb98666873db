"""Random programs of groups on stand-in devices; benchmarks/evidence/torch/random_on_devices.py has more."""

import pytest
from tests.standin.build import built
from tests.support.engine_programs import run_engine_programs
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


@pytest.mark.parametrize(
    ("engine", "ranks", "carrier"),
    [("shm", 2, "staged"), ("shm+tcp", 3, "staged"), ("shm", 2, "nccl"), ("shm", 3, "nccl")],
)
def test_random_programs(engine: str, ranks: int, carrier: str) -> None:
    run_ranks(run_engine_programs, ranks, [1, 2], carrier, engine=engine, deadline_s=240.0)
