"""Run a few cases of each family of benchmarks/evidence/torch/main.py: random programs, compared with one process."""

from pathlib import Path

import torch
from benchmarks.evidence.support.cases import faults_of
from benchmarks.evidence.torch.gradients import ready
from benchmarks.evidence.torch.main import TOPIC
from tests.support.ranks import Here, run_ranks

CASES, SEED = 2, 7_000


def test_random_programs_are_as_in_one_process(tmp_path: Path) -> None:
    for tried in run_ranks(try_cases, 2, str(tmp_path), deadline_s=240.0):
        assert not tried["faults"]
        assert tried["cases"] == CASES * len(TOPIC.families), "some families were not tried"


def try_cases(_here: Here, folder: str) -> dict[str, object]:
    """Run some cases of all families, the same number on each rank."""
    ready()
    cases, faults = 0, []
    for family in TOPIC.families:
        for seed in range(SEED, SEED + CASES):
            place = Path(folder) / f"{family.name}-{seed}"
            place.mkdir(exist_ok=True)
            faults += [(family.name, seed, *fault) for fault in faults_of(family, seed, place)]
            cases += 1
    torch.distributed.destroy_process_group()
    return {"faults": faults, "cases": cases}
