"""Buckets that start in the same order on all ranks, whenever gradients arrive.

A bucket starts when all of its gradients have arrived and the previous bucket has started. At the end of a step, the
caller starts the remaining buckets and waits for all buckets.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from multiring._frontend.errors import internal_errors
from multiring._frontend.first_steps import FirstSteps
from multiring._gradients.buckets import COMPARES_FLAG, SPARSE_FLAG, TRAINS_FLAG
from multiring._gradients.reductions import Reduction
from multiring._runtime.job.job import note_progress
from multiring._steps.step_counters import STEPS


@dataclass(slots=True, eq=False)
class BucketMember:
    """One gradient in a bucket."""

    name: str
    bucket: "Bucket[Any]"
    member: int  # the gradient's number in the bucket
    has_arrived: bool = field(default=False, kw_only=True)  # in this step

    @property
    def place(self) -> Any:
        """The gradient's place in its bucket, before and after the reduction."""
        return self.bucket.reduction.places[self.member]


Member = TypeVar("Member", bound=BucketMember)


@dataclass(slots=True, eq=False)
class Bucket(Generic[Member]):
    """Gradients that are reduced together."""

    reduction: Reduction
    gradients: list[Member]
    missing: int = 0  # gradients that have not arrived in this step
    has_news: bool = False  # a gradient arrived sparse for the first time
    spare: Reduction | None = None  # the twin, whose gradients are being reduced or in use


class BucketOrder(Generic[Member]):
    """The buckets of some gradients, in the order in which they start on all ranks.

    For gradients that do not lie in NumPy arrays, a subclass overrides `see` and `zero`. A subclass with comparisons of
    its own overrides `compares`.
    """

    def __init__(self, what: str, first_steps: FirstSteps) -> None:
        """Create an order without buckets.

        Args:
            what: the name of the operation in errors.
            first_steps: the comparison of the ranks' first steps.
        """
        self.first_steps = first_steps
        self.buckets: list[Bucket[Member]] = []
        self._what = what
        self._waits: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Begin a step: no gradient has arrived, and no bucket has started."""
        self._waits.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.gradients)
            for gradient in bucket.gradients:
                gradient.has_arrived = False

    def arrive(self, gradient: Member) -> None:
        """Record that a gradient has arrived."""
        gradient.has_arrived = True
        gradient.bucket.missing -= 1

    def start_complete(self) -> None:
        """Start the next buckets, up to the first that lacks a gradient."""
        while len(self._waits) < len(self.buckets) and not self.buckets[len(self._waits)].missing:
            self._start(self.buckets[len(self._waits)])

    def start_rest(self, bring_in: Callable[[Member], object]) -> None:
        """Start all remaining buckets.

        Args:
            bring_in: puts a gradient that has not arrived, or zeros, into its place.
        """
        for bucket in self.buckets[len(self._waits) :]:
            for gradient in bucket.gradients:
                if not gradient.has_arrived:
                    bring_in(gradient)
            self._start(bucket)

    def wait(self) -> None:
        """Wait until all started reductions have finished."""
        self._wait_for(self._waits)

    def take(self) -> Callable[[], None]:
        """Return a function that waits for the started reductions, and no longer count them."""
        waits, self._waits = self._waits, []
        return partial(self._wait_for, waits)

    def contribute_neutrally(self) -> bool:
        """Contribute zeros to one step of the other ranks; return whether any rank still trains."""
        for bucket in self.buckets:
            self.zero(bucket)
            bucket.reduction.flags[:] = 0
            self._post(bucket)
        self.wait()
        self.begin()
        return any(bucket.reduction.flags[TRAINS_FLAG] for bucket in self.buckets)

    @property
    def compares(self) -> bool:
        """Whether this rank wants all ranks to compare after the reduction that is about to start."""
        return self.first_steps.wants

    def see(self, bucket: Bucket[Member]) -> None:
        """Observe a bucket that is about to start, for the comparison of the first steps."""
        self.first_steps.see(bucket.reduction.places)

    def zero(self, bucket: Bucket[Member]) -> None:
        """Set the gradients of a bucket to zero."""
        for place in bucket.reduction.places:
            place[...] = 0

    def _start(self, bucket: Bucket[Member]) -> None:
        flags = bucket.reduction.flags
        flags[COMPARES_FLAG] = self.compares
        flags[SPARSE_FLAG] = bucket.has_news
        flags[TRAINS_FLAG] = True
        self.see(bucket)
        self._post(bucket)

    def _post(self, bucket: Bucket[Member]) -> None:
        with internal_errors(self._what):
            self._waits.append(bucket.reduction.start())

    def _wait_for(self, waits: Sequence[Callable[[], object]]) -> None:
        with internal_errors(self._what):
            for wait in waits:
                wait()
        note_progress()
        STEPS.count()


def any_compares(reductions: Iterable[Reduction]) -> bool:
    """Return whether any rank wanted to compare its first steps when these reductions started."""
    return any(reduction.flags[COMPARES_FLAG] for reduction in reductions)
