"""DistributedOptimizer: an optimizer whose gradients are those of all ranks."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from multiring.errors import ArgumentError, StateError, UnsupportedError
from multiring.runtime import Group, world
from multiring.runtime.arrays import numpy_dtype
from multiring.torch.buckets import BUCKET_BYTES, BucketLayout
from multiring.torch.carried import KEY, packed, unpacked
from multiring.torch.coded import Coded
from multiring.torch.gradients import GradientSharing, is_shared, take_over
from multiring.torch.likeness import require_alike, told_to_others
from multiring.torch.options import Options, PowerSGD
from multiring.torch.powersgd import Factored, Stages
from multiring.torch.reductions import Kept, Plain, Reduction
from multiring.torch.tensors import dense_strides, described, dtype_name, refuse_elsewhere
from multiring.torch.timeline import follow_timelines

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
_Named = tuple[tuple[str, Tensor], ...]


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer has beyond the class it was made from; its place is before that one."""

    _plain: type[torch.optim.Optimizer]
    _group: Group
    _options: Options
    _sharing: GradientSharing
    _named: _Named | None

    def synchronize(self) -> None:
        """Return when the gradients are those of all ranks; nothing to do after a backward has ended."""
        self._sharing.synchronize()

    def step_is_next(self) -> None:
        """Return when the gradients are those of all ranks, and take note that a step uses them up."""
        self._sharing.use_up()
        if self._group.size == 1:
            return
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if parameter.grad is not None and not is_shared(parameter):
                    raise StateError(
                        f"a parameter, {described(parameter)}, has a gradient now, and had none to expect when the "
                        "DistributedOptimizer was made: the ranks do not share it. Make it anew on every rank"
                    )

    def sent_bytes(self) -> int:
        """See `gradient_bytes`."""
        return self._sharing.sent_bytes

    def stop_sharing(self) -> dict[int, Kept]:
        """Let go of the parameters; return what was carried on from step to step for each."""
        kept = self._sharing.kept()
        self._sharing.close()
        return kept

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 -- torch's signature
        super().zero_grad(set_to_none)
        self._sharing.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; every rank has to."""
        super().add_param_group(param_group)
        self._sharing = _share(self, self._group, self._options, self._named)

    def state_dict(self) -> dict[str, Any]:
        """As in torch; with what lossy gradients carry from step to step, part of which is this rank's own."""
        state = super().state_dict()
        carried = packed(self._sharing.kept(), _parameters(self), self._group)
        return {**state, KEY: carried} if carried else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch; also what lossy gradients carry from step to step, where `state_dict` has that."""
        carried = state_dict.get(KEY)
        kept = {} if carried is None else unpacked(carried, self._sharing.kept(), _parameters(self), self._group)
        super().load_state_dict(state_dict)
        self._sharing.restore(kept)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """A copy is a plain optimizer: two cannot share one gradient."""
        return _plain_copy, (self._plain,), self.__getstate__()


def DistributedOptimizer(  # noqa: N802, PLR0913 -- Horovod's name; options are keywords
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    *,
    op: str = "average",
    bucket_bytes: int = BUCKET_BYTES,
    backward_passes_per_step: int = 1,
    wire: str | None = None,
    error_feedback: bool = False,
    compression: PowerSGD | None = None,
    group: Group | None = None,
) -> Optimizer:
    """Make `optimizer`'s gradients those of all ranks from the end of each backward on, and return it.

    Every rank calls it, with the same parameters. The optimizer stays the object it was, and of its class: schedulers
    and checkpoints made with it go on working. What a rank has no gradient for counts as zero; a `.grad` stays None
    where no rank has one. Called again, it makes the sharing anew, as parameters that begin to require a gradient need.

    Args:
        optimizer: any but LBFGS, which decides by the loss of one rank.
        named_parameters: as `model.named_parameters()` gives them, in the order in which the model uses them: names for
            errors, and the order for buckets. All of the optimizer's, and perhaps more.
        op: "average"; or "sum", where each rank's loss is divided by the number of samples of all ranks.
        bucket_bytes: how much is reduced at once.
        backward_passes_per_step: how many backwards add up before their sum is reduced; a step reduces in any case.
        wire: "fp16", "bf16" or "int8": what float32 gradients become between hosts (`Group.all_reduce`).
        error_feedback: whether what this rank's gradients lose by `wire` goes along with the next ones.
        compression: PowerSGD(rank=...) sends float32 matrices as narrow factors instead, always with error feedback.
        group: the ranks to share with; by default all.

    Raises:
        ArgumentError: an option makes no sense, alone or with these parameters; a parameter has no name, another's, or
            a type that cannot be moved.
        MismatchError: on every rank: their parameters or options differ.
        UnsupportedError: a parameter on a GPU, or an optimizer that cannot be distributed.
        StateError: before `init`.
    """
    follow_timelines()
    whole = group or world()
    with told_to_others(whole, "DistributedOptimizer"):
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError("LBFGS decides by the loss, which each rank has its own of")
        options = Options(
            op=op,
            bucket_bytes=bucket_bytes,
            backward_passes_per_step=backward_passes_per_step,
            wire=wire,
            error_feedback=error_feedback,
            compression=compression,
        )
        named = None if named_parameters is None else _named(named_parameters)
        if named is not None:
            _require_names(optimizer, named)
    sharing = _share(optimizer, whole, options, named)
    if not isinstance(optimizer, _Distributed):
        kind = type(optimizer)
        optimizer.register_step_pre_hook(_before_step)
        members = {"_plain": kind, "__doc__": kind.__doc__, "__module__": kind.__module__}
        optimizer.__class__ = cast("type[Optimizer]", type(kind.__name__, (_Distributed, kind), members))
    vars(optimizer).update(_group=whole, _options=options, _named=named, _sharing=sharing)
    return optimizer


def gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return how many bytes each reduction of `optimizer`'s gradients hands over, as they travel between hosts.

    That is after coding and compression; how often an algorithm sends them is in docs/algorithms.md. 0 for one rank.

    Raises:
        ArgumentError: `optimizer` is no DistributedOptimizer.
    """
    if not isinstance(optimizer, _Distributed):
        raise ArgumentError(f"{type(optimizer).__name__} shares no gradients; want one from DistributedOptimizer")
    return optimizer.sent_bytes()


