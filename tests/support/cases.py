"""Test cases for a transport and its Group, as values: each case has its inputs, its oracle and its schedule.

The oracle is independent of the library: NumPy in extended precision with an error bound, or exact integers.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

import multiring
from multiring._runtime.arrays import numpy_dtype
from multiring._runtime.group.compile import Request, Segments
from multiring._schedule import OPS, Collective, Splits, interpret, wire_of
from multiring.planner import Plan

Array = NDArray[Any]

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (*INTEGERS, *FLOATS, "bool")
# Unit roundoff of one addition and of one store. 16-bit floats are added in float32.
ADDS = {"float16": 2.0**-24, "bfloat16": 2.0**-24, "float32": 2.0**-24, "float64": 2.0**-53}
STORES = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
SMALLEST = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 0.0}  # half a subnormal

# A staging slot of the shm engine holds 128 KiB; a window of the tcp engine holds 2 MiB.
OVER_A_SLOT, OVER_A_WINDOW = (128 << 10) + 12_347, (2 << 20) + 123_457  # bytes


@dataclass(frozen=True, slots=True)
class Case:
    """One operation that all ranks run.

    `rows` is the row count of each rank's array. In all_gather and all_to_all, the row counts of ranks differ.
    """

    collective: Collective
    dtype: str
    op: str
    rows: int
    width: int = 1
    in_arena: bool = False
    seed: int = 0
    root: int = 0
    wire: str | None = None

    def splits(self, ranks: int) -> NDArray[np.int64]:
        """Return the matrix of rows that rank i sends to rank j in an all_to_all: about `rows` in total, some zero."""
        random = np.random.default_rng([self.seed, 11])
        weights = random.integers(0, 3, (ranks, ranks))
        return weights * self.rows // ranks

    def own_rows(self, rank: int, ranks: int) -> int:
        """Return the number of rows in the operand of `rank`."""
        if self.collective is Collective.ALL_GATHER:
            return self.rows * ((rank + self.seed) % ranks) // max(ranks - 1, 1)  # one rank contributes no rows
        if self.collective is Collective.ALL_TO_ALL:
            return int(self.splits(ranks)[rank].sum())
        return self.rows

    def operand(self, rank: int, ranks: int) -> Array:
        """Return the operand of `rank`. Every process computes the same values."""
        return operand(self.dtype, self.op, (self.own_rows(rank, ranks), self.width), (self.seed, rank))

    def run(self, group: multiring.Group, array: Array) -> Array:
        """Run the operation and return this rank's result."""
        if self.collective is Collective.ALL_REDUCE:
            group.all_reduce(array, self.op, wire=self.wire)
            return array
        if self.collective is Collective.BROADCAST:
            group.broadcast(array, self.root)
            return array
        before = array.copy()
        if self.collective is Collective.REDUCE_SCATTER:
            result = group.reduce_scatter(array, op=self.op)
        elif self.collective is Collective.ALL_GATHER:
            result = group.all_gather(array)
        else:
            result = group.all_to_all(array, splits=self.splits(group.size)[group.rank].tolist())
        assert array.tobytes() == before.tobytes(), f"{self}: the input was changed"
        out: Array = result
        return out

    def request(self, rank: int, ranks: int) -> Request:
        """Return the request that the Group makes when it selects a program for this operation."""
        rows = [self.own_rows(each, ranks) for each in range(ranks)]
        counts: Any = self.rows * self.width
        total = counts
        if self.collective is Collective.REDUCE_SCATTER:
            counts = tuple(self.width * each for each in even_rows(self.rows, ranks))
        elif self.collective is Collective.ALL_GATHER:
            counts = tuple(self.width * each for each in rows)
            total = sum(counts)
        elif self.collective is Collective.ALL_TO_ALL:
            splits = self.splits(ranks) * self.width
            counts = Splits(tuple(splits[rank].tolist()), tuple(splits[:, rank].tolist()))
            total = int(splits.sum()) // ranks
        return Request(self.collective, self.dtype, counts, total, self.op, self.root, wire=wire_of(self.wire))

    def reference(self, plan: Plan, rank: int, ranks: int) -> Array:
        """Return the bits that `rank` must get: the interpreter's result of the plan, segment by segment."""
        operands = [self.operand(each, ranks).reshape(-1) for each in range(ranks)]
        requests = [self.request(each, ranks) for each in range(ranks)]
        segments = Segments.of(plan, requests[rank])
        if segments.count == 1:
            counts = [request.counts for request in requests]
            return interpret(plan.schedule, operands, self.op, counts).outputs[rank].reshape(-1, self.width)
        cuts = [int(segments.each) * index for index in range(1, segments.count)]  # type: ignore[arg-type]  # one number
        pieces = zip(*(np.split(operand, cuts) for operand in operands), strict=True)
        results = [interpret(plan.schedule, piece, self.op).outputs[rank] for piece in pieces]
        return np.concatenate(results).reshape(-1, self.width)

    def check(self, result: Array, rank: int, ranks: int, axes: int) -> None:
        """Compare `result` with the oracle. `axes` is the largest number of roundings in the schedule."""
        operands = [self.operand(each, ranks) for each in range(ranks)]
        if self.collective is Collective.ALL_GATHER:
            assert_same(result, np.concatenate(operands), self)
        elif self.collective is Collective.BROADCAST:
            assert_same(result, operands[self.root], self)
        elif self.collective is Collective.ALL_TO_ALL:
            ends = np.cumsum(self.splits(ranks), axis=1)
            starts = ends - self.splits(ranks)
            sent = [operands[each][starts[each, rank] : ends[each, rank]] for each in range(ranks)]
            assert_same(result, np.concatenate(sent), self)
        else:
            if self.collective is Collective.REDUCE_SCATTER:
                rows = even_rows(self.rows, ranks)
                start = sum(rows[:rank])
                operands = [each[start : start + rows[rank]] for each in operands]
            check_reduced(result, operands, self.op, axes, self)


