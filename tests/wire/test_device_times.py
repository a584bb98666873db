"""Timelines show when NCCL ran an operation on the device, by the device's own times on the host's clock."""

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.standin.build import built
from tests.standin.loading import reports
from tests.support.cuda_ranks import OtherArray, device_array, new_stream, open_engine
from tests.support.ranks import Here, run_ranks

import multiring
from multiring import Group

COUNT = 1000
HELD_S = (0.1, 0.5, 3.0)  # a loaded machine may be late
ROUNDING_US = 1.0


class Seen(NamedTuple):
    """The host's times around an operation, in us: the input of rank 1 comes after `released`."""

    called: float
    released: float
    ended: float


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    built()


def now_us() -> float:
    return time.monotonic_ns() / 1000


def held(group: Group, host: Group, held_s: float, *, until: Any = None) -> Seen:
    """Reduce an array whose contents come late on rank 1, after the operation has started on rank 0's device."""
    own = OtherArray(np.ones(COUNT, np.float32), group.rank, is_held=group.rank == 1)
    called = now_us()
    handle: Any = group.all_reduce_async(own)
    if group.rank == 0:
        handle.order(new_stream().value)  # returns when the device has got it
    host.barrier()
    time.sleep(held_s)
    if until is not None:
        until()
    released = now_us()
    if own.hold is not None:
        own.hold.release()
    handle.wait()
    ended = now_us()
    assert (own.now() == 2).all()
    return Seen(called, released, ended)


def record(here: Here, path: str) -> list[Seen]:
    host, _, group = open_engine(here)
    group.all_reduce(device_array(group, np.ones(3)))  # before the timeline
    multiring.start_timeline(path)
    seen = [held(group, host, each) for each in HELD_S]
    held(group, host, 0.0, until=multiring.stop_timeline)  # the device still does this one when the timeline ends
    group.all_reduce(device_array(group, np.ones(3)))  # after it
    assert reports() == []
    return seen


def test_devices_tell_when_they_ran_operations(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    seen = run_ranks(record, 2, str(path), engine="shm")
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    rows = {(each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"}
    starts = []
    for rank in range(2):
        found = [each for each in events if each.get("cat") == "device" and each["pid"] == rank]
        assert len(found) == len(HELD_S), found
        for each, of_host, late in zip(found, seen[rank], seen[1], strict=True):
            told, start, end = each["args"], each["ts"], each["ts"] + each["dur"]
            assert rows[rank, each["tid"]] == f"NCCL on cuda:{rank}"
            assert each["name"] == "all_reduce"
            assert told["bytes"] == 4 * COUNT
            assert "all_reduce sum float32 of shape (1000,)" in told["title"]
            assert told["algbw GB/s"] > 0
            slack = told["clock_error_us"] + ROUNDING_US
            assert of_host.called - slack <= start <= end <= of_host.ended + slack
            assert end >= late.released - slack, "the sum was there before rank 1's input"
            assert rank == 0 or start >= late.released - slack, "rank 1's device began before its input was there"
        starts += [each["ts"] for each in found if rank == 0]
    # Rank 0's device waits for rank 1's; the host's rows do not show that.
    assert any(start < each.released for start, each in zip(starts, seen[1], strict=True))
