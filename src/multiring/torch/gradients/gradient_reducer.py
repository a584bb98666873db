"""Gradients in the arena, reduced while backward runs.

Every parameter's gradient has a place in a bucket. Where autograd hands over a fresh tensor (`.grad` was None), a hook
copies it there, while it is still in the cache, and makes `.grad` that place; from then on autograd adds to it in
place. A bucket starts once all its gradients are in and the one before it has started, so that the order is the same on
all ranks, whatever order backward takes. At the end of backward a callback starts the rest and waits for all of them.

A gradient that first comes as a sparse one travels as a dense one, and the ranks tell each other; from then on it is
gathered (`gathered`), unless dense was asked for.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multiring.errors import StateError, UnsupportedError
from multiring.frontend.errors import LoopOrderError, internal_errors
from multiring.frontend.process_sets import Members
from multiring.gradients.options import Options
from multiring.gradients.reducer import BucketOrder
from multiring.gradients.reductions import CompressionState
from multiring.runtime import Group
from multiring.torch.autograd import add_gradient_hook, call_after_backward, is_compiled_backward, is_within_backward
from multiring.torch.gradients.bucket_assignment import BucketAssignment
from multiring.torch.gradients.bucket_tensors import TensorReductionOf
from multiring.torch.gradients.change_detection import Witnesses
from multiring.torch.gradients.parameter_gradient import ParameterGradient
from multiring.torch.gradients.rounds import Rounds
from multiring.torch.gradients.sparse_rows import Gathered

_WHAT = "DistributedOptimizer"
_ANEW = "The ranks may be out of step; make the DistributedOptimizer anew on every rank"
_OTHERS = (
    "Count only backwards for this optimizer's own steps: around another network's, as a GAN's generator's through its "
    "discriminator, freeze these parameters by requires_grad_(False), and thaw them after it (docs/torch_optimizer.md)"
)
# Both as Horovod says them: programs and tests look for these words.
_TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally, or call optimizer.synchronize() in between. It "
    "was before step {step} of this optimizer, with backward_passes_per_step={passes}. " + _OTHERS
)
_TOO_EARLY = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or optimizer.synchronize(). "
    "This is prohibited as it can cause a race condition. To drop gradients, call optimizer.synchronize() first. "
    + _OTHERS
)


_COMPILED = (
    "torch's compiled autograd makes one function of the whole backward, which tells nobody that it has ended, so that "
    "gradients cannot be shared. Leave torch._dynamo.config.compiled_autograd off; torch.compile(model) is served"
)


class GradientReducer:
    """The gradients of some parameters, which the ranks of a group reduce together, backward by backward.

    It works as long as somebody holds it: the parameters' hooks do not. `home` makes another one once the job was left.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        group: Group,
        options: Options,
        reduction_of: TensorReductionOf,
        together: Sequence[Sequence[int]] = (),
    ) -> None:
        """Give each of `parameters` its place; local.

        Args:
            parameters: names and leaf tensors that require a gradient, in the order in which the model uses them.
            group: of this object alone, as the order of operations in it is.
            options: what was asked for.
            reduction_of: makes a bucket of this layout, whose members are these parameters.
            together: indices of parameters whose gradients are reduced in one bucket of their own.
        """
        self._group = group
        self._options = options
        self._op = options.op
        self._passes = options.backward_passes_per_step
        self._assignment = BucketAssignment(parameters, group, options, reduction_of, together)
        self._buckets, self._gradients = self._assignment.buckets, self._assignment.gradients
        self._order = BucketOrder(_WHAT)
        self._passes_done = 0  # since the last reduction
        self._steps = 0
        self.backwards = 0  # that brought gradients
        self._is_open = False  # a backward is going on, or broke off
        self._is_called_back = False  # at the end of it
        self._is_shared = False  # the gradients are the same on all ranks
        self._is_unused = False  # a backward brought some, and neither a step nor anybody else has asked for them
        self._witnesses = Witnesses()  # of what the last backward left, where it is not reduced yet
        self.rounds = Rounds(self._assignment, self._witnesses)
        self.home: Home | None = None
        self.reduces_early = False  # whether the group of backwards may end with the next one, before it is complete
        self.is_synchronized = False  # somebody has, since the last backward and the last step
        this = weakref.ref(self)
        self._hooks = [
            add_gradient_hook(entry.parameter, Arrival(this, index)) for index, entry in enumerate(self._gradients)
        ]

    def names(self) -> dict[int, str]:
        """Return the parameters' names, by the parameters' `id`."""
        return {id(entry.parameter): entry.name for entry in self._gradients}

    @property
    def accumulates(self) -> bool:
        """Whether several backwards make a step."""
        return self._passes > 1

    @property
    def sent_bytes(self) -> int:
        """How much one reduction of all gradients gives to collectives, as it travels between hosts."""
        return sum(bucket.reduction.sent_bytes for bucket in self._buckets)

    def states(self) -> dict[int, CompressionState]:
        """Return what is carried from one step to the next, by the parameters' `id`.

        That is nothing where a backward, or a reduction, broke off: what had been sent of it nobody can say.
        """
        if self._is_open or not self.rounds.are_settled():
            return {}
        return {id(entry.parameter): entry.bucket.reduction.state(entry.member) for entry in self._gradients}

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Carry on what `states` has, by the parameters' `id`, as far as it has use for it."""
        self.rounds.are_settled()
        for entry in self._gradients:
            if id(entry.parameter) in states:
                entry.bucket.reduction.load_state(entry.member, states[id(entry.parameter)])

    def close(self) -> None:
        """Let go of the parameters; what their gradients hold stays."""
        self.rounds.close()
        for hook in self._hooks:
            hook.remove()
        self._assignment.clear()

    # ---- what the optimizer's owner does ----

    def restart(self, passes: int) -> None:
        """Reduce after so many backwards from now on, of which none has been."""
        self._passes = passes
        self._end_group()
        self._is_unused = False

    def synchronize(self) -> None:
        """Reduce the gradients now, and take note that somebody asked for it."""
        self.reduce()
        self.rounds.hand_out()
        self.is_synchronized = True

    def reduce(self) -> None:
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
            self._end_reduction()
        self._assignment.compare_noted()
        self._end_group()
        self._is_unused = False

    def changed(self) -> str:
        """Return how gradients that are still to be reduced were changed since the last backward; "" where none was.

        A gradient that was dropped counts as zero, as ever.
        """
        if self._is_shared and not self.rounds.is_on_its_way:
            return ""
        return self.rounds.changed(self._steps + 1, self._passes_done, self._passes)

    def use_up(self) -> None:
        """Take note that the optimizer takes a step with the gradients as they are."""
        self._steps += 1
        self._assignment.first_steps.step()
        self._end_group()
        self._is_shared = self._is_unused = self.is_synchronized = False

    def _end_reduction(self) -> None:
        """Wait for the gradients, or have them come later."""
        if not self.rounds.delays:
            self._finish()
            return
        self.rounds.post(self._order.take())
        if self._passes_done >= self._passes:
            self._passes_done = 0
        self._is_open = False
        self._is_shared = True

    def forget(self) -> None:
        """Take note that the gradients are about to be set to zero, or to None.

        Raises:
            LoopOrderError: a backward brought them, and nobody has used them; Horovod would still be reducing.
        """
        if self._is_unused:
            raise LoopOrderError(_TOO_EARLY)
        self._is_shared = False
        for entry in self._gradients:
            entry.is_reduced = False

    def take(self, index: int) -> None:
        """Take the gradient that autograd just put into, or added to, a parameter's `.grad`."""
        entry = self._gradients[index]
        if not self._is_open:
            self._begin(entry)
        if not self._is_called_back:
            call_after_backward(self._end_pass)
            self._is_called_back = True
        if entry.has_arrived:
            raise StateError(
                f"parameter {entry.name} got a second gradient before the backward that brought the first had ended: "
                "that one raised an error, or a reentrant checkpoint uses the parameter twice (pass "
                "use_reentrant=False). " + _ANEW
            )
        entry.has_arrived = True
        reduces = self.reduces_early or self._passes_done + 1 == self._passes
        if reduces or not self.rounds.delays:
            self._bring_in(entry)
        entry.bucket.missing -= 1
        if reduces:
            self._start_complete()

    def _begin(self, entry: ParameterGradient) -> None:
        if is_compiled_backward():
            raise UnsupportedError(_COMPILED)
        gradient = entry.parameter.grad
        # Where they were dropped in the meantime, autograd hands over a new tensor.
        is_complete = self._passes_done == 0
        is_same = entry.holds(gradient) or (gradient is not None and gradient is entry.brought)
        if self._is_shared and self._is_unused and is_complete and is_same:
            # Its part of the second backward is in this one already: the ranks would differ in it.
            self._is_shared = False
            raise LoopOrderError(_TOO_MANY.format(step=self._steps + 1, passes=self._passes))
        self._open()
        self.backwards += 1
        self._is_unused = True
        self.is_synchronized = False

    def _open(self) -> None:
        self._is_open = True
        self._is_shared = False
        self.rounds.begin()
        self._order.begin()
        self._witnesses.clear()
        for bucket in self._buckets:
            bucket.missing = len(bucket.gradients)
        for entry in self._gradients:
            entry.has_arrived = False

    def _end_pass(self) -> None:
        self._is_called_back = False
        # After a reentrant checkpoint's own backward, the outer one may bring more.
        if is_within_backward() and any(bucket.missing for bucket in self._buckets):
            return
        self._passes_done += 1
        if self._passes_done < self._passes and not self.reduces_early:
            self._witnesses.see(self._buckets)
            self._is_open = False
            return
        self._start_rest()
        # Last of all: other sharings in this backward start theirs before anybody waits, as their order may differ.
        call_after_backward(self._end_reduction)

    def _bring_in(self, entry: ParameterGradient) -> None:
        """Put what the parameter's `.grad` holds into its place, and make it `.grad`; zeros where it is None.

        Gradients that arrive later leave `.grad` as it is: what is on its way nobody may touch.
        """
        gradient, reduction = entry.parameter.grad, entry.bucket.reduction
        entry.brought = gradient if self.rounds.delays else None
        if entry.is_reduced and self._op == "sum" and gradient is not None and entry.holds(gradient):
            if entry.early_sum is None:
                raise StateError(
                    f"the gradient of {entry.name} is a sum over the ranks already; to sum it again would count it "
                    f"{self._group.size} times. Call optimizer.zero_grad() first, or pass backward_passes_per_step"
                )
            if self._group.rank:  # rank 0 brings it along for all
                gradient.sub_(entry.early_sum)
        entry.early_sum = None
        if isinstance(reduction, Gathered):
            if gradient is not None:
                entry.check(gradient)
            reduction.bring(gradient)
        elif gradient is None:
            entry.view.zero_()
        elif gradient.layout is not torch.strided or not entry.lies_in_place(gradient):
            entry.take_in(gradient, hands_out=not self.rounds.delays)
            if entry.came_sparse and self._options.is_lossy and not self._options.sparse_as_dense:
                raise UnsupportedError(
                    f"the gradient of {entry.name} is sparse_coo, and {self._options} carries on what it loses of "
                    "dense ones: want sparse_as_dense=True, or Embedding(sparse=False)"
                )
        entry.is_reduced = False
        reduction.flags[entry.member] = gradient is not None

    def _start_complete(self) -> None:
        while self._order.started < len(self._buckets) and not self._buckets[self._order.started].missing:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._order.started]
        bucket.mark(trains=True, compares=self._assignment.look_at(bucket))
        self.rounds.see_own(bucket)
        self._order.start(bucket.reduction)

    def _start_rest(self) -> None:
        for bucket in self._buckets[self._order.started :]:
            for entry in bucket.gradients:
                if not entry.has_arrived:
                    self._bring_in(entry)
            self._start()

    def _finish(self) -> None:
        self._order.wait()
        self.rounds.see_whole()
        for entry in self._gradients:
            entry.come_out()
        self._assignment.note_wishes()
        with internal_errors(_WHAT):
            found = self._assignment.learn_sparse()
        for entry in self._assignment.sparse:
            entry.hand_out_rows()
        self._assignment.move_out(found)
        if self._passes_done >= self._passes:
            self._passes_done = 0
        if self._passes_done and self._op == "sum":
            # Should the group go on after all, this must not be counted by every rank.
            for entry in self._gradients:
                entry.early_sum = None if entry.parameter.grad is None else entry.parameter.grad.clone()
        self._is_open = False
        self._is_shared = True

    def _end_group(self) -> None:
        """Let the next backward be the first of those that make a step."""
        if self._passes_done:
            for entry in self._gradients:
                entry.early_sum = None
        self._passes_done = 0

    def contribute_neutrally(self) -> None:
        """Reduce along with the ranks that train on, without gradients of this rank's own; called by all in the end."""
        if self._is_open:
            raise StateError("a backward began and did not end. " + _ANEW)
        self.rounds.contribute_neutrally(self._order)
        self.use_up()


class Home(NamedTuple):
    """The ranks that a reducer is of, and what takes its gradients to the next job.

    members: the ranks.
    move: shares the gradients in the job that there is now, and begins with that of a parameter.
    """

    members: Members
    move: Callable[[Tensor], None]


class Arrival:
    """The hook of one parameter."""

    __slots__ = ("_index", "reducer")

    def __init__(self, reducer: "weakref.ref[GradientReducer]", index: int) -> None:
        self.reducer = reducer
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        """Have the sharing, while there is one, take the parameter's gradient; that of another job is made anew."""
        reducer = self.reducer()
        if reducer is None:
            return
        if reducer.home is not None and reducer.home.members.is_over:
            reducer.home.move(parameter)
        else:
            reducer.take(self._index)