def even_rows(rows: int, ranks: int) -> list[int]:
    """Return the number of rows that reduce_scatter leaves on each rank."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


@lru_cache(maxsize=32)
def operand(dtype: str, op: str, shape: tuple[int, ...], seed: tuple[int, ...]) -> Array:
    """Return a random read-only array. Integers use their whole range, so that sums wrap."""
    array = _random(np.random.default_rng(seed), numpy_dtype(dtype), shape, op)
    array.setflags(write=False)
    return array


def _random(random: np.random.Generator, kind: np.dtype[Any], shape: tuple[int, ...], op: str) -> Array:
    if kind == np.bool_:
        booleans: Array = random.integers(0, 2, shape).astype(kind)
        return booleans
    if kind.name in FLOATS:
        numbers = random.uniform(0.5, 1.5, shape) if op == "product" else random.standard_normal(shape)
        floats: Array = numbers.astype(kind)
        return floats
    info = np.iinfo(kind)
    return random.integers(info.min, info.max, shape, kind, endpoint=True)


def check_reduced(result: Array, operands: list[Array], op: str, axes: int, what: object) -> None:
    """Compare a reduction with exact integers, or with extended precision within the bound of docs/algorithms.md."""
    name = result.dtype.name
    if name not in FLOATS:
        assert_same(result, exact(operands, op), what)
        return
    wide = np.stack([each.astype(np.longdouble) for each in operands])
    if op in ("min", "max"):
        assert_same(result, (wide.min(0) if op == "min" else wide.max(0)).astype(result.dtype), what)
        return
    ranks = len(operands)
    want = wide.prod(0) if op == "product" else wide.sum(0)
    scale = np.abs(want) if op == "product" else np.abs(wide).sum(0)
    if op == "average":
        want, scale = want / ranks, scale / ranks
    # Each operand of a product may already be rounded, so roundings accumulate over ranks instead of axes.
    rounded = ranks if op == "product" and axes > 1 else axes
    relative = ranks * ADDS[name] + rounded * STORES[name]
    bound = relative / (1 - relative) * scale + axes * SMALLEST[name]
    far = np.abs(result.astype(np.longdouble) - want) > bound
    assert not far.any(), (
        f"{what}: {far.sum()} of {far.size} exceed the error bound; the first is {result[far][0]}, want {want[far][0]}"
    )


def exact(operands: list[Array], op: str) -> Array:
    """Return the reduction of integers or bools: sums and products modulo 2^bits, averages exact and truncated."""
    kind = operands[0].dtype
    if kind == np.bool_:
        meets: Any = np.logical_and if op in ("min", "product") else np.logical_or
        truths: Array = meets.reduce(operands)
        return truths
    # A sum or product modulo 2^64 is also right modulo 2^bits. 64 bits hold the sums of narrower integers exactly.
    wide: Any = np.int64 if kind.kind == "i" else np.uint64
    if op == "average" and kind.itemsize == 8:
        wide = object  # Python's unbounded integers
    reduce: Any = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(op, np.add)
    total: Array = reduce.reduce(np.stack(operands).astype(wide))
    if op == "average":
        total = np.where(total < 0, -(-total // len(operands)), total // len(operands))
    return total.astype(kind)


def assert_same(result: Array, want: Array, what: object) -> None:
    """Check that shape, type and all bits are equal."""
    assert (result.shape, result.dtype) == (want.shape, want.dtype), (
        f"{what}: {result.shape} {result.dtype}, want {want.shape}"
    )
    if result.tobytes() != np.ascontiguousarray(want).tobytes():
        differ = bits_of(result) != bits_of(want)
        places = np.flatnonzero(differ)
        raise AssertionError(
            f"{what}: {len(places)} of {result.size} differ, first at {places[0]}: "
            f"{result.reshape(-1)[places[0]]}, want {want.reshape(-1)[places[0]]}"
        )


def bits_of(array: Array) -> Array:
    """Return the bit patterns of the elements as a flat array."""
    bits: Array = np.ascontiguousarray(array).reshape(-1).view(f"u{array.dtype.itemsize}")
    return bits


def digest_of(array: Array) -> bytes:
    """Return a short digest of all bits."""
    return hashlib.blake2b(array.tobytes(), digest_size=8).digest()


def place(group: multiring.Group, array: Array, *, in_arena: bool) -> Array:
    """Return a copy of `array` in the arena or in ordinary memory."""
    memory: Array = group.allocate(array.shape, array.dtype) if in_arena else np.empty_like(array)
    memory[...] = array
    return memory


REDUCES = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)


def all_cases(ranks: int) -> Iterator[Case]:
    """Yield the meaningful combinations of collective, type, operation, size and kind of memory."""
    unseeded = itertools.chain(_arithmetic(), _sizes(), _types(), _roots(ranks))
    for seed, case in enumerate(unseeded):
        yield replace(case, seed=seed)


def _arithmetic() -> Iterator[Case]:
    for collective, dtype, op, (rows, in_arena) in itertools.product(
        REDUCES, DTYPES, OPS, ((1, False), (7, True), (1000, False))
    ):
        if (dtype, op) != ("bool", "average"):
            yield Case(collective, dtype, op, rows, in_arena=in_arena)


def _sizes() -> Iterator[Case]:
    shapes = ((0, 1), (0, 3), (1, 1), (7, 2), (1000, 1), (33, 5))
    large = [*((OVER_A_SLOT, dtype) for dtype in ("float32", "bfloat16", "uint8")), (OVER_A_WINDOW, "float32")]
    for collective, in_arena in itertools.product(Collective, (False, True)):
        for rows, width in shapes:
            yield Case(collective, "float32", "sum", rows, width, in_arena=in_arena)
        for size_bytes, dtype in large:
            rows = math.ceil(size_bytes / numpy_dtype(dtype).itemsize)
            yield Case(collective, dtype, "sum", rows, in_arena=in_arena)


def _types() -> Iterator[Case]:
    for collective, dtype, in_arena in itertools.product(Collective, DTYPES, (False, True)):
        if collective not in REDUCES:
            yield Case(collective, dtype, "sum", 50, 3, in_arena=in_arena)


def _roots(ranks: int) -> Iterator[Case]:
    for root, rows in itertools.product(range(ranks), (5, 5000)):
        yield Case(Collective.BROADCAST, "int16", "sum", rows, root=root)
