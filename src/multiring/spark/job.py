"""A job in a barrier stage of Spark: start it, watch it, and say why it failed."""

import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from multiring._launch.cluster_worker import draw_job_name, python_here, version_probe
from multiring._launch.first_failure import RankEnds, end_in
from multiring._version import VERSION
from multiring.errors import LaunchError

_TURN_S = 0.25
_CANCEL_S = 60.0  # how long Spark may take to cancel a job
_FAILED = "multiring.spark.run: the function did not return on every rank"
# Spark passes the error of a task on as text. Our part of the text is between these words.
BEGIN, END = "<multiring>", "</multiring>"
_OURS = re.compile(f"{BEGIN}(.*?){END}", re.DOTALL)


class BarrierJob:
    """One job of ranks.

    Args:
        context: the SparkContext.
        count: the number of ranks.
        start_timeout_s: how long the executors may take to have a slot for each rank.
    """

    def __init__(self, context: Any, count: int, start_timeout_s: float) -> None:
        self._context, self._count, self._start_timeout_s = context, count, start_timeout_s
        self._start_by = time.monotonic() + start_timeout_s
        self._group = f"multiring-{secrets.token_hex(8)}"

    def run(self, call: bytes, variables: Mapping[str, str], *, horovod: bool) -> list[Any]:
        """Run the call on every rank, and return the results by rank.

        Raises:
            LaunchError: see `multiring.spark.run`.
        """
        self._wait_for_slots()
        task = _task(call, dict(variables), draw_job_name("spark"), horovod=horovod)
        stage = self._context.parallelize(range(self._count), self._count).barrier().mapPartitions(task)
        found = self._collected(stage)
        ends = RankEnds(self._count)
        for rank, end in found:
            ends.add(rank, end_in(end), time.monotonic())
        if ends.has_failed:
            raise ends.error(_FAILED)
        return ends.results()

    def _wait_for_slots(self) -> None:
        """Wait until Spark has a slot for each rank. Spark itself would wait for ten minutes.

        Raises:
            LaunchError: there are too few slots in time.
        """
        while (slots := _slots(self._context)) < self._count:
            if time.monotonic() >= self._start_by:
                raise LaunchError(
                    f"{self._count} ranks need {self._count} slots (cores of executors, over spark.task.cpus); after "
                    f"{self._start_timeout_s:g} s the application has {slots}: start more executors or workers, ask "
                    "for fewer ranks with num_proc, or wait longer with start_timeout_s"
                )
            time.sleep(_TURN_S)

    def _collected(self, stage: Any) -> list[tuple[int, bytes]]:
        """Return what the tasks of the stage have returned."""
        from pyspark import InheritableThread  # noqa: PLC0415 -- see running.active_context

        found: list[tuple[int, bytes]] = []
        errors: list[BaseException] = []

        def collect() -> None:
            try:
                self._context.setJobGroup(self._group, f"{self._count} ranks of multiring")
                found.extend(stage.collect())
            except BaseException as error:  # noqa: BLE001 -- raised below, in the caller's thread
                errors.append(error)

        thread = InheritableThread(target=collect, name=self._group, daemon=True)
        thread.start()
        try:
            self._watch(thread)
        finally:
            if thread.is_alive():
                self._context.cancelJobGroup(self._group)
                thread.join(_CANCEL_S)
        if errors:
            raise _failure(errors[0])
        return found

    def _watch(self, thread: threading.Thread) -> None:
        """Wait for the end of the stage.

        Raises:
            LaunchError: the stage has not started in time.
        """
        while thread.is_alive() and not self._has_started():
            if time.monotonic() >= self._start_by:
                raise LaunchError(
                    f"{self._count} ranks did not get their slots within {self._start_timeout_s:g} s, because other "
                    f"tasks use them. The application has {_slots(self._context)} slots. Wait for these tasks, start "
                    "more executors, or wait longer with start_timeout_s"
                )
            thread.join(_TURN_S)
        while thread.is_alive():
            thread.join(_TURN_S)  # a join without a time would not be interrupted by Ctrl-C in every Python

    def _has_started(self) -> bool:
        tracker = self._context.statusTracker()
        for job in tracker.getJobIdsForGroup(self._group):
            known = tracker.getJobInfo(job)
            stages = [tracker.getStageInfo(stage) for stage in known.stageIds] if known else []
            if any(stage and stage.numActiveTasks + stage.numCompletedTasks for stage in stages):
                return True
        return False


def _slots(context: Any) -> int:
    """Return how many tasks the executors can run at a time."""
    spark = context._jsc.sc()  # noqa: SLF001 -- Spark has no public name for it
    return int(spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile()))


def _failure(error: BaseException) -> BaseException:
    """Return the LaunchError for an error of Spark."""
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return LaunchError(f"{_FAILED}: {ours[0]}")
    if isinstance(error, Exception):
        (first, *_) = text.strip().split("\n\tat ", 1) or [""]
        made = LaunchError(f"{_FAILED}: {type(error).__name__}: {first[:4000]}")
        made.__cause__ = error
        return made
    return error


def _task(
    call: bytes, variables: Mapping[str, str], job: str, *, horovod: bool
) -> Callable[[Iterable[Any]], Iterable[tuple[int, bytes]]]:
    """Return the function of the stage's tasks.

    It is defined here without a name that can be imported, so that Spark sends its code: an executor with another
    version of multiring, or without it, can then still say so.
    """
    probe, begin, end, version, python = version_probe(), BEGIN, END, VERSION, python_here()

    def task(_: Iterable[Any]) -> Iterable[tuple[int, bytes]]:
        found = probe()
        if (found["version"], found["python"]) != (version, python):
            raise RuntimeError(
                f"{begin}the executor on {found['hostname']} has multiring {found['version']} and Python "
                f"{found['python']}, the driver has {version} and Python {python}: install the same versions on every "
                f"host{end}"
            )
        from multiring.spark.task import keep_rank  # noqa: PLC0415 -- the function runs without this module's globals

        return [keep_rank(call, variables, job, horovod=horovod)]

    return task
