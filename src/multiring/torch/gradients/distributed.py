"""The class that DistributedOptimizer adds to an optimizer, and the setup of its gradient reducer."""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from multiring._frontend.consistency_check import reporting_errors, require_alike
from multiring._frontend.errors import LoopOrderError
from multiring._frontend.process_sets import Members, members_of
from multiring._gradients.compression_state import KEY, packed
from multiring._gradients.reductions import CompressionState
from multiring._runtime import Group
from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.job.job import is_rank
from multiring.data import Share
from multiring.errors import StateError, UnsupportedError
from multiring.torch.alone import LONE_RANK
from multiring.torch.compression import Compression
from multiring.torch.gradients.adasum_delta import DeltaReducer
from multiring.torch.gradients.autograd_reducer import AutogradReducer, Home
from multiring.torch.gradients.bucket_assignment import GradientWatch
from multiring.torch.gradients.bucket_tensors import TensorReductions, specs_of, states_of
from multiring.torch.gradients.hook_registry import is_shared, take_over
from multiring.torch.gradients.rounds import INSTEAD, Round
from multiring.torch.gradients.setup import Setup, parameters_of, together_of, trained
from multiring.torch.interop import described, dtype_name, refuse_unserved

# This is Horovod's text: programs and tests look for it.
_NOT_SKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class Distributed(torch.optim.Optimizer):
    """The base class that DistributedOptimizer adds to an optimizer, in front of the optimizer's own class.

    If a program constructs an object of such a class itself, the object shares no gradients until it is passed to
    DistributedOptimizer.
    """

    _plain: type[torch.optim.Optimizer]
    _setup: Setup
    _members: Members | None = None  # the ranks that share gradients; None if this rank is not among them
    _group: Group | None = None  # the group of these ranks; None if this rank is not among them
    _reducer: AutogradReducer | None = None
    _delta_reducer: DeltaReducer | None = None
    _skips: bool = False
    _is_accumulating: bool = False
    ends_early: bool = False  # the next backward ends the group of backwards, even if the group is incomplete
    _is_lenient: bool = False  # warn instead of raising if gradients were changed before their reduction
    _has_warned: bool = False  # whether this warning was given
    _watching: GradientWatch | None = None  # see `watch`
    share_of_batch: Share | None = None  # this rank's share of the newest batch from a loader of `distribute`
    _shares: tuple[Share, ...] = ()  # the shares of the batches in the gradients; the newest may be missing
    _seen_backwards: int = 0  # the value of `backwards` when the newest batch was handed out

    def synchronize(self) -> None:
        """Wait until the gradients are combined over the ranks.

        After a complete backward, this returns at once.
        """
        self.follow_job()
        if self._reducer is not None:
            self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` uses the current gradients, without another reduction.

        Call `synchronize` before, and change the gradients as needed, for example by clipping.

        Raises:
            LoopOrderError: op=Adasum, because each of its steps must combine the ranks' changes.
        """
        if self._delta_reducer is not None:
            raise LoopOrderError(
                "Skipping synchronization is not supported when using Adasum optimizer. Each step combines the ranks' "
                "changes: remove skip_synchronize(), or use op=Average"
            )
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after every `passes` backwards from now on; every rank must call this.

        Raises:
            ArgumentError: `passes` is below 1.
        """
        self._setup = replace(self._setup, options=replace(self._setup.options, backward_passes_per_step=passes))
        if self._reducer is not None:
            self._reducer.restart(passes)

    def accumulate(self, passes: int) -> None:
        """Set the number of backwards per step, also for the loader of a job of one rank."""
        self.set_backward_passes_per_step(passes)
        self._is_accumulating = passes > 1

    @property
    def accumulates(self) -> bool:
        """Whether several backwards make a step; a loader then reports the last batch of a pass."""
        return self._is_accumulating or (self._reducer is not None and self._reducer.accumulates)

    def reduce_early(self, *, early: bool) -> None:
        """Set whether each backward reduces (`early`), or only the backward that completes a group.

        A loader sets `early` if the next batch may end an incomplete group. The group may still continue.
        """
        self.ends_early = early
        if self._reducer is not None:
            self._reducer.reduces_early = early

    @property
    def backwards(self) -> int:
        """The number of backwards that have produced gradients so far; 0 if the ranks do not share them."""
        return 0 if self._reducer is None else self._reducer.backwards

    def take_batch(self, share: Share | None) -> None:
        """Record this rank's `share` of the loader's newest batch; None ends the loader's pass."""
        self._count_batch()
        vars(self)["share_of_batch"] = share

    @property
    def shares_of_step(self) -> tuple[Share, ...]:
        """This rank's parts of the batches that contributed to the current gradients."""
        self._count_batch()
        return self._shares

    def _count_batch(self) -> None:
        if self.backwards > self._seen_backwards and self.share_of_batch is not None:
            vars(self)["_shares"] = (*self._shares, self.share_of_batch)
        vars(self)["_seen_backwards"] = self.backwards

    def be_lenient(self) -> None:
        """Make `step` warn once instead of raising if gradients were changed before their reduction."""
        self._is_lenient = True

    def bring_gradients(self) -> None:
        """Reduce the gradients before a step, for stages that use the combined gradients first.

        Raises:
            UnsupportedError: op=Adasum, because each rank steps with its own gradients.
        """
        self.follow_job()
        if self._delta_reducer is not None:
            raise UnsupportedError("gradient lag, LARC, loss scaling and the like with op=Adasum: want op=Average")
        if not self._skips:
            self._bring_gradients()

    def take_round(self) -> Round | None:
        """Return the round in flight before a step; None if `.grad` already has the reduced gradients."""
        return None if self._reducer is None else self._reducer.rounds.take()

    def watch(self, watching: GradientWatch | None) -> None:
        """Show `watching` the gradients before and after each reduction from now on; None ends this."""
        self._watching = watching
        if self._reducer is not None:
            self._reducer.rounds.watching = watching

    def scale_residuals(self, factor: float) -> None:
        """Multiply the compression errors that are still to be sent, for example after a change of the loss scale."""
        if self._reducer is None:
            return
        found = {key: each for key, each in self._reducer.states().items() if each.residual is not None}
        self._reducer.load_states({key: replace(each, residual=each.residual * factor) for key, each in found.items()})

    def residual_norm(self) -> float:
        """Return the norm of this rank's compression errors that are still to be sent."""
        found = [] if self._reducer is None else [each.residual for each in self._reducer.states().values()]
        return float(sum(float(each.norm()) ** 2 for each in found if each is not None) ** 0.5)

    @property
    def group(self) -> Group | None:
        """The group of the ranks that share gradients; None before setup, and if this rank is not one of them."""
        return self._group

    def before_step(self, call: Any, *, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """Reduce the gradients for a step, and return the closure for the step.

        If the step has a closure, the returned closure reduces the gradients after the closure's backward.

        Args:
            call: the frame of the call of `step`.
            closure: the function that the program passed to `step` to evaluate the model, or None.
        """
        self.follow_job()
        if self._delta_reducer is not None:
            self._delta_reducer.before_step(
                self, call, unscales=not vars(self).get("_step_supports_amp_scaling", False)
            )
            return closure
        if self._skips:
            return closure
        if closure is None:
            self._warn_once()
            self._bring_gradients()
            return None

        def evaluate() -> Any:
            loss = closure()
            self._bring_gradients()
            return loss

        return evaluate

    def after_step(self, call: Any) -> None:
        """Record that a step has used the gradients; with op=Adasum, combine the ranks' changes."""
        self._count_batch()
        vars(self)["_shares"] = ()
        if self._reducer is not None:
            self._reducer.use_up()
        if self._delta_reducer is not None:
            self._delta_reducer.after_step(call)

    def _warn_once(self) -> None:
        if self._reducer is not None and self._reducer.is_synchronized:
            self._reducer.is_synchronized = False
            warnings.warn(_NOT_SKIPPED, stacklevel=5)  # where `step` was called

    def _bring_gradients(self, *, waits: bool = False) -> None:
        if self._reducer is None:
            return
        self._object_to_changes(self._reducer.changed(waits=waits))
        self._reducer.reduce()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                # A frozen parameter may still have an earlier gradient, which is the same on all ranks.
                if parameter.grad is not None and parameter.requires_grad and not is_shared(parameter):
                    raise StateError(
                        f"a parameter, {described(parameter)}, has a gradient now, but did not require one when the "
                        "DistributedOptimizer was made: the ranks do not share this gradient. Make the "
                        "DistributedOptimizer anew on every rank"
                    )

    def _object_to_changes(self, changed: str) -> None:
        if not changed:
            return
        text = f"optimizer.step(): {changed}. {INSTEAD}"
        if not self._is_lenient or vars(self).get("_delays_gradients"):
            raise StateError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text}. The changed gradients are reduced now, as in Horovod", stacklevel=6)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` itself handles the attributes that torch.amp.GradScaler sets on an optimizer.

        GradScaler reads this property before it looks for an overflow and takes or skips the step. The property
        therefore reduces the gradients first: otherwise one rank's overflow would skip a step that the other ranks
        take. The name is torch's; torch sets it on an optimizer whose fused step supports a scaler.

        Raises:
            StateError: gradients were changed before they were reduced, for example by `unscale_`.
        """
        self.follow_job()
        if self._reducer is not None and not self._skips:
            self._bring_gradients(waits=True)
            self._reducer.rounds.hand_out()
        return self._delta_reducer is not None or bool(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def sent_bytes(self) -> int:
        """Return the bytes that each reduction passes to collectives; see `gradient_bytes`."""
        reducer = self._delta_reducer or self._reducer
        return 0 if reducer is None else reducer.sent_bytes

    def close_reducer(self) -> dict[int, CompressionState]:
        """Release the parameters, and return the compression state of each by its `id`."""
        if self._reducer is None:
            return {}
        states = self._reducer.states()
        self._reducer.close()
        return states

    def share_anew(self) -> None:
        """Share the gradients in this process's current job; every rank of the job must call this."""
        if "_setup" in vars(self):
            share(self, self._setup)

    def follow_job(self) -> None:
        """Share the gradients anew if this process has joined another job since; every rank must call this."""
        if "_setup" in vars(self) and is_rank():
            process_set = self._setup.process_set
            if self._members is not (None if process_set.included() is False else members_of(process_set)):
                self.share_anew()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 -- torch's signature
        """Set the gradients to None or zero, as in torch.

        Raises:
            LoopOrderError: a backward has produced gradients, and neither `step` nor `synchronize` has used them.
        """
        self.follow_job()
        if self._reducer is not None:
            self._reducer.forget()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as in torch; every rank must call this."""
        super().add_param_group(param_group)
        self.share_anew()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch, with the state of gradient compression, which differs between ranks."""
        state = super().state_dict()
        if self._reducer is None or self._group is None:
            return state
        states = self._reducer.states()
        carried = packed([states.get(id(parameter)) for parameter in parameters_of(self)], self._group)
        return {**state, KEY: carried} if carried else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as in torch, and the state of gradient compression if `state_dict` has it."""
        carried, reducer, group = state_dict.get(KEY), self._reducer, self._group
        states: dict[int, CompressionState] = {}
        if carried is not None and reducer is not None and group is not None:
            if is_rank() and self._setup.process_set.included():
                group = members_of(self._setup.process_set).group  # of the current job; `_group` may be older
            own, parameters = reducer.states(), parameters_of(self)
            has_residual = [own.get(id(each), CompressionState()).residual is not None for each in parameters]
            states = states_of(carried, has_residual, parameters, group)
        super().load_state_dict(state_dict)
        if reducer is not None:
            reducer.restart(self._setup.options.backward_passes_per_step)
            reducer.load_states(states)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle this as a plain optimizer: two optimizers cannot share one gradient."""
        if "_setup" not in vars(self):
            return super().__reduce_ex__(protocol)
        kind = type(self)
        return _plain_copy, (vars(kind).get("_plain", kind),), self.__getstate__()


