"""The balance line finds the limiting stage from counters, and merges spans of time correctly."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from multiring._runtime.tracing.event_log import EventLog
from multiring.data.balance.decision import STAGES, TrainingCounts, balance_of
from multiring.data.feeding.batches import queued_s


def counted(**changes: Any) -> TrainingCounts:
    """Return counters of 100 steps of 10 ms, in which worker stages, computation and wire take 2 ms each."""
    spent = {
        "source": 0.2,
        "source alone": 0.15,
        "source alone requests": 75,
        "source beside": 0.05,
        "source beside requests": 25,
        "disk": 0.2,
        "disk alone": 0.15,
        "disk alone requests": 75,
        "disk beside": 0.05,
        "disk beside requests": 25,
        "decode": 0.2,
        "copy": 0.1,
        "cpu": 0.3,
    }
    values: dict[str, Any] = {
        "wall_s": 1.0,
        "steps": 100,
        "waited_s": 0.6,
        "wire_s": 0.3,
        "exposed_s": 0.2,
        "cpu_s": 0.5,
        "workers": 2,
        "cores": 2.0,
        "spent": spent,
    }
    values |= changes
    values["spent"] = spent | changes.get("spent", {})
    return TrainingCounts(**values)


LIMITED: dict[str, dict[str, Any]] = {
    # Concurrent requests take twice as long as single ones, so the source serves them one by one.
    "source": {
        "spent": {
            "source": 1.8,
            "source alone": 0.09,
            "source alone requests": 10,
            "source beside": 1.71,
            "source beside requests": 95,
        }
    },
    # A request is always in progress, so that no request is alone.
    "disk": {
        "spent": {
            "disk": 1.9,
            "disk alone": 0.0,
            "disk alone requests": 0,
            "disk beside": 1.9,
            "disk beside requests": 100,
        }
    },
    "network": {
        "spent": {
            "network": 1.8,
            "network alone": 0.09,
            "network alone requests": 10,
            "network beside": 1.71,
            "network beside requests": 95,
        }
    },
    # Both cores are busy, so more workers would not help.
    "decode": {"cpu_s": 1.98, "spent": {"decode": 1.6, "cpu": 1.7}},
    "copy": {
        "cpu_s": 1.0,
        "workers": 1,
        "cores": 1.0,
        "spent": {"copy": 0.85, "decode": 0.0, "source": 0.05, "disk": 0.05, "cpu": 0.9},
    },
    "compute": {"waited_s": 0.0, "exposed_s": 0.1, "wire_s": 0.1},
    "wire": {"waited_s": 0.0, "exposed_s": 0.8, "wire_s": 0.9},
    # The only worker is always busy with several stages, and a core is idle.
    "workers": {"workers": 1, "spent": {"source": 0.3, "disk": 0.3, "decode": 0.3}},
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_is_found(stage: str) -> None:
    balance = balance_of([counted(**LIMITED[stage])])
    assert balance.bound == stage
    assert balance.gains[stage] == max(balance.gains.values()) > 1.2
    assert 0.99 < sum(balance.shares[each] for each in ("compute", "wire", "data", "other ranks")) < 1.01


def test_the_rank_that_others_wait_for_decides() -> None:
    waiting = counted(peers_s=0.7, waited_s=0.0, exposed_s=0.0, wire_s=0.0)
    slow = counted(peers_s=0.01, **LIMITED["wire"])
    assert balance_of([waiting, slow]).bound == balance_of([slow]).bound == "wire"


def test_requests_that_are_served_at_once_are_no_bound_of_more_workers() -> None:
    spent = {
        "source": 1.8,
        "source alone": 0.18,
        "source alone requests": 10,
        "source beside": 1.62,
        "source beside requests": 90,
    }
    assert balance_of([counted(spent=spent)]).bound == "workers"


def test_workers_that_wait_for_a_core_gain_nothing_by_more_workers() -> None:
    # Two workers decode all the time with 0.8 of a core each; other processes use the rest.
    shared: dict[str, Any] = {
        "spent": {"decode": 1.8, "cpu": 1.6},
        "cpu_s": 1.65,
        "waited_s": 0.8,
        "exposed_s": 0.1,
        "wire_s": 0.1,
    }
    assert balance_of([counted(**shared)]).gains["workers"] > 1.3  # computed for free cores
    shared["spent"] |= {"queued": 0.4}
    balance = balance_of([counted(**shared)])
    assert balance.bound == "decode"
    assert balance.gains["workers"] < 1.15


def test_the_line_has_all_of_it() -> None:
    line = str(balance_of([counted(**LIMITED["compute"])]))
    for word in ("bounded by compute", "source", "disk", "network", "decode", "host-to-arena", "compute", "wire"):
        assert word in line
    assert "\n" not in line


def test_every_reader_gets_all_events() -> None:
    recorded: list[Any] = [1, 2]

    def take() -> list[Any]:
        found = recorded[:]
        recorded.clear()
        return found

    log = EventLog(take)
    reader = log.reader()
    recorded += [3]
    found: Any = (reader.take(), log.take())
    assert found == ([3], [1, 2, 3])
    recorded += [4]
    found = (log.take(), log.take(), reader.take(), reader.take())
    assert found == ([4], [], [4], [])


def test_waiting_for_a_core_is_counted_by_each_thread_and_leaves_no_file_open() -> None:
    descriptors = Path("/proc/self/fd")
    queued_s()
    before = len(list(descriptors.iterdir()))
    ended: list[float] = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: ended.append(queued_s()))
        thread.start()
        thread.join()
    assert len(ended) == 20
    assert all(0 <= each < 60 for each in ended)
    assert len(list(descriptors.iterdir())) <= before
    # A forked process reads its own counters and closes only its own descriptors.
    file = os.open(os.devnull, os.O_RDONLY)
    child = os.fork()
    if child == 0:
        os._exit(0 if queued_s() < 60 and os.fstat(file).st_rdev else 1)
    assert os.waitpid(child, 0)[1] == 0
    os.close(file)


def test_what_sleeps_is_no_computation_where_others_fill_the_cores() -> None:
    spent = {"decode": 0.2, "copy": 0.004, "cpu": 0.008, "queued": 0.02}
    one = TrainingCounts(wall_s=0.22, steps=12, waited_s=0.21, cpu_s=0.01, workers=1, cores=2.0, spent=spent)
    assert balance_of([one]).bound == "workers"
