"""A job on a Dask cluster: choose workers, start the ranks as tasks, wait for their ends, and clean up."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from multiring._launch.cluster_ranks import (
    ClusterRendezvous,
    WorkerFacts,
    check_versions,
    positions_of,
    slots_by_worker,
)
from multiring._launch.cluster_worker import draw_job_name, draw_secret, probed, python_here, version_probe
from multiring._launch.first_failure import Ended, RankEnds, end_in
from multiring._version import VERSION
from multiring.dask import worker as on_worker
from multiring.errors import LaunchError

_TURN_S = 0.25
_LOOK_S = 1.0  # how often to look for workers that are gone
_ANSWER_S = 60.0  # how long a worker may take to answer a question
_LATE_S = 2.0  # how long an answer may take after the end of the start's time
_FORGET_S = 60.0
_END_S = 30.0  # how long the ranks may take to end


@final
class DaskJob:
    """A context manager within which the ranks of one job run.

    Args:
        client: the client of the cluster.
        count: the number of ranks.
        start_timeout_s: how long the start may take: until every rank has a thread of a worker.
    """

    def __init__(self, client: Any, count: int, start_timeout_s: float) -> None:
        self._client, self._count, self._start_timeout_s = client, count, start_timeout_s
        self._start_by = time.monotonic() + start_timeout_s
        self._name = draw_job_name("dask")
        self._workers: list[str] = []  # the address of each rank's worker
        self._futures: list[Any] = []  # by rank
        self._is_starting = True

    def __enter__(self) -> "DaskJob":
        return self

    def __exit__(self, *_: object) -> None:
        """End all ranks, and wait for their ends."""
        asked, self._is_starting = set(self._workers), False
        until = time.monotonic() + _END_S
        with suppress(LaunchError, OSError):  # an error of the job is more important, and the ranks end anyway
            while asked and time.monotonic() < until:
                here = asked & self._threads().keys()
                left = self._ask(on_worker.end_job, self._name, workers=sorted(here)) if here else {}
                asked = {worker for worker, count in left.items() if count != 0}
                time.sleep(_TURN_S if asked else 0)
            if self._futures:
                _within(_ANSWER_S, self._client.cancel, self._futures)

    def run(self, call: bytes, variables: Mapping[str, str]) -> RankEnds:
        """Run the call on every rank, and return the ends of the ranks.

        They may be incomplete if a rank has failed.

        Raises:
            LaunchError: the ranks could not be started.
        """
        self._check_pythons()
        threads = self._enough_threads()
        facts = self._facts(sorted(threads))
        hosts = {worker: each.host for worker, each in facts.items()}
        workers = slots_by_worker({worker: threads[worker] for worker in facts}, hosts, self._count)
        positions = positions_of([facts[worker] for worker in workers])
        is_one_host = len({hosts[worker] for worker in workers}) == 1
        self._workers = workers
        patience_s = self._start_timeout_s + _FORGET_S  # workers forget a job whose driver has died
        (told,) = self._answers(
            on_worker.reserve, self._name, variables, patience_s, is_one_host=is_one_host, workers=workers[:1]
        ).values()
        place = ClusterRendezvous(**told, secret=draw_secret(), job=self._name)
        self._answers(on_worker.prepare, call, place, variables, patience_s, workers=sorted(set(workers)))
        self._futures = [
            self._client.submit(
                on_worker.keep_rank,
                self._name,
                position,
                key=f"{self._name}-rank-{position.rank}",
                workers=[worker],
                allow_other_workers=False,
                retries=0,
                pure=False,
            )
            for position, worker in zip(positions, workers, strict=True)
        ]
        return self._wait()

    # -- waiting

    def _wait(self) -> RankEnds:
        ends, look_at = RankEnds(self._count), 0.0
        while not (ends.are_complete or ends.is_decided(time.monotonic())):
            for rank in ends.missing:
                if (end := _end_of(self._futures[rank])) is not None:
                    ends.add(rank, end, time.monotonic())
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + _LOOK_S
                threads = self._threads()
                for rank in ends.missing:
                    if self._workers[rank] not in threads and not self._futures[rank].done():
                        ends.add(rank, Ended(f"is lost: Dask worker {self._workers[rank]} is gone"), time.monotonic())
                if self._is_starting and self._have_all_started(ends):
                    self._is_starting = False
            time.sleep(_TURN_S)
        return ends

    def _have_all_started(self, ends: RankEnds) -> bool:
        """Return whether every rank has started.

        Raises:
            LaunchError: not every rank has got a thread in time.
        """
        answers = self._ask(on_worker.started, self._name, workers=sorted(set(self._workers)))
        running: set[int] = set().union(*(each for each in answers.values() if isinstance(each, set)))
        waiting = [rank for rank in ends.missing if rank not in running]
        if waiting and not ends.has_failed and time.monotonic() >= self._start_by:
            busy = sorted({self._workers[rank] for rank in waiting})
            raise LaunchError(
                f"ranks {waiting} got no thread of a Dask worker within {self._start_timeout_s:g} s, because other "
                f"tasks run there: {', '.join(busy)}. Wait for these tasks, start more workers, or wait longer with "
                "start_timeout_s"
            )
        return not waiting

    # -- asking the cluster

    def _enough_threads(self) -> dict[str, int]:
        """Return the number of threads of each worker, once there are enough of them.

        Raises:
            LaunchError: there are too few in time.
        """
        while True:
            threads = self._threads()
            if sum(threads.values()) >= self._count:
                return threads
            if time.monotonic() >= self._start_by:
                raise LaunchError(
                    f"{self._count} ranks need {self._count} threads of Dask workers; after "
                    f"{self._start_timeout_s:g} s the cluster has {sum(threads.values())}, on {len(threads)} workers: "
                    "start more workers, start them with more threads (--nthreads), ask for fewer ranks, or wait "
                    "longer with start_timeout_s"
                )
            time.sleep(_TURN_S)

    def _threads(self) -> dict[str, int]:
        threads: dict[str, int] = _within(self._patience_s(), self._client.run_on_scheduler, _threads_of_workers())
        return threads

    def _check_pythons(self) -> None:
        """Compare the Python of the scheduler and the workers with this process's, by Dask's own question.

        Another Python may not understand the code that the other questions send.

        Raises:
            LaunchError: one has another Python.
        """
        told = _within(self._patience_s(), self._client.get_versions)
        found = {"the Dask scheduler": told["scheduler"]} | {
            f"Dask worker {worker}": about for worker, about in told["workers"].items()
        }
        for name, about in found.items():
            if not f"{about['host']['python']}.".startswith(f"{python_here()}."):
                raise LaunchError(
                    f"{name} has Python {about['host']['python']}, this process has {python_here()}: functions are "
                    "sent as bytecode, so use the same version on every host"
                )

    def _facts(self, workers: Sequence[str]) -> dict[str, WorkerFacts]:
        """Return each worker's facts; the versions are compared first, by code that needs no multiring there."""
        self._check_pythons()  # workers may have come since the start
        answers = self._answers(version_probe(), workers=workers)
        known = [probed(f"Dask worker {worker}", answer) for worker, answer in answers.items()]
        check_versions(known, VERSION, python_here())
        return self._answers(on_worker.facts, workers=workers)

    def _answers(
        self, function: Callable[..., Any], *args: Any, workers: Sequence[str], **kwargs: Any
    ) -> dict[str, Any]:
        """Ask each worker, and return the answers by worker.

        Raises:
            LaunchError: a worker is gone, or has raised.
        """
        answers = self._ask(function, *args, workers=workers, **kwargs)
        for worker in workers:
            answer = answers.get(worker)
            if isinstance(answer, LaunchError):
                raise answer
            if isinstance(answer, BaseException) or worker not in answers:
                raise LaunchError(f"Dask worker {worker} could not start ranks: {answer!r}")
        return answers

    def _ask(self, function: Callable[..., Any], *args: Any, workers: Sequence[str], **kwargs: Any) -> dict[str, Any]:
        """Ask each worker, and return its answer, or its error, by worker."""
        answers: dict[str, Any] = _within(
            self._patience_s(), self._client.run, function, *args, workers=list(workers), on_error="return", **kwargs
        )
        return answers

    def _patience_s(self) -> float:
        """Return how long the cluster may take to answer a question.

        A question of the start shares the start's time, but its answer always gets a moment to arrive.
        """
        left_s = max(self._start_by - time.monotonic(), _LATE_S) if self._is_starting else _ANSWER_S
        return min(left_s, _ANSWER_S)


