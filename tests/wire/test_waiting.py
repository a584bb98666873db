"""Waiting for ranks that are silent, slow or gone, and waits that end early."""

import logging
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.faults import freeze, interrupt
from tests.support.ranks import Here, Report, report_of, run_ranks

import multiring
from multiring.errors import MultiringError, PeerLostError, StallError

LIMIT_S = 100.0  # it ends a wait that hangs


class Messages(logging.Handler):
    """A handler that stores log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


def be_silent_until(told: Sequence[Path]) -> None:
    """Take part in nothing until other ranks have made these files."""
    until = time.monotonic() + LIMIT_S
    while not all(path.exists() for path in told):
        assert time.monotonic() < until, told
        time.sleep(0.02)


def wait_for_the_silent(here: Here, name: str, over: Path) -> tuple[str, list[str], float]:
    """Call an operation in which rank 1 does not take part; return (error, log messages, seconds)."""
    logged = Messages()
    logging.getLogger("multiring").addHandler(logged)
    group = here.join(stall_warn_s=0.3, stall_timeout_s=2.0)
    group.barrier()
    if here.rank == 1:
        be_silent_until([over])
        return "", [], 0
    logged.texts.clear()
    start = time.monotonic()
    with pytest.raises(StallError) as stalled:
        operations(group)[name]()
    waited_s = time.monotonic() - start
    over.touch()
    return str(stalled.value), logged.texts, waited_s


def operations(group: multiring.Group) -> dict[str, Any]:
    """Return an operation of each kind that needs rank 1."""
    return {
        "all_reduce": lambda: group.all_reduce(np.ones(10)),
        "barrier": group.barrier,
        "all_gather": lambda: group.all_gather(np.ones(3)),
        "all_gather_async": lambda: group.all_gather_async(np.ones(3)).wait(),
        "recv": lambda: group.recv(np.ones(3), 1),
        "send": lambda: group.send(np.ones(3), 1),
        "subgroup": lambda: group.subgroup([0, 1]),
    }


ONE_OF_EACH = ("all_reduce", "barrier", "all_gather", "all_gather_async", "recv", "send", "subgroup")
SILENT = [*((name, "shm") for name in ONE_OF_EACH), ("all_reduce", "tcp"), ("send", "tcp")]


@pytest.mark.parametrize(("name", "engine"), SILENT)
def test_silent_rank_is_named(name: str, engine: str, tmp_path: Path) -> None:
    by_rank = run_ranks(wait_for_the_silent, 2, name, tmp_path / "over", engine=engine)
    text, logged, waited_s = by_rank[0]
    assert re.search(r"nothing came from rank 1 for ([2-9]|\d\d) s", text), text
    assert text.endswith("; the contents of its arrays are undefined")
    assert 1.9 < waited_s < LIMIT_S
    if name != "all_gather_async":  # this wait happens in a future, without a warning
        (warning,) = logged
        assert warning.startswith("WARNING ")
        assert "nothing has come from rank 1 for " in warning


def culprit_beyond(here: Here, folder: Path) -> str:
    """Leave rank 3 silent. Ranks that wait for it only through other ranks must name it too."""
    group = here.join(stall_warn_s=0.2, stall_timeout_s=2.0)
    group.barrier()
    if here.rank == 3:
        be_silent_until([folder / str(rank) for rank in (0, 1, 2, 4)])
        return ""
    with pytest.raises(MultiringError) as stalled:
        group.all_reduce(np.ones(100))
    (folder / str(here.rank)).touch()
    return f"{type(stalled.value).__name__}: {stalled.value}"


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_culprit_is_named_everywhere(engine: str, tmp_path: Path) -> None:
    for text in run_ranks(culprit_beyond, 5, tmp_path, engine=engine)[:3]:
        assert text.startswith("StallError"), text
        assert "rank 3" in text, text


def slow(here: Here) -> list[str]:
    """Wait for a slow rank: there is a single warning and no error."""
    logged = Messages()
    logging.getLogger("multiring").addHandler(logged)
    group = here.join(stall_warn_s=1.0, stall_timeout_s=LIMIT_S)
    group.barrier()
    logged.texts.clear()
    time.sleep(2.5 if here.rank == 1 else 0)
    total = np.ones(10)
    group.all_reduce(total)
    assert (total == here.size).all()
    return logged.texts


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_slow_rank_is_warned_of(engine: str) -> None:
    for rank, texts in enumerate(run_ranks(slow, 3, engine=engine)):
        assert len(texts) == (rank != 1), texts
        assert all("all_reduce sum float64 of shape (10,)" in text and "rank 1 for " in text for text in texts), texts


def timeouts(here: Here, over: Path) -> list[bool]:
    """Check that `wait(timeout)` raises and that the operation continues."""
    group = here.join()
    if here.rank == 1:
        be_silent_until([over])
    array = np.ones(10)
    handles = [group.all_reduce_async(array), group.all_gather_async(np.ones(2))]
    timed_out = []
    for handle in handles:
        try:
            handle.wait(timeout=0.1)
            timed_out.append(False)
        except TimeoutError as error:
            timed_out.append("is still in flight after 0.1 s" in str(error))
    over.touch()
    for handle in handles:
        handle.wait(timeout=240)
        assert handle.done()
    assert (array == here.size).all()
    return timed_out


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_wait_with_timeout(engine: str, tmp_path: Path) -> None:
    assert run_ranks(timeouts, 2, tmp_path / "over", engine=engine)[0] == [True, True]


def leave_others_waiting(here: Here, name: str) -> str:
    group = here.join()
    group.barrier()
    if here.rank == 1:
        return ""  # exits normally
    with pytest.raises(PeerLostError) as lost:
        operations(group)[name]()
    return str(lost.value)


@pytest.mark.parametrize("engine", ["shm", "tcp", "shm+tcp"])
@pytest.mark.parametrize("name", ["all_reduce", "barrier", "all_gather_async", "recv", "send"])
def test_rank_that_left_is_named(name: str, engine: str) -> None:
    by_rank = run_ranks(leave_others_waiting, 3, name, engine=engine)
    for text in (by_rank[0], by_rank[2]):
        assert "rank 1 left the job" in text, text
        assert text.endswith("; the contents of its arrays are undefined")


def uncaught(here: Here) -> None:
    group = here.join()
    group.barrier()
    if here.rank == 1:
        raise RuntimeError("a bug in the training script")
    group.all_reduce(np.ones(5))


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_uncaught_error_is_a_death(engine: str) -> None:
    report = report_of(uncaught, 3, engine=engine)
    assert str(report.outcomes[1].error) == "a bug in the training script"
    for outcome in (report.outcomes[0], report.outcomes[2]):
        assert isinstance(outcome.error, PeerLostError)
        assert "rank 1 died" in str(outcome.error)


def wait_for_ever(here: Here, name: str, over: Path) -> str:
    group = here.join()
    group.barrier()
    if here.rank == 0:
        here.reach("waiting")
        try:
            operations(group)[name]()
        except KeyboardInterrupt:
            multiring.shutdown()
            return "interrupted"
        finally:
            over.touch()
    be_silent_until([over])
    return "slept"


@pytest.mark.parametrize("engine", ["shm", "tcp"])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather_async"])
def test_waits_serve_ctrl_c(name: str, engine: str, tmp_path: Path) -> None:
    """Rank 1 is silent until the wait of rank 0 has ended, so that only the signal can end it."""
    fault = interrupt(0).at("waiting").after(0.3)
    report = report_of(wait_for_ever, 2, name, tmp_path / "over", engine=engine, faults=[fault], stall_warn_s=0.2)
    assert report.outcomes[0].value == "interrupted", report
    assert report.outcomes[1].value == "slept", report


def join_alone(here: Here) -> None:
    if here.rank == 0:
        here.reach("joining")
        here.join()
    time.sleep(LIMIT_S)


def test_init_serves_ctrl_c() -> None:
    report = report_of(join_alone, 2, faults=[interrupt(0).at("joining").after(0.3), interrupt(1).after(0.5)])
    assert isinstance(report.outcomes[0].error, KeyboardInterrupt)
    assert report.outcomes[0].ended_s < LIMIT_S


def work(here: Here, *, arena: bool = False) -> str:
    group = here.join(stall_warn_s=0.2, stall_timeout_s=3.0)
    array = group.allocate(100_000, "float64") if arena else np.ones(100_000)
    here.reach("working")
    try:
        for _ in range(1_000_000):
            group.all_reduce(array, "average")
    except MultiringError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def the_frozen_one_is_named(report: Report, rank: int) -> bool:
    texts = [outcome.value for outcome in report.outcomes if outcome.rank != rank]
    return all(text and text.startswith("StallError") and f"rank {rank}" in text for text in texts)


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_frozen_rank_is_named(engine: str) -> None:
    """SIGSTOP during a collective closes no connection and ends no process, so only a time-out detects it."""
    report = report_of(work, 3, engine=engine, faults=[freeze(2).at("working").after(0.2)])
    assert the_frozen_one_is_named(report, 2), [outcome.value for outcome in report.outcomes]


def test_a_rank_that_may_write_into_memory_later_is_named() -> None:
    """A rank is stopped during its part of a sum of arenas; it would finish that part if it were resumed."""
    report = report_of(work_in_arenas, 3, engine="shm", faults=[freeze(2).at("working").after(0.2)])
    assert the_frozen_one_is_named(report, 2), [outcome.value for outcome in report.outcomes]
    for outcome in report.outcomes[:2]:
        assert (
            "; rank 2 has not answered since, and may still write into this rank's array; the contents" in outcome.value
        )


def work_in_arenas(here: Here) -> str:
    return work(here, arena=True)
