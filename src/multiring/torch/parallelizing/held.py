"""Marks that tell norms, steps and checkpoints how a model is distributed.

Each parameter of a model that `parallelize` made carries a `Held`. A program's own `clip_grad_norm_` and `GradScaler`
do not read it. Therefore gradients are `PartGradient`s if other ranks have the other gradients, or if they are
DTensors. A `PartGradient` is a tensor like any other, except that torch's results over all gradients together (their
norm, whether they are finite) cover all ranks.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multiring.errors import ArgumentError, UnsupportedError

_KEY = "_multiring_held"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Held:
    """How a model is distributed over the ranks.

    Attributes:
        parallelism: the axes and their sizes, as text.
        stages: the ranks that hold the other stages of a pipeline; None without a pipeline.
        is_sharded: whether ranks hold parts of parameters, along a shard axis.
        is_divided: whether ranks hold parts of parameters, along a tensor axis.
    """

    parallelism: str
    stages: dist.ProcessGroup | None = None
    is_sharded: bool = False
    is_divided: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether each rank holds the whole model."""
        return self.stages is None and not self.is_sharded and not self.is_divided

    def __deepcopy__(self, memo: Any) -> "Held":
        """Return this object: a copy of a model is distributed like the original."""
        return self

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Pickle to None: an unpickled model is not distributed."""
        return _nothing, ()


def _nothing() -> None:
    """Return None, the value of an unpickled `Held`."""


def mark_held(parameters: Iterable[Tensor], held: Held) -> None:
    """Record on each of `parameters` how its model is distributed."""
    for each in parameters:
        vars(each)[_KEY] = held


def held_of(parameters: Iterable[Tensor]) -> Held | None:
    """Return how the model of `parameters` is distributed.

    The result is None if `parallelize` did not make the model.
    """
    return next((found for each in parameters if (found := vars(each).get(_KEY)) is not None), None)


def mark_module(module: nn.Module, held: Held) -> None:
    """Record on `module` and its tensors how the model is distributed.

    The state_dict and copies of the module keep the record.
    """
    mark_held(module.parameters(), held)
    vars(module)[_KEY] = held  # copied modules keep this attribute, copied parameters do not
    module.register_state_dict_post_hook(partial(_mark_state, held))  # type: ignore[no-untyped-call] # torch does not annotate it


def held_of_module(module: nn.Module) -> Held | None:
    """Return how the model of `module`, or of its original, is distributed.

    The result is None if `parallelize` did not make the model.
    """
    found = held_of(module.parameters())
    marks = (vars(each).get(_KEY) for each in module.modules())
    return found if found is not None else next((each for each in marks if each is not None), None)


def held_by(optimizer: torch.optim.Optimizer) -> Held | None:
    """Return how the optimizer's model is distributed.

    The result is None if `parallelize` did not make the model.
    """
    return held_of(each for group in optimizer.param_groups for each in group["params"])


def refuse_held(what: str, parameters: Iterable[Tensor], remedy: str) -> None:
    """Raise ArgumentError if `parallelize` made the model of `parameters`.

    Args:
        what: the name of the call that cannot accept such a model, for the message.
        parameters: the model's parameters.
        remedy: what to do instead, for the message.
    """
    held = held_of(parameters)
    if held is not None:
        raise ArgumentError(
            f"{what}: parallelize has put the model on the ranks already ({held.parallelism}); {remedy}"
        )


def refuse_parts(what: str, held: Held | None, remedy: str) -> None:
    """Raise ArgumentError if ranks hold only parts of a model.

    Args:
        what: the name of the call that cannot accept such a model, for the message.
        held: how the model is distributed.
        remedy: what to do instead, for the message.
    """
    if held is not None and not held.is_whole:
        raise ArgumentError(
            f"{what}: under {held.parallelism} each rank has a different part of the model, so one rank's part cannot "
            f"replace the others'; {remedy}"
        )


def _mark_state(held: Held, _module: nn.Module, state: dict[str, Any], *_others: Any) -> None:
    """Hook of a module: record on each tensor of its state_dict how the model is distributed."""
    mark_held((each for each in state.values() if isinstance(each, Tensor)), held)


# ---- tensors of which this rank holds a part ----


def is_dtensor(value: Any) -> bool:
    """Return whether `value` is a DTensor, without importing DTensor's module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Any) -> Tensor:
    """Return the part of `tensor` that this rank holds."""
    with torch.no_grad():
        found: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
        return found


def whole(tensor: Any) -> Tensor:
    """Return the whole of `tensor`.

    Every rank that holds a part of it has to call this function.
    """
    found: Tensor = tensor.full_tensor() if is_dtensor(tensor) else tensor
    return found


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the parts of `tensors` that this rank holds."""
    return [local(each) for each in tensors]


def as_spread(part: Tensor, likes: Sequence[Any]) -> Tensor:
    """Return `part` as a DTensor laid out like `likes[0]`, if that is a DTensor.

    Nothing is sent.
    """
    if not likes or not is_dtensor(likes[0]):
        return part
    like = likes[0]
    found: Tensor = type(like.data).from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return found


def summed_over_parts(squares: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Sum each of `squares` over the ranks that hold parts of its tensor.

    Each of these ranks calls it.

    Args:
        squares: sums of squares of this rank's parts, shape (tensors,). They are changed in place.
        tensors: the tensors, some of which are DTensors.
    """
    lines: dict[int, tuple[dist.ProcessGroup, list[int]]] = {}
    for number, each in enumerate(tensors):
        if is_dtensor(each):
            for dim, placement in enumerate(each.placements):  # type: ignore[attr-defined] # an attribute of DTensor
                if placement.is_shard():
                    group = each.device_mesh.get_group(dim)  # type: ignore[attr-defined] # an attribute of DTensor
                    lines.setdefault(id(group), (group, []))[1].append(number)
    for group, numbers in lines.values():
        told = squares[numbers]
        dist.all_reduce(told, group=group)
        squares[numbers] = told
    return squares


