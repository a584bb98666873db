"""Ranks on a Spark cluster of two hosts. `.ci/with-clusters` has Spark."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.cluster_attacks import ODD
from tests.support.cluster_cases import (
    BAD_INPUT,
    attacks_on,
    bad_input_on,
    cases_on,
    check_attack,
    check_digits,
    check_guide,
    check_large_and_nested,
    check_nothing_left,
    check_raised,
    check_refused,
    guide_commands,
    reference_losses,
)
from tests.support.cluster_hosts import ClusterHosts, wait_for

from multiring._launch.horovod import path_with_horovod
from multiring.errors import ArgumentError, UnsupportedError
from multiring.horovod import spark_running

pytest.importorskip("pyspark", reason="make spark-test has Spark")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root"),
    pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java 17"),
    pytest.mark.timeout(2400),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    """Return two hosts with a Spark master and two workers, started with the commands of the guide."""
    folder = tmp_path_factory.mktemp("spark")
    own = "/dev/shm/spark"  # noqa: S108 -- the host's own
    with ClusterHosts(folder, SPARK_LOCAL_DIRS=own, SPARK_WORKER_DIR=own, KERAS_BACKEND="torch") as made:
        signs = ("I have been elected leader", "Successfully registered", "Successfully registered")
        for (host, command), name, sign in zip(guide_commands("guide_spark.md"), "mab", signs, strict=False):
            wait_for(made.start(host, name, "bash", "-c", f"exec {command}"), sign, timeout_s=240)
        yield made


@pytest.fixture(scope="module")
def cases(hosts: ClusterHosts) -> dict[str, dict[str, Any]]:
    """Return the reports of all jobs of one session."""
    return cases_on(hosts, "spark", "spark://host0:7077")


def test_digits_are_learnt_with_the_losses_of_multiring_run(
    cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_digits(cases["digits"], reference_losses(tmp_path_factory))


@pytest.mark.parametrize(("case", "rank"), [("raise", 2), ("raise in a collective", 1), ("children", 1)])
def test_a_ranks_error_reaches_the_driver_and_ends_the_others(
    cases: dict[str, dict[str, Any]], case: str, rank: int
) -> None:
    check_raised(cases[case], rank, has_cause=False)


@pytest.mark.parametrize(
    ("case", "text"),
    [("killed", "rank 3 was killed by SIGKILL"), ("worker killed", "Python worker exited unexpectedly")],
)
def test_a_killed_rank_or_worker_is_named(cases: dict[str, dict[str, Any]], case: str, text: str) -> None:
    assert cases[case]["error"] == "LaunchError"
    assert text in cases[case]["text"]
    assert cases[case]["seconds"] < 150


def test_more_jobs_run_in_the_session(cases: dict[str, dict[str, Any]]) -> None:
    for case in ("again", "again 2"):
        numbers = cases[case]["result"]
        assert [each[:4] for each in numbers] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]


def test_nothing_is_left_behind(cases: dict[str, dict[str, Any]], hosts: ClusterHosts) -> None:
    assert cases["again 2"]["case"] == "again"  # the last job has ended
    check_nothing_left(hosts)


def test_horovods_run_starts_ranks(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["horovod"]["result"] == [[0, 5.0, "pepper"], [1, 5.0, "pepper"]]


def test_the_secret_is_where_no_other_user_reads_it(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["secret"]["result"] == [[], [], [], []]


@pytest.fixture(scope="module")
def estimates(hosts: ClusterHosts, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of the estimators, run after all other jobs."""
    del cases
    return cases_on(hosts, "estimators", "spark://host0:7077", timeout_s=1600.0)  # 400 s at a load of 8


@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_an_estimator_fits_and_transforms(estimates: dict[str, dict[str, Any]], framework: str) -> None:
    found = estimates[f"{framework} estimator"]["result"]
    history = found["history"]
    assert len(history["loss"]) == len(history["val_loss"]) == 6
    assert history["loss"][-1] < 0.01 < history["loss"][0]
    assert history["val_loss"][-1] < 0.01
    assert ("mae" in history) == (framework == "keras")
    assert found["error"] < 0.3
    assert found["rows"] == 400
    assert found["model"] == "Sequential"