def _threads_of_workers() -> Callable[..., dict[str, int]]:
    """Return a function for the scheduler, which may have no multiring: cloudpickle sends the code of a local one."""

    def threads(dask_scheduler: Any) -> dict[str, int]:
        return {address: each.nthreads for address, each in dask_scheduler.workers.items()}

    return threads


def _within(patience_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of the client, and return its result. A frozen worker or scheduler must not block the driver.

    Raises:
        LaunchError: there is no answer in time.
    """
    answer = _asked(function, *args, **kwargs)
    try:
        is_good, value = answer.get(timeout=patience_s)
    except queue.Empty:
        raise LaunchError(f"the Dask cluster has not answered within {patience_s:.3g} s") from None
    if not is_good:
        raise value
    return value


def _asked(function: Callable[..., Any], *args: Any, **kwargs: Any) -> "queue.SimpleQueue[tuple[bool, Any]]":
    """Call a function in a thread; return a queue that gets True and its result, or False and its error."""
    answer: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answer.put((True, function(*args, **kwargs)))
        except BaseException as error:  # noqa: BLE001 -- the error is the answer
            answer.put((False, error))

    threading.Thread(target=ask, name="multiring-dask", daemon=True).start()
    return answer


def _end_of(future: Any) -> Any:
    """Return the end of a rank, or None if there is none.

    A worker may die with the result before it is fetched. Then Dask waits for another result, which never comes, and
    the future is not done any more. A result that is there may take any time to arrive.
    """
    if not future.done():
        return None
    answer = _asked(future.result)
    while True:
        try:
            is_good, value = answer.get(timeout=_TURN_S)
        except queue.Empty:
            if future.done():
                continue
            return None
        return end_in(value) if is_good else Ended(f"is lost: {value!r}")
