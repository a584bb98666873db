"""Buckets that start in one order on all ranks, whatever order their gradients come in.

A bucket starts once all its gradients are in and the one before it has started; `start_rest` starts those that are
left, and `wait` waits for all. What of it belongs to a framework (when a gradient is in, where it lies) the adapter
knows; one whose gradients are NumPy's arrays has it all in GradientReducer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.errors import ArgumentError, StateError
from multiring.frontend.consistency_check import require_alike, told_to_others
from multiring.frontend.errors import internal_errors
from multiring.frontend.first_steps import FirstSteps, Parameters
from multiring.gradients.buckets import COMPARES_FLAG, MORE_FLAGS, TRAINS_FLAG, GradientSpec, lay_out
from multiring.gradients.choice import ReductionOf, reductions_of
from multiring.gradients.options import Options
from multiring.gradients.reductions import CompressionState, Predivided, Reduction
from multiring.runtime import Group
from multiring.runtime.job.job import note_progress

_WHAT = "gradients"


class BucketOrder:
    """Which buckets have started, of some whose order is the same on all ranks."""

    def __init__(self, what: str) -> None:
        """Name `what` in errors."""
        self._what = what
        self._waits: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Let none have started."""
        self._waits.clear()

    @property
    def started(self) -> int:
        """How many have."""
        return len(self._waits)

    def start(self, reduction: Reduction) -> None:
        """Start the next one."""
        with internal_errors(self._what):
            self._waits.append(reduction.start())

    def wait(self) -> None:
        """Return once all that have started are those of all ranks."""
        self._wait_for(self._waits)

    def take(self) -> Callable[[], None]:
        """Return what waits for all that have started, and let none have."""
        waits, self._waits = self._waits, []
        return partial(self._wait_for, waits)

    def _wait_for(self, waits: Sequence[Callable[[], object]]) -> None:
        with internal_errors(self._what):
            for wait in waits:
                wait()
        note_progress()


class GradientReducer:
    """The gradients of some parameters, which the ranks of a group reduce together, step by step.

    `bring` each of them as it is made, in any order, and `finish`; or all at once: `reduce`. A gradient is an array
    that NumPy takes, or None where this rank has none; it is not changed. What comes out are views of the buckets,
    which hold until the next step.
    """

    def __init__(
        self,
        specs: Sequence[tuple[str, GradientSpec]],
        group: Group,
        options: Options,
        together: Sequence[Sequence[int]] = (),
        parameters: Parameters | None = None,
    ) -> None:
        """Give each gradient its place; all ranks do.

        Args:
            specs: names and forms, in the order in which the model uses the parameters.
            group: the ranks.
            options: what was asked for; op "adasum", compressors and sparse gradients are not for arrays.
            together: indices of gradients that are reduced in one bucket of their own.
            parameters: returns the parameters' values now, which ranks compare before their second step.

        Raises:
            ArgumentError: `options` do not fit.
            MismatchError: on every rank: they differ in options or gradients.
        """
        if options.op == "adasum" or options.translates:
            raise ArgumentError(f"{options}: want a sum or an average, and a wire type, PowerSGD or nothing")
        with told_to_others(group, _WHAT):
            options.require_fit(specs)
        lines = [f"groups={[list(each) for each in together]}"] if together else []
        lines += [f"{name}, {spec.dtype} of shape {spec.shape} with strides {spec.strides}" for name, spec in specs]
        require_alike(group, _WHAT, [str(options), *lines])
        self._names = [name for name, _ in specs]
        self._specs = [spec for _, spec in specs]
        # Groups of its own: buckets keep their order, whatever else the ranks do meanwhile.
        own = group.twin()
        make: ReductionOf = reductions_of(own, own.twin, options)
        self._layouts = lay_out(self._specs, options.bucket_bytes, together)
        self._reductions = []
        self._place: dict[int, tuple[int, int]] = {}  # a gradient's bucket, and its number there
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
        """How much one reduction of all gradients gives to collectives, as it travels between hosts."""
        return sum(reduction.sent_bytes for reduction in self._reductions)

    def bring(self, index: int, gradient: Any) -> None:
        """Take a gradient, and start what is complete with it.

        Raises:
            StateError: it has come in this step already.
            ArgumentError: it is of another shape or type than was said.
            HorovodInternalError: ranks disagree, or one is gone.
        """
        if index in self._came:
            raise StateError(f"gradient {self._names[index]} came twice; want finish() between two steps")
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
                    f"shape {place.shape}, as was said when the reducer was made"
                )
            place[...] = array
        self._came.add(index)
        reduction.flags[member] = gradient is not None
        self._missing[number] -= 1
        while self._order.started < len(self._reductions) and not self._missing[self._order.started]:
            self._start()

    def finish(self) -> list[NDArray[Any] | None]:
        """Return all ranks' gradients, once they are; None where no rank has one. What has not come, this rank lacks.

        Raises:
            HorovodInternalError: ranks disagree, or one is gone.
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
        """Return all ranks' gradients for these of this rank; see `bring` and `finish`."""
        for index in reversed(range(len(gradients))):
            self.bring(index, gradients[index])
        return self.finish()

    def contribute_neutrally(self) -> None:
        """Take part in the other ranks' steps without gradients, until no rank trains any more.

        Every rank calls it when it has no more samples.
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
        """Return copies of what is carried from one step to the next, by gradient."""
        places = [self._place[index] for index in range(len(self._specs))]
        return [self._reductions[number].state(member) for number, member in places]

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Carry these on, by gradient, as far as there is use for them."""
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
