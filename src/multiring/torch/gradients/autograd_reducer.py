"""Gradients in the arena, reduced while backward runs.

Every parameter's gradient has a place in a bucket. If autograd hands over a new tensor (`.grad` was None), a hook
copies it to this place, while it is still in the CPU's cache, and makes `.grad` this place. From then on, autograd adds
to the place directly. A bucket starts once all its gradients have arrived and the previous bucket has started. The
order is therefore the same on all ranks, whatever order backward takes. At the end of backward, a callback starts the
remaining buckets and waits for all of them.

If a gradient is sparse for the first time, it travels as a dense tensor, and the ranks inform each other. From then on
its rows are gathered (`Gathered`), unless the options ask for dense transport.
"""

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from multiring._frontend.errors import LoopOrderError, internal_errors
from multiring._frontend.process_sets import Members
from multiring._gradients.options import GradientOptions
from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group
from multiring.errors import StateError, UnsupportedError
from multiring.torch.autograd import add_gradient_hook, call_after_backward, is_compiled_backward, is_within_backward
from multiring.torch.gradients.bucket_assignment import BucketAssignment
from multiring.torch.gradients.bucket_tensors import TensorReductions
from multiring.torch.gradients.change_detection import GradientRecords
from multiring.torch.gradients.device_buckets import DeviceBucket
from multiring.torch.gradients.parameter_gradient import ParameterGradient
from multiring.torch.gradients.rounds import Rounds
from multiring.torch.gradients.sparse_rows import Gathered

_WHAT = "DistributedOptimizer"
_ANEW = "The ranks may be out of step; make the DistributedOptimizer anew on every rank"
_OTHERS = (
    "Run only backwards for this optimizer's own steps through these parameters. Before another network's backward "
    "(a GAN's generator's, through the discriminator), freeze them by requires_grad_(False); unfreeze them afterwards "
    "(docs/torch_optimizer.md)"
)
# The first sentences of the next two texts are Horovod's: programs and tests look for them.
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
    "torch's compiled autograd makes one function of the whole backward and does not report its end, so gradients "
    "cannot be shared. Leave torch._dynamo.config.compiled_autograd off; torch.compile(model) is supported"
)


