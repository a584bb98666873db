"""The monitored barrier names missing ranks on every rank that came, and the next call works."""

import signal
import time
from typing import Any

import numpy as np
import pytest
from tests.support.faults import kill
from tests.support.ranks import ENGINES, Here, report_of, run_ranks

import multiring
from multiring._runtime.failures.monitored_barrier import BarrierOutcome, MonitoredBarrier
from multiring.errors import StateError

LONG_S = 240.0


def all_come(here: Here) -> None:
    """Check that no rank passes before the last rank has come, in the world and in a subgroup."""
    world = here.join()
    group = world.subgroup(list(reversed(range(here.size))))
    assert group is not None
    for each in (world, group):
        roll_call = MonitoredBarrier(each)
        for turn in range(3):
            arrived = np.zeros(1)
            if here.rank == turn % here.size:
                time.sleep(0.02)
                arrived[0] = time.monotonic()
            assert roll_call.call(LONG_S) == BarrierOutcome()
            passed = time.monotonic()
            world.broadcast(arrived, turn % here.size)
            assert passed >= arrived[0]
        roll_call.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_come(engine: str, ranks: int) -> None:
    run_ranks(all_come, ranks, engine=engine)


def await_sign(found: Any) -> None:
    """Wait until `found` returns True, which shows that another rank's message has arrived here."""
    while not found():
        time.sleep(0.005)


def some_are_missing(here: Here) -> list[BarrierOutcome]:
    """Let ranks 1 and 3 come after the first call has failed. They get its error, and the second call passes."""
    group = here.join()
    roll_call = MonitoredBarrier(group)
    rolls = []
    if here.rank == 0:
        roll_call._context.link_with([1, 2, 3])  # connect as the call does; rank 2 may have no connection yet
        await_sign(lambda: roll_call._come.get(1) == {2})
        rolls.append(roll_call.call(0.1, waits_for_all=True))
    elif here.rank == 2:
        rolls.append(roll_call.call(LONG_S))
    group.barrier()
    if here.rank in {1, 3}:
        rolls.append(roll_call.call(LONG_S))
    rolls.append(roll_call.call(LONG_S))
    return rolls


@pytest.mark.parametrize("engine", ENGINES)
def test_some_are_missing(engine: str) -> None:
    assert run_ranks(some_are_missing, 4, engine=engine) == [[BarrierOutcome(missing=(1, 3)), BarrierOutcome()]] * 4


def no_teller(here: Here) -> BarrierOutcome | None:
    """Call the barrier without rank 0; the others then cannot name further missing ranks."""
    group = here.join()
    roll = MonitoredBarrier(group).call(0.1) if here.rank else None
    group.barrier()
    return roll


def test_no_teller() -> None:
    assert run_ranks(no_teller, 3) == [None] + [BarrierOutcome(missing=(0,), was_decided=False)] * 2


def until_a_death(here: Here, waits_for_all: bool) -> Any:  # noqa: FBT001 -- of the test
    """Wait for rank 2, which dies."""
    roll_call = MonitoredBarrier(here.join())
    here.reach("waiting")
    if here.rank == 2:
        time.sleep(LONG_S)
    if here.rank == 0 and waits_for_all:
        await_sign(lambda: roll_call._come.get(1) == {1, 3} and 2 in roll_call._lost)
    return roll_call.call(0.1 if here.rank == 0 and waits_for_all else LONG_S, waits_for_all=waits_for_all)


@pytest.mark.parametrize("waits_for_all", [False, True])
def test_a_death(waits_for_all: bool) -> None:  # noqa: FBT001 -- a parameter
    report = report_of(until_a_death, 4, waits_for_all, faults=[kill(2).at("waiting").after(0.1)])
    assert report.outcomes[2].exit_code == -signal.SIGKILL
    rolls = [outcome.value for outcome in report.outcomes if outcome.rank != 2]
    assert [roll.missing for roll in rolls] == [(2,)] * 3
    ((rank, why),) = rolls[0].lost
    assert rank == 2
    assert why.startswith("it died")


def the_teller_dies(here: Here) -> Any:
    group = here.join()
    here.reach("waiting")
    if here.rank == 0:
        time.sleep(30)
    return MonitoredBarrier(group).call(LONG_S)


def test_the_teller_dies() -> None:
    report = report_of(the_teller_dies, 3, faults=[kill(0).at("waiting").after(0.1)])
    for outcome in report.outcomes[1:]:
        roll = outcome.value
        assert (roll.missing, roll.was_decided) == ((0,), False)
        assert roll.lost[0][1].startswith("it died")


def after_the_end(here: Here) -> None:
    roll_call = MonitoredBarrier(here.join())
    roll_call.close()
    with pytest.raises(StateError, match="left the job, or the group was closed"):
        roll_call.call(LONG_S)
    multiring.shutdown()


def test_after_the_end() -> None:
    run_ranks(after_the_end, 2)
