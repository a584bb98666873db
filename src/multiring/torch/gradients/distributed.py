"""What an optimizer becomes whose gradients are those of all ranks."""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from multiring.data import Share
from multiring.errors import StateError, UnsupportedError
from multiring.frontend.consistency_check import require_alike, told_to_others
from multiring.frontend.errors import LoopOrderError
from multiring.frontend.process_sets import Members, members_of
from multiring.gradients.compression_state import KEY, packed
from multiring.gradients.reductions import CompressionState
from multiring.runtime import Group
from multiring.runtime.arrays import numpy_dtype
from multiring.runtime.job.job import is_rank
from multiring.torch.compression import Compression
from multiring.torch.gradients.adasum_delta import DeltaReducer
from multiring.torch.gradients.bucket_tensors import spec_of, states_of, tensor_reductions_of
from multiring.torch.gradients.gradient_reducer import GradientReducer, Home
from multiring.torch.gradients.hook_registry import is_shared, take_over
from multiring.torch.gradients.rounds import GradientWatch, Round
from multiring.torch.gradients.setup import Setup, parameters_of, together_of, trained
from multiring.torch.interop import dense_strides, described, dtype_name, refuse_elsewhere

# Horovod's words, which programs and tests look for.
_NOT_SKIPPED = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)


class Distributed(torch.optim.Optimizer):
    """What a distributed optimizer has beyond the class it was made from; its place is before that one.

    An object that somebody made of such a class, or of one derived from it, shares nothing until it is given to
    DistributedOptimizer itself.
    """

    _plain: type[torch.optim.Optimizer]
    _setup: Setup
    _members: Members | None = None  # the ranks to share with, in the job in which `_group` is theirs; None likewise
    _group: Group | None = None  # of the ranks to share with; None where this rank is not one of them
    _reducer: GradientReducer | None = None
    _delta_reducer: DeltaReducer | None = None
    _skips: bool = False
    _is_accumulating: bool = False
    ends_early: bool = False  # the group of backwards ends with the next one, though it be short
    _is_lenient: bool = False  # towards gradients that were changed before they were reduced
    _has_warned: bool = False  # of such
    _watching: GradientWatch | None = None  # see `watch`
    share_of_batch: Share | None = None  # this rank's part of the batch handed out last, by a loader of `distribute`
    _shares: tuple[Share, ...] = ()  # of the batches whose backwards are in the gradients, but perhaps the last one
    _seen_backwards: int = 0  # when the last batch was handed out

    def synchronize(self) -> None:
        """Return when the gradients are those of all ranks; nothing to do after a backward has ended."""
        self.follow_job()
        if self._reducer is not None:
            self._reducer.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it a step takes the gradients as they are: after `synchronize`, and whatever was done to them since.

        Raises:
            LoopOrderError: with op=Adasum, where each step has to combine.
        """
        if self._delta_reducer is not None:
            raise LoopOrderError(
                "Skipping synchronization is not supported when using Adasum optimizer. Each step combines what the "
                "ranks have changed: leave skip_synchronize() away, or use op=Average"
            )
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Reduce after so many backwards from now on; every rank has to.

        Raises:
            ArgumentError: `passes` below 1.
        """
        self._setup = replace(self._setup, options=replace(self._setup.options, backward_passes_per_step=passes))
        if self._reducer is not None:
            self._reducer.restart(passes)

    def accumulate(self, passes: int) -> None:
        """As `set_backward_passes_per_step`; also where there is one rank, whose loader has to know of it."""
        self.set_backward_passes_per_step(passes)
        self._is_accumulating = passes > 1

    @property
    def accumulates(self) -> bool:
        """Whether several backwards make a step, so that a pass's last batch is worth knowing."""
        return self._is_accumulating or (self._reducer is not None and self._reducer.accumulates)

    def reduce_early(self, *, early: bool) -> None:
        """Reduce at the end of each backward from now on, or again only where the group of backwards is complete.

        For who knows that a group may end here, though it is short; where it goes on all the same, it may.
        """
        self.ends_early = early
        if self._reducer is not None:
            self._reducer.reduces_early = early

    @property
    def backwards(self) -> int:
        """How many backwards have brought gradients so far; 0 where they are not shared."""
        return 0 if self._reducer is None else self._reducer.backwards

    def take_batch(self, share: Share | None) -> None:
        """Take note that a loader has handed out a batch, of which this rank has `share`; None: its pass is over."""
        self._count_batch()
        vars(self)["share_of_batch"] = share

    @property
    def shares_of_step(self) -> tuple[Share, ...]:
        """This rank's parts of the batches whose backwards make the gradients as they are now."""
        self._count_batch()
        return self._shares

    def _count_batch(self) -> None:
        if self.backwards > self._seen_backwards and self.share_of_batch is not None:
            vars(self)["_shares"] = (*self._shares, self.share_of_batch)
        vars(self)["_seen_backwards"] = self.backwards

    def be_lenient(self) -> None:
        """Warn, once, where a step finds gradients that were changed before they were reduced, instead of raising."""
        self._is_lenient = True

    def bring_gradients(self) -> None:
        """See, before a step, that the gradients are those of all ranks; for stages that look at them first.

        Raises:
            UnsupportedError: with op=Adasum, where each rank steps with its own.
        """
        self.follow_job()
        if self._delta_reducer is not None:
            raise UnsupportedError("gradient lag, LARC, loss scaling and the like with op=Adasum: want op=Average")
        if not self._skips:
            self._bring_gradients()

    def take_round(self) -> Round | None:
        """Return the gradients that are on their way, before a step; None where `.grad` has those of all ranks."""
        return None if self._reducer is None else self._reducer.rounds.take()

    def watch(self, watching: GradientWatch | None) -> None:
        """Show `watching` this rank's gradients before they are reduced, and all ranks', from now on; None ends it."""
        self._watching = watching
        if self._reducer is not None:
            self._reducer.rounds.watching = watching

    def scale_residuals(self, factor: float) -> None:
        """Multiply what lossy gradients owe, as by a change of the loss scale."""
        if self._reducer is None:
            return
        found = {key: each for key, each in self._reducer.states().items() if each.residual is not None}
        self._reducer.load_states({key: replace(each, residual=each.residual * factor) for key, each in found.items()})

    def residual_norm(self) -> float:
        """Return the norm of what lossy gradients of this rank owe."""
        found = [] if self._reducer is None else [each.residual for each in self._reducer.states().values()]
        return float(sum(float(each.norm()) ** 2 for each in found if each is not None) ** 0.5)

    @property
    def group(self) -> Group | None:
        """Of the ranks that share gradients; None before that, and where this rank is not one of them."""
        return self._group

    def before_step(self, call: Any, *, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        """See that the step finds the gradients of all ranks; return its closure, which then sees to it itself.

        Args:
            call: the frame of the call.
            closure: what the step was given to evaluate the model.
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
        """Take note that a step has used the gradients."""
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

    def _bring_gradients(self) -> None:
        if self._reducer is None:
            return
        self._object_to_changes(self._reducer.changed())
        self._reducer.reduce()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                # One that is frozen may still have what an earlier backward brought, the same on all ranks.
                if parameter.grad is not None and parameter.requires_grad and not is_shared(parameter):
                    raise StateError(
                        f"a parameter, {described(parameter)}, has a gradient now, and had none to expect when the "
                        "DistributedOptimizer was made: the ranks do not share it. Make it anew on every rank"
                    )

    def _object_to_changes(self, changed: str) -> None:
        if not changed:
            return
        text = (
            f"optimizer.step(): {changed}. Call optimizer.synchronize() after the last backward, before gradients are "
            "used, and step within `with optimizer.skip_synchronize():`"
        )
        if not self._is_lenient or vars(self).get("_delays_gradients"):
            raise StateError(text)
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(f"{text}. They are reduced as they are now, as in Horovod", stacklevel=6)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks before it takes the step, or leaves it out without telling anybody.

        Before it looks at the gradients, too: where they are still each rank's own, one rank's overflow would have it
        leave out a step that the others take. The name is torch's own; an optimizer whose fused step knows what a
        scaler leaves for it has it set.

        Raises:
            StateError: gradients were changed before they were reduced, as by `unscale_`.
        """
        self.follow_job()
        if self._reducer is not None and not self._skips:
            self._bring_gradients()
            self._reducer.rounds.hand_out()
        return self._delta_reducer is not None or bool(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def sent_bytes(self) -> int:
        """See `gradient_bytes`."""
        reducer = self._delta_reducer or self._reducer
        return 0 if reducer is None else reducer.sent_bytes

    def close_reducer(self) -> dict[int, CompressionState]:
        """Let go of the parameters; return what was carried on from step to step for each."""
        if self._reducer is None:
            return {}
        states = self._reducer.states()
        self._reducer.close()
        return states

    def share_anew(self) -> None:
        """Share the gradients in the job that this process is in now; every rank of it has to call this."""
        if "_setup" in vars(self):
            share(self, self._setup)

    def follow_job(self) -> None:
        """Share the gradients anew where the job was joined anew, and every rank calls this; else do nothing."""
        if "_setup" in vars(self) and is_rank():
            process_set = self._setup.process_set
            if self._members is not (None if process_set.included() is False else members_of(process_set)):
                self.share_anew()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 -- torch's signature
        """As in torch.

        Raises:
            LoopOrderError: after a backward whose gradients neither a step nor `synchronize` has asked for.
        """
        self.follow_job()
        if self._reducer is not None:
            self._reducer.forget()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; every rank has to."""
        super().add_param_group(param_group)
        self.share_anew()

    def state_dict(self) -> dict[str, Any]:
        """As in torch; with what lossy gradients carry from step to step, part of which is this rank's own."""
        state = super().state_dict()
        if self._reducer is None or self._group is None:
            return state
        states = self._reducer.states()
        carried = packed([states.get(id(parameter)) for parameter in parameters_of(self)], self._group)
        return {**state, KEY: carried} if carried else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; also what lossy gradients carry from step to step, where `state_dict` has that."""
        carried, reducer, group = state_dict.get(KEY), self._reducer, self._group
        states: dict[int, CompressionState] = {}
        if carried is not None and reducer is not None and group is not None:
            if is_rank() and self._setup.process_set.included():
                group = members_of(self._setup.process_set).group  # of this job; it need not be the one shared in yet
            own, parameters = reducer.states(), parameters_of(self)
            has_residual = [own.get(id(each), CompressionState()).residual is not None for each in parameters]
            states = states_of(carried, has_residual, parameters, group)
        super().load_state_dict(state_dict)
        if reducer is not None:
            reducer.restart(self._setup.options.backward_passes_per_step)
            reducer.load_states(states)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is a plain optimizer: two cannot share one gradient."""
        if "_setup" not in vars(self):
            return super().__reduce_ex__(protocol)
        kind = type(self)
        return _plain_copy, (vars(kind).get("_plain", kind),), self.__getstate__()


def setup_of(optimizer: torch.optim.Optimizer) -> Setup | None:
    """Return what a DistributedOptimizer was called with; None for another optimizer."""
    setup: Setup | None = vars(optimizer).get("_setup") if isinstance(optimizer, Distributed) else None
    return setup


def _move(optimizer: "weakref.ref[Distributed]", parameter: torch.Tensor) -> None:
    """Share the gradients anew amid a backward, of which this parameter's is the first in this job."""
    found = optimizer()
    if found is None:
        return
    found.share_anew()
    reducer: GradientReducer | None = vars(found)["_reducer"]
    if reducer is not None:
        reducer.take(list(reducer.names()).index(id(parameter)))


def delay_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Let backwards end while their gradients are on their way, once they are shared: `take_round` has them."""
    vars(optimizer)["_delays_gradients"] = True
    reducer = optimizer._reducer if isinstance(optimizer, Distributed) else None  # noqa: SLF001 -- of this module
    if reducer is not None:
        reducer.rounds.delays = True


def _plain_copy(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    if not isinstance(optimizer, Distributed):
        return None
    # `arguments` has the optimizer itself in front. A closure runs its backwards later, and they reduce.
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
    """Share the optimizer's gradients as `setup` wants it, instead of any way they were shared before."""
    # Other ranks than the set's train for themselves.
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
) -> tuple[GradientReducer | None, DeltaReducer | None]:
    options = setup.options
    with nullcontext() if group is None else told_to_others(group, "DistributedOptimizer"):
        parameters = trained(optimizer, setup.named)
        for name, parameter in parameters:
            refuse_elsewhere(parameter, f"parameter {name}")
            numpy_dtype(dtype_name(parameter.dtype))
        options.require_fit([(name, spec_of(parameter)) for name, parameter in parameters])
    together = together_of(parameters, setup.groups)
    states: dict[int, CompressionState] = {}
    if group is not None:
        lines = [str(options)]
        lines += [f"groups={together}"] if together else []
        lines += [f"{name}, {described(parameter, dense_strides(parameter))}" for name, parameter in parameters]
        require_alike(group, "DistributedOptimizer", lines)
    states |= optimizer.close_reducer() if isinstance(optimizer, Distributed) else {}
    states |= take_over(parameters)
    if group is None or group.size == 1:
        # One rank's gradients are those of all ranks as they are.
        return None, None
    # A group of its own: its buckets keep their order, whatever else the ranks do meanwhile.
    own = _subgroup(group)
    if options.op == "adasum":
        return None, DeltaReducer(parameters, own, options.compression or Compression.none)
    reducer = GradientReducer(
        parameters, own, options, tensor_reductions_of(own, lambda: _subgroup(own), options), together
    )
    reducer.load_states(states)
    return reducer, None


def _subgroup(group: Group) -> Group:
    return cast("Group", group.subgroup(range(group.size)))
