"""`keras.distribute` acts like one process for each loss, metric, row and file."""

import importlib
from importlib.util import find_spec
from typing import Any

import pytest
from tests.frameworks.keras.test_keras import SAVES_BY
from tests.support.ranks import Here, Process, run_ranks

pytestmark = [
    pytest.mark.skipif(find_spec("keras") is None or find_spec("torch") is None, reason="Keras or torch is missing"),
]
NAMES = ("dealing", "losses", "metrics", "logged", "written", "summaries", "restored", "mistaken", "handed_on")


def found_here(_here: Here, folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = importlib.import_module("tests.support.keras_trust_programs").found(folder, names)
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KERAS_BACKEND", "torch")
        beforehand = (*SAVES_BY, "tests.support.keras_trust_programs")
        process = Process(nursery="keras", beforehand=beforehand)
        folder = str(tmp_path_factory.mktemp("written"))
        found: list[dict[str, Any]] = run_ranks(found_here, 2, folder, NAMES, process=process, deadline_s=250.0)
    return found


def test_every_row_is_dealt_once(by_rank: list[dict[str, Any]]) -> None:
    assert all(each["dealing"] for each in by_rank)


def test_every_loss_trains_as_without_distribute(by_rank: list[dict[str, Any]]) -> None:
    tried = {name: how for name, how in by_rank[0]["losses"].items() if how is not None}
    far = {name: how for name, how in tried.items() if not how < 1e-4}
    # These losses are one number per batch instead of a mean over samples; multiring warns about this once.
    assert {name.split()[0] for name in far} <= {"Dice", "Tversky"}, far
    assert len(tried) > 35, by_rank[0]["losses"]


def test_every_metric_is_that_of_one_process(by_rank: list[dict[str, Any]]) -> None:
    tried = {name: how for name, how in by_rank[0]["metrics"].items() if how is not None}
    assert not {name: how for name, how in tried.items() if not how < 1e-5}
    assert len(tried) > 30, by_rank[0]["metrics"]


def test_a_log_is_a_metric_by_identity(by_rank: list[dict[str, Any]]) -> None:
    for each in by_rank:
        alone, shared = each["logged"]
        own = {"seen": [6.0], "depth": [5.0]}  # the values that the step returned
        assert alone == shared == {"rows": [9.0], **own}


def test_every_file_is_written_whole(by_rank: list[dict[str, Any]]) -> None:
    wanted = [
        "backup/latest.weights.h5",
        "backup/training_metadata.json",
        "best.keras",
        "by-function.keras",
        "evaluated.keras",
        "guarded.keras",
        "log.csv",
        "predicted.keras",
    ]
    wanted += ["new/folder/model.keras", "text"]
    wanted += [f"epoch-{epoch}.weights.h5" for epoch in (1, 2, 3)] + [f"own{epoch}.weights.h5" for epoch in range(3)]
    names = by_rank[0]["written"]
    assert {name for name in names if not name.startswith("batch-")} == set(wanted)
    assert by_rank[1]["written"] == names


def test_tensorboard_gets_the_numbers_of_one_process_once(by_rank: list[dict[str, Any]]) -> None:
    alone, shared = by_rank[0]["summaries"]
    assert [each[:2] for each in shared] == [each[:2] for each in alone]
    assert [each[2] for each in shared] == pytest.approx([each[2] for each in alone], rel=1e-5)
    assert {"batch_loss", "epoch_mae", "evaluation_loss_vs_iterations"} <= {each[0] for each in shared}
    assert by_rank[1]["summaries"][1] == []


def test_a_restored_training_goes_on_alike_on_every_rank(by_rank: list[dict[str, Any]]) -> None:
    assert by_rank[0]["restored"] == by_rank[1]["restored"]


def test_a_models_own_methods_hand_on_what_they_get(by_rank: list[dict[str, Any]]) -> None:
    assert [each["handed_on"] for each in by_rank] == [[True, True], [True, True]]


def test_data_that_differ_between_ranks_are_refused(by_rank: list[dict[str, Any]]) -> None:
    for each in by_rank:
        assert len(each["mistaken"]) == 2
        assert all("the data of rank 1 differ from rank 0's" in text for text in each["mistaken"])