class AutogradReducer:
    """Reduce the gradients of some parameters over the ranks of a group, backward by backward.

    The caller must keep a reference to the reducer: the parameters' hooks hold only weak ones. If this process joins
    another job, `home` creates a new reducer.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        group: Group,
        options: GradientOptions,
        reductions: TensorReductions,
        together: Sequence[Sequence[int]] = (),
    ) -> None:
        """Give each parameter's gradient a place in a bucket; local, without communication.

        Args:
            parameters: names and leaf tensors that require a gradient, in the order in which the model uses them.
            group: the ranks, in a group that only this object uses.
            options: how the gradients are reduced.
            reductions: makes the reductions of the buckets.
            together: lists of indices of parameters; the gradients of each list are reduced in a separate bucket.
        """
        self._group = group
        self._options = options
        self._op = options.op
        self._passes = options.backward_passes_per_step
        self._assignment = BucketAssignment(parameters, group, options, reductions, together)
        self._buckets, self._gradients = self._assignment.buckets, self._assignment.gradients
        self._passes_done = 0  # backwards since the last reduction
        self._steps = 0
        self.backwards = 0  # the number of backwards that produced gradients
        self._lock = threading.RLock()
        self._is_open = False  # a backward is running, or the last backward failed
        self._is_called_back = False  # a callback is registered for the end of the backward
        self._is_shared = False  # the gradients are the same on all ranks
        self._is_unused = False  # a backward produced gradients, and neither `step` nor `synchronize` has used them
        self._records = GradientRecords()  # records of gradients that the last backward left unreduced
        self.rounds = Rounds(self._assignment, self._records)
        self.home: Home | None = None
        self.reduces_early = False  # whether the next backward may end an incomplete group of backwards
        self.is_synchronized = False  # `synchronize` was called since the last backward and the last step
        this = weakref.ref(self)
        self._hooks = [
            add_gradient_hook(entry.parameter, GradientHook(this, index)) for index, entry in enumerate(self._gradients)
        ]

    def names(self) -> dict[int, str]:
        """Return the parameters' names, by the parameters' `id`."""
        return {id(entry.parameter): entry.name for entry in self._gradients}

    @property
    def accumulates(self) -> bool:
        """Whether a step needs several backwards."""
        return self._passes > 1

    @property
    def sent_bytes(self) -> int:
        """The bytes that one reduction of all gradients passes to collectives, as they travel between hosts."""
        return sum(bucket.reduction.sent_bytes for bucket in self._buckets)

    def states(self) -> dict[int, CompressionState]:
        """Return the compression states, by the parameters' `id`.

        The result is empty if a backward or a reduction failed, because it is unknown how much of it was sent.
        """
        if self._is_open or not self.rounds.are_settled():
            return {}
        return {id(entry.parameter): entry.bucket.reduction.state(entry.member) for entry in self._gradients}

    def load_states(self, states: Mapping[int, CompressionState]) -> None:
        """Load compression states, by the parameters' `id`; states of other parameters are ignored."""
        self.rounds.are_settled()
        for entry in self._gradients:
            if id(entry.parameter) in states:
                entry.bucket.reduction.load_state(entry.member, states[id(entry.parameter)])

    def close(self) -> None:
        """Remove the hooks and release the parameters; the gradients keep their values."""
        self.rounds.close()
        for hook in self._hooks:
            hook.remove()
        self._assignment.clear()

    # ---- calls of the optimizer ----

    def restart(self, passes: int) -> None:
        """Reduce after every `passes` backwards from now on, and restart their count."""
        self._passes = passes
        self._end_group()
        self._is_unused = False

    def synchronize(self) -> None:
        """Reduce the gradients now, and record that the program asked for this."""
        self.reduce()
        self.rounds.hand_out()
        self.is_synchronized = True

    def reduce(self) -> None:
        """Reduce the gradients now, unless they have been reduced since the last step.

        A rank that ran no backward contributes zeros and receives the other ranks' gradients.
        """
        if self._is_open:
            raise StateError(
                "a backward began and did not complete: it raised an error, or it ended within a reentrant "
                "checkpoint (pass use_reentrant=False) and left parameters without a gradient. " + _ANEW
            )
        if not self._is_shared:
            self._open()
            self._assignment.start_rest(self._bring_in)
            self._end_reduction()
        self._assignment.compare_noted()
        self._end_group()
        self._is_unused = False

    def changed(self, *, waits: bool) -> str:
        """Return how the program changed gradients after the last backward, before their reduction; "" if it did not.

        A dropped gradient (`.grad` is None) counts as zero and not as changed.

        Args:
            waits: whether the caller waits for the reduced gradients next.
        """
        if self._is_shared and not self.rounds.is_on_its_way:
            return ""
        return self.rounds.changed(self._steps + 1, self._passes_done, self._passes, waits=waits)

    def use_up(self) -> None:
        """Record that the optimizer takes a step with the current gradients."""
        self._steps += 1
        self._assignment.first_steps.step()
        self._end_group()
        self._is_shared = self._is_unused = self.is_synchronized = False

    def _end_reduction(self) -> None:
        """Wait for the reduction, or post it as a round if gradients are delayed."""
        if not self.rounds.delays:
            self._finish()
            return
        self.rounds.post(self._assignment.take())
        if self._passes_done >= self._passes:
            self._passes_done = 0
        self._is_open = False
        self._is_shared = True

    def forget(self) -> None:
        """Record that the program is about to set the gradients to zero or None.

        Raises:
            LoopOrderError: a backward has produced gradients, and neither `step` nor `synchronize` has used them.
        """
        if self._is_unused:
            raise LoopOrderError(_TOO_EARLY)
        self._is_shared = False
        for entry in self._gradients:
            entry.is_reduced = False

    def take(self, index: int) -> None:
        """Take the gradient that autograd has just assigned or added to the `.grad` of parameter `index`."""
        with self._lock:  # autograd has a thread for each device
            self._take(self._gradients[index])

    def _take(self, entry: ParameterGradient) -> None:
        if not self._is_open:
            self._begin(entry)
        if not self._is_called_back:
            call_after_backward(self._end_pass)
            self._is_called_back = True
        if entry.has_arrived:
            raise StateError(
                f"parameter {entry.name} got a second gradient before the backward that brought the first had ended: "
                "that backward raised an error, or a reentrant checkpoint uses the parameter twice (pass "
                "use_reentrant=False). " + _ANEW
            )
        entry.has_arrived = True  # also if the gradient is refused: the backward fails, and must not be repeated
        reduces = self.reduces_early or self._passes_done + 1 == self._passes
        if reduces or not self.rounds.delays:
            self._bring_in(entry)
        self._assignment.arrive(entry)
        if reduces:
            self._assignment.start_complete()

    def _begin(self, entry: ParameterGradient) -> None:
        if is_compiled_backward():
            raise UnsupportedError(_COMPILED)
        gradient = entry.parameter.grad
        # If the program has dropped the gradients in the meantime, autograd hands over a new tensor.
        is_complete = self._passes_done == 0
        is_same = entry.holds(gradient) or (gradient is not None and gradient is entry.brought)
        if self._is_shared and self._is_unused and is_complete and is_same:
            # The reduced gradient already contains this rank's part of the second backward. The gradients would differ
            # between ranks.
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
        self._records.clear()

    def _end_pass(self) -> None:
        self._is_called_back = False
        # This may be the end of a reentrant checkpoint's inner backward. The outer backward may bring more gradients.
        if is_within_backward() and any(bucket.missing for bucket in self._buckets):
            return
        self._passes_done += 1
        if self._passes_done < self._passes and not self.reduces_early:
            self._records.see(self._buckets)
            self._is_open = False
            return
        self._assignment.start_rest(self._bring_in)
        # Wait in another callback. The order of the reducers may differ between ranks, so all reducers of this backward
        # must start their buckets before any of them waits.
        call_after_backward(self._end_reduction)

    def _bring_in(self, entry: ParameterGradient) -> None:
        """Copy the parameter's `.grad` into its place in the bucket, or zeros if it is None; make `.grad` the place.

        With delayed gradients, `.grad` stays a separate tensor: the program must not touch a place in flight.
        """
        gradient, reduction = self._taken(entry), entry.bucket.reduction
        entry.brought = gradient if self.rounds.delays else None
        if entry.is_reduced and self._op == "sum" and gradient is not None and entry.holds(gradient):
            if entry.early_sum is None:
                raise StateError(
                    f"the gradient of {entry.name} is a sum over the ranks already; to sum it again would count it "
                    f"{self._group.size} times. Call optimizer.zero_grad() first, or pass backward_passes_per_step"
                )
            if self._group.rank:  # only rank 0 contributes the earlier sum
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
                    f"the gradient of {entry.name} is sparse_coo, and {self._options} keeps compression errors of "
                    "dense gradients only: want sparse_as_dense=True, or Embedding(sparse=False)"
                )
        entry.is_reduced = False
        reduction.flags[entry.member] = gradient is not None

    def _taken(self, entry: ParameterGradient) -> Tensor | None:
        """Return the parameter's `.grad`, and prepare the caller's stream to write to the bucket."""
        if isinstance(entry.bucket.reduction, DeviceBucket):
            entry.bucket.reduction.come_behind()
        # If a parameter was moved to another device, all ranks raise the error after this reduction.
        return None if self._assignment.moved else entry.parameter.grad

    def _finish(self) -> None:
        self._assignment.wait()
        self.rounds.see_whole()
        for entry in self._gradients if not self._assignment.moved else ():
            entry.come_out()
        self._assignment.note_wishes()
        with internal_errors(_WHAT):
            found = self._assignment.learn_sparse()
        for entry in self._assignment.sparse if not self._assignment.moved else ():
            entry.hand_out_rows()
        self._assignment.move_out(found)
        if self._passes_done >= self._passes:
            self._passes_done = 0
        if self._passes_done and self._op == "sum":
            # If the group of backwards continues after all, only one rank may contribute this sum again.
            for entry in self._gradients:
                entry.early_sum = None if entry.parameter.grad is None else entry.parameter.grad.clone()
        self._is_open = False
        self._is_shared = True

    def _end_group(self) -> None:
        """Make the next backward the first of a new group."""
        if self._passes_done:
            for entry in self._gradients:
                entry.early_sum = None
        self._passes_done = 0

    def contribute_neutrally(self) -> None:
        """Contribute zeros to the other ranks' reductions; all ranks call this after their last step."""
        if self._is_open:
            raise StateError("a backward began and did not complete. " + _ANEW)
        self.rounds.contribute_neutrally()
        self.use_up()


class Home(NamedTuple):
    """The ranks of a reducer, and the function that moves its gradients to the next job.

    members: the ranks.
    move: a function that shares the gradients in the current job, starting with the given parameter's gradient.
    """

    members: Members
    move: Callable[[Tensor], None]


class GradientHook:
    """The hook of one parameter, called when its gradient has arrived."""

    __slots__ = ("_index", "reducer")

    def __init__(self, reducer: "weakref.ref[AutogradReducer]", index: int) -> None:
        self.reducer = reducer
        self._index = index

    def __call__(self, parameter: Tensor) -> None:
        """Pass the gradient to the reducer, if it still exists; after a change of the job, share anew."""
        reducer = self.reducer()
        if reducer is None:
            return
        if reducer.home is not None and reducer.home.members.is_over:
            reducer.home.move(parameter)
        else:
            reducer.take(self._index)
