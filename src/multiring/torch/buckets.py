"""Which gradients are reduced together, and where in their bucket each one lies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multiring.torch.tensors import dense_strides

# A cache line, and the widest vector there is.
ALIGNMENT_BYTES = 64
# As PyTorch's DistributedDataParallel has them (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3: 25 MB, and
# a first bucket of 1 MiB so that reducing starts early).
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The gradients of one bucket. Offsets and `count` are in elements of `dtype`.

    Behind the gradients is room for a flag for each: 1 where this rank has such a gradient, else 0. Reduced as well,
    they tell a gradient that no rank has from one that is zero.
    """

    dtype: torch.dtype
    members: tuple[int, ...]  # indices of parameters, in the order their gradients are expected
    offsets: tuple[int, ...]  # by member
    flags_offset: int
    count: int


def lay_out(parameters: Sequence[Tensor], bucket_bytes: int) -> list[BucketLayout]:
    """Return the buckets of the parameters' gradients, in the order in which they start.

    Backward reaches parameters roughly in reverse order, so buckets are filled from the last one on. Buckets are of
    one type each, and no larger than `bucket_bytes`, except for a parameter that is larger by itself.

    Args:
        parameters: in the order in which the model uses them.
        bucket_bytes: the limit; that of each type's first bucket is at most 1 MiB.
    """
    finished: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    filled_bytes: dict[torch.dtype, int] = {}
    limits: dict[torch.dtype, int] = {}
    for index in reversed(range(len(parameters))):
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
    return BucketLayout(
        dtype=first.dtype, members=tuple(members), offsets=tuple(offsets), flags_offset=end, count=end + len(members)
    )


def _padded_bytes(parameter: Tensor) -> int:
    size_bytes = parameter.numel() * parameter.element_size()
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