# ---- gradients, as a program sees them ----


class _Part(Tensor):
    """A tensor for which some torch functions also count other ranks' tensors."""

    _stages: dist.ProcessGroup | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute as for plain tensors, except for the functions that the class overrides."""
        del types
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 -- the way that torch documents for subclasses
            return cls._computed(func, args, kwargs or {})

    @classmethod
    def _computed(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class PartGradient(_Part):
    """A gradient that is a DTensor, or belongs to a model with other gradients on other ranks.

    Its norm is a PartNorm.
    """

    @classmethod
    def _computed(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        return _of_gradients(func, args, kwargs)


class PartNorm(_Part):
    """The norm of a gradient.

    The norm of a stack of such norms is the norm of all ranks' gradients.
    """

    @classmethod
    def _computed(cls, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        stages = next((group for each in _leaves(args) if (group := _stages_of(each)) is not None), None)
        found = func(*args, **kwargs)
        if func in _KEEPS:
            return _as_norm(found, stages)
        if func in _NORMS:
            return _over_stages(found, _order_of(args[1:], kwargs), stages)
        return found


def as_part(gradient: Tensor, held: Held) -> Tensor:
    """Return `gradient` as a PartGradient of the same memory."""
    found = gradient.as_subclass(PartGradient)
    found._stages = held.stages  # noqa: SLF001 -- only this module uses it
    return found


def _of_gradients(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if func in _FINITE_CHECKS:
        return _checked(func, *args)
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and any(map(is_dtensor, _leaves(args))):
        found: Any = _one_by_one(func, args, kwargs)
    else:
        # Make DTensor scalars, such as the factor of gradient clipping, plain tensors.
        found = func(*(whole(each) if isinstance(each, Tensor) and not each.dim() else each for each in args), **kwargs)
    if func is torch._foreach_norm:  # noqa: SLF001 -- torch has no public name for it
        return [_as_norm(whole(norm), _stages_of(each)) for norm, each in zip(found, args[0], strict=True)]
    if func in _NORMS:
        return _as_norm(found, _stages_of(args[0]))
    return found


def _checked(func: Callable[..., Any], gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Unscale `gradients`, and report to all ranks whether any number is not finite."""
    func(locals_of(gradients), found_inf, inverse_scale)
    groups = [group for each in gradients if (group := _stages_of(each)) is not None]
    groups += [each.device_mesh.get_group(0) for each in gradients if is_dtensor(each)]  # type: ignore[attr-defined]
    for group in {id(each): each for each in groups}.values():
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def _one_by_one(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Apply `func`, which takes lists of tensors of one kind, to each tensor of a mixed list."""
    count = len(args[0])
    changes = func.__name__.endswith("_")  # an elementwise in-place function, which needs only this rank's part

    def part(value: Any, at: int) -> Any:
        if isinstance(value, list | tuple) and len(value) == count:
            return [local(value[at]) if changes else value[at]]
        return value.item() if isinstance(value, Tensor) and not value.dim() else value

    found: list[Any] = []
    for at in range(count):
        made = func(*(part(each, at) for each in args), **{name: part(each, at) for name, each in kwargs.items()})
        found.append(made[0] if made is not None else None)
    return found


def _as_norm(norm: Any, stages: dist.ProcessGroup | None) -> Any:
    if stages is None or not isinstance(norm, Tensor):
        return norm
    found = norm.as_subclass(PartNorm)
    found._stages = stages  # noqa: SLF001 -- only this module uses it
    return found


def _over_stages(norm: Tensor, order: float, stages: dist.ProcessGroup | None) -> Tensor:
    """Return the norm over all stages, given this stage's norm."""
    if stages is None:
        return norm
    if math.isinf(order):
        told = norm.clone()
        dist.all_reduce(told, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN, group=stages)
        return told
    if order == 0:
        raise UnsupportedError("a norm of order 0 of a pipeline's gradients: want 1, 2, any other number, or inf")
    told = norm**order
    dist.all_reduce(told, group=stages)
    return told ** (1.0 / order)


def _order_of(args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    found = args[0] if args else kwargs.get("ord", kwargs.get("p", 2))
    return 2.0 if found in {None, "fro"} else float(found)


def _stages_of(value: Any) -> dist.ProcessGroup | None:
    found: dist.ProcessGroup | None = getattr(value, "_stages", None) if isinstance(value, Tensor) else None
    return found


def _leaves(args: Any) -> Iterable[Any]:
    for each in args:
        if isinstance(each, list | tuple):
            yield from each
        else:
            yield each


_NORMS = {torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm}
_KEEPS = {torch.stack, Tensor.to}
_FINITE_CHECKS = {torch._amp_foreach_non_finite_check_and_unscale_}  # the function that GradScaler calls
