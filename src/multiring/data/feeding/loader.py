"""A loader: each step's batch of this rank, ready before it is asked for, and how far the training is."""

import multiprocessing
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Failure, Job, Layout, Wanted, wanted_by
from multiring.data.feeding.leaving_out import Count, LeavingOut, first_layout
from multiring.data.feeding.processes import ProcessWorkers, Start
from multiring.data.feeding.threads import ThreadWorkers, WorkersEndedError
from multiring.data.progress import Progress, Step, steps
from multiring.data.readers.opening import tell
from multiring.data.shares import Share
from multiring.errors import ArgumentError, DataError, StateError

Batch = dict[str, Any]
_Crew = ThreadWorkers | ProcessWorkers
_Started = tuple[Job, _Crew]
_UnderWay = deque[tuple[Step, _Started]]


@dataclass(frozen=True, slots=True)
class Workers:
    """Who reads and decodes.

    Attributes:
        count: how many threads, or processes.
        processes: whether they are processes: for transforms in Python that take long. Then a script has to have its
            beginning under `if __name__ == "__main__"`, as Python's multiprocessing wants.
        ahead: how many batches are made before they are asked for.
        context: how processes are started, in Python's multiprocessing's words.

    Raises:
        ArgumentError: none of them, none ahead, or no such context.
    """

    count: int = 2
    _: KW_ONLY
    processes: bool = False
    ahead: int = 2
    context: str = "forkserver"

    def __post_init__(self) -> None:
        if min(self.count, self.ahead) < 1:
            raise ArgumentError(f"workers={self.count}, ahead={self.ahead}: want 1 or more of each")
        known = multiprocessing.get_all_start_methods()
        if self.context not in known:
            raise ArgumentError(f"Workers(context={self.context!r}): want one of {', '.join(known)}")


