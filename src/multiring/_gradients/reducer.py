"""GradientReducer: reduce the gradients of a framework whose arrays NumPy accepts.

An adapter of other arrays uses a BucketOrder (bucket_order.py) itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.first_steps import FirstSteps, Parameters
from multiring._gradients.bucket_order import Bucket, BucketMember, BucketOrder, any_compares
from multiring._gradients.buckets import GradientSpec, lay_out
from multiring._gradients.choice import ReductionOf, reductions_of
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState, Predivided, Reduction
from multiring._runtime import Group
from multiring.errors import ArgumentError, StateError

_WHAT = "gradients"


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
        require_alike(group, _WHAT, options.lines_with(specs, together))
        # Use twin groups, so that other operations of the ranks cannot disturb the order of buckets.
        own = group.twin()
        make: ReductionOf = reductions_of(own, own.twin, options)
        names, forms = [name for name, _ in specs], [spec for _, spec in specs]
        self._first_steps = FirstSteps(_WHAT, own, names, parameters)
        self._order = BucketOrder[BucketMember](_WHAT, self._first_steps)
        self._gradients: dict[int, BucketMember] = {}
        for layout in lay_out(forms, options.bucket_bytes, together):
            reduction: Reduction = make(layout, [forms[index] for index in layout.members])
            if options.predivide != 1.0:
                reduction = Predivided(reduction, options.predivide, own.size)
            bucket = Bucket[BucketMember](reduction, [])
            bucket.gradients += [BucketMember(names[index], bucket, at) for at, index in enumerate(layout.members)]
            self._gradients |= zip(layout.members, bucket.gradients, strict=True)
            self._order.buckets.append(bucket)
        self._order.begin()

    @property
    def sent_bytes(self) -> int:
        """Bytes that one reduction of all gradients sends, as encoded between hosts."""
        return sum(bucket.reduction.sent_bytes for bucket in self._order.buckets)

    def bring(self, index: int, gradient: Any) -> None:
        """Add a gradient to its bucket, and start the buckets that are complete.

        Raises:
            StateError: `bring` was already called with this gradient in this step.
            ArgumentError: its shape or type differs from its spec.
            CollectiveError: the ranks disagree, or a rank is lost.
        """
        known = self._gradients[index]
        if known.has_arrived:
            raise StateError(f"gradient {known.name} came twice; call finish() between two steps")
        self._bring_in(known, gradient)
        self._order.arrive(known)
        self._order.start_complete()

    def finish(self) -> list[NDArray[Any] | None]:
        """Wait for the reductions, and return the reduced gradients.

        The result is None for a gradient that no rank has. A gradient that `bring` did not receive counts as missing on
        this rank.

        Raises:
            CollectiveError: the ranks disagree, or a rank is lost.
        """
        self._order.start_rest(self._bring_in)
        self._order.wait()
        self._order.begin()
        self._compare(self._first_steps.told)
        self._first_steps.step()
        known = [self._gradients[index] for index in range(len(self._gradients))]
        return [each.place if each.bucket.reduction.flags[each.member] else None for each in known]

    def reduce(self, gradients: Sequence[Any]) -> list[NDArray[Any] | None]:
        """Reduce these gradients, and return the results; see `bring` and `finish`."""
        for index in reversed(range(len(gradients))):
            self.bring(index, gradients[index])
        return self.finish()

    def contribute_neutrally(self) -> None:
        """Contribute zeros to other ranks' steps, until every rank has stopped training.

        Every rank calls this when it has no more samples.
        """
        while self._order.contribute_neutrally():
            self._compare(self._first_steps.told_nothing)

    def states(self) -> list[CompressionState]:
        """Return copies of the compression state of each gradient."""
        known = [self._gradients[index] for index in range(len(self._gradients))]
        return [each.bucket.reduction.state(each.member) for each in known]

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Load the compression states of gradients, by index."""
        for index, state in states.items():
            known = self._gradients[index]
            known.bucket.reduction.load_state(known.member, state)

    @staticmethod
    def _bring_in(known: BucketMember, gradient: Any = None) -> None:
        place = known.place
        if gradient is None:
            place[...] = 0
        else:
            array = np.asarray(gradient)
            if array.shape != place.shape or array.dtype != place.dtype:
                raise ArgumentError(
                    f"gradient {known.name} is {array.dtype} of shape {array.shape}; want {place.dtype} of "
                    f"shape {place.shape}, as in the reducer's specs"
                )
            place[...] = array
        known.bucket.reduction.flags[known.member] = gradient is not None

    def _compare(self, told: Callable[[], NDArray[np.int64]]) -> None:
        if any_compares(bucket.reduction for bucket in self._order.buckets):
            self._first_steps.meet(told())
