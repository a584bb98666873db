"""Gradients in the arena, reduced while backward runs.

Every parameter's gradient has a place in a bucket. Where autograd hands over a fresh tensor (`.grad` was None), a hook
copies it there, while it is still in the cache, and makes `.grad` that place; from then on autograd adds to it in
place. A bucket starts once all its gradients are in and the one before it has started, so that the order is the same on
all ranks, whatever order backward takes. At the end of backward a callback starts the rest and waits for all of them.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.runtime import Group
from multiring.torch.autograd import add_gradient_hook, call_after_backward, gradient_hooks, is_within_backward
from multiring.torch.buckets import BucketLayout, lay_out
from multiring.torch.options import Options
from multiring.torch.reductions import Kept, Reduction
from multiring.torch.tensors import described

_ANEW = "The ranks may be out of step; make the DistributedOptimizer anew on every rank"


@dataclass(slots=True, eq=False)
class _Slot:
    """One parameter's gradient."""

    name: str
    parameter: Tensor
    view: Tensor  # its place in the bucket, with the parameter's shape and order of strides
    bucket: "_Bucket"
    member: int  # its number in the bucket
    has_arrived: bool = False  # in the backward that is going on
    is_reduced: bool = False  # what is in its place came out of a reduction


@dataclass(slots=True, eq=False)
class _Bucket:
    reduction: Reduction
    slots: list[_Slot]
    missing: int = 0  # gradients, in the backward that is going on


class GradientSharing:
    """The gradients of some parameters, which the ranks of a group reduce together, backward by backward.

    It works as long as somebody holds it: the parameters' hooks do not.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        group: Group,
        options: Options,
        reduction_of: Callable[[BucketLayout, list[Tensor]], Reduction],
    ) -> None:
        """Give each of `parameters` its place; local.

        Args:
            parameters: names and leaf tensors that require a gradient, in the order in which the model uses them.
            group: of this object alone, as the order of operations in it is.
            options: what was asked for.
            reduction_of: makes a bucket of this layout, whose members are these parameters.
        """
        self._group = group
        self._op = options.op
        self._passes = options.backward_passes_per_step
        self._buckets: list[_Bucket] = []
        self._slots: list[_Slot] = []
        for layout in lay_out([parameter for _, parameter in parameters], options.bucket_bytes):
            named = [parameters[index] for index in layout.members]
            bucket = _Bucket(reduction_of(layout, [parameter for _, parameter in named]), [])
            for member, ((name, parameter), view) in enumerate(zip(named, bucket.reduction.places, strict=True)):
                bucket.slots.append(_Slot(name, parameter, view, bucket, member))
            self._buckets.append(bucket)
            self._slots += bucket.slots
        self._waits: list[Callable[[], object]] = []  # for the buckets that have started
        self._passes_done = 0  # since the last reduction
        self._is_open = False  # a backward is going on, or broke off
        self._is_called_back = False  # at the end of it
        self._is_shared = False  # the gradients are the same on all ranks
        this = weakref.ref(self)
        self._hooks = [
            add_gradient_hook(slot.parameter, _Arrival(this, index)) for index, slot in enumerate(self._slots)
        ]

    def names(self) -> dict[int, str]:
        """Return the parameters' names, by the parameters' `id`."""
        return {id(slot.parameter): slot.name for slot in self._slots}

    @property
    def sent_bytes(self) -> int:
        """How much one reduction of all gradients gives to collectives, as it travels between hosts."""
        return sum(bucket.reduction.sent_bytes for bucket in self._buckets)

    def kept(self) -> dict[int, Kept]:
        """Return what is carried from one step to the next, by the parameters' `id`.

        That is nothing where a backward broke off: what had been sent of it nobody can say.
        """
        if self._is_open:
            return {}
        return {id(slot.parameter): slot.bucket.reduction.kept(slot.member) for slot in self._slots}

    def restore(self, kept: Mapping[int, Kept]) -> None:
        """Carry on what `kept` has for parameters of this sharing, as far as it has use for it."""
        for slot in self._slots:
            if id(slot.parameter) in kept:
                slot.bucket.reduction.restore(slot.member, kept[id(slot.parameter)])

    def close(self) -> None:
        """Let go of the parameters; what their gradients hold stays."""
        for hook in self._hooks:
            hook.remove()
        self._slots.clear()
        self._buckets.clear()

    def synchronize(self) -> None:
        """Reduce the gradients now, unless that has happened since they were last used up.

        A rank that ran no backward has none of its own, and gets the others'.
        """
        if self._is_open:
            raise StateError(
                "a backward began and did not end as one: it raised an error, or it ended within a reentrant "
                "checkpoint (pass use_reentrant=False) and left parameters without a gradient. " + _ANEW
            )
        if not self._is_shared:
            self._open()
            self._start_rest()
            self._finish()

    def use_up(self) -> None:
        """Reduce the gradients unless that has happened; the optimizer then takes a step with them."""
        self.synchronize()
        self._is_shared = False

    def forget(self) -> None:
        """Take note that the gradients were set to zero, or to None."""
        self._is_shared = False
        for slot in self._slots:
            slot.is_reduced = False

    # ---- while backward runs ----

    def take(self, index: int) -> None:
        """Take the gradient that autograd just put into, or added to, a parameter's `.grad`."""
        slot = self._slots[index]
        if not self._is_open:
            self._open()
        if not self._is_called_back:
            call_after_backward(self._end_pass)
            self._is_called_back = True
        if slot.has_arrived:
            raise StateError(
                f"parameter {slot.name} got a second gradient before the backward that brought the first had ended: "
                "that one raised an error, or a reentrant checkpoint uses the parameter twice (pass "
                "use_reentrant=False). " + _ANEW
            )
        slot.has_arrived = True
        self._bring_in(slot)
        slot.bucket.missing -= 1
        if self._passes_done + 1 == self._passes:
            self._start_complete()

    def _open(self) -> None:
        self._is_open = True
        self._is_shared = False
        self._waits.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)
        for slot in self._slots:
            slot.has_arrived = False

    def _end_pass(self) -> None:
        self._is_called_back = False
        # After a reentrant checkpoint's own backward, the outer one may bring more.
        if is_within_backward() and any(bucket.missing for bucket in self._buckets):
            return
        self._passes_done += 1
        if self._passes_done < self._passes:
            self._is_open = False
            return
        self._start_rest()
        # Last of all: other sharings in this backward start theirs before anybody waits, as their order may differ.
        call_after_backward(self._finish)

    def _bring_in(self, slot: _Slot) -> None:
        """Put what the parameter's `.grad` holds into its place, and make it `.grad`; zeros where it is None."""
        gradient = slot.parameter.grad
        if gradient is None:
            slot.view.zero_()
        elif gradient is not slot.view:
            _check(slot, gradient)
            slot.view.copy_(gradient)
            slot.parameter.grad = slot.view
        elif slot.is_reduced and self._op == "sum":
            raise StateError(
                f"the gradient of {slot.name} is a sum over the ranks already; to sum it again would count it "
                f"{self._group.size} times. Call optimizer.zero_grad() first, or pass backward_passes_per_step"
            )
        slot.is_reduced = False
        slot.bucket.reduction.flags[slot.member] = gradient is not None

    def _start_complete(self) -> None:
        while len(self._waits) < len(self._buckets) and not self._buckets[len(self._waits)].missing:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[len(self._waits)]
        self._waits.append(bucket.reduction.start())

    def _start_rest(self) -> None:
        for bucket in self._buckets[len(self._waits) :]:
            for slot in bucket.slots:
                if not slot.has_arrived:
                    self._bring_in(slot)
            self._start()

    def _finish(self) -> None:
        for wait in self._waits:
            wait()
        for slot in self._slots:
            if slot.parameter.grad is None and slot.bucket.reduction.flags[slot.member]:
                slot.parameter.grad = slot.view
            slot.is_reduced = slot.parameter.grad is not None
        self._passes_done = 0
        self._is_open = False
        self._is_shared = True