class Loader:
    """Batches of a data set, as one rank of several has them.

    An iteration gives what is left of the epoch; the next one begins the next epoch. A batch is a dict: arrays with the
    samples on their first axis, lists of whatever is no number. Who has which sample depends on neither ranks nor
    workers, and where the order is random, another epoch has another.

    Args:
        samples: a Dataset or a Mixture.
        batch: samples of a step, on all ranks together. The last step of an epoch may have fewer.
        rank: this one.
        ranks: how many there are.
        workers: how many threads read and decode; a `Workers` says more, for instance that they are processes.
        drop_last: whether an epoch's last step is left out where it has fewer samples than `batch`.
        skip_bad: whether samples that cannot be read are left out of their batch, and told of; else they are an error.
            A batch of which nothing is left is passed over; 1,000 such samples one after the other are an error.
        allocate: gives the memory of batches, for instance `Group.allocate`.

    Raises:
        ArgumentError: numbers that make no sense.
    """

    def __init__(  # noqa: PLR0913 -- as torch's has them
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
        if batch < 1:
            raise ArgumentError(f"batch={batch}: want 1 or more")
        if drop_last and batch > samples.order.length:
            raise ArgumentError(f"batch={batch} with drop_last=True: the epoch has {samples.order.length} samples only")
        self.samples = samples
        self.batch = batch
        self.workers = chosen.count
        self.waited_s = 0.0  # by who asked for batches
        self.batches = 0  # handed out
        self.spent: dict[str, float] = defaultdict(float)  # seconds of workers by stage: see StageClock
        self._attendant: Callable[[], None] | None = None
        self._place = (rank, ranks)
        self._crew_of = chosen
        self._drop_last, self._allocate = drop_last, allocate
        self._leaving_out = LeavingOut(samples) if skip_bad else None
        self._progress = Progress.beginning(samples)
        self._share: Share | None = None
        self._workers: _Crew | None = None
        self._made_for: tuple[Any, ...] | None = None  # what the workers depend on
        self._moves = 0  # of the samples, from one job to another
        self._where: Callable[[], tuple[int, int]] | None = None
        self._layout: Layout | None = None
        self._expects: tuple[Any, ...] | None = None
        self.place(rank, ranks)

    # ---- how far it is ----

    @property
    def epoch(self) -> int:
        """Return which epoch is under way, or comes next: from 0."""
        return self._rolled().epoch

    @property
    def share(self) -> Share:
        """Return this rank's part of the newest batch; its `weight` is what the mean of this rank's losses counts for.

        Raises:
            StateError: there is none yet.
        """
        if self._share is None:
            raise StateError("no batch has been handed out, of which this could be the share")
        return self._share

    @property
    def skipped(self) -> int:
        """Return how many samples have been left out of batches, with `skip_bad=True`."""
        return self._leaving_out.skipped if self._leaving_out is not None else 0

    def count_by(self, count: Count) -> None:
        """Have ranks tell each other how many samples of each batch they could read, so that means are exact.

        Without it, and on more ranks than one, `share.weight` with `skip_bad=True` is what samples count for in a batch
        of which all can be read.

        Args:
            count: is given this rank's number, and returns the sum and the least of all ranks' numbers. It is called
                with each batch, by the thread that asks for it, if the loader has `skip_bad=True`.
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
        """Return whether the newest batch is the epoch's last, or only one follows, of which nothing may be left."""
        left = self.samples.order.length - self._progress.samples
        return self.is_at_end or (self._leaving_out is not None and left <= self.batch)

    def place(self, rank: int, ranks: int) -> None:
        """Be another rank of another number of ranks, from the next iteration on.

        Raises:
            ArgumentError: there is no such rank.
        """
        if not 0 <= rank < ranks:
            raise ArgumentError(f"rank {rank} of {ranks}: want 0 to {ranks - 1}")
        self._place = (rank, ranks)
        self._where = None

    def follow(self, where: Callable[[], tuple[int, int]]) -> None:
        """Be the rank that `where` returns, with the number of ranks, whenever an iteration begins.

        So a loader that is older than its job, or than the job's newest ranks, has the right samples. `place` ends it.
        """
        self.place(*where())
        self._where = where

    def attend_by(self, attendant: Callable[[], None] | None) -> None:
        """Call `attendant` with every batch, in the thread that asks for it; None for nobody."""
        self._attendant = attendant

    def state_dict(self) -> dict[str, Any]:
        """Return how far the training is, counted in batches that were handed out: to be saved with the model.

        The same on all ranks, and good for any number of ranks and workers, and any batch.
        """
        return self._rolled().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, with the next iteration.

        Raises:
            ArgumentError: it is of another data set or seed, or none.
        """
        self._progress = self._progress.resumed(state, self.samples.order.length)

    def __len__(self) -> int:
        """Return how many batches the next iteration has."""
        left = self.samples.order.length - self._rolled().samples
        return left // self.batch if self._drop_last else -(-left // self.batch)

    def _rolled(self) -> Progress:
        """Return the progress; at an epoch's end that of the next one's beginning."""
        if self.is_at_end:
            return replace(self._progress, epoch=self._progress.epoch + 1, samples=0)
        return self._progress

    # ---- batches ----

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that are left of the epoch; at its end, those of the next one.

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
        made = steps(self.samples.order, self.batch, **begin, rank=rank, ranks=ranks)
        return self._batches(islice(made, len(self)))

    def _batches(self, source: Iterator[Step]) -> Iterator[Batch]:
        under_way: _UnderWay = deque()
        try:
            while True:
                began = time.monotonic()
                for step in islice(source, self._crew_of.ahead + 1 - len(under_way)):
                    under_way.append((step, self._started(wanted_by(self.samples, step))))
                self.waited_s += time.monotonic() - began
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

    def _started(self, wanted: Wanted) -> _Started:
        while True:
            crew = self._crew(wanted)
            try:
                return crew.start(wanted), crew
            except WorkersEndedError:  # closed by another thread just now
                continue

    def _waited(self, started: _Started) -> tuple[_Started, list[Failure], dict[str, list[Any]]]:
        """Return a batch that is done, begun anew where its workers ended before, its failures and its lists."""
        while True:
            job, crew = started
            if crew.pid != os.getpid():  # this process is a fork of the one that the workers are of
                started = self._started(job.wanted)
                continue
            try:
                lists, failures = job.wait()
            except WorkersEndedError:
                # Closed meanwhile, or another iteration began as another rank: new workers make this one's batches.
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
        self.waited_s += time.monotonic() - began
        self.batches += 1
        for name, each in job.spent().items():
            self.spent[name] += each
        if self._attendant is not None:
            self._attendant()
        if self._leaving_out is not None:
            return self._leaving_out.rest(step, batch, failures)
        if failures:
            raise DataError(f"{failures[0].text} (skip_bad=True leaves such samples out)")
        return batch, step.share

    def _begun_anew(self, started: _Started, types: Mapping[str, Any], under_way: _UnderWay) -> _Started:
        """Begin batches again with types that hold the values of all samples; return the first one."""
        job, crew = started
        if crew.layout == self._layout:  # else another iteration has widened the types, and they are tried first
            self._layout = self.layout().widened(types)
        later = list(under_way)
        under_way.clear()
        for one, its in (started, *(other for _, other in later)):
            its.drop(one)
        made = self._started(job.wanted)
        under_way.extend((step, self._started(one.wanted)) for step, (one, _) in later)
        return made

    # ---- workers ----

    def _crew(self, wanted: Wanted) -> _Crew:
        """Return workers of this process that were made for this place, and for batches of this size and layout."""
        layout = self._layout = self._layout or self._looked_at(wanted)
        needed = (os.getpid(), self.batch, self._place, layout, self._moves)
        if self._workers is not None and (self._workers.is_over or self._made_for != needed):
            self.close()
        if self._workers is None:
            rows = -(-self.batch // self._place[1])
            self._workers = _made(self._crew_of, self.samples, layout, rows, self._allocate)
            self._made_for = needed
        return self._workers

    def layout(self) -> Layout:
        """Return how a batch's fields lie, by the first sample of the epoch that can be read.

        Raises:
            DataError: it cannot be read.
        """
        if self._layout is None:
            progress = self._rolled()
            first = steps(self.samples.order, self.batch, epoch=progress.epoch, begin=progress.samples)
            self._layout = self._looked_at(wanted_by(self.samples, next(first)))
        return self._layout

    def _looked_at(self, wanted: Wanted) -> Layout:
        return first_layout(self.samples, wanted, skip_bad=self._leaving_out is not None)

    def close(self) -> None:
        """End the workers; the next iteration begins new ones, as does one that is under way."""
        if self._workers is not None:
            workers, self._workers = self._workers, None
            workers.close()

    def __del__(self) -> None:
        if getattr(self, "_workers", None) is not None and not sys.is_finalizing():
            self.close()


def _made(chosen: Workers, samples: Samples, layout: Layout, rows: int, allocate: Allocate | None) -> _Crew:
    """Return workers as they are chosen, for batches of up to so many rows."""
    if chosen.processes:
        start = Start(samples=samples, layout=layout, rows=rows, spare=2, context=chosen.context)
        return ProcessWorkers(start, chosen.count, allocate, tell)
    return ThreadWorkers(samples, layout, chosen.count, allocate, chosen.ahead)
