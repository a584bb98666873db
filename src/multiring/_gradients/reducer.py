"""Buckets that start in the same order on all ranks, whenever gradients arrive.

A bucket starts when all of its gradients have arrived and the previous bucket has started. At the end of a step, the
reducer starts the remaining buckets and waits for all buckets. GradientReducer does this for NumPy arrays. The adapter
of a framework with other arrays does it with a BucketOrder.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import internal_errors
from multiring._frontend.first_steps import FirstSteps, Parameters
from multiring._gradients.buckets import COMPARES_FLAG, MORE_FLAGS, TRAINS_FLAG, GradientSpec, lay_out
from multiring._gradients.choice import ReductionOf, reductions_of
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState, Predivided, Reduction
from multiring._runtime import Group
from multiring._runtime.job.job import note_progress
from multiring.errors import ArgumentError, StateError

_WHAT = "gradients"


class BucketOrder:
    """Starts buckets in an order that is the same on all ranks, and waits for them."""

    def __init__(self, what: str) -> None:
        """Use `what` as the name of the operation in errors."""
        self._what = what
        self._waits: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Discard the records of all started reductions."""
        self._waits.clear()

    @property
    def started(self) -> int:
        """The number of started reductions."""
        return len(self._waits)

    def start(self, reduction: Reduction) -> None:
        """Start the next reduction."""
        with internal_errors(self._what):
            self._waits.append(reduction.start())

    def wait(self) -> None:
        """Wait until all started reductions have finished."""
        self._wait_for(self._waits)

    def take(self) -> Callable[[], None]:
        """Start a new round; return a function that waits for the previous reductions."""
        waits, self._waits = self._waits, []
        return partial(self._wait_for, waits)

    def _wait_for(self, waits: Sequence[Callable[[], object]]) -> None:
        with internal_errors(self._what):
            for wait in waits:
                wait()
        note_progress()


