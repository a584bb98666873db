"""Ranks on a cluster's workers: their order, positions, variables and releases, without any cluster."""

import pytest

from multiring._launch.cluster_ranks import (
    ClusterRendezvous,
    WorkerFacts,
    check_function,
    check_release,
    check_start_timeout,
    check_versions,
    check_workers,
    positions_of,
    rank_order,
    rank_variables,
    slots_by_worker,
    variables_to_hand_on,
)
from multiring._launch.cluster_worker import version_probe
from multiring._version import VERSION
from multiring.errors import ArgumentError, LaunchError

PLACE = ClusterRendezvous(
    rendezvous="10.0.0.1:2000", secret="s" * 64, job="ray-1", torch_address="10.0.0.1", torch_port=2001
)


def facts(host: str, version: str = "1", python: str = "3.11") -> WorkerFacts:
    return WorkerFacts(name=f"worker on {host}", host=f"{host} id", hostname=host, version=version, python=python)


def test_ranks_of_a_host_are_consecutive_and_the_first_worker_is_rank_0() -> None:
    assert rank_order(["a", "b", "a", "c", "b"]) == [0, 2, 1, 4, 3]
    assert rank_order(["b"]) == [0]
    workers = [facts(host) for host in "aabbc"]
    places = positions_of(workers)
    assert [(each.rank, each.size, each.local_rank, each.local_size) for each in places] == [
        (0, 5, 0, 2), (1, 5, 1, 2), (2, 5, 0, 2), (3, 5, 1, 2), (4, 5, 0, 1),
    ]  # fmt: skip
    assert [(each.cross_rank, each.cross_size) for each in places] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]
    assert [each.hostname for each in places] == list("aabbc")


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 0, -1.0, 1e9, "60", None, True])
def test_a_start_timeout_that_no_timer_can_take_is_refused(seconds: object) -> None:
    with pytest.raises(ArgumentError, match=r"start_timeout_s=.*: want a number of seconds above 0, at most 1e\+07"):
        check_start_timeout(seconds)
    assert check_start_timeout(60) == 60.0


def test_ranks_are_spread_over_the_workers_as_their_slots_allow() -> None:
    hosts = {"w1": "a", "w2": "b", "w3": "a"}
    assert slots_by_worker({"w1": 2, "w2": 2, "w3": 1}, hosts, 4) == ["w1", "w1", "w3", "w2"]
    assert slots_by_worker({"w1": 4, "w2": 4, "w3": 4}, hosts, 3) == ["w1", "w3", "w2"]
    assert slots_by_worker({"w1": 1, "w2": 3, "w3": 0}, hosts, 4) == ["w1", "w2", "w2", "w2"]


def test_a_rank_has_its_numbers_for_multiring_and_torch_and_no_secret() -> None:
    variables = rank_variables(positions_of([facts("a"), facts("b")])[1], PLACE)
    assert variables["MULTIRING_RANK"] == variables["RANK"] == "1"
    assert variables["MULTIRING_SIZE"] == variables["WORLD_SIZE"] == "2"
    assert variables["MULTIRING_LOCAL_RANK"] == variables["LOCAL_RANK"] == "0"
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "2001")
    assert (variables["MULTIRING_RENDEZVOUS"], variables["MULTIRING_JOB"]) == ("10.0.0.1:2000", "ray-1")
    assert PLACE.secret not in str(variables)
    assert PLACE.secret not in f"{PLACE} {PLACE!r}"


def test_the_drivers_settings_apply_and_its_place_does_not() -> None:
    here = {
        "MULTIRING_RANK": "0",
        "MULTIRING_SECRET": "x",
        "MULTIRING_JOB": "outer",
        "MULTIRING_STALL_WARN_S": "9",
        "HOROVOD_RANK": "0",
        "HOROVOD_TIMELINE": "t.json",
        "OMP_NUM_THREADS": "2",
        "HOME": "/root",
    }
    handed = variables_to_hand_on(here, {"SPICE": "salt", "OMP_NUM_THREADS": "1"})
    assert handed == {
        "MULTIRING_STALL_WARN_S": "9",
        "HOROVOD_TIMELINE": "t.json",
        "OMP_NUM_THREADS": "1",
        "SPICE": "salt",
    }


def test_another_version_on_a_worker_is_named() -> None:
    check_versions([facts("a"), facts("b")], "1", "3.11")
    with pytest.raises(LaunchError, match="worker on b on b has multiring 2, this process has 1"):
        check_versions([facts("a"), facts("b", version="2")], "1", "3.11")
    with pytest.raises(LaunchError, match=r"has Python 3\.12, this process has 3\.11"):
        check_versions([facts("b", python="3.12")], "1", "3.11")
    probed = version_probe()()
    assert probed["version"] == VERSION


@pytest.mark.parametrize("found", ["2.39.9", "1.99", "2.4"])
def test_an_old_release_is_refused_with_both_numbers(found: str) -> None:
    with pytest.raises(LaunchError, match=rf"Ray {found} is too old: want 2\.40 or newer"):
        check_release("Ray", found, (2, 40))


@pytest.mark.parametrize("found", ["2.40.0", "2.41rc1", "3.0.0.dev0", "2026.8.0"])
def test_a_new_release_is_accepted(found: str) -> None:
    check_release("Ray", found, (2, 40))


@pytest.mark.parametrize("count", [0, -1, True, 2.0, "4", None])
def test_a_wrong_number_of_workers_is_refused(count: object) -> None:
    with pytest.raises(ArgumentError, match="want an integer, at least 1"):
        check_workers(count)
    assert check_workers(3) == 3


def test_a_result_in_place_of_a_function_is_refused() -> None:
    with pytest.raises(ArgumentError, match="3 is not a function"):
        check_function(3)
