"""Which gradients are reduced together, and where in their bucket each one lies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring.runtime.arrays import numpy_dtype

# A cache line, and the widest vector there is.
ALIGNMENT_BYTES = 64
# As PyTorch's DistributedDataParallel has them (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3: 25 MB, and
# a first bucket of 1 MiB so that reducing starts early).
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
# Behind the members' flags there are three more; their places from the end.
MORE_FLAGS = 3
COMPARES_FLAG = -3
SPARSE_FLAG = -2
TRAINS_FLAG = -1


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """What is known of a gradient before there is one. It is dense: its elements lie without gaps, in some order."""

    dtype: str  # by NumPy's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @classmethod
    def row_major(cls, dtype: str, shape: Sequence[int]) -> "GradientSpec":
        """Return the spec of a gradient whose last dimension is the fastest."""
        return cls(dtype, tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))

    @property
    def count(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes that it takes in a bucket."""
        return -(-self.count * self.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The gradients of one bucket. Offsets and `count` are in elements of `dtype`.

    Behind the gradients is room for a flag for each: 1 where this rank has such a gradient, else 0. Reduced as well,
    they tell a gradient that no rank has from one that is zero. Three more tell whether any rank wants to compare its
    first steps, whether any rank's gradients came as sparse ones that were not expected, and whether any rank still
    trains.
    """

    dtype: str  # by NumPy's name
    members: tuple[int, ...]  # indices of gradients, in the order in which they are expected
    offsets: tuple[int, ...]  # by member
    flags_offset: int

    @property
    def flags(self) -> int:
        """How many flags there are."""
        return len(self.members) + MORE_FLAGS

    @property
    def count(self) -> int:
        """How many elements there are, with the flags."""
        return self.flags_offset + self.flags


def lay_out(
    specs: Sequence[GradientSpec], bucket_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[BucketLayout]:
    """Return the buckets of some gradients, in the order in which they start.

    Backward makes gradients roughly in the reverse order of the parameters' use, so buckets are filled from the last
    one on. Buckets are of one type each, and no larger than `bucket_bytes`, except for a gradient that is larger by
    itself.

    Args:
        specs: in the order in which the model uses their parameters.
        bucket_bytes: the limit; that of each type's first bucket is at most 1 MiB.
        together: indices of gradients that make buckets of their own, whatever their size; none twice.
    """
    finished: list[list[int]] = []
    for group in together:
        by_type: dict[str, list[int]] = {}
        for index in sorted(group, reverse=True):
            by_type.setdefault(specs[index].dtype, []).append(index)
        finished += by_type.values()
    placed = {index for members in finished for index in members}
    filling: dict[str, list[int]] = {}
    filled_bytes: dict[str, int] = {}
    limits: dict[str, int] = {}
    for index in reversed(range(len(specs))):
        if index in placed:
            continue
        dtype, size_bytes = specs[index].dtype, specs[index].padded_bytes
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
    return [_bucket(specs, members) for members in sorted(finished, key=lambda members: -members[-1])]


def lay_out_one(specs: Sequence[GradientSpec]) -> BucketLayout:
    """Return the layout of one bucket of these gradients, of one type, in this order."""
    return _bucket(specs, range(len(specs)))


def places_in(memory: NDArray[Any], layout: BucketLayout, specs: Sequence[GradientSpec]) -> list[NDArray[Any]]:
    """Return the place of each member's gradient in the bucket's flat `memory`, in its own order of strides.

    Args:
        memory: at least `layout.flags_offset` elements.
        layout: of the bucket.
        specs: of its members.
    """
    size = memory.itemsize
    return [
        np.ndarray(
            spec.shape, memory.dtype, memory.view(np.uint8), offset * size, [stride * size for stride in spec.strides]
        )
        for spec, offset in zip(specs, layout.offsets, strict=True)
    ]


def _bucket(specs: Sequence[GradientSpec], members: Sequence[int]) -> BucketLayout:
    first = specs[members[0]]
    offsets, end = [], 0
    for index in members:
        offsets.append(end)
        end += specs[index].padded_bytes // first.itemsize
    return BucketLayout(dtype=first.dtype, members=tuple(members), offsets=tuple(offsets), flags_offset=end)
