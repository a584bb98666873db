"""Run a few cases of benchmarks/evidence/keras/main.py: random Keras programs, compared with one bare process."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from benchmarks.evidence.keras.main import TOPIC, truth
from benchmarks.evidence.support.cases import faults_of
from tests.frameworks.keras.test_keras import SAVES_BY
from tests.support.ranks import Here, Process, run_ranks

CASES, SEED = 2, 9_000
FAMILIES = ("training-torch-2", "callbacks-torch-2")
LOADED = Process(
    nursery="keras",
    beforehand=(*SAVES_BY, "benchmarks.evidence.keras.truth", "tests.support.keras_trust_programs"),
)


@pytest.mark.skipif(find_spec("keras") is None or find_spec("torch") is None, reason="Keras or torch is missing")
def test_random_programs_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    for tried in run_ranks(try_cases, 2, str(tmp_path), process=LOADED, deadline_s=280.0):
        assert not tried["faults"]
        assert tried["cases"] == CASES * len(FAMILIES), "some families were not tried"


def try_cases(here: Here, folder: str) -> dict[str, object]:
    """Run some cases of some families, the same number on each rank."""
    cases, faults = 0, []
    for family in [each for each in TOPIC.families if each.name in FAMILIES]:
        for seed in range(SEED, SEED + CASES):
            place = Path(folder) / f"{family.name}-{seed}"
            place.mkdir(exist_ok=True)
            faults += [(family.name, seed, *fault) for fault in faults_of(family, seed, place)]
            cases += 1
    if here.rank == 0:
        truth().process.kill()
        truth().process.wait()
    return {"faults": faults, "cases": cases}
