"""The assignment of gradients to buckets, without ranks."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multiring._gradients.buckets import ALIGNMENT_BYTES, FIRST_BUCKET_BYTES, GradientSpec, lay_out
from multiring._runtime.arrays import numpy_dtype

SHAPES = st.tuples(st.sampled_from(["float32", "float64", "bfloat16"]), st.integers(0, 3000))


def spec(dtype: str, count: int) -> GradientSpec:
    return GradientSpec.row_major(dtype, (count,))


@given(st.lists(SHAPES, max_size=30), st.sampled_from([1, 4096, 25 << 20]))
def test_every_gradient_has_a_place_of_its_own(shapes: list[tuple[str, int]], bucket_bytes: int) -> None:
    buckets = lay_out([spec(*shape) for shape in shapes], bucket_bytes)
    assert sorted(index for bucket in buckets for index in bucket.members) == list(range(len(shapes)))
    for bucket in buckets:
        size = numpy_dtype(bucket.dtype).itemsize
        ends = [offset + shapes[index][1] for index, offset in zip(bucket.members, bucket.offsets, strict=True)]
        assert {shapes[index][0] for index in bucket.members} == {bucket.dtype}
        assert all(offset * size % ALIGNMENT_BYTES == 0 for offset in bucket.offsets)
        assert all(end <= offset for end, offset in zip(ends, [*bucket.offsets[1:], bucket.flags_offset], strict=True))
        assert bucket.count == bucket.flags_offset + bucket.flags
        assert bucket.flags == len(bucket.members) + 3  # the flags of a bucket: compares, sparse, trains
        assert len(bucket.members) == 1 or bucket.flags_offset * size <= bucket_bytes


@given(st.lists(SHAPES, max_size=30), st.sampled_from([1, 4096]))
def test_buckets_complete_in_the_order_they_start(shapes: list[tuple[str, int]], bucket_bytes: int) -> None:
    """Gradients arrive in reverse order of the parameters."""
    buckets = lay_out([spec(*shape) for shape in shapes], bucket_bytes)
    assert all(list(bucket.members) == sorted(bucket.members, reverse=True) for bucket in buckets)
    assert all(one.members[-1] > other.members[-1] for one, other in pairwise(buckets))


@pytest.mark.parametrize(
    ("bucket_bytes", "members"),
    [
        (25 << 20, [(9, 8, 7, 6), (5, 4, 3, 2, 1, 0)]),
        (1 << 20, [(9, 8, 7, 6), (5, 4, 3, 2), (1, 0)]),
        (1 << 19, [(9, 8), (7, 6), (5, 4), (3, 2), (1, 0)]),
    ],
)
def test_first_bucket_is_small(bucket_bytes: int, members: list[tuple[int, ...]]) -> None:
    quarter = spec("float32", FIRST_BUCKET_BYTES // 16)
    assert [bucket.members for bucket in lay_out([quarter] * 10, bucket_bytes)] == members


def test_groups_have_buckets_of_their_own() -> None:
    large = spec("float32", FIRST_BUCKET_BYTES)
    mixed = [large, large, spec("float64", 1), large, large, large]
    buckets = lay_out(mixed, 1, [[1, 4, 2], [0]])
    assert [bucket.members for bucket in buckets] == [(5,), (3,), (2,), (4, 1), (0,)]
    assert [bucket.members for bucket in lay_out(mixed, 1, [range(6)])] == [(2,), (5, 4, 3, 1, 0)]
