"""Horovod's environment variables: those that ranks get, and those that multiring reads."""

import os
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._cli import main
from multiring._launch.horovod import (
    HOROVOD_IGNORED,
    PACKAGES,
    horovod_environment,
    horovod_exec_command,
    horovod_without_effect,
    path_with_horovod,
    positions_on,
)
from multiring._launch.horovod_exec import main as become
from multiring._launch.horovod_exec import position_of
from multiring._settings import HOROVOD_PLACE, HOROVOD_READ, Settings
from multiring.errors import ArgumentError, LaunchError

DOCS = Path(__file__).parents[2] / "docs" / "horovod.md"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_places_number_ranks_host_by_host(counts: list[int]) -> None:
    places = positions_on([(f"h{index}", count) for index, count in enumerate(counts)])
    assert [place.rank for place in places] == list(range(sum(counts)))
    assert all(place.size == sum(counts) for place in places)
    for place in places:
        there = [each for each in places if each.hostname == place.hostname]
        assert place.local_size == len(there)
        assert there[place.local_rank] is place
        across = [each for each in places if each.local_rank == place.local_rank]
        assert place.cross_size == len(across)
        assert across[place.cross_rank] is place


def test_the_variables_of_a_rank() -> None:
    place = positions_on([("me@a", 2), ("b", 1)])[2]
    assert horovod_environment({"PYTHONPATH": "x:y"}, place) == {
        "HOROVOD_RANK": "2",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "1",
        "HOROVOD_CROSS_RANK": "1",
        "HOROVOD_CROSS_SIZE": "2",
        "HOROVOD_HOSTNAME": "b",
        "HOROVOD_CONTROLLER": "multiring",
        "HOROVOD_CPU_OPERATIONS": "multiring",
        "PYTHONPATH": f"{PACKAGES}:x:y",
    }


def test_the_path_leads_to_our_package_once() -> None:
    assert path_with_horovod({}) == str(PACKAGES)
    assert path_with_horovod({"PYTHONPATH": ""}) == str(PACKAGES)
    assert path_with_horovod({"PYTHONPATH": f"{PACKAGES}:z"}) == f"{PACKAGES}:z"
    assert (PACKAGES / "horovod" / "__init__.py").is_file()


def test_mpiexecs_rank_is_placed() -> None:
    assert position_of("a:2,b:2", {"PMI_RANK": "3"}).hostname == "b"
    assert position_of("a:2,b:2", {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "0"}).local_rank == 1
    for foreign in ({}, {"PMI_RANK": "4"}, {"PMI_RANK": "-1"}):
        with pytest.raises(LaunchError, match="in OMPI_COMM_WORLD_RANK or PMI_RANK or PMIX_RANK: want 0 to 3"):
            position_of("a:2,b:2", foreign)


@pytest.mark.parametrize(("program", "code"), [("/no/such/program", 127), ("/", 126)])
def test_a_placed_command_that_cannot_be_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], program: str, code: int
) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    with pytest.raises(SystemExit) as exit_:
        become(["a:1", program])
    assert exit_.value.code == code
    assert f"cannot execute '{program}'" in capsys.readouterr().err


# A minimal mpiexec: every rank gets the same environment and its own number.
MPIEXEC = """#!/bin/sh
[ "$1" = --version ] && exec echo HYDRA
while [ "$1" != -wdir ]; do shift; done; shift 2
for rank in 0 1 2; do PMI_RANK=$rank PMI_SIZE=3 "$@" || exit; done
"""


def test_several_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "mpiexec"
    program.write_text(MPIEXEC)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOROVOD_RANK", "7")  # left over from an outer job
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "9")
    script = (
        "echo $HOROVOD_RANK/$HOROVOD_SIZE $HOROVOD_LOCAL_RANK $HOROVOD_CROSS_RANK $HOROVOD_HOSTNAME ${PYTHONPATH%%:*}"
    )
    assert main(["run", "--launcher", "mpiexec", "--horovod", "--hosts", "a:2,b:1", "--", "sh", "-c", script]) == 0
    assert capfd.readouterr().out.splitlines() == [
        f"0/3 0 0 a {PACKAGES}",
        f"1/3 1 0 a {PACKAGES}",
        f"2/3 0 1 b {PACKAGES}",
    ]
    assert horovod_exec_command("a:2", ["x"])[0] == sys.executable


# -- variables that the user sets


def test_horovods_variables_are_read_when_asked_for() -> None:
    environment = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "50",
        "HOROVOD_GLOO_IFACE": "eth7",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "12",
    }
    settings = Settings.from_environment(environment, horovod=True)
    assert (settings.stall_warn_s, settings.stall_timeout_s) == (5.0, 50.0)
    assert (settings.interface, settings.init_timeout_s) == ("eth7", 12.0)
    assert Settings.from_environment(environment) == Settings()
    sets = Settings.from_environment({"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}, horovod=True)
    assert sets.dynamic_process_sets


def test_ours_win_over_horovods() -> None:
    both = {"MULTIRING_STALL_WARN_S": "3", "HOROVOD_STALL_CHECK_TIME_SECONDS": "4"}
    assert Settings.from_environment(both, horovod=True).stall_warn_s == 3.0


def test_horovods_words_for_never() -> None:
    never = Settings.from_environment({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, horovod=True)
    assert never.stall_timeout_s > 10 * 365 * 86400
    assert never.stall_warn_s == Settings().stall_warn_s
    off = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "4"}
    assert Settings.from_environment(off, horovod=True).stall_warn_s > 10 * 365 * 86400
    on = Settings.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "0", "HOROVOD_GLOO_IFACE": ""}, horovod=True)
    assert on == Settings()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "soon"),
        ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "-1"),
        ("HOROVOD_STALL_CHECK_DISABLE", "perhaps"),
        ("HOROVOD_GLOO_TIMEOUT_SECONDS", "0"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ArgumentError, match=f"{name}='{text}': want "):
        Settings.from_environment({name: text}, horovod=True)
    monkeypatch.setenv(name, text)
    assert main(["run", "--horovod", "-n", "1", "true"]) == 2
    assert f"{name}='{text}': want " in capsys.readouterr().err


def test_what_has_no_effect_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "")
    assert list(horovod_without_effect()) == ["HOROVOD_AUTOTUNE"]
    assert main(["run", "--horovod", "-n", "1", "true"]) == 0
    told = capfd.readouterr().err
    assert told == f"multiring: HOROVOD_AUTOTUNE has no effect: {HOROVOD_IGNORED['HOROVOD_AUTOTUNE']}\n"
    assert main(["run", "-n", "1", "true"]) == 0
    assert capfd.readouterr().err == ""


def test_the_page_lists_every_variable() -> None:
    text = DOCS.read_text()
    names = {*HOROVOD_PLACE.values(), *HOROVOD_READ, *HOROVOD_IGNORED}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert not set(HOROVOD_READ) & set(HOROVOD_IGNORED)
