"""Measure a model and its batch, for the forecasts of `planner.parallelism`."""

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from multiring._schedule import Collective
from multiring._topology import Topology
from multiring.planner import Task, cheapest
from multiring.planner.parallelism import Profile, Unit
from multiring.torch.parallelizing.anatomy import Anatomy, ModelUnit, Split, modules_below
from multiring.torch.parallelizing.measuring import (
    Call,
    alone,
    ascending,
    batch_of,
    calls_of,
    cost_of,
    part_of,
    together,
    undone,
)
from multiring.torch.parallelizing.overheads import measured_overheads

_SMALL = Task(collective=Collective.ALL_REDUCE, size_bytes=4)


@dataclass(frozen=True, slots=True)
class MeasuredProfile:
    """A profile, and the output of each unit for one sample.

    `made` maps a unit's name to the output's shape and type; None means that the output is not a single tensor.
    """

    profile: Profile
    made: MappingProxyType[str, tuple[torch.Size, torch.dtype] | None]


def measure(
    model: nn.Module, inputs: tuple[Tensor, ...], anatomy: Anatomy, optimizer_states: int, topology: Topology
) -> MeasuredProfile:
    """Return the profile of `model` for `inputs`, the batch of all ranks.

    Every rank calls it. All ranks get the same profile. The measurement takes about ten steps of the whole batch,
    during which each rank's memory holds the model and its gradients.

    Raises:
        ArgumentError: `inputs` are no batch.
    """
    batch, ranks = batch_of(inputs), dist.get_world_size()
    samples = max(1, batch // ranks)
    given = part_of(inputs, samples)
    with undone(model):
        modules = {part.name: part.module for part in anatomy.parts if part.module is not None}
        layers = {name: model.get_submodule(name) for name in anatomy.splits}
        calls = calls_of(model, given, {**layers, **modules})
        splits, refused = _once(anatomy, calls)
        refused |= _uncut(anatomy, calls, samples)
        units = tuple(_unit(model, part, calls, splits, samples) for part in anatomy.parts)
        sizes = sorted({max(1, batch // cut) for cut in _cuts(ranks, has_stages="pipeline" not in refused)})
        compute = ascending([together(model, inputs, each) for each in sizes])
        undisturbed_s = alone(model, inputs, samples)
    crowded = next(each for each in compute if each.samples == samples)
    profile = Profile(
        units=units,
        batch=batch,
        compute=compute,
        crowding=max(1.0, crowded.seconds / undisturbed_s),
        optimizer_states=optimizer_states,
        overheads=measured_overheads(
            model.parameters(), optimizer_states, cheapest(_SMALL, topology).predicted_seconds
        ),
        divisor=anatomy.divisor,
        refused=refused,
    )
    return MeasuredProfile(_of_rank_0(profile), MappingProxyType({name: _made(calls[name]) for name in modules}))


def _cuts(ranks: int, *, has_stages: bool) -> list[int]:
    """Return the numbers of parts into which batches are cut.

    They are the divisors of the number of ranks and, for microbatches, two and four times that number.
    """
    divisors = [cut for cut in range(1, ranks + 1) if ranks % cut == 0]
    return [*divisors, *((ranks * 2, ranks * 4) if has_stages else ())]


def _of_rank_0(profile: Profile) -> Profile:
    # Each rank times units by itself, but all ranks have to make the same choice.
    told = [profile]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def _once(anatomy: Anatomy, calls: dict[str, list[Call]]) -> tuple[dict[str, Split], dict[str, str]]:
    """Return the layers to divide, and why axes are refused, for example because a layer is called twice."""
    refused = dict(anatomy.refused)
    other = [name for name in anatomy.splits if len(calls[name]) != 1]
    if other:
        refused.setdefault("tensor", f"{other[0]} is called {len(calls[other[0]])} times in forward; want one call")
    named = [name for name in anatomy.splits if any(not args for args, _, _ in calls[name])]
    if named:
        refused.setdefault("tensor", f"{named[0]} gets its input by keyword; pass the input as the first argument")
    return dict(anatomy.splits), refused


def _uncut(anatomy: Anatomy, calls: dict[str, list[Call]], samples: int) -> dict[str, str]:
    """Return why a pipeline is impossible, if a part's output cannot be cut into samples."""
    for part in anatomy.parts:
        made = [] if part.module is None else calls[part.name]
        out = made[0][2] if len(made) == 1 else None
        if not isinstance(out, Tensor) or not out.dim() or out.shape[0] != samples:
            refused = f"{part.name or 'the model'} does not return a single tensor whose first dimension counts samples"
            return {} if "pipeline" in anatomy.refused else {"pipeline": refused}
    return {}


def _unit(
    model: nn.Module, part: ModelUnit, calls: dict[str, list[Call]], splits: dict[str, Split], samples: int
) -> Unit:
    if part.module is None:
        own = list(model.parameters(recurse=False))
        return Unit(
            name="", parameters=len(own), parameter_bytes=sum(each.nbytes for each in own), seconds=0.0,
            output_bytes=0.0, saved_bytes=0.0,
        )  # fmt: skip
    own = list(part.module.parameters())
    cost = cost_of(part.module, calls[part.name])
    made = _made(calls[part.name])
    inside = {name: module for name, module in modules_below(model, part.name) if name in splits}
    gathers, sums = _exchanges(inside, calls, splits)
    return Unit(
        name=part.name,
        parameters=len(own),
        parameter_bytes=sum(each.nbytes for each in own),
        seconds=cost.seconds,
        output_bytes=0.0 if made is None else math.prod(made[0]) * made[1].itemsize,
        saved_bytes=cost.saved_bytes / samples,
        split_parameters=sum(1 for module in inside.values() for _ in module.parameters()),
        split_bytes=sum(_divided_bytes(module, splits[name]) for name, module in inside.items()),
        split_seconds=min(cost.seconds, sum(cost_of(module, calls[name]).seconds for name, module in inside.items())),
        gathers=tuple(each / samples for each in gathers),
        sums=tuple(each / samples for each in sums),
    )


def _exchanges(
    layers: dict[str, nn.Module], calls: dict[str, list[Call]], splits: dict[str, Split]
) -> tuple[list[int], list[int]]:
    """Return the bytes that ranks of a tensor axis gather and sum for `layers` in forward and backward."""
    gathers, sums = [], []
    for name in layers:
        for args, _, out in calls[name]:
            if splits[name] is Split.GATHERED:
                gathers.append(out.nbytes)
            if splits[name] is Split.ROW:
                sums.append(out.nbytes)
            elif args and args[0].is_floating_point():  # its gradient is summed over the ranks
                sums.append(args[0].nbytes)
    return gathers, sums


def _divided_bytes(module: nn.Module, split: Split) -> int:
    # Every rank holds the whole bias of a row-divided layer.
    return sum(each.nbytes for name, each in module.named_parameters() if split is not Split.ROW or name == "weight")


def _made(calls: list[Call]) -> tuple[torch.Size, torch.dtype] | None:
    out = calls[0][2] if len(calls) == 1 else None
    return (out.shape[1:], out.dtype) if isinstance(out, Tensor) and out.dim() else None
