"""Mixes: the ranks laid along axes, each of which divides the work in its way; what there is to choose from."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import permutations
from typing import Any

import numpy as np

from multiring.errors import ArgumentError
from multiring.planner.parallelism.profile import Profile
from multiring.topology import Topology

_MICROBATCHES = (1, 2, 4)  # for each stage


class Axis(Enum):
    """How the ranks of an axis divide the work."""

    DATA = "data"  # each has all parameters, and its own samples
    SHARD = "shard"  # each keeps a part of all parameters, and has its own samples
    TENSOR = "tensor"  # each has a part of the large layers, and the same samples
    PIPELINE = "pipeline"  # each has some of the layers, and passes the samples on


# What is built and measured; docs/parallelize.md says what is not.
_KINDS: tuple[tuple[Axis, ...], ...] = (
    (Axis.DATA,),
    (Axis.SHARD,),
    (Axis.DATA, Axis.SHARD),
    (Axis.TENSOR,),
    (Axis.DATA, Axis.TENSOR),
    (Axis.PIPELINE,),
    (Axis.DATA, Axis.PIPELINE),
)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Axes and how many ranks are along each, outermost first: neighbours on the last one are nearest.

    Of one rank alone the only axis is data 1. `microbatches` is how many a pipeline cuts its samples into.
    """

    axes: tuple[tuple[Axis, int], ...]
    microbatches: int = 1

    def size(self, axis: Axis) -> int:
        """Return how many ranks are along `axis`; 1 where there is no such axis."""
        return dict(self.axes).get(axis, 1)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return math.prod(size for _, size in self.axes)

    @property
    def data_ranks(self) -> int:
        """Into how many parts the batch is cut."""
        return self.size(Axis.DATA) * self.size(Axis.SHARD)

    def lines(self, axis: Axis, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the ranks along each line of `axis`; `order` has the ranks, near ones side by side."""
        laid = np.asarray(order).reshape([size for _, size in self.axes])
        at = [name for name, _ in self.axes].index(axis)
        return [tuple(line) for line in np.moveaxis(laid, at, -1).reshape(-1, laid.shape[at]).tolist()]

    def __str__(self) -> str:
        cut = f", {self.microbatches} microbatches" if self.size(Axis.PIPELINE) > 1 else ""
        return " x ".join(f"{axis.value} {size}" for axis, size in self.axes) + cut


def parallelism_of(mesh: Mapping[str, Any]) -> Parallelism:
    """Return the mix that `mesh`, like {"data": 2, "tensor": 2}, names; which axis is near is not said yet.

    Raises:
        ArgumentError: an axis is unknown, a size is no positive integer, or these axes are not built together.
    """
    known = {axis.value: axis for axis in Axis}
    for name, size in mesh.items():
        if name not in known or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"mesh={dict(mesh)}: want {', '.join(known)}, each with how many ranks are along it")
    axes = tuple((known[name], size) for name, size in mesh.items() if size > 1)
    parallelism = Parallelism(axes or ((Axis.DATA, 1),))
    if {axis for axis, _ in parallelism.axes} not in [set(kind) for kind in _KINDS]:
        together = "; ".join(" and ".join(axis.value for axis in kind) for kind in _KINDS)
        raise ArgumentError(f"mesh={dict(mesh)}: those axes are not built together; want one of: {together}")
    return parallelism


def parallelisms_of(profile: Profile, topology: Topology) -> list[Parallelism]:
    """Return every mix that the model, the batch and the ranks allow, in every way to lay it."""
    if topology.ranks == 1:
        return [Parallelism(((Axis.DATA, 1),))]
    return [
        laid
        for kind in _KINDS
        for sizes in _sizes(topology.ranks, len(kind))
        for laid in laid_out(Parallelism(tuple(zip(kind, sizes, strict=True))), profile, topology)
    ]


def laid_out(parallelism: Parallelism, profile: Profile, topology: Topology) -> Iterator[Parallelism]:
    """Yield every way to lay `parallelism` on the ranks, with every number of microbatches; none where it cannot be."""
    if reason_against(parallelism, profile, topology):
        return
    stages = parallelism.size(Axis.PIPELINE)
    share = profile.batch // parallelism.data_ranks
    cuts = [stages * times for times in _MICROBATCHES if share % (stages * times) == 0] if stages > 1 else [1]
    # Within one host no rank is nearer than another.
    orders = permutations(parallelism.axes) if len(topology.hosts) > 1 else [parallelism.axes]
    for axes in orders:
        for microbatches in cuts:
            yield replace(parallelism, axes=tuple(axes), microbatches=microbatches)


def reason_against(parallelism: Parallelism, profile: Profile, topology: Topology) -> str:
    """Return why `parallelism` cannot be had, "" where it can."""
    stages, ways = parallelism.size(Axis.PIPELINE), parallelism.size(Axis.TENSOR)
    holding = sum(unit.parameter_bytes > 0 for unit in profile.units)
    batch, share = profile.batch, profile.batch // parallelism.data_ranks
    refused = {axis.value: profile.refused.get(axis.value, "") for axis, size in parallelism.axes if size > 1}
    checks = [
        (parallelism.ranks != topology.ranks, f"is for {parallelism.ranks} ranks, and there are {topology.ranks}"),
        *((bool(words), f"no {axis} axis: {words}") for axis, words in refused.items()),
        (batch % parallelism.data_ranks, f"{batch} samples cannot be cut into {parallelism.data_ranks} equal parts"),
        (profile.divisor % ways, f"layers have {profile.divisor} features, which {ways} ranks cannot divide"),
        (stages > holding, f"{holding} units with parameters are fewer than {stages} stages"),
        (share % stages, f"{share} samples cannot be cut into {stages} microbatches or a multiple"),
    ]
    return next((f"{parallelism}: {words}" for is_wrong, words in checks if is_wrong), "")


def _sizes(ranks: int, axes: int) -> list[tuple[int, ...]]:
    if axes == 1:
        return [(ranks,)]
    return [(ranks // near, near) for near in range(2, ranks) if ranks % near == 0]