class GradientReducer:
    """Reduces the gradients of some parameters over the ranks, step by step.

    Call `bring` with each gradient when it is made, in any order, and then `finish`. Or call `reduce` with all
    gradients. A gradient is an array that NumPy accepts, or None if this rank has none; it is not changed. The results
    are views of the buckets, which are valid until the next step.
    """

    def __init__(
        self,
        specs: Sequence[tuple[str, GradientSpec]],
        group: Group,
        options: GradientOptions,
        together: Sequence[Sequence[int]] = (),
        parameters: Parameters | None = None,
    ) -> None:
        """Assign the gradients to buckets; every rank calls it.

        Args:
            specs: names and specs, in the order in which the model uses the parameters.
            group: the ranks that reduce.
            options: the options. The op "adasum", compressors and sparse gradients are not supported for arrays.
            together: groups of gradients by index; each group is reduced in its own bucket.
            parameters: a function that returns the current values of the parameters, which ranks compare before their
                second step.

        Raises:
            ArgumentError: `options` are not supported.
            MismatchError: the ranks have different options or gradients. Every rank raises it.
        """
        if options.op == "adasum" or options.translates:
            raise ArgumentError(f"{options}: want a sum or an average, with a wire type, PowerSGD or no compression")
        with reporting_errors(group, _WHAT):
            options.require_fit(specs)
        lines = [f"groups={[list(each) for each in together]}"] if together else []
        lines += [f"{name}, {spec.dtype} of shape {spec.shape} with strides {spec.strides}" for name, spec in specs]
        require_alike(group, _WHAT, [str(options), *lines])
        self._names = [name for name, _ in specs]
        self._specs = [spec for _, spec in specs]
        # Use twin groups, so that other operations of the ranks cannot disturb the order of buckets.
        own = group.twin()
        make: ReductionOf = reductions_of(own, own.twin, options)
        self._layouts = lay_out(self._specs, options.bucket_bytes, together)
        self._reductions = []
        self._place: dict[int, tuple[int, int]] = {}  # for each gradient, the number of its bucket and its index there
        for number, layout in enumerate(self._layouts):
            reduction: Reduction = make(layout, [self._specs[index] for index in layout.members])
            if options.predivide != 1.0:
                reduction = Predivided(reduction, options.predivide, own.size)
            self._reductions.append(reduction)
            self._place |= {index: (number, member) for member, index in enumerate(layout.members)}
        self._first_steps = FirstSteps(_WHAT, own, self._names, parameters)
        self._order = BucketOrder(_WHAT)
        self._came: set[int] = set()
        self._missing = [len(layout.members) for layout in self._layouts]

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction of all gradients sends, as encoded between hosts."""
        return sum(reduction.sent_bytes for reduction in self._reductions)

    def bring(self, index: int, gradient: Any) -> None:
        """Add a gradient to its bucket, and start the buckets that are complete.

        Raises:
            StateError: `bring` was already called with this gradient in this step.
            ArgumentError: its shape or type differs from its spec.
            CollectiveError: the ranks disagree, or a rank is lost.
        """
        if index in self._came:
            raise StateError(f"gradient {self._names[index]} came twice; call finish() between two steps")
        number, member = self._place[index]
        reduction = self._reductions[number]
        place: NDArray[Any] = reduction.places[member]
        if gradient is None:
            place[...] = 0
        else:
            array = np.asarray(gradient)
            if array.shape != place.shape or array.dtype != place.dtype:
                raise ArgumentError(
                    f"gradient {self._names[index]} is {array.dtype} of shape {array.shape}; want {place.dtype} of "
                    f"shape {place.shape}, as in the reducer's specs"
                )
            place[...] = array
        self._came.add(index)
        reduction.flags[member] = gradient is not None
        self._missing[number] -= 1
        while self._order.started < len(self._reductions) and not self._missing[self._order.started]:
            self._start()

    def finish(self) -> list[NDArray[Any] | None]:
        """Wait for the reductions, and return the reduced gradients.

        The result is None for a gradient that no rank has. A gradient that `bring` did not receive counts as missing on
        this rank.

        Raises:
            CollectiveError: the ranks disagree, or a rank is lost.
        """
        for index in range(len(self._specs)):
            if index not in self._came:
                self.bring(index, None)
        self._end()
        self._first_steps.step()
        found: list[NDArray[Any] | None] = [None] * len(self._specs)
        for index, (number, member) in self._place.items():
            reduction = self._reductions[number]
            found[index] = reduction.places[member] if reduction.flags[member] else None
        return found

    def reduce(self, gradients: Sequence[Any]) -> list[NDArray[Any] | None]:
        """Reduce these gradients, and return the results; see `bring` and `finish`."""
        for index in reversed(range(len(gradients))):
            self.bring(index, gradients[index])
        return self.finish()

    def contribute_neutrally(self) -> None:
        """Contribute zeros to other ranks' steps, until every rank has stopped training.

        Every rank calls this when it has no more samples.
        """
        trains = bool(self._reductions)
        while trains:
            for reduction in self._reductions:
                for place in reduction.places:
                    place[...] = 0
                reduction.flags[:] = 0
                self._order.start(reduction)
            self._end(trains=False)
            trains = bool(self._reductions[0].flags[TRAINS_FLAG])

    def states(self) -> list[CompressionState]:
        """Return copies of the compression state of each gradient."""
        places = [self._place[index] for index in range(len(self._specs))]
        return [self._reductions[number].state(member) for number, member in places]

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Load the compression states of gradients, by index."""
        for index, state in states.items():
            number, member = self._place[index]
            self._reductions[number].load_state(member, state)

    def _start(self) -> None:
        reduction = self._reductions[self._order.started]
        reduction.flags[-MORE_FLAGS:] = 0
        reduction.flags[COMPARES_FLAG] = self._first_steps.wants
        reduction.flags[TRAINS_FLAG] = 1
        self._first_steps.see(reduction.places)
        self._order.start(reduction)

    def _end(self, *, trains: bool = True) -> None:
        self._order.wait()
        self._order.begin()
        if any(reduction.flags[COMPARES_FLAG] for reduction in self._reductions):
            self._first_steps.meet(self._first_steps.told() if trains else self._first_steps.told_nothing())
        self._came.clear()
        self._missing = [len(layout.members) for layout in self._layouts]
