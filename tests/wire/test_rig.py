"""The rig must not lose an error, a hang or a fault; otherwise all other wire tests would be unreliable."""

import atexit
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.faults import absent, freeze, kill
from tests.support.ranks import Here, Process, RanksFailed, report_of, run_ranks


def number(here: Here, factor: int) -> int:
    return here.rank * factor


def test_values_come_back_by_rank() -> None:
    assert run_ranks(number, 3, 10) == [0, 10, 20]


def odd_ones_fail(here: Here) -> None:
    if here.rank % 2:
        raise ValueError(f"rank {here.rank} is odd")


def test_every_error_is_shown() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)2 ranks failed.*rank 1 is odd.*rank 3 is odd"):
        run_ranks(odd_ones_fail, 4)


def sleep_on_rank_one(here: Here) -> None:
    if here.rank == 1:
        time.sleep(60)


def test_hang_is_explained() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)1 ranks failed.*rank 1: hung.*sleep_on_rank_one"):
        run_ranks(sleep_on_rank_one, 2, deadline_s=5)


def pass_a_stage(here: Here) -> None:
    here.reach("there")
    time.sleep(60 if here.rank == 1 else 0)


def test_fault_fires() -> None:
    report = report_of(pass_a_stage, 2, faults=[kill(1).at("there").after(0.05)])
    assert [outcome.exit_code for outcome in report.outcomes] == [0, -signal.SIGKILL]


def test_fault_that_does_not_fire_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="never happened"):
        report_of(number, 2, 1, faults=[kill(1).at("nowhere")])


def test_frozen_rank_does_not_hold_the_job() -> None:
    report = report_of(pass_a_stage, 2, faults=[freeze(1).at("there")], deadline_s=10)
    assert [outcome.exit_code for outcome in report.outcomes] == [0, -signal.SIGKILL]


def test_absent_rank_is_not_started() -> None:
    report = report_of(number, 3, 1, faults=[absent(1)])
    assert [outcome.rank for outcome in report.outcomes] == [0, 2]


def leave_a_child(_: Here) -> int:
    child = os.fork()
    if child == 0:
        time.sleep(60)
    return child


def test_what_ranks_leave_behind_is_ended() -> None:
    report = report_of(leave_a_child, 2)
    assert report.orphans == 2
    assert not any(Path(f"/proc/{outcome.value}").exists() for outcome in report.outcomes)


class Leaver:
    """An object that reports its own finalization by a raw write."""

    def __init__(self, file: int) -> None:
        self._say = partial(os.write, file, b"torn down")

    def __del__(self) -> None:
        self._say()


kept: list[Any] = []


def leave_notes(here: Here, folder: Path) -> None:
    kept.append(Leaver(os.open(folder / f"last {here.rank}", os.O_CREAT | os.O_WRONLY)))
    atexit.register((folder / f"ended {here.rank}").touch)
    threading.Timer(0.2, (folder / f"thread {here.rank}").touch).start()


@pytest.mark.parametrize("fully", [False, True])
def test_ranks_wait_for_threads_and_run_exit_functions_and_may_end_as_python_does(
    *, fully: bool, tmp_path: Path
) -> None:
    run_ranks(leave_notes, 2, tmp_path, process=Process(ends_fully=fully))
    assert {file.name for file in tmp_path.glob("[et]*")} == {
        f"{word} {n}" for word in ("ended", "thread") for n in (0, 1)
    }
    assert [(tmp_path / f"last {rank}").read_text() for rank in (0, 1)] == ["torn down" if fully else ""] * 2
