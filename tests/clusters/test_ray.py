"""Ranks on a Ray cluster of two hosts. `.ci/with-clusters` has Ray."""

import os
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
from tests.support.cluster_hosts import ClusterHosts

pytest.importorskip("ray", reason="make cluster-test has Ray")
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="virtual hosts need root"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterHosts]:
    """Return two hosts with a Ray cluster."""
    folder = tmp_path_factory.mktemp("ray")
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/dev/shm"}  # noqa: S108 -- the host's own
    variables |= {"RAY_raylet_start_wait_time_s": "200"}  # a busy machine
    # With a token, as today's Ray starts a head on a host that has one; never with the one in the user's home.
    variables |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    with ClusterHosts(folder, **variables) as made:
        start_ray(made)
        yield made


def start_ray(made: ClusterHosts) -> None:
    """Start the nodes with the commands of the guide."""
    for host, command in guide_commands("guide_ray.md")[:2]:
        code, output = made.run(
            host, "bash", "-c", f"{command} --num-cpus=2 --object-store-memory=100000000", timeout_s=240
        )
        assert code == 0, output


@pytest.fixture(scope="module")
def cases(hosts: ClusterHosts) -> dict[str, dict[str, Any]]:
    """Return the reports of all jobs of one session."""
    return cases_on(hosts, "ray", f"{hosts.address(0)}:6379")


def test_digits_are_learnt_with_the_losses_of_multiring_run(
    cases: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_digits(cases["digits"], reference_losses(tmp_path_factory))


@pytest.mark.parametrize(("case", "rank"), [("raise in a collective", 1), ("children", 1)])
def test_a_ranks_error_reaches_the_driver_and_ends_the_others(
    cases: dict[str, dict[str, Any]], case: str, rank: int
) -> None:
    check_raised(cases[case], rank)


def test_a_killed_worker_is_named(cases: dict[str, dict[str, Any]]) -> None:
    killed = cases["killed"]
    assert killed["error"] == "LaunchError"
    assert "rank 3 ended without a result" in killed["text"]
    assert killed["seconds"] < 150


def test_more_jobs_run_in_the_session(cases: dict[str, dict[str, Any]]) -> None:
    numbers = cases["again"]["result"]
    assert [each[:4] for each in numbers] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]
    assert [each[:4] for each in cases["one host"]["result"]] == [[0, 2, 0, 2], [1, 2, 1, 2]]


def test_nothing_is_left_behind(cases: dict[str, dict[str, Any]], hosts: ClusterHosts) -> None:
    for case in ("left", "left 2"):
        assert cases[case]["result"] == {"groups": [], "cpus": 4.0}
    check_nothing_left(hosts)


def test_the_secret_is_where_no_other_user_reads_it(cases: dict[str, dict[str, Any]]) -> None:
    assert cases["secret"]["result"] == [[], [], [], []]


def test_horovods_executor_keeps_its_ranks(cases: dict[str, dict[str, Any]]) -> None:
    found = cases["executor"]["result"]
    assert found["run"] == [[0, 5.0, "pepper"], [1, 5.0, "pepper"]]
    assert found["run again"] == [[0, 7.0, "pepper"], [1, 7.0, "pepper"]]
    assert found["remote"] == [[0, 9.0, "pepper"], [1, 9.0, "pepper"]]
    assert found["execute"] == [11, 11]
    assert found["single"] == 12
    assert found["raised"] == ["LaunchError", "ZeroDivisionError"]
    assert [each[:4] for each in found["by host"]] == [[0, 4, 0, 2], [1, 4, 1, 2], [2, 4, 0, 2], [3, 4, 1, 2]]


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        ("not initialized", "StateError", "call ray.init()"),
        ("too few", "LaunchError", "within 3 s. The cluster has CPU 4, of which are free CPU 4"),
        ("no GPU", "LaunchError", "The cluster has GPU 0"),
        ("pickle", "ArgumentError", "cannot be sent to other processes"),
        ("placement", "ArgumentError", "want PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
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
    return attacks_on(hosts, "ray", f"{hosts.address(0)}:6379")


@pytest.mark.parametrize("kind", ODD)
def test_a_rank_that_ends_oddly_is_named(attacks: dict[str, dict[str, Any]], kind: str) -> None:
    check_attack(attacks, kind)


def test_large_results_and_nested_jobs_arrive(attacks: dict[str, dict[str, Any]]) -> None:
    check_large_and_nested(attacks)


@pytest.fixture(scope="module")
def refused(hosts: ClusterHosts, attacks: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the reports of jobs with bad input on the hosts, run after all other jobs."""
    del attacks
    return bad_input_on(hosts, "ray", f"{hosts.address(0)}:6379")


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_on_a_host_is_an_error_in_bounded_time(refused: dict[str, dict[str, Any]], case: str) -> None:
    check_refused(refused[case], *BAD_INPUT[case])
    assert len(refused["again"]["result"]) == 2  # after all of them


def test_the_guides_programs_run_as_they_stand(hosts: ClusterHosts) -> None:
    check_guide(hosts, "guide_ray.md", programs=2)