def _plain_copy(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    return kind.__new__(kind)


def _before_step(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    # `arguments` has the optimizer itself in front. A closure runs its backwards later, and they reduce.
    closure = keywords.get("closure", arguments[1] if len(arguments) > 1 else None)
    if isinstance(optimizer, _Distributed) and closure is None:
        optimizer.step_is_next()


def _share(optimizer: torch.optim.Optimizer, group: Group, options: Options, named: _Named | None) -> GradientSharing:
    with told_to_others(group, "DistributedOptimizer"):
        parameters = _trained(optimizer, named)
        for name, parameter in parameters:
            refuse_elsewhere(parameter, f"parameter {name}")
            numpy_dtype(dtype_name(parameter.dtype))
        options.require_fit(parameters)
    lines = [str(options)]
    lines += [f"{name}, {described(parameter, dense_strides(parameter))}" for name, parameter in parameters]
    require_alike(group, "DistributedOptimizer", lines)
    kept = optimizer.stop_sharing() if isinstance(optimizer, _Distributed) else {}
    kept |= take_over(parameters)
    # A group of its own: its buckets keep their order, whatever else the ranks do meanwhile.
    own = _subgroup(group)
    # One rank's gradients are those of all ranks as they are.
    sharing = GradientSharing(parameters if own.size > 1 else (), own, options, _reductions(own, options))
    sharing.restore(kept)
    return sharing


def _reductions(group: Group, options: Options) -> Callable[[BucketLayout, list[Tensor]], Reduction]:
    """Return what makes a bucket as `options` want it."""
    if options.compression is not None:
        return partial(Factored, Stages(group, _subgroup(group)), options.op, options.compression)
    if options.wire is not None:
        return partial(Coded, group, options)
    return partial(Plain, group, options.op)


def _subgroup(group: Group) -> Group:
    return cast("Group", group.subgroup(range(group.size)))


def _named(named_parameters: Iterable[tuple[str, Tensor]]) -> _Named:
    named = tuple(named_parameters)
    for each in cast("tuple[Any, ...]", named):
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise ArgumentError(
                f"named_parameters has a {type(each).__name__}; want (name, tensor), as model.named_parameters() has"
            )
    names = Counter(name for name, _ in named)
    name, count = next(iter(names.most_common(1)), ("", 0))
    if count > 1:
        raise ArgumentError(f"named_parameters has {name} {count} times; want each name once")
    return named


def _trained(optimizer: torch.optim.Optimizer, named: _Named | None) -> list[tuple[str, Tensor]]:
    """Return the optimizer's parameters that require a gradient: those of `named` in its order, then the others."""
    own = _placed(optimizer)
    wanted = {id(parameter) for _, parameter in own if parameter.requires_grad}
    chosen: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in [*(named or ()), *own]:
        if id(parameter) in wanted:
            chosen.setdefault(id(parameter), (name, parameter))
    return list(chosen.values())


def _require_names(optimizer: torch.optim.Optimizer, named: _Named) -> None:
    known = {id(parameter) for _, parameter in named}
    for place, parameter in _placed(optimizer):
        if id(parameter) not in known:
            raise ArgumentError(f"named_parameters lacks the optimizer's {place}, {described(parameter)}")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for _, parameter in _placed(optimizer)]


def _placed(optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    return [
        (f'param_groups[{i}]["params"][{j}]', parameter)
        for i, param_group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(param_group["params"])
    ]