def setup_of(optimizer: torch.optim.Optimizer) -> Setup | None:
    """Return the arguments that DistributedOptimizer was called with; None for another optimizer."""
    setup: Setup | None = vars(optimizer).get("_setup") if isinstance(optimizer, Distributed) else None
    return setup


def _move(optimizer: "weakref.ref[Distributed]", parameter: torch.Tensor) -> None:
    """Share the gradients in the new job, during a backward; `parameter` has the first gradient of this backward."""
    found = optimizer()
    if found is None:
        return
    found.share_anew()
    reducer: AutogradReducer | None = vars(found)["_reducer"]
    if reducer is not None:
        reducer.take(list(reducer.names()).index(id(parameter)))


def residuals_of(optimizer: torch.optim.Optimizer) -> dict[int, Any] | None:
    """Return what this rank has not sent yet of the gradients, by the parameter's number; None without."""
    reducer = optimizer._reducer if isinstance(optimizer, Distributed) else None  # noqa: SLF001 -- of this module
    if reducer is None:
        return None
    states = reducer.states()
    found = [states.get(id(each), CompressionState()).residual for each in parameters_of(optimizer)]
    return {number: each for number, each in enumerate(found) if each is not None} or None


def set_residuals(optimizer: torch.optim.Optimizer, residuals: Mapping[int, Any]) -> None:
    """Replace what this rank has not sent yet of the gradients, by the parameter's number."""
    reducer = optimizer._reducer if isinstance(optimizer, Distributed) else None  # noqa: SLF001 -- of this module
    if reducer is not None:
        parameters = parameters_of(optimizer)
        reducer.load_states({id(parameters[at]): CompressionState(residual=each) for at, each in residuals.items()})


