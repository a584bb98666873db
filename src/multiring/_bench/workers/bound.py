"""A rank that runs its part of a collective without waiting for other ranks: an upper bound for libraries.

It reads and writes as many bytes as a rank must in any algorithm that moves each byte once. It uses the same kernels
and the same kind of memory as multiring, and all ranks run at once. Other ranks' operands are represented by memory of
the rank itself: after the first read, it makes no difference which core wrote the operands, and no core changes them.
"""

import time
import timeit
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

import multiring
from multiring._native import DType, ReduceOp, combine
from multiring._settings import Settings
from multiring._version import VERSION

if TYPE_CHECKING:
    from multiring._bench.workers import contract
else:
    import contract

Array = contract.Array
# Sizes of one operand. Small blocks stay in the core's cache until they are written to every rank; large blocks need
# fewer calls. The fastest size is used, because the result is meant as a bound.
_BLOCKS_BYTES = (1 << 15, 1 << 17, 1 << 19, 1 << 40)
_TRIES = 3


def reduction(case: contract.Case, operands: list[Array], targets: list[Array], block_bytes: int) -> Callable[[], None]:
    """Return a function that combines `operands` block by block and writes the result to each of `targets`."""
    itemsize = operands[0].itemsize
    block = block_bytes // itemsize
    dtype, op = getattr(DType, case.dtype), getattr(ReduceOp, "sum" if case.op == "average" else case.op)
    divisor = len(operands) if case.op == "average" else 1
    addresses = [operand.ctypes.data for operand in operands]
    first, others = targets[0], targets[1:]
    steps = []
    for start in range(0, len(first), block):
        count = min(block, len(first) - start)
        at = start * itemsize
        copies = [(other[start : start + count], first[start : start + count]) for other in others]
        steps.append((first.ctypes.data + at, [address + at for address in addresses], count, copies))

    def run() -> None:
        for target, sources, count, copies in steps:
            combine(dtype, op, target, sources, count, divisor)
            for there, here in copies:
                np.copyto(there, here)

    return run


def copying(pairs: list[tuple[Array, Array]]) -> Callable[[], None]:
    """Return a function that copies the first array of each pair to the second."""

    def run() -> None:
        for source, target in pairs:
            np.copyto(target, source)

    return run


def part_of(
    case: contract.Case, place: tuple[int, int], make: Callable[[int], Array], block_bytes: int
) -> Callable[[], None]:
    """Return a function with this rank's reads and writes, in memory from `make`."""
    rank, ranks = place
    part = -(-case.count // ranks)
    if case.collective == "all_reduce":
        buffers = [make(part) for _ in range(ranks)]
        return reduction(case, buffers, buffers, block_bytes)
    if case.collective == "reduce_scatter":
        return reduction(case, [make(part) for _ in range(ranks)], [make(part)], block_bytes)
    if case.collective == "broadcast":
        return copying([] if rank == case.root else [(make(case.count), make(case.count))])
    whole = make(case.count)
    pieces = np.array_split(whole, ranks)
    if case.collective == "all_gather":
        pieces.pop(rank)  # the rank's own part may be in place already
    return copying([(make(len(piece)), piece) for piece in pieces])


def _mean_s(calls: list[Callable[[], None]]) -> float:
    """Return the mean seconds of a call over all calls, because ranks that share a core must compete for the core."""
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def main(case: contract.Case) -> None:
    """Time the case, and write the answer."""
    settings = Settings.from_environment()
    rank, ranks = settings.rank or 0, settings.size or 1
    contract.pin(case, rank)
    group = multiring.init()
    dtype = contract.numpy_dtype(case.dtype)

    def make(count: int) -> Array:
        made: Array = group.allocate(count, dtype)
        made[:] = contract.rest_value(case)
        return made

    def seconds_with(block_bytes: int) -> float:
        call = part_of(case, (rank, ranks), make, block_bytes)
        call()
        return min(timeit.repeat(call, number=1, repeat=_TRIES))

    best = min(_BLOCKS_BYTES, key=seconds_with)
    calls = [part_of(case, (rank, ranks), make, best) for _ in range(contract.num_buffers(case))]
    for call in calls:
        call()
    group.barrier()
    order = [calls[turn % len(calls)] for turn in range(case.calls)]
    seconds = [timeit.timeit(call, number=1) for call in order] if case.cores else [_mean_s(order)]
    group.barrier()
    contract.write_result(case, rank, seconds, VERSION, {"block_bytes": str(best)})
    multiring.shutdown()


if __name__ == "__main__":
    contract.run_cases(main)