def test_an_estimator_fits_fewer_rows_than_a_batch(estimates: dict[str, dict[str, Any]]) -> None:
    losses = estimates["few rows"]["result"]["history"]["loss"]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("no rows", "ArgumentError", "the DataFrame has no rows"),
        ("no rows for validation", "ArgumentError", "with validation=1e-06, no rows are left for val_loss"),
        ("no column", "ArgumentError", "the DataFrame has no column 'z'; want one of x, target"),
        ("no value", "ArgumentError", "column 'x' has no value in 1 of 4 rows"),
        ("texts", "ArgumentError", "column 'x' has the type string"),
        ("transform without a column", "ArgumentError", "the DataFrame has no column 'x'; want one of target"),
        ("a rank raises", "LaunchError", "ZeroDivisionError: rank 1 divides"),
        ("a rank is killed", "LaunchError", "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_fit_that_fails_says_why_and_leaves_nothing(
    estimates: dict[str, dict[str, Any]], case: str, error: str, text: str
) -> None:
    assert estimates[case].get("error") == error, estimates[case]  # an AssertionError if something is left
    assert text in estimates[case]["text"]


def test_an_interrupted_fit_ends_its_ranks_and_leaves_nothing(estimates: dict[str, dict[str, Any]]) -> None:
    assert estimates["interrupted"]["result"] == "interrupted"
    assert [each[:2] for each in estimates["again"]["result"]] == [[0, 2], [1, 2]]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("no application", "StateError", "make a SparkSession"),
        ("too few", "LaunchError", "after 3 s the application has 4"),
        ("busy", "LaunchError", "did not get their slots within 4 s"),
        ("pickle", "ArgumentError", "cannot be sent to other processes"),
    ],
)
def test_bad_input_is_an_error_in_bounded_time(
    cases: dict[str, dict[str, Any]], case: str, error: str, text: str
) -> None:
    check_refused(cases[case], error, text)


@pytest.fixture(scope="module")
def attacks(hosts: ClusterHosts, estimates: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of odd programs, run after all other jobs."""
    del estimates
    return attacks_on(hosts, "spark", "spark://host0:7077")


@pytest.mark.parametrize("kind", ODD)
def test_a_rank_that_ends_oddly_is_named(attacks: dict[str, dict[str, Any]], kind: str) -> None:
    check_attack(attacks, kind)


def test_large_results_and_nested_jobs_arrive(attacks: dict[str, dict[str, Any]]) -> None:
    check_large_and_nested(attacks)


@pytest.fixture(scope="module")
def refused(hosts: ClusterHosts, attacks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of jobs with bad input on the hosts, run after all other jobs."""
    del attacks
    return bad_input_on(hosts, "spark", "spark://host0:7077")


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_on_a_host_is_an_error_in_bounded_time(refused: dict[str, dict[str, Any]], case: str) -> None:
    check_refused(refused[case], *BAD_INPUT[case])
    assert len(refused["again"]["result"]) == 2  # after all of them


def test_the_guides_programs_run_as_they_stand(hosts: ClusterHosts) -> None:
    check_guide(hosts, "guide_spark.md", programs=3)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"feature_cols": []}, "want at least one each"),
        ({"input_shapes": [[2], [2]]}, "2 input_shapes for 1 feature_cols"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"epochs": 0}, "epochs=0"),
        ({"validation": 1.0}, "want a fraction of the rows"),
        ({"store": ""}, "want a folder or URL"),
        ({"loss": [max, min]}, "2 losses for 1 label_cols"),
    ],
)
def test_an_estimator_refuses_bad_arguments(changed: dict[str, Any], text: str) -> None:
    import torch  # noqa: PLC0415 -- needs Spark's environment

    from multiring.spark.torch_estimator import TorchEstimator  # noqa: PLC0415 -- as above

    model = torch.nn.Linear(2, 1)
    arguments: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "loss": max}
    arguments |= {"feature_cols": ["x"], "label_cols": ["y"], "store": "/nowhere", **changed}
    with pytest.raises(ArgumentError, match=text):
        TorchEstimator(**arguments)


def test_the_keras_estimator_refuses_what_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    from multiring.spark.keras_estimator import KerasEstimator  # noqa: PLC0415 -- needs Spark's environment

    with pytest.raises(ArgumentError, match=r"want a keras\.Model"):
        KerasEstimator(model=1, optimizer="sgd", loss="mse", feature_cols="x", label_cols="y", store="/nowhere")


def test_horovods_names_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import horovod.spark, horovod.spark.torch, horovod.spark.keras\n"
        "from horovod.spark.common.store import LocalStore, Store\n"
        "print(Store.create('a').prefix_path, LocalStore('b'), horovod.spark.run.__module__)\n"
    )
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setenv("PYTHONPATH", path_with_horovod(os.environ))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "a b multiring.horovod.spark_running\n", done.stderr


@pytest.mark.parametrize(
    "unavailable",
    [{"use_mpi": True}, {"stdout": sys.stdout}, {"executable": "/python"}, {"nics": ["a", "b"]}],
    ids=lambda each: next(iter(each)),
)
def test_what_horovods_run_cannot_do_is_an_error(unavailable: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        spark_running.run(print, **unavailable)
    with pytest.raises(UnsupportedError, match="fixed"):
        spark_running.run_elastic(print)