class _Arrival:
    """The hook of one parameter."""

    __slots__ = ("_index", "sharing")

    def __init__(self, sharing: "weakref.ref[GradientSharing]", index: int) -> None:
        self.sharing = sharing
        self._index = index

    def __call__(self, _parameter: Tensor) -> None:
        sharing = self.sharing()
        if sharing is not None:
            sharing.take(self._index)


def is_shared(parameter: Tensor) -> bool:
    """Return whether some sharing has `parameter`."""
    hooks = gradient_hooks(parameter)
    return any(isinstance(hook, _Arrival) and hook.sharing() is not None for hook in hooks)


def take_over(parameters: Sequence[tuple[str, Tensor]]) -> dict[int, Kept]:
    """Close every sharing that `parameters` are in: a gradient is shared once. Return what they carried on.

    Raises:
        ArgumentError: such a sharing has parameters that are not among these; nothing was closed.
    """
    ours = {id(parameter) for _, parameter in parameters}
    sharings: dict[int, tuple[str, GradientSharing]] = {}
    for name, parameter in parameters:
        found = [hook.sharing() for hook in gradient_hooks(parameter) if isinstance(hook, _Arrival)]
        sharings |= {id(sharing): (name, sharing) for sharing in found if sharing is not None}
    for name, sharing in sharings.values():
        others = [other for key, other in sharing.names().items() if key not in ours]
        if others:
            raise ArgumentError(
                f"parameter {name} is shared by another DistributedOptimizer, which has {others[0]} too; want all of "
                "its parameters, or none"
            )
    kept: dict[int, Kept] = {}
    for _, sharing in sharings.values():
        kept |= sharing.kept()
        sharing.close()
    return kept


def _check(slot: _Slot, gradient: Tensor) -> None:
    if gradient.requires_grad:
        raise UnsupportedError(
            f"the gradient of {slot.name} is itself differentiable (create_graph=True); that graph would be lost"
        )
    if gradient.layout != torch.strided:
        kind = str(gradient.layout).removeprefix("torch.")
        raise UnsupportedError(
            f"the gradient of {slot.name} is {kind}; want a dense one, such as of Embedding(sparse=False)"
        )
    if gradient.shape != slot.view.shape or gradient.dtype != slot.view.dtype:
        raise StateError(
            f"the gradient of {slot.name} is {described(gradient)}, but was {described(slot.view)} when the "
            "DistributedOptimizer was made; make it anew on every rank"
        )
