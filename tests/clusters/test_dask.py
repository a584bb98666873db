"""Ranks on a Dask cluster of two hosts. `.ci/with-clusters` has Dask."""

import os
from collections.abc import Callable, Iterator
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

pytest.importorskip("distributed", reason="make cluster-test has Dask")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    """Return two hosts with a Dask scheduler and two workers, started with the commands of the guide."""
    folder = tmp_path_factory.mktemp("dask")
    with ClusterHosts(folder, DASK_TEMPORARY_DIRECTORY="/dev/shm/dask") as made:  # noqa: S108 -- the host's own
        signs = ("Scheduler at", "Registered to", "Registered to")
        for (host, command), name, sign in zip(guide_commands("guide_dask.md"), "sab", signs, strict=False):
            wait_for(made.start(host, name, "bash", "-c", f"exec {command}"), sign, timeout_s=240)
        yield made


@pytest.fixture(scope="module")
def cases(hosts: ClusterHosts) -> dict[str, dict[str, Any]]:
    """Return the reports of all jobs of one session."""
    return cases_on(hosts, "dask", f"{hosts.address(0)}:8786")


def test_digits_are_learnt_with_the_losses_of_multiring_run(
    cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_digits(cases["digits"], reference_losses(tmp_path_factory))


@pytest.mark.parametrize(("case", "rank"), [("raise", 2), ("raise in a collective", 1), ("children", 1)])
def test_a_ranks_error_reaches_the_driver_and_ends_the_others(
    cases: dict[str, dict[str, Any]], case: str, rank: int
) -> None:
    check_raised(cases[case], rank)


@pytest.mark.parametrize(
    ("case", "text"), [("killed", "rank 3 was killed by SIGKILL"), ("worker killed", "is lost: Dask worker tcp://")]
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
    assert cases["left"]["result"] == [0, 0]
    check_nothing_left(hosts)


def test_the_secret_is_where_no_other_user_reads_it(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["secret"]["result"] == [[], [], [], []]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("no client", "ArgumentError", "want a dask.distributed.Client"),
        ("too few", "LaunchError", "after 3 s the cluster has 4, on 2 workers"),
        ("busy", "LaunchError", "got no thread of a Dask worker within 4 s"),
        ("pickle", "ArgumentError", "cannot be sent to other processes"),
    ],
)
def test_bad_input_is_an_error_in_bounded_time(
    cases: dict[str, dict[str, Any]], case: str, error: str, text: str
) -> None:
    check_refused(cases[case], error, text)


@pytest.fixture(scope="module")
def attacks(hosts: ClusterHosts, cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of odd programs, run after all other jobs."""
    del cases
    return attacks_on(hosts, "dask", f"{hosts.address(0)}:8786")


@pytest.mark.parametrize("kind", ODD)
def test_a_rank_that_ends_oddly_is_named(attacks: dict[str, dict[str, Any]], kind: str) -> None:
    check_attack(attacks, kind)


def test_large_results_and_nested_jobs_arrive(attacks: dict[str, dict[str, Any]]) -> None:
    check_large_and_nested(attacks)


def renew(hosts: ClusterHosts) -> Callable[[], None]:
    """Return a function that kills the worker of host1 and waits until its nanny has started another."""

    def act() -> None:
        log = hosts.folder / "b.log"
        count = log.read_text(errors="replace").count("Registered to")
        code, output = hosts.run(1, "pkill", "-9", "-f", "multiprocessing.spawn import spawn_main", timeout_s=60)
        assert code == 0, output
        wait_for(log, "Registered to", timeout_s=240, count=count + 1)

    return act


@pytest.fixture(scope="module")
def refused(hosts: ClusterHosts, attacks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of jobs with bad input on the hosts, run after all other jobs."""
    del attacks
    return bad_input_on(hosts, "dask", f"{hosts.address(0)}:8786", renew(hosts))


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_on_a_host_is_an_error_in_bounded_time(refused: dict[str, dict[str, Any]], case: str) -> None:
    check_refused(refused[case], *BAD_INPUT[case])
    assert len(refused["again"]["result"]) == 2  # after all of them


def test_another_python_on_a_worker_is_named(refused: dict[str, dict[str, Any]]) -> None:
    check_refused(refused["other Python"], "LaunchError", "has Python 3.99.0.final.0, this process has 3.")


def test_the_guides_programs_run_as_they_stand(hosts: ClusterHosts) -> None:
    check_guide(hosts, "guide_dask.md", programs=1)