def averages(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a DistributedOptimizer divides the sums of gradients by the number of ranks."""
    setup = setup_of(optimizer)
    return setup is not None and setup.options.op == "average"


def delay_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let backwards end before their gradients are reduced; `take_round` returns the gradients."""
    vars(optimizer)["_delays_gradients"] = True
    reducer = optimizer._reducer if isinstance(optimizer, Distributed) else None  # noqa: SLF001 -- of this module
    if reducer is not None:
        reducer.rounds.delays = True


def _plain_copy(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if not isinstance(optimizer, Distributed):
        return None
    # `arguments[0]` is the optimizer itself. A closure runs its backwards later, and they reduce the gradients.
    given = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    closure = optimizer.before_step(sys._getframe(1), closure=given)  # noqa: SLF001 -- documented in sys
    if closure is given:
        return None
    if "closure" in keywords:
        return arguments, {**keywords, "closure": closure}
    return (arguments[0], closure, *arguments[2:]), keywords


def _after_step(optimizer: torch.optim.Optimizer, _arguments: tuple[Any, ...], _keywords: dict[str, Any]) -> None:
    if isinstance(optimizer, Distributed):
        optimizer.after_step(sys._getframe(1))  # noqa: SLF001 -- documented in sys


def share(optimizer: torch.optim.Optimizer, setup: Setup) -> None:
    """Share the optimizer's gradients as configured by `setup`, which replaces an earlier configuration."""
    # Ranks outside the process set train on their own.
    members = None if setup.process_set.included() is False else members_of(setup.process_set)
    group = None if members is None else members.group
    reducer, deltas = _reducers(optimizer, group, setup)
    either = reducer or deltas
    if members is not None and either is not None:
        members.reducers.add(either)
    if not isinstance(optimizer, Distributed):
        kind = type(optimizer)
        namespace = {"_plain": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
        optimizer.__class__ = type(kind.__name__, (Distributed, kind), namespace)
    if "_setup" not in vars(optimizer):
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
    vars(optimizer).update(_setup=setup, _members=members, _group=group, _reducer=reducer, _delta_reducer=deltas)
    shared = cast("Distributed", optimizer)
    if reducer is not None and members is not None:
        reducer.home = Home(members, partial(_move, weakref.ref(shared)))
    shared.watch(vars(optimizer).get("_watching"))
    if reducer is not None and vars(optimizer).get("_delays_gradients"):
        reducer.rounds.delays = True


def _reducers(
    optimizer: torch.optim.Optimizer, group: Group | None, setup: Setup
) -> tuple[AutogradReducer | None, DeltaReducer | None]:
    options = setup.options
    with nullcontext() if group is None else reporting_errors(group, "DistributedOptimizer"):
        parameters = trained(optimizer, setup.named)
        for name, parameter in parameters:
            refuse_unserved(parameter, f"parameter {name}")
            numpy_dtype(dtype_name(parameter.dtype))
        names, tensors = [name for name, _ in parameters], [parameter for _, parameter in parameters]
        specs = list(zip(names, specs_of(tensors), strict=True))
        options.require_fit(specs)
    together = together_of(parameters, setup.groups)
    states: dict[int, CompressionState] = {}
    if group is not None:
        require_alike(group, "DistributedOptimizer", options.lines_with(specs, together))
    states |= optimizer.close_reducer() if isinstance(optimizer, Distributed) else {}
    states |= take_over(parameters)
    if group is None or (group.size == 1 and not LONE_RANK.exchanges):
        # A single rank needs no reduction.
        return None, None
    # The buckets need their own group, so that the order of their operations is independent of other operations.
    own = _subgroup(group)
    if options.op == "adasum":
        return None, DeltaReducer(parameters, own, options.compression or Compression.none)
    reductions = TensorReductions(own, lambda: _subgroup(own), options)
    reducer = AutogradReducer(parameters, own, options, reductions, together)
    reducer.load_states(states)
    return reducer, None


def _subgroup(group: Group) -> Group:
    return cast("Group", group.subgroup(range(group.size)))
