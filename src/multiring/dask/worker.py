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
from multiring._launch.pickled_call import Outcome, pickled_outcome
from multiring._launch.rank_keeper import RankKeeper


@dataclass(slots=True)
class _KeptJob:
    """What a worker knows of a job.

    - call, place, variables: for the job's ranks; not in Dask's graph, which the scheduler keeps and may show.
    - keepers: the running ranks.
    """

    call: bytes
    place: ClusterRendezvous
    variables: Mapping[str, str]
    keepers: dict[int, RankKeeper] = field(default_factory=dict)
    started: set[int] = field(default_factory=set)


_jobs: dict[str, _KeptJob] = {}
_reserved: dict[str, ReservedPlace] = {}
_lock = threading.Lock()


def facts(dask_worker: Any) -> WorkerFacts:
    """Return the facts of this worker. Dask passes the worker."""
    return facts_here(f"Dask worker {dask_worker.address}")


def reserve(job: str, variables: Mapping[str, str], *, is_one_host: bool) -> dict[str, Any]:
    """Reserve a place for the ranks to meet. Only rank 0's worker is asked.

    Raises:
        LaunchError: this host has no address that other hosts can reach, or no port is free.
    """
    place = ReservedPlace(variables, is_one_host=is_one_host)
    with _lock:
        _reserved[job] = place
    return place.told


def prepare(call: bytes, place: ClusterRendezvous, variables: Mapping[str, str]) -> None:
    """Keep what the ranks of a job need."""
    with _lock:
        _jobs[place.job] = _KeptJob(call, place, variables)


def keep_rank(job: str, position: HorovodPosition) -> bytes:
    """Run a rank to its end. Return the pickled Outcome, or the pickled Ended."""
    with _lock:
        kept = _jobs.get(job)
        if kept is None:  # the job is over, or Dask has restarted the worker
            return pickled_outcome(Ended("was not started: its Dask worker does not know the job (any more)"))
        keeper = RankKeeper(kept.call, position, kept.place, kept.variables)
        kept.keepers[position.rank] = keeper
        kept.started.add(position.rank)
    end: Outcome | Ended = Ended("was not started")
    try:
        end = keeper.run(_is_wanted())
        return pickled_outcome(end)
    finally:
        with _lock:
            kept.keepers.pop(position.rank, None)


def started(job: str) -> set[int]:
    """Return the ranks of a job that this worker has started so far."""
    with _lock:
        return set(_jobs[job].started) if job in _jobs else set()


def end_job(job: str) -> int:
    """Ask the ranks of a job to end, refuse new ones, and return how many still run. The driver may ask again."""
    with _lock:
        kept = _jobs.get(job)
        place = _reserved.pop(job, None)
        if place is not None:
            place.release()
        if kept is None:
            return 0
        for keeper in kept.keepers.values():
            keeper.stop()
        if not kept.keepers:
            del _jobs[job]
        return len(kept.keepers)


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
