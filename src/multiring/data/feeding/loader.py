"""A loader: prepares this rank's batch of each step ahead of time, and tracks the progress of the training."""

import multiprocessing
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Any

from multiring._arguments import is_of, require_flag, require_function, require_whole, shown
from multiring._steps.step_counters import STEPS
from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, BatchJob, BatchLayout, SampleFailure, wanted_by
from multiring.data.feeding.leaving_out import Count, LeavingOut, first_layout
from multiring.data.feeding.processes import ProcessWorkers, WorkerArguments
from multiring.data.feeding.threads import ThreadWorkers, WorkersEndedError
from multiring.data.feeding.wanted import WantedSamples
from multiring.data.permutation import MOST
from multiring.data.progress import Progress, Step, steps, steps_by_counts
from multiring.data.readers.opening import tell
from multiring.data.shares import Share
from multiring.data.stages import working_s
from multiring.errors import ArgumentError, DataError, StateError

Batch = dict[str, Any]
_Crew = ThreadWorkers | ProcessWorkers
_Started = tuple[BatchJob, _Crew]
_UnderWay = deque[tuple[Step, _Started]]
_MOST_WORKERS = 4096  # more threads than a host has cores for, and than many hosts allow a process
_Divide = Callable[[int], Sequence[int]]  # the number of samples of a step -> how many of them each rank gets


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of a loader, which read and decode samples.

    Attributes:
        count: the number of threads or processes.
        processes: whether the workers are processes, for slow transforms in Python. The script must then start under
            `if __name__ == "__main__"`, as Python's multiprocessing requires.
        ahead: how many batches are made ahead of time. Threads make up to seven more at once if their records are small
            and need no decoding.
        context: the start method of processes, a name of Python's multiprocessing.

    Raises:
        ArgumentError: `count` is not a whole number from 1 to 4,096, `ahead` is not one from 1 on, or the start method
            does not exist.
    """

    count: int = 2
    _: KW_ONLY
    processes: bool = False
    ahead: int = 2
    context: str = "forkserver"

    def __post_init__(self) -> None:
        require_whole("workers", self.count, 1, _MOST_WORKERS)
        require_whole("ahead", self.ahead, 1)
        require_flag("Workers(processes)", self.processes)
        known = multiprocessing.get_all_start_methods()
        if not is_of(self.context, str) or self.context not in known:
            raise ArgumentError(f"Workers(context={self.context!r}): want one of {', '.join(known)}")


class Loader:
    """Yields one rank's batches of a data set.

    An iteration yields the rest of the epoch; the next iteration begins the next epoch. A batch is a dict. Numeric
    fields are arrays with the samples on their first axis; other fields are lists. The samples of a step, on all ranks
    together, depend on neither the number of ranks nor the workers. A random order differs between epochs.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together. The last step of an epoch may have fewer.
        rank: this rank.
        ranks: the number of ranks.
        workers: the number of threads that read and decode; or a `Workers`, which can also choose processes.
        drop_last: whether to leave out an epoch's last step if it has fewer samples than `batch`.
        skip_bad: whether unreadable samples are reported and left out of their batch; otherwise they raise an error. A
            batch without readable samples is skipped. 1,000 consecutive unreadable samples are an error.
        allocate: allocates the memory of batches, for instance `Group.allocate`.

    Raises:
        ArgumentError: `samples` is no data set. `batch` is not a whole number from 1 on, or is larger than the epoch
            with `drop_last`. `rank` is not below `ranks`. Another argument has a wrong type.
    """

    def __init__(  # noqa: PLR0913 -- as many as torch's loader has
        self,
        samples: Samples,
        batch: int,
        *,
        rank: int = 0,
        ranks: int = 1,
        workers: int | Workers = 2,
        drop_last: bool = False,
        skip_bad: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        chosen = workers if isinstance(workers, Workers) else Workers(workers)
        batch = require_whole("batch", batch, 1, MOST)
        drop_last, skip_bad = require_flag("drop_last", drop_last), require_flag("skip_bad", skip_bad)
        require_samples(samples)
        if allocate is not None:
            require_function("allocate", allocate, "a function such as Group.allocate, or None")
        if drop_last and batch > samples.order.length:
            raise ArgumentError(f"batch={batch} with drop_last=True: the epoch has {samples.order.length} samples only")
        self.samples = samples
        self.batch = batch
        self.workers = chosen.count
        self.waited_s = 0.0  # seconds that the training waited for batches
        self.batches = 0  # batches that the training has received
        self.spent: dict[str, float] = defaultdict(float)  # seconds of workers by stage: see StageClock
        self._attendant: Callable[[], None] | None = None
        self._place = (rank, ranks)
        self._crew_of = chosen
        self._drop_last, self._allocate = drop_last, allocate
        self._leaving_out = LeavingOut(samples) if skip_bad else None
        self._progress = Progress.beginning(samples)
        self._share: Share | None = None
        self._workers: _Crew | None = None
        self._made_for: tuple[Any, ...] | None = None  # the values for which the workers were made
        self._moves = 0  # how many times the data set has changed from one job to another
        self._where: Callable[[], tuple[int, int]] | None = None
        self._divide_in: Callable[[], _Divide] | None = None
        self._layout: BatchLayout | None = None
        self._expects: tuple[Any, ...] | None = None
        self.place(rank, ranks)

    # ---- progress ----

    @property
    def epoch(self) -> int:
        """Return the current epoch, from 0; at an epoch's end, the next one."""
        return self._rolled().epoch

    @property
    def share(self) -> Share:
        """Return this rank's part of the newest batch.

        Multiply the mean of this rank's losses by its `weight` before you average the ranks' losses.

        Raises:
            StateError: the loader has not yielded a batch yet.
        """
        if self._share is None:
            raise StateError("the loader has not yielded a batch yet: read `share` after the first batch")
        return self._share

    @property
    def skipped(self) -> int:
        """Return how many samples `skip_bad=True` has left out of batches."""
        return self._leaving_out.skipped if self._leaving_out is not None else 0

    def count_by(self, count: Count) -> None:
        """Let the ranks exchange how many samples of each batch they could read.

        With this exchange, weighted means are exact with `skip_bad=True`. Without it, and with more than one rank,
        `share.weight` is computed as if all samples of the batch could be read.

        Args:
            count: called with this rank's number of samples. It returns the sum and the minimum of all ranks' numbers.
                If the loader has `skip_bad=True`, the thread that requests a batch calls it for each batch.
        """
        if self._leaving_out is not None:
            self._leaving_out.count = count

    @property
    def is_at_end(self) -> bool:
        """Return whether the newest batch is the epoch's last."""
        left = self.samples.order.length - self._progress.samples
        return left < (self.batch if self._drop_last else 1)

    @property
    def may_be_last(self) -> bool:
        """Return whether the newest batch may be the epoch's last.

        It may be the last if one batch follows and `skip_bad=True` can leave out all its samples.
        """
        left = self.samples.order.length - self._progress.samples
        return self.is_at_end or (self._leaving_out is not None and left <= self.batch)

    def place(self, rank: int, ranks: int) -> None:
        """Change the rank and the number of ranks, from the next iteration on.

        Raises:
            ArgumentError: `rank` is not in 0 ... `ranks` - 1.
        """
        ranks = require_whole("ranks", ranks, 1)
        self._place = (require_whole("rank", rank, 0, ranks - 1), ranks)
        self._where = None

    def follow(self, where: Callable[[], tuple[int, int]]) -> None:
        """Call `where` for the rank and the number of ranks before each iteration.

        The loader then yields the right samples even if the job or its ranks change later. A call of `place` removes
        `where`.
        """
        self.place(*where())
        self._where = where

    def divide_by(self, divide_in: Callable[[], _Divide] | None) -> None:
        """Give ranks parts of other sizes than equal ones; None gives equal parts.

        Args:
            divide_in: called for each iteration. It returns a function that is called once for each step, in the order
                of the steps, in the thread that requests batches. Given the number of samples of the step, that
                function returns the numbers of samples by rank; the same ones on all ranks.
        """
        self._divide_in = divide_in

    def attend_by(self, attendant: Callable[[], None] | None) -> None:
        """Call `attendant` for every batch, in the thread that requests the batch.

        None removes the call.
        """
        self._attendant = attendant

    def state_dict(self) -> dict[str, Any]:
        """Return the progress up to the newest batch, to be saved with the model.

        The progress is the same on all ranks. It is valid for any number of ranks and workers, and for any batch size.
        """
        return self._rolled().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state` in the next iteration.

        Raises:
            ArgumentError: `state` is not a result of `state_dict`, or has another data set, order or seed.
        """
        self._progress = self._progress.resumed(state, self.samples.order.length)

    def __len__(self) -> int:
        """Return the number of batches of the next iteration."""
        left = self.samples.order.length - self._rolled().samples
        return left // self.batch if self._drop_last else -(-left // self.batch)

    def _rolled(self) -> Progress:
        """Return the progress; at an epoch's end, the progress at the beginning of the next epoch."""
        if self.is_at_end:
            return replace(self._progress, epoch=self._progress.epoch + 1, samples=0)
        return self._progress

    # ---- batches ----

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; after the epoch's end, yield those of the next epoch.

        Raises:
            DataError: a sample cannot be read.
        """
        if self._where is not None:
            self.follow(self._where)
        self._progress = self._rolled()
        self._moves = getattr(self.samples, "follow_job", int)()
        expect = getattr(self.samples, "expect", None)
        if expect is not None and self._expects != (expected := (self.batch, self._place, self._moves)):
            expect(self.batch, self._place, self._progress.epoch, self._progress.samples)
            self._expects = expected
        begin = {"epoch": self._progress.epoch, "begin": self._progress.samples}
        rank, ranks = self._place
        if self._divide_in is None:
            made = steps(self.samples.order, self.batch, **begin, rank=rank, ranks=ranks)
        else:
            made = steps_by_counts(self.samples.order, self.batch, self._divide_in(), **begin, rank=rank)
        return self._batches(islice(made, len(self)))

    def _batches(self, source: Iterator[Step]) -> Iterator[Batch]:
        under_way: _UnderWay = deque()
        try:
            while True:
                began = time.monotonic()
                self._begin(source, under_way)
                self._count_wait(began)
                if not under_way:
                    return
                step, started = under_way.popleft()
                batch, share = self._finished(step, started, under_way)
                self._progress = replace(self._progress, epoch=step.epoch, samples=step.end)
                if batch is not None:
                    self._share = share
                    yield batch
                del batch, started
        finally:
            for _, (job, crew) in under_way:
                crew.drop(job)

    def _begin(self, source: Iterator[Step], under_way: _UnderWay) -> None:
        """Begin steps of the source until enough are under way."""
        # Parts that are chosen while the training runs are chosen as late as can be.
        together = 1 if self._workers is None or self._divide_in is not None else self._workers.together
        room = self._crew_of.ahead + together - len(under_way)
        if room < together:
            return
        if not under_way:  # then the training waits: it gets the first batch before the others are made
            self._begin_together(list(islice(source, 1)), under_way)
        self._begin_together(list(islice(source, self._crew_of.ahead + together - len(under_way))), under_way)

    def _begin_together(self, found: list[Step], under_way: _UnderWay) -> None:
        if found:
            started = self._all_started([wanted_by(self.samples, step) for step in found])
            under_way.extend(zip(found, started, strict=True))

    def _count_wait(self, began_s: float) -> None:
        waited_s = time.monotonic() - began_s
        self.waited_s += waited_s
        STEPS.input_s += waited_s

    def _started(self, wanted: WantedSamples) -> _Started:
        return self._all_started([wanted])[0]

    def _all_started(self, wanted: Sequence[WantedSamples]) -> list[_Started]:
        while True:
            crew = self._crew(wanted[0])
            try:
                return [(job, crew) for job in crew.start_all(wanted)]
            except WorkersEndedError:  # another thread has just closed the workers
                continue

    def _waited(self, started: _Started) -> tuple[_Started, list[SampleFailure], dict[str, list[Any]]]:
        """Wait for a batch, and return it with its failures and lists; restart it if its workers have ended."""
        while True:
            job, crew = started
            if crew.pid != os.getpid():  # another process has the workers: this process is a fork of it
                started = self._started(job.wanted)
                continue
            try:
                lists, failures = job.wait()
            except WorkersEndedError:
                # The loader was closed, or another iteration began with another rank. New workers make the batch.
                crew.drop(job)
                started = self._started(job.wanted)
            except BaseException:
                crew.drop(job)
                raise
            else:
                return started, failures, lists

    def _finished(self, step: Step, started: _Started, under_way: _UnderWay) -> tuple[Batch | None, Share]:
        began = time.monotonic()
        started, failures, lists = self._waited(started)
        while types := started[0].wider():
            started, failures, lists = self._waited(self._begun_anew(started, types, under_way))
        job, crew = started
        batch: Batch = {**crew.hand_over(job), **lists}
        self._count_wait(began)
        self.batches += 1
        spent = job.spent()
        for name, each in spent.items():
            self.spent[name] += each
        STEPS.count_made(
            len(job.wanted.numbers),
            self.workers,
            working_s(spent),
            spent.get("cpu", 0.0),
            by_threads=not self._crew_of.processes,
        )
        if self._attendant is not None:
            self._attendant()
        if self._leaving_out is not None:
            return self._leaving_out.rest(step, batch, failures)
        if failures:
            raise DataError(f"{failures[0].text} (skip_bad=True leaves such samples out)")
        return batch, step.share

    def _begun_anew(self, started: _Started, types: Mapping[str, Any], under_way: _UnderWay) -> _Started:
        """Restart the started batches with types that hold the values of all samples; return the first batch."""
        job, crew = started
        if crew.layout == self._layout:  # otherwise another iteration has widened the types: try its layout first
            self._layout = self.layout().widened(types)
        later = list(under_way)
        under_way.clear()
        for one, its in (started, *(other for _, other in later)):
            its.drop(one)
        made = self._started(job.wanted)
        under_way.extend((step, self._started(one.wanted)) for step, (one, _) in later)
        return made

    # ---- workers ----

    def _crew(self, wanted: WantedSamples) -> _Crew:
        """Return this process's workers for the current rank, batch size and layout; start them if needed."""
        layout = self._layout = self._layout or self._looked_at(wanted)
        needed = (os.getpid(), self.batch, self._place, layout, self._moves)
        if self._workers is not None and (self._workers.is_over or self._made_for != needed):
            self.close()
        if self._workers is None:
            rows = -(-min(self.batch, self.samples.order.length) // self._place[1])
            self._workers = _made(self._crew_of, self.samples, layout, rows, self._allocate)
            self._made_for = needed
        return self._workers

    def layout(self) -> BatchLayout:
        """Return the layout of a batch, determined by the next sample of the epoch.

        With `skip_bad=True`, the next readable sample determines it.

        Raises:
            DataError: the sample cannot be read.
        """
        if self._layout is None:
            progress = self._rolled()
            first = steps(self.samples.order, self.batch, epoch=progress.epoch, begin=progress.samples)
            self._layout = self._looked_at(wanted_by(self.samples, next(first)))
        return self._layout

    def _looked_at(self, wanted: WantedSamples) -> BatchLayout:
        return first_layout(self.samples, wanted, skip_bad=self._leaving_out is not None)

    def close(self) -> None:
        """Stop the workers. A running iteration and the next iteration start new workers."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.close()

    def __del__(self) -> None:
        if getattr(self, "_workers", None) is not None and not sys.is_finalizing():
            self.close()


def require_samples(samples: Any) -> None:
    """Raise ArgumentError for what is no data set, before a worker or the first batch would fail on it."""
    lacking = [name for name in ("order", "seed", "digest", "sample") if not hasattr(samples, name)]
    if lacking:
        raise ArgumentError(
            f"samples={shown(samples)}: it has no {' and no '.join(lacking)}; want a Dataset, a Mixture, an "
            "ArrayDataset, or an object with what `multiring.data.Samples` lists"
        )


def _made(chosen: Workers, samples: Samples, layout: BatchLayout, rows: int, allocate: Allocate | None) -> _Crew:
    """Start the chosen workers, for batches of up to `rows` rows."""
    if chosen.processes:
        start = WorkerArguments(samples=samples, layout=layout, rows=rows, spare=2, context=chosen.context)
        return ProcessWorkers(start, chosen.count, allocate, tell)
    return ThreadWorkers(samples, layout, rows, chosen.count, allocate, chosen.ahead)
