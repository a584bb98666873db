"""Assign gradients to buckets, and lay out each bucket."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multiring._runtime.arrays import numpy_dtype

# The size of a cache line, and of the widest vector register.
ALIGNMENT_BYTES = 64
# The defaults of PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3): 25 MB,
# and a first bucket of 1 MiB so that reductions start early.
BUCKET_BYTES = 25 << 20
FIRST_BUCKET_BYTES = 1 << 20
# Three more flags follow the members' flags. These are their positions from the end.
MORE_FLAGS = 3
COMPARES_FLAG = -3
SPARSE_FLAG = -2
TRAINS_FLAG = -1


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """Type and memory layout of a dense gradient.

    Its elements lie without gaps, in some order.
    """

    dtype: str  # NumPy's name
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    device: str = ""  # of the gradient, as all ranks name it; "" is the host

    @classmethod
    def row_major(cls, dtype: str, shape: Sequence[int]) -> "GradientSpec":
        """Return the spec of a gradient in row-major order."""
        return cls(dtype, tuple(shape), tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))))

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def kind(self) -> tuple[str, str]:
        """Device and type; gradients of one kind may share a bucket."""
        return self.device, self.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return numpy_dtype(self.dtype).itemsize

    @property
    def padded_bytes(self) -> int:
        """Bytes of the gradient in a bucket, with padding."""
        return -(-self.count * self.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLayout:
    """The layout of one bucket's gradients.

    Offsets and `count` are in elements of `dtype`. The gradients are followed by one flag per member: 1 if this rank
    has the member's gradient, else 0. The reduced flags distinguish a gradient that no rank has from a gradient of
    zeros. Three more flags follow: whether any rank wants to compare its first steps, whether any rank got unexpected
    sparse gradients, and whether any rank still trains.
    """

    dtype: str  # NumPy's name
    members: tuple[int, ...]  # indices of gradients, in the order in which they are expected
    offsets: tuple[int, ...]  # the offset of each member
    flags_offset: int

    @property
    def flags(self) -> int:
        """The number of flags."""
        return len(self.members) + MORE_FLAGS

    @property
    def count(self) -> int:
        """The number of elements, flags included."""
        return self.flags_offset + self.flags


def lay_out(
    specs: Sequence[GradientSpec], bucket_bytes: int, together: Sequence[Sequence[int]] = ()
) -> list[BucketLayout]:
    """Return the buckets of gradients, in the order in which they start.

    Backward makes gradients roughly in the reverse order of the parameters' use. Therefore buckets are filled from the
    last gradient on. Each bucket has one type and one device. It has at most `bucket_bytes`, unless a single gradient
    is larger.

    Args:
        specs: the gradients, in the order in which the model uses their parameters.
        bucket_bytes: limit of a bucket. The limit of each type's first bucket on a device is at most 1 MiB.
        together: groups of gradients by index. Each group gets buckets of its own, whatever its size; no index may
            occur twice.
    """
    finished: list[list[int]] = []
    for group in together:
        by_type: dict[tuple[str, str], list[int]] = {}
        for index in sorted(group, reverse=True):
            by_type.setdefault(specs[index].kind, []).append(index)
        finished += by_type.values()
    placed = {index for members in finished for index in members}
    filling: dict[tuple[str, str], list[int]] = {}
    filled_bytes: dict[tuple[str, str], int] = {}
    limits: dict[tuple[str, str], int] = {}
    for index in reversed(range(len(specs))):
        if index in placed:
            continue
        kind, size_bytes = specs[index].kind, specs[index].padded_bytes
        limit = limits.setdefault(kind, min(FIRST_BUCKET_BYTES, bucket_bytes))
        if kind in filling and filled_bytes[kind] + size_bytes > limit:
            finished.append(filling.pop(kind))
            limits[kind] = bucket_bytes
        if kind not in filling:
            filling[kind], filled_bytes[kind] = [], 0
        filling[kind].append(index)
        filled_bytes[kind] += size_bytes
    finished += filling.values()
    # A bucket can start when its last gradient arrives: the gradient with the lowest index.
    return [_bucket(specs, members) for members in sorted(finished, key=lambda members: -members[-1])]


def lay_out_one(specs: Sequence[GradientSpec]) -> BucketLayout:
    """Return the layout of one bucket of these gradients, in this order.

    All gradients must have the same type and device.
    """
    return _bucket(specs, range(len(specs)))


def places_in(memory: NDArray[Any], layout: BucketLayout, specs: Sequence[GradientSpec]) -> list[NDArray[Any]]:
    """Return a view of each member's gradient in the bucket's flat `memory`.

    The views have the gradients' strides.

    Args:
        memory: at least `layout.flags_offset` elements.
        layout: the bucket's layout.
        specs: the specs of its members.
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
