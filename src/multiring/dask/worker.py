"""The ranks that a Dask worker keeps.

The functions of this module run in the worker's process: `keep_rank` as a task, in a thread of the worker, and the
others when the driver asks for them, in the worker's event loop.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multiring._launch.cluster_ranks import ClusterRendezvous, WorkerFacts
from multiring._launch.cluster_worker import ReservedPlace, facts_here
from multiring._launch.first_failure import Ended
from multiring._launch.horovod import HorovodPosition
from multiring._launch.pickled_call import pickled_outcome
from multiring._launch.rank_keeper import RankKeeper


@dataclass(slots=True)
class _KeptJob:
    """What a worker knows of a job.

    - call, place, variables: for the job's ranks; not in Dask's graph, which the scheduler keeps and may show.
    - patience_s: how long the job is known while none of its ranks runs here.
    - keepers: the running ranks.
    - started: the ranks that were started. Dask may send a task again, for example after a broken connection, and a
      rank must not run twice.
    - is_ended: the driver has ended the job; a task that comes late starts no rank.
    """

    call: bytes
    place: ClusterRendezvous
    variables: Mapping[str, str]
    patience_s: float
    keepers: dict[int, RankKeeper] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)
    is_ended: bool = False


_jobs: dict[str, _KeptJob] = {}
_reserved: dict[str, ReservedPlace] = {}
_timers: dict[str, threading.Timer] = {}  # when a job whose driver has died is forgotten
_lock = threading.RLock()


def facts(dask_worker: Any) -> WorkerFacts:
    """Return the facts of this worker. Dask passes the worker."""
    return facts_here(f"Dask worker {dask_worker.address}")


def reserve(job: str, variables: Mapping[str, str], patience_s: float, *, is_one_host: bool) -> dict[str, Any]:
    """Reserve a place for the ranks to meet. Only rank 0's worker is asked.

    The place is released after `patience_s` seconds if no rank of the job runs here then.

    Raises:
        LaunchError: this host has no address that other hosts can reach, or no port is free.
    """
    place = ReservedPlace(variables, is_one_host=is_one_host)
    with _lock:
        _reserved[job] = place
        _forget_after(job, patience_s)
    return place.told


def prepare(call: bytes, place: ClusterRendezvous, variables: Mapping[str, str], patience_s: float) -> None:
    """Keep what the ranks of a job need; forget it after `patience_s` seconds if no rank of the job runs here then."""
    with _lock:
        _jobs[place.job] = _KeptJob(call, place, variables, patience_s)
        _forget_after(place.job, patience_s)


def keep_rank(job: str, position: HorovodPosition) -> bytes:
    """Run a rank to its end. Return the pickled Outcome, or the pickled Ended."""
    with _lock:
        kept = _jobs.get(job)
        if kept is None:  # the job is over, or Dask has restarted the worker
            return pickled_outcome(Ended("was not started: its Dask worker does not know the job (any more)"))
        if kept.is_ended:
            return pickled_outcome(Ended("was not started: the job is over"))
        if position.rank in kept.started:
            return pickled_outcome(Ended("was not started again: Dask has sent its task twice to the same worker"))
        keeper = RankKeeper(kept.call, position, kept.place, kept.variables)
        kept.keepers[position.rank] = keeper
        kept.started.add(position.rank)
    try:
        return keeper.run(_is_wanted())
    finally:
        with _lock:
            kept.keepers.pop(position.rank, None)
            if job in _jobs and not kept.keepers:
                _forget_after(job, kept.patience_s)


def started(job: str) -> set[int]:
    """Return the ranks of a job that this worker has started so far."""
    with _lock:
        return set(_jobs[job].started) if job in _jobs else set()


def end_job(job: str) -> int:
    """Ask the ranks of a job to end, refuse new ones, and return how many still run. The driver may ask again."""
    with _lock:
        kept = _jobs.get(job)
        if kept is not None:
            kept.is_ended = True
        running = {} if kept is None else dict(kept.keepers)
        for keeper in running.values():
            keeper.stop()
        if not running:
            _forget(job)
        return len(running)


def _forget_after(job: str, seconds: float) -> None:
    """Forget a job after `seconds`, unless a rank of it runs here then. An earlier time for the job is void."""
    former = _timers.pop(job, None)
    if former is not None:
        former.cancel()
    timer = threading.Timer(seconds, _forget_if_idle, (job,))
    timer.daemon = True
    _timers[job] = timer
    timer.start()


def _forget_if_idle(job: str) -> None:
    with _lock:
        kept = _jobs.get(job)
        if kept is None or not kept.keepers:  # otherwise the end of the last rank sets another time
            _forget(job)


def _forget(job: str) -> None:
    """Drop what is known of a job, and release its ports."""
    _jobs.pop(job, None)
    place = _reserved.pop(job, None)
    if place is not None:
        place.release()
    timer = _timers.pop(job, None)
    if timer is not None:
        timer.cancel()


def _is_wanted() -> Callable[[], bool]:
    """Return a function that says whether the scheduler still wants this task.

    It no longer does once the driver has cancelled the task, or has ended.
    """
    from distributed import get_worker  # noqa: PLC0415 -- a Dask worker has it

    worker = get_worker()
    key = worker.get_current_task()

    def is_wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state in {"executing", "long-running"}

    return is_wanted
