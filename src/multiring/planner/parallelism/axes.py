"""Mixes of parallelism: ranks laid out along axes, each of which divides the work in its way."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import permutations
from typing import Any

import numpy as np

from multiring._topology import Topology
from multiring.errors import ArgumentError
from multiring.planner.parallelism.profile import Profile

_MICROBATCHES = (1, 2, 4)  # the numbers of microbatches per stage to try


class Axis(Enum):
    """The way in which the ranks of an axis divide the work."""

    DATA = "data"  # each rank has all parameters, and its own samples
    SHARD = "shard"  # each rank keeps a part of all parameters, and has its own samples
    TENSOR = "tensor"  # each rank has a part of the large layers, and the same samples
    PIPELINE = "pipeline"  # each rank has some of the layers, and passes the samples on


# The combinations that are built and measured; docs/parallelize.md lists the missing ones.
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
    """Axes and their numbers of ranks, outermost first: neighbours on the last axis are nearest.

    A single rank has the axis data 1. A pipeline cuts its samples into `microbatches` microbatches.
    """

    axes: tuple[tuple[Axis, int], ...]
    microbatches: int = 1

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along `axis`; 1 if there is no such axis."""
        return dict(self.axes).get(axis, 1)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def data_ranks(self) -> int:
        """The number of parts into which the batch is cut."""
        return self.size(Axis.DATA) * self.size(Axis.SHARD)

    def lines(self, axis: Axis, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Return the ranks along each line of `axis`.

        In `order`, near ranks are neighbours.
        """
        laid = np.asarray(order).reshape([size for _, size in self.axes])
        at = [name for name, _ in self.axes].index(axis)
        return [tuple(line) for line in np.moveaxis(laid, at, -1).reshape(-1, laid.shape[at]).tolist()]

    def __str__(self) -> str:
        cut = f", {self.microbatches} microbatches" if self.size(Axis.PIPELINE) > 1 else ""
        return " x ".join(f"{axis.value} {size}" for axis, size in self.axes) + cut


def parallelism_of(mesh: Mapping[str, Any]) -> Parallelism:
    """Return the mix that `mesh` names, like {"data": 2, "tensor": 2}.

    The caller still chooses the axes' layout.

    Raises:
        ArgumentError: an axis is unknown, a size is not a positive integer, or these axes cannot be combined.
    """
    known = {axis.value: axis for axis in Axis}
    for name, size in mesh.items():
        if name not in known or not isinstance(size, int) or size < 1:
            raise ArgumentError(f"mesh={dict(mesh)}: want {', '.join(known)}, each with its number of ranks")
    axes = tuple((known[name], size) for name, size in mesh.items() if size > 1)
    parallelism = Parallelism(axes or ((Axis.DATA, 1),))
    if {axis for axis, _ in parallelism.axes} not in [set(kind) for kind in _KINDS]:
        together = "; ".join(" and ".join(axis.value for axis in kind) for kind in _KINDS)
        raise ArgumentError(f"mesh={dict(mesh)}: these axes are not built together; want one of: {together}")
    return parallelism


def parallelisms_of(profile: Profile, topology: Topology) -> list[Parallelism]:
    """Return every mix that the model, the batch and the ranks allow, in every layout."""
    if topology.ranks == 1:
        return [Parallelism(((Axis.DATA, 1),))]
    return [
        laid
        for kind in _KINDS
        for sizes in _sizes(topology.ranks, len(kind))
        for laid in laid_out(Parallelism(tuple(zip(kind, sizes, strict=True))), profile, topology)
    ]


def laid_out(parallelism: Parallelism, profile: Profile, topology: Topology) -> Iterator[Parallelism]:
    """Yield every layout of `parallelism` with every number of microbatches.

    If the mix is impossible, yield nothing.
    """
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
    """Return why `parallelism` is impossible, or "" if it is possible."""
    stages, ways = parallelism.size(Axis.PIPELINE), parallelism.size(Axis.TENSOR)
    holding = sum(unit.parameter_bytes > 0 for unit in profile.units)
    batch, share = profile.batch, profile.batch // parallelism.data_ranks
    refused = {axis.value: profile.refused.get(axis.value, "") for axis, size in parallelism.axes if size > 1}
    checks = [
        (parallelism.ranks != topology.ranks, f"is for {parallelism.ranks} ranks, but there are {topology.ranks}"),
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
