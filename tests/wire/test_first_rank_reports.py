"""Reports of rank 0: every other rank learns what rank 0 has done, and rank 0 waits for none."""

import signal
import time

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.ranks import Here, report_of, run_ranks

from multiring._frontend.first_rank_reports import FirstRankReports, OutcomeKind
from multiring._runtime.failures.monitored_barrier import MonitoredBarrier
from multiring.errors import PeerLostError, StallError

PHASE = (3, 1)


def learn_all(here: Here) -> list[tuple[OutcomeKind, str]]:
    """Return what this rank learns of each act; rank 0 is early for some acts, and late for others."""
    group = here.join()
    reports = FirstRankReports(group)
    group.barrier()
    if here.rank == 0:
        reports.open(PHASE)
        reports.report(PHASE, "early")
        time.sleep(0.1)
        reports.report(PHASE, "broken", "a disk is full")
        reports.report(PHASE, "early")
        group.all_reduce(np.ones(1))
        reports.close(PHASE)
        group.barrier()
        return []
    # The other ranks ask before rank 0 has opened the phase, or afterwards.
    asked = (("early", 1), ("broken", 1), ("early", 2), ("passed", 1))
    learnt = [reports.learn(PHASE, act, repetition) for act, repetition in asked]
    group.all_reduce(np.ones(1))
    learnt.append(reports.learn(PHASE, "closed", 1))
    group.barrier()
    return learnt


@pytest.mark.parametrize("ranks", [1, 6])  # rank 5 has rank 2 between itself and rank 0
def test_every_rank_learns_what_rank_0_has_done(ranks: int) -> None:
    for learnt in run_ranks(learn_all, ranks)[1:]:
        done, never = (OutcomeKind.DONE, ""), (OutcomeKind.NEVER, "")
        assert learnt == [done, (OutcomeKind.FAILED, "a disk is full"), done, never, never]


def wait_for_rank_0(here: Here) -> str:
    group = here.join()
    reports = FirstRankReports(group)
    here.reach("waiting")
    if here.rank == 0:
        MonitoredBarrier(group).call(60.0)
        return ""
    try:
        reports.learn(PHASE, "model.keras", 1)
    except (PeerLostError, StallError) as error:
        if isinstance(error, StallError):
            MonitoredBarrier(group).call(60.0)
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def test_the_death_of_rank_0_ends_the_wait() -> None:
    report = report_of(wait_for_rank_0, 2, faults=[kill(0).at("waiting").after(0.1)])
    assert report.outcomes[0].exit_code == -signal.SIGKILL
    assert report.outcomes[1].value.startswith("PeerLostError: model.keras: rank 0 died")


def test_a_silent_rank_0_is_named_after_the_time_limit() -> None:
    told = run_ranks(wait_for_rank_0, 2, stall_warn_s=0.2, stall_timeout_s=0.5)[1]
    assert told.startswith("StallError: model.keras: rank 0 has not done this for")
    assert "wait_for_rank_0" in told
