"""Under `keras.distribute`, a callback may save on any ranks, and call collectives in the same hook."""

import importlib
from collections import Counter
from importlib.util import find_spec
from typing import Any

import pytest
from tests.frameworks.keras.test_keras import SAVES_BY
from tests.support.ranks import Here, Process, run_ranks

pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None or find_spec("torch") is None, reason="Keras or torch is missing"),
]
RANKS = 3
NAMES = ("saving_on", "two_models", "failing", "restarted")


def found_here(_here: Here, folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module("tests.support.keras_saving_programs").found(folder, names)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", "torch")
        process = Process(nursery="keras-trust", beforehand=(*SAVES_BY, "tests.support.keras_trust_programs"))
        folder = str(tmp_path_factory.mktemp("saved"))
        found: list[dict[str, Any]] = run_ranks(found_here, RANKS, folder, NAMES, process=process, deadline_s=250.0)
    return found


def test_a_save_on_any_ranks_beside_collectives_changes_nothing(by_rank: list[dict[str, Any]]) -> None:
    for each in by_rank:
        trained, names = each["saving_on"]
        assert all(weights == trained[0] for weights in trained)  # the first programs do not save
        assert names == by_rank[0]["saving_on"][1]
    counts = Counter(name.partition("-")[0] for name in names)
    # Two hooks of `fit` or three, one of which has three batches, and the hook of `predict`.
    assert counts == {"first": 3 + 6, "last": 3, "each": 6 * RANKS, "all": 3, "test": 1}


def test_two_models_do_not_meet_each_others_saves(by_rank: list[dict[str, Any]]) -> None:
    assert all(each["two_models"] == by_rank[0]["two_models"] for each in by_rank)


def test_a_failed_save_reaches_every_rank(by_rank: list[dict[str, Any]]) -> None:
    first, *others = (each["failing"] for each in by_rank)
    assert [each.partition(":")[0] for each in first] == ["FileNotFoundError"] * 2
    for told in others:
        assert [each.partition(":")[0] for each in told] == ["MismatchError"] * 2
        assert all("rank 0 could not save" in each and each.endswith("missing/model.keras") for each in told)


def test_a_restart_after_a_save_trains_on(by_rank: list[dict[str, Any]]) -> None:
    assert all(each["restarted"] == by_rank[0]["restarted"] for each in by_rank)
    assert by_rank[0]["restarted"][0] == 2
