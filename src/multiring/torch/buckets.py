"""Which gradients are reduced together, and where in their bucket each one lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiring.torch.interop import dense_strides

# A cache line, and the widest vector there is.
ALIGNMENT_BYTES = 64
# As PyTorch's DistributedDataParallel has them (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3: 25 MB, and
# a first bucket of 1 MiB so that reducing starts early).
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
# Behind the members' flags there are two more; their places from the end.
SPARSE_FLAG = -2
TRAINS_FLAG = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The gradients of one bucket. Offsets and `count` are in elements of `dtype`.

    Behind the gradients is room for a flag for each: 1 where this rank has such a gradient, else 0. Reduced as well,
    they tell a gradient that no rank has from one that is zero. Two more tell whether any rank's gradients came as
    sparse ones that were not expected, and whether any rank still trains.
    """

    dtype: torch.dtype
    members: tuple[int, ...]  # indices of parameters, in the order their gradients are expected
    offsets: tuple[int, ...]  # by member
    flags_offset: int

    @property
    def flags(self) -> int:
        """How many flags there are."""
        return len(self.members) + 2

    @property
    def count(self) -> int:
        """How many elements there are, with the flags."""
        return self.flags_offset + self.flags


def lay_out(
    parameters: Sequence[Tensor], bucket_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[BucketLayout]:
    """Return the buckets of the parameters' gradients, in the order in which they start.

    Backward reaches parameters roughly in reverse order, so buckets are filled from the last one on. Buckets are of
    one type each, and no larger than `bucket_bytes`, except for a parameter that is larger by itself.

    Args:
        parameters: in the order in which the model uses them.
        bucket_bytes: the limit; that of each type's first bucket is at most 1 MiB.
        together: indices of parameters that make buckets of their own, whatever their size; none twice.
    """
    finished: list[list[int]] = []
    for group in together:
        by_type: dict[torch.dtype, list[int]] = {}
        for index in sorted(group, reverse=True):
            by_type.setdefault(parameters[index].dtype, []).append(index)
        finished += by_type.values()
    placed = {index for members in finished for index in members}
    filling: dict[torch.dtype, list[int]] = {}
    filled_bytes: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for index in reversed(range(len(parameters))):
        if index in placed:
            continue
        dtype, size_bytes = parameters[index].dtype, _padded_bytes(parameters[index])
        limit = limits.setdefault(dtype, min(FIRST_BUCKET_BYTES, bucket_bytes))
        if dtype in filling and filled_bytes[dtype] + size_bytes > limit:
            finished.append(filling.pop(dtype))
            limits[dtype] = bucket_bytes
        if dtype not in filling:
            filling[dtype], filled_bytes[dtype] = [], 0
        filling[dtype].append(index)
        filled_bytes[dtype] += size_bytes
    finished += filling.values()
    # A bucket can start once its last gradient is there, which has the lowest index.
    return [_bucket(parameters, members) for members in sorted(finished, key=lambda members: -members[-1])]


def places_in(memory: Tensor, layout: BucketLayout, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the place of each member's gradient in the bucket's flat `memory`, in the parameter's order of strides.

    Args:
        memory: at least `layout.flags_offset` elements.
        layout: of the bucket.
        parameters: its members.
    """
    return [
        memory.as_strided(parameter.shape, dense_strides(parameter), offset)
        for parameter, offset in zip(parameters, layout.offsets, strict=True)
    ]


def _bucket(parameters: Sequence[Tensor], members: Sequence[int]) -> BucketLayout:
    first = parameters[members[0]]
    offsets, end = [], 0
    for index in members:
        offsets.append(end)
        end += _padded_bytes(parameters[index]) // first.element_size()
    return BucketLayout(dtype=first.dtype, members=tuple(members), offsets=tuple(offsets), flags_offset=end)


def _padded_bytes(parameter: Tensor) -> int:
    size_bytes = parameter.numel() * parameter.element_size()
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
