"""A loader: each step's batch of this rank, ready before it is asked for, and how far the training is."""

import multiprocessing
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from itertools import islice
from typing import Any

from multiring.data.dataset import Samples
from multiring.data.feeding.batches import Allocate, Job, Layout, Wanted, wanted_by
from multiring.data.feeding.leaving_out import Count, LeavingOut, first_layout
from multiring.data.feeding.processes import ProcessWorkers, Start
from multiring.data.feeding.threads import ThreadWorkers
from multiring.data.progress import Progress, Step, steps
from multiring.data.readers.opening import tell
from multiring.data.shares import Share
from multiring.errors import ArgumentError, DataError, StateError

Batch = dict[str, Any]


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
        self._workers: ThreadWorkers | ProcessWorkers | None = None
        self._layout: Layout | None = None
        self._expects: tuple[int, tuple[int, int]] | None = None
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
        self._progress = self._rolled()
        expect = getattr(self.samples, "expect", None)
        if expect is not None and self._expects != (expected := (self.batch, self._place)):
            expect(self.batch, self._place, self._progress.epoch, self._progress.samples)
            self._expects = expected
        return self._batches(self._steps())

    def _steps(self) -> Iterator[Step]:
        rank, ranks = self._place
        made = steps(
            self.samples.order,
            self.batch,
            epoch=self._progress.epoch,
            begin=self._progress.samples,
            rank=rank,
            ranks=ranks,
        )
        return islice(made, len(self))

    def _batches(self, source: Iterator[Step]) -> Iterator[Batch]:
        under_way: deque[tuple[Step, Job]] = deque()
        try:
            while True:
                began = time.monotonic()
                for step in islice(source, self._crew_of.ahead + 1 - len(under_way)):
                    under_way.append((step, self._started(step)))
                self.waited_s += time.monotonic() - began
                if not under_way:
                    return
                step, job = under_way.popleft()
                batch, share = self._finished(step, job, under_way)
                self._progress = replace(self._progress, epoch=step.epoch, samples=step.end)
                if batch is not None:
                    self._share = share
                    yield batch
                del batch, job
        finally:
            for _, job in under_way:
                self._crew().drop(job)

    def _started(self, step: Step) -> Job:
        wanted = wanted_by(self.samples, step)
        return self._crew(wanted).start(wanted)

    def _finished(self, step: Step, job: Job, under_way: "deque[tuple[Step, Job]]") -> tuple[Batch | None, Share]:
        began = time.monotonic()
        lists, failures = job.wait()
        while job.wider():
            job = self._begun_anew(step, job, under_way)
            lists, failures = job.wait()
        batch: Batch = {**self._crew().hand_over(job), **lists}
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

    def _begun_anew(self, step: Step, job: Job, under_way: "deque[tuple[Step, Job]]") -> Job:
        """Begin batches again with types that hold the values of all samples; return the first one's job."""
        self._layout = self.layout().widened(job.wider())
        crew = self._crew()
        for each in (job, *(other for _, other in under_way)):
            crew.drop(each)
        self.close()
        made = self._started(step)
        later = [(other, self._started(other)) for other, _ in under_way]
        under_way.clear()
        under_way.extend(later)
        return made

    # ---- workers ----

    def _crew(self, wanted: Wanted | None = None) -> ThreadWorkers | ProcessWorkers:
        if self._workers is None:
            if wanted is None:
                raise StateError("the loader was closed")
            chosen = self._crew_of
            layout = self._layout = self._layout or self._looked_at(wanted)
            if chosen.processes:
                rows = -(-self.batch // self._place[1])
                start = Start(
                    samples=self.samples,
                    layout=layout,
                    rows=rows,
                    slots=chosen.ahead + 3,
                    spare=2,
                    context=chosen.context,
                )
                self._workers = ProcessWorkers(start, chosen.count, self._allocate, tell)
            else:
                self._workers = ThreadWorkers(self.samples, layout, chosen.count, self._allocate, chosen.ahead)
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
        """End the workers; the next iteration begins new ones."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def __del__(self) -> None:
        if getattr(self, "_workers", None) is not None and not sys.is_finalizing():
            self.close()
